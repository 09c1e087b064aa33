"""The draft over a cache of its own: it proposes choices for every slot, and is kept up with what became final.

The target's features of every final token of a row that may draft go into the cache at once, also in steps in which
the row decodes plainly: a draft that misses part of its context is accepted less, and nothing else would show it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockpilot.drafts.dflash import DraftModel
from blockpilot.engine.rows import Row
from blockpilot.engine.sampling import Candidates, candidates
from blockpilot.engine.trees import Slots
from blockpilot.models.packing import Packing
from blockpilot.models.target import Target


class Drafter:
    """A draft and its cache of `num_slots` slots; embeddings and LM head are the target's."""

    def __init__(self, draft: DraftModel, target: Target, num_slots: int, length: int) -> None:
        self._draft, self._target = draft, target
        self.cache = draft.new_cache(num_slots, length)

    def propose(self, rows: Sequence[Row], slots: Sequence[int], depths: Sequence[int], num: int) -> list[Slots]:
        """The `num` best choices for each of the depths[r] (1 or more) positions after the anchor of every row [R].

        The rows lie in `slots` [R]. Draft and target draw a position's token with the same key: where their
        distributions agree, so do the tokens, at any temperature.
        """
        anchors = torch.tensor([row.tokens[-1] for row in rows], device=self.cache.layers.device)
        starts = [row.anchor_position for row in rows]
        hidden = self._run(slots, [depth + 1 for depth in depths], starts, anchors)
        positions = [start + i for start, depth in zip(starts, depths, strict=True) for i in range(1, depth + 1)]
        sampling = [row.request.sampling for row, depth in zip(rows, depths, strict=True) for _ in range(depth)]
        found = candidates(self._target.logits(hidden), positions, sampling, num)
        drawn = torch.tensor([each.temperature > 0 for each in sampling], device=anchors.device)
        tokens, chances = found.tokens.tolist(), own_chances(found, drawn).tolist()
        ends = torch.tensor(depths).cumsum(0).tolist()
        spans = [slice(end - depth, end) for end, depth in zip(ends, depths, strict=True)]
        return [Slots(tokens[span], [chances[span]]) for span in spans]

    def _run(self, slots: Sequence[int], sizes: Sequence[int], starts: Sequence[int], anchors: Tensor) -> Tensor:
        """Hidden states [M, hidden] of all positions but the anchors' of blocks of sizes[r] tokens from starts[r] on.

        anchors [R] are token ids.
        """
        blocks = Packing(sizes, starts, anchors.device)
        # The slots in use are dense, so that where all of them draft the cache is read as a plain view.
        index = torch.tensor(slots, device=anchors.device)
        rows = slice(0, len(slots)) if slots[-1] == len(slots) - 1 else index
        view = self.cache.view(index[blocks.rows], blocks.columns, rows, blocks.length)
        tokens = torch.where(blocks.offsets == 0, anchors[blocks.rows], self._draft.options.mask_token_id)
        embedded = self._target.embed(tokens).to(self._draft.dtype)
        return self._draft.propose(embedded[None], blocks.positions[None], view, blocks)[0][blocks.after_first]

    def keep_up(self, features: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Cache the target's features [N, F] of final tokens in slots [N] at positions [N].

        Returns their context vectors [N, hidden].
        """
        contexts = self._draft.fuse(features.to(self._draft.dtype))
        self._draft.extend(contexts[None], positions[None], self.cache.view(slots, positions, slice(0, 0), 0))
        return contexts


def own_chances(found: Candidates, drawn: Tensor) -> Tensor:
    """Chances [N, k] that the target makes a draft's choices, by the draft alone: they fall along k.

    At temperature 0 its probabilities. Where tokens are drawn [N] the noise has decided already, if the distributions
    agree; how clearly it has says how far they may differ.
    """
    return torch.where(drawn[:, None], found.scores.softmax(dim=-1), found.log_probs.exp())
