"""Step costs that follow what the steps of a running engine really take.

Measured costs are of steps that have the machine to themselves. In a server they share it with event loops, clients
and tokenizers, which lengthens a short step by more than a long one: on two CPU cores a plain step took 20% longer
than measured and a drafting one 2 to 6%, so that the measured costs made drafting look dearer than it was.
"""

import time

from blockpilot.control.backoff import Rest
from blockpilot.control.pace import ALIKE, MIXED, PLAIN, RESTING, Pace
from blockpilot.control.price import StepCosts
from blockpilot.engine.engine import Engine
from blockpilot.types import Step, StepShape

KINDS = PLAIN, ALIKE, MIXED
REFRESH_EVERY = 2  # steps


class LiveCosts:
    """Steps an engine, and corrects the costs that it weighs forecasts with by the seconds of its steps.

    Plain steps, those whose rows draft alike, and those of rows of several sizes have a factor each (`pace.py`), at
    the rows of the next step: costs are interpolated between measured numbers of rows, which on a CPU is wrong by up
    to a fifth. Kinds are hoped to cost a little less than is known of them beside the last step's, so that they are
    tried where that could matter: what is never tried is never known. Mixed steps take no less than their costs times
    the factor of those alike. `factors`, those of the next step, may be read by any thread.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.use(engine.costs)

    def use(self, measured: StepCosts | None) -> None:
        """Correct these costs from now on; None: steps cost alike."""
        self.engine.costs = self._measured = measured
        self._pace, self._last_kind = Pace(self.engine.num_slots), PLAIN
        self._corrected = dict[int, tuple[dict[str, float], StepCosts]]()
        self._num_steps = 0
        self._rest, self.engine.resting = Rest(), False
        self.factors = dict.fromkeys(KINDS, 1.0)
        """What steps take now, in what was measured of their kind."""

    def step(self) -> tuple[list[Step], float]:
        """`engine.step` and its seconds; one that only decodes is a measurement, and decides on rests (rest.py)."""
        started = time.perf_counter()
        steps = self.engine.step()
        seconds = time.perf_counter() - started
        self.observe(seconds)
        self._rest_or_not(sum(len(step.tokens) for step in steps), seconds)
        return steps, seconds

    def _rest_or_not(self, num_tokens: int, seconds: float) -> None:
        shape = self.engine.last_shape
        if self._measured is None:
            return
        if shape.only_decodes:
            rows = len(shape.sizes)
            plain_s = self._measured.step_s(1, rows) * self._pace.factor(RESTING, rows)
            self._rest.observe(shape, num_tokens, seconds, plain_s)
        self.engine.resting = self._rest.resting(self.engine.num_decoding)

    def observe(self, seconds: float) -> None:
        """Learn from the engine's last step, and prepare its next one."""
        if self._measured is None:
            return
        shape = self.engine.last_shape
        if shape.only_decodes:
            self._count(shape, seconds / self._measured.mixed_s(shape.sizes))
        if self._num_steps >= REFRESH_EVERY and (rows := self.engine.num_decoding):
            self.factors, self.engine.costs = self._correct(self._measured, rows)

    def _count(self, shape: StepShape, ratio: float) -> None:
        self._num_steps += 1
        self._last_kind = _kind(shape)
        self._pace.observe(self._last_kind, len(shape.sizes), ratio)
        if self._num_steps % REFRESH_EVERY == 0:
            self._corrected.clear()

    def _correct(self, measured: StepCosts, rows: int) -> tuple[dict[str, float], StepCosts]:
        """Factors for so many rows, and costs scaled by them."""
        if rows not in self._corrected:
            factors = {kind: self._pace.hoped(kind, rows, beside=self._last_kind) for kind in KINDS}
            factors[MIXED] = max(factors[MIXED], factors[ALIKE])
            self._corrected[rows] = factors, measured.scaled(**factors)
        return self._corrected[rows]


def _kind(shape: StepShape) -> str:
    widest = max(shape.sizes)
    if widest == 1:
        return PLAIN if shape.num_chosen else RESTING
    return ALIKE if min(shape.sizes) == widest else MIXED
