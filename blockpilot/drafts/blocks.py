"""Blocks at many anchors of known texts in one draft pass, for training and replay.

A row holds consecutive blocks of one text. A block attends to itself and to the context strictly before its anchor,
never to another block.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blockpilot.device import sent

ANCHORS_PER_ROW = 8


class Blocks(NamedTuple):
    """A blocks in each of R rows. Block a has `widths[a]` positions: sizes[r, a] of the block, then padding.

    No other position attends to padding.
    """

    anchors: Tensor  # [R, A] positions
    tokens: Tensor  # [R, A], at the anchors
    sizes: Tensor  # [R, A]
    widths: tuple[int, ...]

    def layout(self) -> tuple[Tensor, Tensor]:
        """Index of the block, and offset in it, of every position of a row: two tensors [sum(widths)]."""
        block = torch.arange(len(self.widths)).repeat_interleave(torch.tensor(self.widths))
        offset = torch.cat([torch.arange(width) for width in self.widths])
        return sent(block, self.anchors.device), sent(offset, self.anchors.device)


class KnownLayer(NamedTuple):
    """A layer's keys and values of known texts [N, heads, S, head_dim].

    It has no layer index: torch.compile would compile each index separately, up to its limit.
    """

    keys: Tensor
    values: Tensor
    rows_each: int

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the texts, followed by those of the blocks [R, heads, W, head_dim]."""
        known = self.keys, self.values
        if self.rows_each > 1:
            known = known[0].repeat_interleave(self.rows_each, 0), known[1].repeat_interleave(self.rows_each, 0)
        return torch.cat([known[0], keys], dim=2), torch.cat([known[1], values], dim=2)


class KnownContext:
    """Keys and values of a draft for known texts.

    keys and values: [N, heads, S, head_dim] per layer; each text has `rows_each` rows of blocks. tokens [N, S]
    and contexts [N, S, hidden] (context vectors): for drafts that read them.
    """

    def __init__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        rows_each: int = 1,
        *,
        tokens: Tensor | None = None,
        contexts: Tensor | None = None,
    ) -> None:
        self.keys, self.values, self.rows_each = keys, values, rows_each
        self.tokens, self.contexts = tokens, contexts

    @property
    def num_columns(self) -> int:
        return self.keys[0].shape[2]

    @property
    def layers(self) -> list[KnownLayer]:
        return [KnownLayer(k, v, self.rows_each) for k, v in zip(self.keys, self.values, strict=True)]


def block_mask(blocks: Blocks, num_columns: int) -> Tensor:
    """Block-diffusion mask [R, sum(widths), num_columns + sum(widths)].

    A position attends to the context strictly before its anchor, and to the positions of its block.
    """
    block, offset = blocks.layout()
    columns = torch.arange(num_columns, device=block.device)
    before = columns < blocks.anchors[:, block, None]
    inside = (block[:, None] == block) & (offset < blocks.sizes[:, block])[:, None]
    return torch.cat([before, inside], dim=2)
