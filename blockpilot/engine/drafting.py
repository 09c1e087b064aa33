"""The draft over a cache of its own: it proposes choices for every slot, and is kept up with what became final.

The target's features of every final token of a row that may draft go into the cache at once, also in steps in which
the row decodes plainly: a draft that misses part of its context is accepted less, and nothing else would show it.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from blockpilot.control.chances import own_chances
from blockpilot.drafts.decoder import DraftDecoder
from blockpilot.drafts.head import DraftHead
from blockpilot.engine.rows import Row
from blockpilot.engine.sampling import candidates
from blockpilot.engine.trees import Slots
from blockpilot.models.packing import Packing
from blockpilot.models.target import Target
from blockpilot.types import Candidates, Reader, Sampling


class Drafter:
    """A draft and its cache of `num_slots` slots; embeddings are the target's."""

    def __init__(self, draft: DraftDecoder, head: DraftHead, target: Target, num_slots: int, length: int) -> None:
        self._draft, self._head, self._target = draft, head, target
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
        return with_chances(draft_candidates(self._head, hidden, positions, sampling, num), rows, depths)

    def _run(self, slots: Sequence[int], sizes: Sequence[int], starts: Sequence[int], anchors: Tensor) -> Tensor:
        """Hidden states [M, hidden] of all positions but the anchors' of blocks of sizes[r] tokens from starts[r] on.

        anchors [R] are token ids.
        """
        blocks = Packing(sizes, starts, anchors.device)
        # The slots in use are dense, so that where all of them draft the cache is read as a plain view.
        index = torch.tensor(slots, device=anchors.device)
        rows = slice(0, len(slots)) if slots[-1] == len(slots) - 1 else index
        view = self.cache.view(index[blocks.rows], blocks.columns, rows, blocks.length)
        tokens = torch.where(blocks.offsets == 0, anchors[blocks.rows], self._draft.mask_token_id)
        return self._draft.propose(self._target.embed(tokens), blocks, view)[blocks.after_first]

    def keep_up(self, features: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Cache the target's features [N, F] of final tokens in slots [N] at positions [N].

        Returns their context vectors [N, hidden].
        """
        return self._draft.extend(features, slots, positions, self.cache)


def draft_candidates(
    head: DraftHead, hidden: Tensor, positions: Sequence[int], sampling: Sequence[Sampling], num: int
) -> Candidates:
    """The draft's `num` best choices at hidden states [N, hidden], as `sampling.candidates` gives them.

    Where no token is drawn its own vocabulary is enough; a race is one of all of the target's tokens.
    """
    if head.tokens is None or not all(each.is_greedy for each in sampling):
        return candidates(head(hidden), positions, sampling, num)
    found = candidates(head.of_own(hidden), positions, sampling, num)
    return found._replace(tokens=head.tokens[found.tokens])


def with_chances(found: Candidates, rows: Sequence[Row], depths: Sequence[int]) -> list[Slots]:
    """Each row's slots [R], with the chances that its policy or else the draft itself gives them.

    `found` are those of depths[r] positions of every row, N in all.
    """
    ends = list(accumulate(depths))
    by_reader: dict[Reader | None, list[int]] = {}
    for r, row in enumerate(rows):
        by_reader.setdefault(None if row.forecast is None else row.forecast.reader, []).append(r)
    tokens, slots = found.tokens.tolist(), dict[int, Slots]()
    for reader, members in by_reader.items():
        some = found.at([i for r in members for i in range(ends[r] - depths[r], ends[r])])
        if reader is None:
            chances = own_chances(some)
        else:
            chances = reader.chances([rows[r].forecast for r in members], some, [depths[r] for r in members])
        split = zip(*(at.split([depths[r] for r in members]) for at in chances), strict=True)
        for r, of_row in zip(members, split, strict=True):
            slots[r] = Slots(tokens[ends[r] - depths[r] : ends[r]], [at.tolist() for at in of_row])
    return [slots[r] for r in range(len(rows))]
