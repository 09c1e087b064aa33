"""Step costs that follow what the steps of a running engine really take.

Measured costs are of steps that have the machine to themselves. In a server they share it with event loops, clients
and tokenizers, which lengthens a short step by more than a long one: on two CPU cores a plain step took 20% longer
than measured and a drafting one 2 to 6%, so that the measured costs made drafting look dearer than it was.
"""

import time
from collections import deque
from statistics import median

from blockpilot.costs import StepCosts
from blockpilot.engine import Engine, Step

WINDOW = 32  # steps of a kind whose median ratio holds
FEWEST = 8  # with less of a kind it is not known
FORGOTTEN_AFTER = 512  # steps; a kind that was given up is then tried anew
HOPE = 0.85  # how much less than measured, against the other kind, an unknown one is taken to cost
REFRESH_EVERY = 8  # steps


class LiveCosts:
    """Steps an engine, and corrects the costs that it weighs forecasts with by the seconds of its steps.

    Plain steps and those that draft have a factor each, the median of seconds over measured costs. A kind that was
    not seen for long is hoped to cost a little less than the other one's factor says, so that it is tried where that
    could matter: what is never tried is never known. `factors` may be read by any thread.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.use(engine.costs)

    def use(self, measured: StepCosts | None) -> None:
        """Correct these costs from now on; None: steps cost alike."""
        self.engine.costs = self._measured = measured
        self._ratios: tuple[deque[tuple[int, float]], ...] = (deque(maxlen=WINDOW), deque(maxlen=WINDOW))
        self._num_steps = 0
        self.factors = 1.0, 1.0
        """What plain and drafting steps take now, in what was measured of them."""

    def step(self) -> tuple[list[Step], float]:
        """`engine.step` and its seconds; one that only decodes is a measurement."""
        started = time.perf_counter()
        steps = self.engine.step()
        seconds = time.perf_counter() - started
        self.observe(seconds)
        return steps, seconds

    def observe(self, seconds: float) -> None:
        """Learn from the engine's last step."""
        shape = self.engine.last_shape
        if self._measured is None or not shape.sizes or shape.num_prompt_tokens:
            return
        self._num_steps += 1
        ratio = seconds / self._measured.mixed_s(shape.sizes, shape.context)
        self._ratios[max(shape.sizes) > 1].append((self._num_steps, ratio))
        if self._num_steps % REFRESH_EVERY == 0:
            plain, drafting = map(self._factor, self._ratios)
            hoped = HOPE * (plain or drafting or 1 / HOPE)
            self.factors = plain or hoped, drafting or hoped
            self.engine.costs = self._measured.scaled(*self.factors)

    def _factor(self, ratios: deque[tuple[int, float]]) -> float | None:
        while ratios and ratios[0][0] <= self._num_steps - FORGOTTEN_AFTER:
            ratios.popleft()
        return median(ratio for _, ratio in ratios) if len(ratios) >= FEWEST else None
