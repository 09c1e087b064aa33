"""Controllers that record outcomes, or follow a script."""

from collections.abc import Callable, Sequence

import numpy as np

from blockpilot.control.acceptance import OF_PATH, AcceptanceModel, Array
from blockpilot.control.choose import Trees
from blockpilot.control.controller import Controller, DepthPlan, Planned, StepOutcome, VerifiedNodes
from blockpilot.control.cost import Load, StepPrice

NOTHING_VERIFIED = VerifiedNodes(
    *np.zeros((3, 0), dtype=int), np.zeros((0, len(OF_PATH))), *np.zeros((2, 0), dtype=int)
)


class Watched(Controller):
    """Records the outcomes of steps; `seconds`, if given, replaces the measured times."""

    def __init__(
        self,
        deepest: int,
        price: StepPrice | None = None,
        seconds: Callable[[StepOutcome], float] | None = None,
        *,
        follows: bool = True,
    ) -> None:
        super().__init__(AcceptanceModel(deepest), price, follows=follows)
        self.seconds = seconds
        self.outcomes: list[StepOutcome] = []
        self.verified: list[VerifiedNodes] = []

    def learn(self, outcome: StepOutcome, seconds: float) -> None:
        self.outcomes.append(outcome)
        self.verified.append(outcome.verified() if outcome.verified is not None else NOTHING_VERIFIED)
        super().learn(outcome, seconds if self.seconds is None else self.seconds(outcome))


class Told(Watched):
    """Follows a script: draft depth and tree size of each step, the same for all rows, repeated cyclically."""

    def __init__(self, deepest: int, turns: Sequence[tuple[int, int]]) -> None:
        super().__init__(deepest)
        self.turns = turns

    @property
    def turn(self) -> tuple[int, int]:
        return self.turns[len(self.outcomes) % len(self.turns)]

    def plan(self, rows: Planned, other_load: Load) -> DepthPlan:
        plan = super().plan(rows, other_load)
        return plan._replace(depths=np.minimum(self.turn[0], rows.max_depths))

    def select(self, trees: Trees, rates: Array, drafted: Load) -> Array:
        super().select(trees, rates, drafted)
        return np.minimum(self.turn[1], trees.nodes.num)
