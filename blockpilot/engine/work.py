"""One step's work: blocks and prompts on their way through the target, and what it says of them."""

from typing import NamedTuple

from torch import Tensor

from blockpilot.engine.rows import Row
from blockpilot.models.packing import Packing
from blockpilot.types import StepShape


class Part(NamedTuple):
    """Rows in neighbouring slots, and what of them goes through the target: tokens [N], packed."""

    rows: list[Row]
    packing: Packing
    tokens: Tensor


class Work(NamedTuple):
    """What a step takes in: the blocks of rows that decode, and prompts, whose last one may be cut."""

    blocks: Part | None
    prompts: Part | None

    @property
    def parts(self) -> list[Part]:
        return [part for part in self if part is not None]

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
    def shape(self) -> StepShape:
        return StepShape(
            sizes=self.blocks.packing.sizes if self.blocks is not None else (),
            num_prompt_tokens=self.prompts.packing.num_tokens if self.prompts is not None else 0,
            num_chosen=sum(row.forecast is not None for row in self.blocks.rows) if self.blocks is not None else 0,
        )


class StepScores(NamedTuple):
    """What the target says of a step's tokens [N].

    logits [M, vocab]: of the blocks' tokens, then of the last token of every prompt that ends. contexts [N, hidden]:
    the draft's context vectors; None where no row may draft.
    """

    logits: Tensor
    contexts: Tensor | None
