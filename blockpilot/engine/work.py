"""One step's work: blocks and prompts on their way through the target, and what it says of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from blockpilot.control.cost import Load
from blockpilot.device import tensor_on
from blockpilot.engine.rows import Row
from blockpilot.models.packing import Packing, SideBySide
from blockpilot.types import NO_TREE, Sampling, Tree


class Part(NamedTuple):
    """Rows in neighbouring slots, and what of them goes through the target: tokens [N], packed."""

    rows: list[Row]
    packing: Packing
    tokens: Tensor


@dataclass(frozen=True)
class Work:
    """What a step takes in: the blocks of rows that decode, and prompts, whose last one may be cut."""

    blocks: Part | None
    trees: Sequence[Tree]
    """[R], of the blocks."""
    depths: Sequence[int]
    """[R]: positions that the draft proposed tokens for."""
    prompts: Part | None
    num_passes: int = 1
    """Passes of the draft, if it drafted."""

    @property
    def parts(self) -> list[Part]:
        return [part for part in (self.blocks, self.prompts) if part is not None]

    @cached_property
    def rows(self) -> list[Row]:
        """Rows of all parts, in the first slots."""
        return [row for part in self.parts for row in part.rows]

    @cached_property
    def packing(self) -> SideBySide:
        """Of all parts, whose slots follow each other from the first on."""
        return SideBySide([part.packing for part in self.parts])

    @property
    def num_block_tokens(self) -> int:
        return self.blocks.packing.num_tokens if self.blocks is not None else 0

    @property
    def prompt_ends(self) -> dict[Row, int]:
        """Rows whose prompt ends in this step, and where in the step's tokens its last one lies."""
        if self.prompts is None:
            return {}
        packing = self.prompts.packing
        placed = zip(self.prompts.rows, packing.firsts, packing.sizes, strict=True)
        return {row: self.num_block_tokens + first + n - 1 for row, first, n in placed if n == row.num_uncached}

    @property
    def draws(self) -> list[tuple[int, Sampling]]:
        """Position and sampling of the target's choices [M]: after tokens of blocks, then after prompts that end."""
        found = list[tuple[int, Sampling]]()
        if self.blocks is not None:
            for row, depths in zip(self.blocks.rows, self.blocks.packing.depths, strict=True):
                found += [(row.anchor_position + depth + 1, row.request.sampling) for depth in depths]
        return found + [(len(row.tokens), row.request.sampling) for row in self.prompt_ends]

    @property
    def scored(self) -> list[tuple[Row, Tree, slice]]:
        """Every row whose tokens are drawn, its tree, and where its logits lie among the step's [M]."""
        found, num = list[tuple[Row, Tree, slice]](), self.num_block_tokens
        if self.blocks is not None:
            packing = self.blocks.packing
            spans = (slice(first, first + size) for first, size in zip(packing.firsts, packing.sizes, strict=True))
            found += zip(self.blocks.rows, self.trees, spans, strict=True)
        return found + [(row, NO_TREE, slice(num + i, num + i + 1)) for i, row in enumerate(self.prompt_ends)]

    @property
    def load(self) -> Load:
        """Of its blocks."""
        num_verified = self.num_block_tokens - len(self.depths)
        return Load(len(self.depths), sum(self.depths), num_verified, self.num_passes)

    def final(self, paths: Sequence[Sequence[int]]) -> dict[Row, list[int]]:
        """Places, among the step's tokens, of those that are final, of rows that may draft: of every block its path
        [R], and all of prompts.
        """
        found, num_tokens = dict[Row, list[int]](), 0
        for part in self.parts:
            of_rows = paths if part is self.blocks else [range(size) for size in part.packing.sizes]
            for row, first, path in zip(part.rows, part.packing.firsts, of_rows, strict=True):
                if row.can_draft:
                    found[row] = [num_tokens + first + node for node in path]
            num_tokens += part.packing.num_tokens
        return found

    def following(self, chosen: Sequence[int]) -> list[int]:
        """The token after each of the step's tokens, given the target's choices [M] (`StepScores`).

        Those after drafted tokens count where these are on their row's path.
        """
        num = self.num_block_tokens
        tokens, drawn = list(chosen[:num]), iter(chosen[num:])
        if self.prompts is not None:
            for row, size in zip(self.prompts.rows, self.prompts.packing.sizes, strict=True):
                known = row.tokens[row.num_cached + 1 :][:size]
                tokens += known if len(known) == size else [*known, next(drawn)]
        return tokens


def blocks_of(rows: list[Row], trees: Sequence[Tree], device: torch.device) -> Part | None:
    """Anchors and drafted tokens of rows that decode."""
    if not rows:
        return None
    parents = None if all(tree.is_chain for tree in trees) else [tree.parents for tree in trees]
    sizes = [1 + len(tree.tokens) for tree in trees]
    packing = Packing(sizes, [row.anchor_position for row in rows], device, parents)
    tokens = [t for row, tree in zip(rows, trees, strict=True) for t in (row.tokens[-1], *tree.tokens)]
    return Part(rows, packing, tensor_on(device, tokens))


class StepScores(NamedTuple):
    """What the target says of a step's tokens [N].

    logits [M, vocab]: of the blocks' tokens, then of the last token of every prompt that ends. features [N, F]: what
    the draft's context is made of; None where no row may draft.
    """

    logits: Tensor
    features: Tensor | None
