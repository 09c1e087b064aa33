"""Blocks at many anchors of known texts, side by side in one draft pass, for training and replay.

A row holds the blocks of one text, one after the other. Each sees itself and the context
strictly before its own anchor, never another block.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blockpilot.device import sent

ANCHORS_PER_ROW = 8


class Blocks(NamedTuple):
    """A blocks in each of R rows. Block a takes `widths[a]` positions of a row, of which sizes [R, A] are its own.

    Positions beyond a block's size are padding that no other position attends to.
    """

    anchors: Tensor  # [R, A] positions
    tokens: Tensor  # [R, A]: those at the anchors
    sizes: Tensor  # [R, A]
    widths: tuple[int, ...]

    def layout(self) -> tuple[Tensor, Tensor]:
        """Block, and offset in that block, of every position of a row: two [sum(widths)]."""
        block = torch.arange(len(self.widths)).repeat_interleave(torch.tensor(self.widths))
        offset = torch.cat([torch.arange(width) for width in self.widths])
        return sent(block, self.anchors.device), sent(offset, self.anchors.device)


class KnownLayer(NamedTuple):
    """A layer's keys and values of known texts [N, heads, S, head_dim].

    It has no number: layers that differ in one are compiled one by one, until the compiler's limit is reached.
    """

    keys: Tensor
    values: Tensor
    rows_each: int

    def with_own(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the texts, then the blocks' own [R, heads, W, head_dim]."""
        known = self.keys, self.values
        if self.rows_each > 1:
            known = known[0].repeat_interleave(self.rows_each, 0), known[1].repeat_interleave(self.rows_each, 0)
        return torch.cat([known[0], keys], dim=2), torch.cat([known[1], values], dim=2)


class KnownContext:
    """Keys and values of a draft for known texts.

    keys and values hold a tensor [N, heads, S, head_dim] for every layer; a text serves `rows_each` rows of blocks.
    tokens [N, S] and context vectors [N, S, hidden] are there for drafts that read them.
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

    A position sees the context strictly before its own anchor, and the positions of its own block.
    """
    block, offset = blocks.layout()
    columns = torch.arange(num_columns, device=block.device)
    before = columns < blocks.anchors[:, block, None]
    inside = (block[:, None] == block) & (offset < blocks.sizes[:, block])[:, None]
    return torch.cat([before, inside], dim=2)
