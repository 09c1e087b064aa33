"""Step costs that follow what the steps of a running engine really take.

Measured costs are of steps that have the machine to themselves. In a server they share it with event loops, clients
and tokenizers, which lengthens a short step by more than a long one: on two CPU cores a plain step took 20% longer
than measured and a drafting one 2 to 6%, so that the measured costs made drafting look dearer than it was.
"""

import time
from collections.abc import Callable, Mapping

from blockpilot.adaptive.backoff import Backoff
from blockpilot.adaptive.pace import ALIKE, BACKED_OFF, MIXED, PLAIN, Pace
from blockpilot.control.controller import Controller
from blockpilot.control.price import StepCosts
from blockpilot.types import Policy, StepShape

KINDS = PLAIN, ALIKE, MIXED


class LiveController(Controller):
    """A controller that corrects its costs by the seconds of an engine's steps, and backs off where drafting fails.

    Plain steps, those whose rows draft alike, and those of rows of several sizes have a factor each (pace.py), at the
    rows of the next step: costs are interpolated between measured numbers of rows, which on a CPU is wrong by up to a
    fifth. The factors are optimistic by a standard deviation, so that kinds of steps are tried where that could
    matter. Mixed steps take no less than their costs times the factor of those alike.

    num_slots: the engine's. refresh_every: steps that only decode, between corrections.
    """

    def __init__(
        self,
        policy: Policy,
        costs: StepCosts | None = None,
        *,
        num_slots: int,
        pace: Pace | None = None,
        backoff: Backoff | None = None,
        refresh_every: int = 2,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(policy, costs)
        self.factors = dict.fromkeys(KINDS, 1.0)
        self._measured = self.costs
        self._pace, self._backoff = pace or Pace(num_slots), backoff or Backoff()
        self._refresh_every, self._clock = refresh_every, clock
        self._started, self._num_steps, self._last_kind = 0.0, 0, PLAIN
        self._corrected = dict[int, tuple[Mapping[str, float], StepCosts]]()
        self._num_rows = 0

    @property
    def speculates(self) -> bool:
        return not self._backoff.active(self._num_rows)

    def begin(self) -> None:
        self._started = self._clock()

    def finish(self, shape: StepShape, num_tokens: int, num_rows: int) -> None:
        self.learn(shape, num_tokens, num_rows, self._clock() - self._started)

    def learn(self, shape: StepShape, num_tokens: int, num_rows: int, seconds: float) -> None:
        """`finish` for a step of so many seconds. A step that takes in prompts teaches nothing."""
        if self._measured is None:
            return
        if shape.only_decodes:
            rows = len(shape.sizes)
            self._count(shape, seconds / self._measured.mixed_s(shape.sizes))
            plain_s = self._measured.step_s(1, rows) * self._pace.factor(BACKED_OFF, rows)
            self._backoff.observe(shape, num_tokens, seconds, plain_s)
        self._num_rows = num_rows
        if self._num_steps >= self._refresh_every and num_rows:
            self.factors, self.costs = self._correct(self._measured, num_rows)

    def _count(self, shape: StepShape, ratio: float) -> None:
        self._num_steps += 1
        self._last_kind = _kind(shape)
        self._pace.observe(self._last_kind, len(shape.sizes), ratio)
        if self._num_steps % self._refresh_every == 0:
            self._corrected.clear()

    def _correct(self, measured: StepCosts, rows: int) -> tuple[Mapping[str, float], StepCosts]:
        """Factors for so many rows, and costs scaled by them."""
        if rows not in self._corrected:
            factors = {kind: self._pace.optimistic(kind, rows, beside=self._last_kind) for kind in KINDS}
            factors[MIXED] = max(factors[MIXED], factors[ALIKE])
            self._corrected[rows] = factors, measured.scaled(**factors)
        return self._corrected[rows]


def _kind(shape: StepShape) -> str:
    widest = max(shape.sizes)
    if widest == 1:
        return PLAIN if shape.num_chosen else BACKED_OFF
    return ALIKE if min(shape.sizes) == widest else MIXED
