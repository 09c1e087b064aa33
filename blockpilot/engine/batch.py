"""One step's rows on their way through the target: blocks of rows that decode, and prompts beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from blockpilot.device import tensor_on
from blockpilot.engine.rows import Row
from blockpilot.models.packing import Packing
from blockpilot.types import NO_TREE, Sampling, Tree


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows in the first slots: R that decode, each a block of its anchor and a tree of drafted tokens, then prompts.

    Their tokens [N] lie side by side. The target makes M choices: one after every token of a block, and one after
    every prompt that ends.
    """

    rows: Sequence[Row]
    trees: Sequence[Tree]
    """[R]"""
    packing: Packing
    tokens: Tensor

    @classmethod
    def of(
        cls, decoding: Sequence[Row], trees: Sequence[Tree], prompts: Mapping[Row, int], device: torch.device
    ) -> Self:
        """Rows that decode with their trees [R], and prompts, each with the number of tokens that is taken in."""
        sizes = [*(1 + len(tree.tokens) for tree in trees), *prompts.values()]
        starts = [*(row.anchor_position for row in decoding), *(row.num_cached for row in prompts)]
        parents = None if all(tree.is_chain for tree in trees) else [tree.parents for tree in trees]
        packing = Packing(sizes, starts, device, parents, cut=len(trees))
        tokens = [t for row, tree in zip(decoding, trees, strict=True) for t in (row.tokens[-1], *tree.tokens)]
        for row, num in prompts.items():
            tokens += row.tokens[row.num_cached :][:num]
        return cls([*decoding, *prompts], trees, packing, tensor_on(device, tokens))

    @cached_property
    def num_block_tokens(self) -> int:
        """Tokens of blocks: the first of the batch."""
        return sum(self.packing.sizes[: len(self.trees)])

    @property
    def prompts(self) -> list[tuple[Row, slice]]:
        """Rows whose prompts are taken in, and which of the batch's tokens are theirs."""
        first = len(self.trees)
        placed = zip(self.packing.firsts[first:], self.packing.sizes[first:], strict=True)
        spans = (slice(place, place + size) for place, size in placed)
        return list(zip(self.rows[first:], spans, strict=True))

    @cached_property
    def ends(self) -> dict[Row, int]:
        """Rows whose prompt ends in this step, and which of the batch's tokens is its last."""
        return {row: own.stop - 1 for row, own in self.prompts if own.stop - own.start == row.num_uncached}

    @property
    def scored(self) -> list[tuple[Row, Tree, slice]]:
        """The rows whose tokens are chosen, their trees, and which of the M choices are theirs."""
        packing, first = self.packing, self.num_block_tokens
        blocks = zip(self.rows, self.trees, packing.firsts, packing.sizes, strict=False)
        found = [(row, tree, slice(start, start + size)) for row, tree, start, size in blocks]
        return found + [(row, NO_TREE, slice(i, i + 1)) for i, row in enumerate(self.ends, first)]

    @property
    def draws(self) -> list[tuple[int, Sampling]]:
        """Position and sampling of every choice [M]."""
        found = list[tuple[int, Sampling]]()
        for row, _, depths in zip(self.rows, self.trees, self.packing.depths, strict=False):
            found += [(row.anchor_position + depth + 1, row.request.sampling) for depth in depths]
        return found + [(len(row.tokens), row.request.sampling) for row in self.ends]

    def read_from(self, hidden: Tensor) -> Tensor:
        """States [M, hidden] that choices are made from, of the target's after all tokens [N, hidden]."""
        of_blocks = hidden[: self.num_block_tokens]
        return torch.cat([of_blocks, hidden[list(self.ends.values())]]) if self.ends else of_blocks

    def final(self, paths: Sequence[Sequence[int]]) -> dict[Row, list[int]]:
        """The batch's tokens that are final, of rows that may draft: of every block its path [R], of prompts all."""
        of_prompts = [range(own.stop - own.start) for _, own in self.prompts]
        rows = zip(self.rows, self.packing.firsts, [*paths, *of_prompts], strict=True)
        return {row: [first + node for node in path] for row, first, path in rows if row.can_draft}

    def following(self, chosen: Sequence[int]) -> list[int]:
        """The token after each of the batch's tokens, given the choices [M]; that after a drafted token is so only
        where it is on the accepted path.
        """
        tokens, of_prompts = list(chosen[: self.num_block_tokens]), iter(chosen[self.num_block_tokens :])
        for row, own in self.prompts:
            known = row.tokens[row.num_cached + 1 :][: own.stop - own.start]
            tokens += [*known, next(of_prompts)] if row in self.ends else known
        return tokens
