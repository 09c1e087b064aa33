"""When to stop being ready to draft.

A request that may draft takes longer even while it does not: the draft takes in its prompt (3% of that on the
embedded pair), and every step computes and reads what the next could be drafted from (3% of a plain step of 16 rows).
Plain decoding pays neither. So where a batch is hardly faster than that, which the tokens and seconds of its own
steps tell, it rests: it decodes plainly for a while, and then tries again with the requests that come.
"""

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field

from blockpilot.engine import StepShape

WINDOW = 64  # steps that say what being ready is worth
GAIN = 0.03  # over plain decoding: less does not pay, since what prompts take longer is not in it
SHORTEST, LONGEST = 256, 4096  # steps of a rest; it doubles while trying again shows nothing new


@dataclass
class _Load:
    """What is known at a number of rows; `plain_s` are what their steps would have taken for as many tokens."""

    plain_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    length: int = SHORTEST
    left: int = 0
    """Steps of the rest that are to come; 0 while awake."""


class Rest:
    """Decides at every load (numbers of rows that are alike to a factor of 1.4) whether to rest."""

    def __init__(self) -> None:
        self._loads = defaultdict[int, _Load](_Load)

    def resting(self, rows: int) -> bool:
        """Whether the next step, of so many rows, is one of a rest."""
        return rows > 0 and self._loads[_load(rows)].left > 0

    def observe(self, shape: StepShape, num_tokens: int, seconds: float, plain_s: float) -> None:
        """Learn from a step without prompts, which emitted so many tokens and would have taken plain_s at rest.

        While awake only steps count of which the policy chose all block sizes.
        """
        rows = len(shape.sizes)
        load = self._loads[_load(rows)]
        if load.left:
            load.left -= 1
            return
        if shape.num_chosen < rows:
            return
        load.plain_s.append(num_tokens / rows * plain_s)
        load.seconds.append(seconds)
        if len(load.seconds) < WINDOW:
            return
        if sum(load.plain_s) >= (1 + GAIN) * sum(load.seconds):
            load.length = SHORTEST
            return
        load.left, load.length = load.length, min(2 * load.length, LONGEST)
        load.plain_s.clear()
        load.seconds.clear()


def _load(rows: int) -> int:
    return round(math.log2(rows))
