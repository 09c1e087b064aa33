"""A draft that knows a text and errs where it is told to: acceptance becomes a test's business."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from blockpilot.drafts.dflash_prepared import CachedDFlash, PreparedDFlash
from blockpilot.models.cache import SlotView
from blockpilot.models.packing import Packing
from blockpilot.pairs.loading import Pair
from blockpilot.types import LAYOUTS, Layout, Request, Sampling
from helpers.engines import NEVER, PROMPT, plain_text

OTHER_PROMPT = tuple(range(70, 82))


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


def scripted_requests(
    pair: Pair, sampling: Sampling, num: int = 40, layouts: Sequence[Layout] = LAYOUTS
) -> tuple[Pair, list[Request]]:
    """A draft that errs at every third and every eleventh position of one text; rows of it, and two of fixed size.

    They end at different lengths; with fewer slots than requests, some join late.
    """
    text = PROMPT + plain_text(pair, PROMPT, num, sampling)
    wrong = frozenset(range(0, len(text), 3)) & frozenset(range(0, 30)) | frozenset(range(0, len(text), 11))
    plain = [
        Request(PROMPT, length, sampling, stop_token_ids=NEVER, layout=layouts[i % len(layouts)])
        for i, length in enumerate((num, 14, 25, 1, 31))
    ]
    fixed = [Request(OTHER_PROMPT[:n], 9 + n, sampling, n, NEVER) for n in (1, 3)]
    return scripted_pair(pair, text, wrong), [plain[0], fixed[0], *plain[1:4], fixed[1], plain[4]]
