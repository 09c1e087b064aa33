"""The price at the moment: coefficients that follow what the steps of a running engine really take.

A step price is of steps that have the machine to themselves. In a server they share it with event loops, clients and
tokenizers, texts grow, and a slow moment of the machine lengthens all steps alike.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from blockpilot.control.backoff import Backoff
from blockpilot.control.controller import NOMINAL, Controller, StepOutcome
from blockpilot.control.price import Load, StepPrice
from blockpilot.types import Policy

LEVEL, SLOPES = 0.5, 0.2  # standard deviations of what is not known of a price at first, as shares of it
LEVEL_STEP, SLOPE_STEP = 0.03, 0.002  # of how they wander, from step to step
NUM_STEPS = 8  # that are observed as one: their loads and seconds add up
NOISE = (
    0.12  # of the seconds of a step, independent of the others': of several as one it is less by their square root
)
OUTLIER = 3.0  # standard deviations: what is further off counts as much as this
LEAST = 0.1  # of a coefficient that was measured
PROBE_EVERY = 128  # steps of one kind, plain or drafting, after which one of the other shows what that takes now


class PriceTracker:
    """Kalman filter (1960) over the coefficients of a price: a level that all share, and slopes of their own.

    Plain steps of one moment and drafting steps of another differ by the level, too; so both are estimated together.
    Steps of one kind are taken in `num_steps` at a time: a step waits for this.
    """

    def __init__(self, price: StepPrice, num_steps: int = NUM_STEPS) -> None:
        self.price, self._num_steps = price, num_steps
        measured = price.coefficients
        self._least = LEAST * measured
        scale = np.maximum(measured, 1e-3 * measured.max())
        self._together, self._apart = np.outer(scale, scale), np.diag(scale**2)
        self._mean = measured
        self._covariance = LEVEL**2 * self._together + SLOPES**2 * self._apart
        self._wander = LEVEL_STEP**2 * self._together + SLOPE_STEP**2 * self._apart
        self._seen: list[tuple[Load, float]] = []

    def observe(self, load: Load, seconds: float) -> None:
        """Learn from a step without prompts."""
        if self._seen and (self._seen[-1][0].num_drafted > 0) != (load.num_drafted > 0):
            self._update()
        self._seen.append((load, seconds))
        if len(self._seen) >= self._num_steps:
            self._update()

    def _update(self) -> None:
        """Take in the sums of the steps seen."""
        num = len(self._seen)
        terms = np.array([load.terms for load, _ in self._seen], dtype=float).sum(axis=0)
        seconds = sum(seconds for _, seconds in self._seen)
        self._covariance += num * self._wander
        self._seen = []
        expected, with_step = terms @ self._mean, self._covariance @ terms
        variance = terms @ with_step + (NOISE * expected) ** 2 / num
        limit = OUTLIER * np.sqrt(variance)
        self._mean = self._mean + with_step / variance * np.clip(seconds - expected, -limit, limit)
        self._mean = np.maximum(self._mean, self._least)
        self._covariance -= np.outer(with_step, with_step) / variance
        self.price = self.price.with_coefficients(self._mean)


class LiveController(Controller):
    """A controller whose price follows the seconds of an engine's steps, and that backs off where drafting fails.

    Steps of one kind do not tell what the other takes, so now and then one is a probe. A nominal price is kept.
    """

    def __init__(
        self,
        policy: Policy,
        price: StepPrice | None = None,
        *,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(policy, price)
        self._tracker, self._backoff, self._clock = PriceTracker(self.price), backoff or Backoff(), clock
        self._measured = self.price is not NOMINAL
        self._started, self._num_rows, self._speculated = 0.0, 0, True
        self._num_alike = 0  # steps in a row that drafted, or below 0 that did not

    @property
    def speculates(self) -> bool:
        return not self._backoff.active(self._num_rows)

    def begin(self) -> None:
        self._started, self._speculated = self._clock(), self.speculates

    def depths(self, reaches: Sequence[Sequence[float]], beside: Load) -> list[int]:
        drafts = any(super().depths(reaches, beside))
        num_alike = self._num_alike if drafts else -self._num_alike
        if self._measured and not beside.num_drafted and num_alike >= PROBE_EVERY:
            self._depths = [0 if drafts else min(1, len(reach)) for reach in reaches]
        return self._depths

    def finish(self, outcome: StepOutcome) -> None:
        self.learn(outcome, self._clock() - self._started)

    def learn(self, outcome: StepOutcome, seconds: float) -> None:
        """`finish` for a step of so many seconds; those with prompts, or the capture of a graph, teach nothing."""
        super().finish(outcome)
        load = outcome.load
        if self._measured and load.rows and not outcome.num_prompt_tokens and not outcome.has_captured:
            self._tracker.observe(load, seconds)
            self.price = self._tracker.price
            drafted, before = load.num_drafted > 0, self._num_alike > 0
            self._num_alike = (self._num_alike if drafted == before else 0) + (1 if drafted else -1)
            if outcome.num_chosen == load.rows or not self._speculated:
                self._backoff.observe(load.rows, outcome.num_tokens, seconds, self.price.seconds(Load(load.rows)))
        self._num_rows = outcome.next_rows
