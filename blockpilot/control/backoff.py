"""When to stop being ready to draft.

A request that may draft takes longer even while it does not: the draft takes in its prompt (3% of that on the
embedded pair), and every step computes and reads what the next could be drafted from (3% of a plain step of 16 rows).
Plain decoding pays neither. So where a batch is hardly faster than that, which the tokens and seconds of its own
steps tell, it rests: it decodes plainly for a while, and then tries again with the requests that come.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

from blockpilot.types import StepShape

WINDOW = 2048  # drafted blocks that say what being ready is worth; with fewer it depends on whose they are
SHORTEST_WINDOW = 512  # blocks before anything is decided
GAIN = 0.02  # over plain decoding: less does not pay, since what prompts take longer is not in it
CHANCE = 0.08  # three standard deviations of the gain that WINDOW drafted blocks show, by whose they are
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
    def evidence(self) -> float:
        """Drafted blocks whose mean gain is as certain as that of these blocks.

        What varies is how many drafts are accepted, so the variance goes as num_drafted / num_blocks^2.
        """
        return self.num_blocks**2 / self.num_drafted if self.num_drafted else math.inf

    @property
    def gain(self) -> float:
        """Over plain decoding, of these blocks."""
        return self.plain_s / self.seconds - 1

    @property
    def pays_too_little(self) -> bool:
        """As surely as after a whole window: what has shown less yet must have gained that much less."""
        doubt = CHANCE * max(0.0, math.sqrt(WINDOW / self.evidence) - 1)
        return self.gain < GAIN - doubt

    @property
    def over(self) -> bool:
        """Whether these blocks say all that a window can."""
        return self.evidence >= WINDOW


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
        if load.num_blocks < SHORTEST_WINDOW:
            return
        if load.pays_too_little:  # at rest, for twice as long as the last time if nothing paid since
            self._loads[key] = _Load(length=min(2 * load.length, LONGEST), left=load.length)
        elif load.over:
            self._loads[key] = _Load()


def _load(rows: int) -> int:
    return round(math.log2(rows))
