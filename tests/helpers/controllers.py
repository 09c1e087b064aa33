"""Controllers that tests can switch and look into."""

from collections.abc import Callable

from blockpilot.adaptive.backoff import Backoff
from blockpilot.adaptive.live import LiveController
from blockpilot.adaptive.pace import Pace
from blockpilot.control.controller import Controller
from blockpilot.control.price import StepCosts
from blockpilot.types import Policy, StepShape


class Switch(Controller):
    """Backs off when told to, and keeps what steps took in."""

    def __init__(self, policy: Policy, costs: StepCosts | None = None) -> None:
        super().__init__(policy, costs)
        self.backs_off = False
        self.shapes: list[StepShape] = []

    @property
    def speculates(self) -> bool:
        return not self.backs_off

    def finish(self, shape: StepShape, num_tokens: int, num_rows: int) -> None:
        self.shapes.append(shape)


class World(LiveController):
    """A live controller whose steps take made-up seconds, `seconds` of what a step takes in. Never backs off."""

    def __init__(
        self,
        policy: Policy,
        costs: StepCosts | None,
        seconds: Callable[[StepShape], float],
        *,
        num_slots: int,
        pace: Pace | None = None,
    ) -> None:
        super().__init__(policy, costs, num_slots=num_slots, pace=pace, backoff=Backoff(min_blocks=10**9))
        self.seconds = seconds
        self.shapes: list[StepShape] = []

    def finish(self, shape: StepShape, num_tokens: int, num_rows: int) -> None:
        self.shapes.append(shape)
        self.learn(shape, num_tokens, num_rows, self.seconds(shape))
