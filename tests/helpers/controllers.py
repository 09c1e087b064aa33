"""Controllers that tests can switch and look into."""

from collections.abc import Callable

from blockpilot.control.backoff import Backoff
from blockpilot.control.controller import Controller, StepOutcome
from blockpilot.control.live import LiveController
from blockpilot.control.cost import StepPrice
from blockpilot.types import Policy


class Switch(Controller):
    """Backs off when told to, and keeps what came of steps."""

    def __init__(self, policy: Policy, price: StepPrice | None = None) -> None:
        super().__init__(policy, price)
        self.backs_off = False
        self.outcomes: list[StepOutcome] = []

    @property
    def speculates(self) -> bool:
        return not self.backs_off

    def finish(self, outcome: StepOutcome) -> None:
        super().finish(outcome)
        self.outcomes.append(outcome)


class World(LiveController):
    """A live controller whose steps take made-up seconds, `seconds` of what came of a step. Never backs off."""

    def __init__(self, policy: Policy, price: StepPrice | None, seconds: Callable[[StepOutcome], float]) -> None:
        super().__init__(policy, price, backoff=Backoff(window=10**9))
        self.seconds = seconds
        self.outcomes: list[StepOutcome] = []

    def finish(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)
        self.learn(outcome, self.seconds(outcome))
