"""Exponential back-off from speculation: plain decoding while drafting does not pay.

A request that may draft takes longer even while it does not: the draft takes in its prompt (3% of that on the
embedded pair), and every step computes and reads what the next could be drafted from (3% of a plain step of 16 rows).
So where a batch is hardly faster than plain decoding, by the tokens and seconds of its own steps, it backs off, and
tries again later with the requests that come.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

from blockpilot.types import StepShape


@dataclass
class _LoadRecord:
    """Tokens and seconds at a number of rows; `plain_s` is what plain steps would take for as many tokens."""

    num_blocks: int = 0  # rows times steps
    num_drafted: int = 0  # of those, with drafted tokens
    plain_s: float = 0.0
    seconds: float = 0.0
    next_length: int = 0
    """Steps of the next back-off; 0 for the shortest."""
    steps_left: int = 0
    """Steps left of the present back-off; 0 while speculating."""

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


class Backoff:
    """Decides for every load (numbers of rows that are alike to a factor of 1.4) whether to speculate.

    window: blocks of evidence that say what speculating is worth; with fewer it depends on whose they are.
    min_blocks: before anything is decided. min_gain: over plain decoding; less does not pay, since what prompts take
    longer is not in it. deviation: three standard deviations of the gain that `window` blocks show.
    shortest, longest: steps of a back-off, which doubles while trying again shows nothing new.
    """

    def __init__(
        self,
        *,
        window: int = 2048,
        min_blocks: int = 512,
        min_gain: float = 0.02,
        deviation: float = 0.08,
        shortest: int = 256,
        longest: int = 4096,
    ) -> None:
        self._window, self._min_blocks = window, min_blocks
        self._min_gain, self._deviation = min_gain, deviation
        self._shortest, self._longest = shortest, longest
        self._loads = defaultdict[int, _LoadRecord](_LoadRecord)

    def active(self, rows: int) -> bool:
        """True if the next step, of so many rows, decodes plainly."""
        return rows > 0 and self._loads[_load(rows)].steps_left > 0

    def observe(self, shape: StepShape, num_tokens: int, seconds: float, plain_s: float) -> None:
        """Learn from a step without prompts, which emitted so many tokens and would have taken plain_s backed off.

        While speculating only steps count of which the policy chose all block sizes.
        """
        rows = len(shape.sizes)
        load = self._loads[_load(rows)]
        if load.steps_left:
            load.steps_left -= 1
            return
        if shape.num_chosen < rows:
            return
        load.num_blocks += rows
        load.num_drafted += sum(size > 1 for size in shape.sizes)
        load.plain_s += num_tokens / rows * plain_s
        load.seconds += seconds
        if load.num_blocks < self._min_blocks:
            return
        if self._pays_too_little(load):
            length = load.next_length or self._shortest
            self._loads[_load(rows)] = _LoadRecord(next_length=min(2 * length, self._longest), steps_left=length)
        elif load.evidence >= self._window:
            self._loads[_load(rows)] = _LoadRecord()

    def _pays_too_little(self, load: _LoadRecord) -> bool:
        """As surely as after a whole window: what has shown less yet must have gained that much less."""
        doubt = self._deviation * max(0.0, math.sqrt(self._window / load.evidence) - 1)
        return load.gain < self._min_gain - doubt


def _load(rows: int) -> int:
    return round(math.log2(rows))
