"""One step's rows on their way through the target: blocks of rows that decode, and prompts beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    num_block_tokens: int
    """Tokens of blocks: the first of the batch."""
    prompts: Sequence[tuple[Row, slice]]
    """Rows whose prompts are taken in, and which of the batch's tokens are theirs."""
    ends: Mapping[Row, int]
    """Rows whose prompt ends in this step, and which of the batch's tokens is its last."""

    @classmethod
    def of(
        cls, decoding: Sequence[Row], trees: Sequence[Tree], prompts: Mapping[Row, int], device: torch.device
    ) -> Self:
        """Rows that decode with their trees [R], and prompts, each with the number of tokens that is taken in."""
        tokens, sizes, starts = list[int](), list[int](), list[int]()
        # 1. Blocks: the anchor, whose keys the target's cache lacks, then the nodes of its tree.
        for row, tree in zip(decoding, trees, strict=True):
            tokens += (row.tokens[-1], *tree.tokens)
            sizes.append(1 + len(tree.tokens))
            starts.append(row.anchor_position)
        num_block_tokens = len(tokens)
        # 2. Prompts: from the first token that the cache lacks on.
        spans, ends = list[tuple[Row, slice]](), dict[Row, int]()
        for row, num in prompts.items():
            spans.append((row, slice(len(tokens), len(tokens) + num)))
            tokens += row.tokens[row.num_cached : row.num_cached + num]
            sizes.append(num)
            starts.append(row.num_cached)
            if num == row.num_uncached:
                ends[row] = len(tokens) - 1
        # 3. Chains need no mask but the causal one: a node's parent is the token before it.
        parents = None if all(tree.is_chain for tree in trees) else [tree.parents for tree in trees]
        packing = Packing(sizes, starts, device, parents, cut=len(trees))
        rows = [*decoding, *prompts]
        return cls(rows, trees, packing, tensor_on(device, tokens), num_block_tokens, spans, ends)

    @property
    def scored(self) -> list[tuple[Row, Tree, slice]]:
        """The rows whose tokens are chosen, their trees, and which of the M choices are theirs."""
        spans, first = list[tuple[Row, Tree, slice]](), 0
        for row, tree in zip(self.rows, self.trees, strict=False):
            spans.append((row, tree, slice(first, first + 1 + len(tree.tokens))))
            first = spans[-1][2].stop
        for i, row in enumerate(self.ends, first):
            spans.append((row, NO_TREE, slice(i, i + 1)))
        return spans

    @property
    def draws(self) -> list[tuple[int, Sampling]]:
        """Position and sampling of every choice [M]: the choice after a node is for the position below it."""
        draws = list[tuple[int, Sampling]]()
        for row, _, depths in zip(self.rows, self.trees, self.packing.depths, strict=False):
            for depth in depths:
                draws.append((row.anchor_position + depth + 1, row.request.sampling))
        for row in self.ends:
            draws.append((len(row.tokens), row.request.sampling))
        return draws

    def read_from(self, hidden: Tensor) -> Tensor:
        """States [M, hidden] that choices are made from, of the target's after all tokens [N, hidden]."""
        of_blocks = hidden[: self.num_block_tokens]
        return torch.cat([of_blocks, hidden[list(self.ends.values())]]) if self.ends else of_blocks

    def final(self, paths: Sequence[Sequence[int]]) -> dict[Row, list[int]]:
        """The batch's tokens that are final, of rows that may draft: of every block its path [R], of prompts all."""
        final = dict[Row, list[int]]()
        for row, first, path in zip(self.rows, self.packing.firsts, paths, strict=False):
            if row.can_draft:
                final[row] = [first + node for node in path]
        for row, span in self.prompts:
            if row.can_draft:
                final[row] = list(range(span.start, span.stop))
        return final

    def following(self, chosen: Sequence[int]) -> list[int]:
        """The token after each of the batch's tokens, given the choices [M]; that after a drafted token is so only
        where it is on the accepted path.
        """
        tokens, of_prompts = list(chosen[: self.num_block_tokens]), iter(chosen[self.num_block_tokens :])
        for row, span in self.prompts:
            known = row.tokens[row.num_cached + 1 :][: span.stop - span.start]
            tokens += [*known, next(of_prompts)] if row in self.ends else known
        return tokens
