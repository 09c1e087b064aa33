"""One step's work: blocks and prompts on their way through the target, and what it says of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from blockpilot.control.controller import StepOutcome
from blockpilot.control.price import Load
from blockpilot.device import tensor_on
from blockpilot.engine.rows import Row
from blockpilot.models.packing import Packing, SideBySide
from blockpilot.types import Step, Tree


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

    @property
    def parts(self) -> list[Part]:
        return [part for part in (self.blocks, self.prompts) if part is not None]

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
    def load(self) -> Load:
        """Of its blocks."""
        return Load(len(self.depths), sum(self.depths), self.num_block_tokens - len(self.depths))

    def outcome(self, steps: Sequence[Step], next_rows: int) -> StepOutcome:
        """Load and results: `steps` are those of the blocks, but for rows that failed, and of prompts."""
        rows = self.blocks.rows if self.blocks is not None else []
        chosen = {row.request_id for row in rows if row.forecast is not None}
        return StepOutcome(
            self.load,
            num_prompt_tokens=self.prompts.packing.num_tokens if self.prompts is not None else 0,
            num_chosen=len(chosen),
            num_accepted=sum(step.num_accepted for step in steps if step.request_id in chosen),
            num_tokens=sum(len(step.tokens) for step in steps),
            next_rows=next_rows,
        )

    def final(self, paths: Sequence[Sequence[int]]) -> dict[Row, list[int]]:
        """Where in the step's tokens those lie that are final: of every block its path [R], and all of prompts."""
        places: dict[Row, list[int]] = {}
        if self.blocks is not None:
            for row, first, path in zip(self.blocks.rows, self.blocks.packing.firsts, paths, strict=True):
                places[row] = [first + i for i in path]
        if self.prompts is not None:
            packing = self.prompts.packing
            for row, first, n in zip(self.prompts.rows, packing.firsts, packing.sizes, strict=True):
                places[row] = list(range(self.num_block_tokens + first, self.num_block_tokens + first + n))
        return places


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
