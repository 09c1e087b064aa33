"""Step costs that follow what the steps of a running engine really take.

Measured costs are of steps that have the machine to themselves. In a server they share it with event loops, clients
and tokenizers, which lengthens a short step by more than a long one: on two CPU cores a plain step took 20% longer
than measured and a drafting one 2 to 6%, so that the measured costs made drafting look dearer than it was.
"""

import time
from collections import defaultdict, deque
from statistics import median

from blockpilot.costs import StepCosts
from blockpilot.engine import Engine, Step, StepShape
from blockpilot.rest import Rest

PLAIN, ALIKE, MIXED = KINDS = "plain", "alike", "mixed"
RESTING = "resting"  # plain steps of rows that never draft
WINDOW = 32  # steps of a kind whose median ratio holds
FEWEST = 8  # with less of a kind it is not known
FORGOTTEN_AFTER = 512  # steps; a kind that was given up is then tried anew
HOPE = 0.85  # how much less than measured, against the others, plain steps or those that draft are taken to cost
REFRESH_EVERY = 8  # steps
ANY = 0  # rows: as many as were measured, whichever


class LiveCosts:
    """Steps an engine, and corrects the costs that it weighs forecasts with by the seconds of its steps.

    Plain steps, those whose rows draft alike, and those of rows of several sizes have a factor each, the median of
    seconds over measured costs, of the last steps with as many rows as the next one. Where there were too few of
    those, steps of all numbers of rows that were measured count: between these costs are interpolated, which on a CPU
    is wrong by up to a fifth (three rows take longer than four), by more for plain steps than for others. Where plain
    steps, or those that draft alike, were not seen for long, they are hoped to cost a little less than the others'
    factors say, so that they are tried where that could matter: what is never tried is never known. Mixed steps take
    no less than their costs times the factor of those alike. `factors`, those of the next step, may be read by any
    thread.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.use(engine.costs)

    def use(self, measured: StepCosts | None) -> None:
        """Correct these costs from now on; None: steps cost alike."""
        self.engine.costs = self._measured = measured
        self._ratios = defaultdict[tuple[str, int], deque[tuple[int, float]]](lambda: deque(maxlen=WINDOW))
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
            known = (self._known(kind, rows) for kind in (RESTING, PLAIN, ALIKE))
            plain_s = self._measured.step_s(1, rows, shape.context) * next(filter(None, known), 1.0)
            self._rest.observe(shape, num_tokens, seconds, plain_s)
        self.engine.resting = self._rest.resting(self.engine.num_decoding)

    def observe(self, seconds: float) -> None:
        """Learn from the engine's last step, and prepare its next one."""
        if self._measured is None:
            return
        shape = self.engine.last_shape
        if shape.only_decodes:
            self._count(shape, seconds / self._measured.mixed_s(shape.sizes, shape.context))
        if self._num_steps >= REFRESH_EVERY and (rows := self.engine.num_decoding):
            self.factors, self.engine.costs = self._correct(self._measured, rows)

    def _count(self, shape: StepShape, ratio: float) -> None:
        assert self._measured is not None
        self._num_steps += 1
        kind, rows = _kind(shape), len(shape.sizes)
        self._ratios[kind, rows].append((self._num_steps, ratio))
        if rows in self._measured.rows:
            self._ratios[kind, ANY].append((self._num_steps, ratio))
        if self._num_steps % REFRESH_EVERY == 0:
            self._corrected.clear()

    def _correct(self, measured: StepCosts, rows: int) -> tuple[dict[str, float], StepCosts]:
        """Factors for so many rows, and costs scaled by them."""
        if rows not in self._corrected:
            factors = self._known_or_hoped(rows)
            self._corrected[rows] = factors, measured.scaled(**factors)
        return self._corrected[rows]

    def _known_or_hoped(self, rows: int) -> dict[str, float]:
        plain, alike, mixed = (self._known(kind, rows) for kind in KINDS)
        hoped = HOPE * (plain or alike or mixed or 1 / HOPE)
        alike = alike or hoped
        return {PLAIN: plain or hoped, ALIKE: alike, MIXED: max(mixed or 0, alike)}

    def _known(self, kind: str, rows: int) -> float | None:
        return self._factor(kind, rows) or self._factor(kind, ANY)

    def _factor(self, kind: str, rows: int) -> float | None:
        ratios = self._ratios[kind, rows]
        while ratios and ratios[0][0] <= self._num_steps - FORGOTTEN_AFTER:
            ratios.popleft()
        return median(ratio for _, ratio in ratios) if len(ratios) >= FEWEST else None


def _kind(shape: StepShape) -> str:
    widest = max(shape.sizes)
    if widest == 1:
        return PLAIN if shape.num_chosen else RESTING
    return ALIKE if min(shape.sizes) == widest else MIXED
