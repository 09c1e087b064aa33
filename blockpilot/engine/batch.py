"""Batch of one step's target pass: the blocks of decoding rows, then the prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from blockpilot.device import tensor_on
from blockpilot.engine.rows import Row
from blockpilot.models.packing import Packing
from blockpilot.types import NO_TREE, Sampling, Tree


class BatchRow(NamedTuple):
    """A row in a batch: a decoding row with its tree, or a row in prefill with NO_TREE."""

    row: Row
    tree: Tree
    tokens: slice
    """Its span of the batch's N tokens."""
    choices: slice
    """Its span of the target's M choices; empty for a prompt that is not complete."""

    @property
    def is_complete(self) -> bool:
        """True if the target chooses tokens for the row; False for a prompt that continues in the next step."""
        return bool(self.choices.start < self.choices.stop)


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows in the first slots: R decoding rows, each with a block, then rows in prefill.

    A block is the row's anchor and a tree of drafted tokens. The tokens of all rows are flattened to [N]. The target
    makes M choices: one after every token of a block, and one after every complete prompt.
    """

    blocks: Sequence[BatchRow]
    """[R]; their tokens come first in the batch, and are the first choices."""
    prompts: Sequence[BatchRow]
    packing: Packing
    tokens: Tensor
    num_block_tokens: int

    @classmethod
    def of(
        cls, decoding: Sequence[Row], trees: Sequence[Tree], prompts: Mapping[Row, int], device: torch.device
    ) -> Self:
        """Batch of decoding rows with trees [R], and of prompts, each with its number of tokens in this step."""
        tokens, sizes, starts = list[int](), list[int](), list[int]()
        # 1. Blocks: the anchor, whose keys are not in the target's cache yet, then the nodes of its tree.
        blocks, prompt_rows = list[BatchRow](), list[BatchRow]()
        for row, tree in zip(decoding, trees, strict=True):
            first = len(tokens)
            tokens += (row.tokens[-1], *tree.tokens)
            span = slice(first, len(tokens))
            blocks.append(BatchRow(row, tree, span, span))
            sizes.append(len(tokens) - first)
            starts.append(row.anchor_position)
        num_block_tokens = num_choices = len(tokens)
        # 2. Prompts: from the first token that is not in the cache.
        for row, num in prompts.items():
            span, first_choice = slice(len(tokens), len(tokens) + num), num_choices
            tokens += row.tokens[row.num_cached : row.num_cached + num]
            sizes.append(num)
            starts.append(row.num_cached)
            num_choices += num == row.num_uncached
            prompt_rows.append(BatchRow(row, NO_TREE, span, slice(first_choice, num_choices)))
        # 3. Chains need only the causal mask: a node's parent is the token before it.
        parents = None if all(tree.is_chain for tree in trees) else [tree.parents for tree in trees]
        packing = Packing(sizes, starts, device, parents, cut=len(trees))
        return cls(blocks, prompt_rows, packing, tensor_on(device, tokens), num_block_tokens)

    @property
    def may_draft(self) -> bool:
        """True if the draft may run for any of the rows."""
        return any(row.can_draft for rows in (self.blocks, self.prompts) for row, _, _, _ in rows)

    @property
    def complete_prompts(self) -> list[BatchRow]:
        """Prompts that are complete after this step."""
        return [prompt for prompt in self.prompts if prompt.is_complete]

    @property
    def draws(self) -> list[tuple[int, Sampling]]:
        """Position and sampling parameters of each choice [M]; a node's choice is for the position after it."""
        draws = list[tuple[int, Sampling]]()
        for block, depths in zip(self.blocks, self.packing.depths, strict=False):
            row = block.row
            for depth in depths:
                draws.append((row.anchor_position + depth + 1, row.request.sampling))
        for prompt in self.complete_prompts:
            draws.append((len(prompt.row.tokens), prompt.row.request.sampling))
        return draws

    def scored_states(self, hidden: Tensor) -> Tensor:
        """Hidden states [M, hidden] of the tokens that need logits, selected from those of all tokens [N, hidden]."""
        block_states, complete = hidden[: self.num_block_tokens], self.complete_prompts
        last_tokens = [prompt.tokens.stop - 1 for prompt in complete]
        return torch.cat([block_states, hidden[last_tokens]]) if complete else block_states

    def accepted_indices(self, paths: Sequence[Sequence[int]]) -> dict[Row, list[int]]:
        """Batch indices of accepted tokens, for rows that may draft: accepted paths [R], and whole prompts."""
        accepted = dict[Row, list[int]]()
        for block, path in zip(self.blocks, paths, strict=True):
            if block.row.can_draft:
                first = block.tokens.start
                accepted[block.row] = [first + node for node in path]
        for prompt in self.prompts:
            if prompt.row.can_draft:
                accepted[prompt.row] = list(range(prompt.tokens.start, prompt.tokens.stop))
        return accepted

    def next_tokens(self, chosen: Sequence[int]) -> list[int]:
        """Next token of every token in the batch [N], given the choices [M]; invalid for rejected tokens."""
        tokens = list(chosen[: self.num_block_tokens])
        for row, _, span, choices in self.prompts:
            tokens += row.tokens[row.num_cached + 1 :][: span.stop - span.start]
            tokens += chosen[choices]
        return tokens
