"""A draft that knows a text and errs where it is told to: acceptance becomes a test's business."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from blockpilot.drafts.dflash_prepared import CachedDFlash, PreparedDFlash
from blockpilot.models.cache import SlotView
from blockpilot.models.packing import Packing
from blockpilot.pairs.loading import Pair


class ScriptedDraft(CachedDFlash):
    def __init__(self, pair: Pair, text: Sequence[int], wrong: frozenset[int]) -> None:
        """text[p] is the token at absolute position p; it drafts another one at positions in `wrong`."""
        super().__init__(pair.draft)
        self.embedding = pair.target.get_input_embeddings().weight.detach()
        self.text, self.wrong = list(text) + [0] * 64, wrong
        pad = pair.target.config.pad_token_id
        assert not {pad - 1, pad} & {*text}  # the target's embedding of it is zero: no draft could mean it

    def propose(self, embedded: Tensor, packing: Packing, cache: SlotView) -> Tensor:
        super().propose(embedded, packing, cache)
        tokens = [(self.text[p] + (p in self.wrong)) % len(self.embedding) for p in packing.positions.tolist()]
        # Tied embeddings: the LM head's best match of a scaled embedding is its own token.
        normed = self.embedding / self.embedding.norm(dim=1, keepdim=True).square()
        return normed[torch.tensor(tokens)] * 1e3


def scripted_pair(pair: Pair, text: Sequence[int], wrong: frozenset[int]) -> Pair:
    scripted = replace(pair)
    scripted.__dict__["prepared_draft"] = PreparedDFlash(ScriptedDraft(pair, text, wrong), pair.target)
    return scripted
