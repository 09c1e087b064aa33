"""When to stop being ready to draft.

A request that may draft takes longer even while it does not: the draft takes in its prompt (3% of that on the
embedded pair), and every step computes and reads what the next could be drafted from (3% of a plain step of 16 rows).
Plain decoding pays neither. So where a batch is hardly faster than that, which the tokens and seconds of its own
steps tell, it rests: it decodes plainly for a while, and then tries again with the requests that come.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

from blockpilot.engine import StepShape

WINDOW = 2048  # drafted blocks that say what being ready is worth; with fewer it depends on whose they are
SHORTEST_WINDOW = 512  # blocks, if few of them or none are drafted: what plain ones gain is no chance
GAIN = 0.02  # over plain decoding: less does not pay, since what prompts take longer is not in it
SHORTEST, LONGEST = 256, 4096  # steps of a rest; it doubles while trying again shows nothing new


@dataclass
class _Load:
    """What is known at a number of rows; `plain_s` is what plain steps would have taken for as many tokens."""

    num_blocks: int = 0  # rows times steps
    num_drafted: int = 0  # of those, with drafted tokens
    plain_s: float = 0.0
    seconds: float = 0.0
    length: int = SHORTEST
    left: int = 0
    """Steps of the rest that are to come; 0 while awake."""

    @property
    def telling(self) -> bool:
        """Whether chance has as small a part in the mean gain of these blocks as in that of WINDOW that all draft.

        What varies is how many drafts are accepted, so the variance goes as num_drafted / num_blocks^2.
        """
        return self.num_blocks >= SHORTEST_WINDOW and self.num_blocks**2 >= WINDOW * self.num_drafted


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
        key = _load(rows)
        load = self._loads[key]
        if load.left:
            load.left -= 1
            return
        if shape.num_chosen < rows:
            return
        load.num_blocks += rows
        load.num_drafted += sum(size > 1 for size in shape.sizes)
        load.plain_s += num_tokens / rows * plain_s
        load.seconds += seconds
        if load.telling:
            self._loads[key] = _judged(load)


def _judged(load: _Load) -> _Load:
    """A load after a full window: awake, or at rest, for twice as long as the last time if nothing paid since."""
    if load.plain_s >= (1 + GAIN) * load.seconds:
        return _Load()
    return _Load(length=min(2 * load.length, LONGEST), left=load.length)


def _load(rows: int) -> int:
    return round(math.log2(rows))
