"""The draft over a cache of its own: it proposes blocks, and is kept up with the context that the target has read.

The target's features of every token of a row that may draft go into the cache at once, also in steps in which the row
decodes plainly: a draft that misses part of its context is accepted less, and nothing else would show it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockpilot.drafts.dflash import DraftModel
from blockpilot.models.packing import Packing
from blockpilot.models.target import Target


class Drafter:
    """A draft and its cache of `num_slots` slots; embeddings are the target's."""

    def __init__(self, draft: DraftModel, target: Target, num_slots: int, length: int) -> None:
        self._draft, self._target = draft, target
        self.cache = draft.new_cache(num_slots, length)

    def propose(self, slots: Sequence[int], sizes: Sequence[int], starts: Sequence[int], anchors: Tensor) -> Tensor:
        """Hidden states [M, hidden] at the drafted positions of every block, for the target's LM head.

        The block of slots[r] has sizes[r] tokens (2 or more) from position starts[r] on, where its anchor lies:
        anchors [R] are token ids.
        """
        blocks = Packing(sizes, starts, anchors.device)
        # The slots in use are dense, so that where all of them draft the cache is read as a plain view.
        index = torch.tensor(slots, device=anchors.device)
        rows = slice(0, len(slots)) if slots[-1] == len(slots) - 1 else index
        positions = blocks.positions[None]
        view = self.cache.view(index[blocks.rows], positions[0], rows, blocks.length)
        tokens = torch.where(blocks.offsets == 0, anchors[blocks.rows], self._draft.options.mask_token_id)
        embedded = self._target.embed(tokens).to(self._draft.dtype)
        return self._draft.propose(embedded[None], positions, view, blocks)[0][blocks.after_first]

    def keep_up(self, features: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Cache the target's features [N, F] of tokens in slots [N] at positions [N].

        Returns their context vectors [N, hidden].
        """
        contexts = self._draft.fuse(features.to(self._draft.dtype))
        self._draft.extend(contexts[None], positions[None], self.cache.view(slots, positions, slice(0, 0), 0))
        return contexts
