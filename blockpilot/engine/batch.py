"""Batch of one step's target pass: the blocks of decoding rows, then the prompts."""

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
    """Rows in the first slots: R decoding rows, each with a block, then rows in prefill.

    A block is the row's anchor and a tree of drafted tokens. The tokens of all rows are flattened to [N]. The target
    makes M choices: one after every token of a block, and one after every complete prompt.
    """

    rows: Sequence[Row]
    trees: Sequence[Tree]
    """[R]"""
    packing: Packing
    tokens: Tensor
    num_block_tokens: int
    """Tokens of the blocks, which come first in the batch."""
    prompts: Sequence[tuple[Row, slice]]
    """Rows in prefill, each with its slice of the batch's tokens."""
    ends: Mapping[Row, int]
    """Rows whose prompt is complete after this step, with the batch index of the prompt's last token."""

    @classmethod
    def of(
        cls, decoding: Sequence[Row], trees: Sequence[Tree], prompts: Mapping[Row, int], device: torch.device
    ) -> Self:
        """Batch of decoding rows with trees [R], and of prompts, each with its number of tokens in this step."""
        tokens, sizes, starts = list[int](), list[int](), list[int]()
        # 1. Blocks: the anchor, whose keys are not in the target's cache yet, then the nodes of its tree.
        for row, tree in zip(decoding, trees, strict=True):
            tokens += (row.tokens[-1], *tree.tokens)
            sizes.append(1 + len(tree.tokens))
            starts.append(row.anchor_position)
        num_block_tokens = len(tokens)
        # 2. Prompts: from the first token that is not in the cache.
        spans, ends = list[tuple[Row, slice]](), dict[Row, int]()
        for row, num in prompts.items():
            spans.append((row, slice(len(tokens), len(tokens) + num)))
            tokens += row.tokens[row.num_cached : row.num_cached + num]
            sizes.append(num)
            starts.append(row.num_cached)
            if num == row.num_uncached:
                ends[row] = len(tokens) - 1
        # 3. Chains need only the causal mask: a node's parent is the token before it.
        parents = None if all(tree.is_chain for tree in trees) else [tree.parents for tree in trees]
        packing = Packing(sizes, starts, device, parents, cut=len(trees))
        rows = [*decoding, *prompts]
        return cls(rows, trees, packing, tensor_on(device, tokens), num_block_tokens, spans, ends)

    @property
    def scored(self) -> list[tuple[Row, Tree, slice]]:
        """Rows for which the target chooses tokens, their trees, and their slices of the M choices."""
        spans, first = list[tuple[Row, Tree, slice]](), 0
        for row, tree in zip(self.rows, self.trees, strict=False):
            spans.append((row, tree, slice(first, first + 1 + len(tree.tokens))))
            first = spans[-1][2].stop
        for i, row in enumerate(self.ends, first):
            spans.append((row, NO_TREE, slice(i, i + 1)))
        return spans

    @property
    def draws(self) -> list[tuple[int, Sampling]]:
        """Position and sampling parameters of each choice [M]; a node's choice is for the position after it."""
        draws = list[tuple[int, Sampling]]()
        for row, _, depths in zip(self.rows, self.trees, self.packing.depths, strict=False):
            for depth in depths:
                draws.append((row.anchor_position + depth + 1, row.request.sampling))
        for row in self.ends:
            draws.append((len(row.tokens), row.request.sampling))
        return draws

    def read_from(self, hidden: Tensor) -> Tensor:
        """Hidden states [M, hidden] of the tokens that need logits, selected from those of all tokens [N, hidden]."""
        block_states = hidden[: self.num_block_tokens]
        return torch.cat([block_states, hidden[list(self.ends.values())]]) if self.ends else block_states

    def final(self, paths: Sequence[Sequence[int]]) -> dict[Row, list[int]]:
        """Batch indices of accepted tokens, for rows that may draft: accepted paths [R], and whole prompts."""
        final = dict[Row, list[int]]()
        for row, first, path in zip(self.rows, self.packing.firsts, paths, strict=False):
            if row.can_draft:
                final[row] = [first + node for node in path]
        for row, span in self.prompts:
            if row.can_draft:
                final[row] = list(range(span.start, span.stop))
        return final

    def following(self, chosen: Sequence[int]) -> list[int]:
        """Next token of every token in the batch [N], given the choices [M]; invalid for rejected tokens."""
        tokens, first_tokens = list(chosen[: self.num_block_tokens]), iter(chosen[self.num_block_tokens :])
        for row, span in self.prompts:
            prompt_tokens = row.tokens[row.num_cached + 1 :][: span.stop - span.start]
            tokens += [*prompt_tokens, next(first_tokens)] if row in self.ends else prompt_tokens
        return tokens
