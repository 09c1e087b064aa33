"""Exponential back-off from speculation: plain decoding while drafting does not pay.

A request that may draft takes longer even while it does not: the draft takes in its prompt, and every step computes
what the next could be drafted from (3% of a plain step of 16 rows on the embedded pair). So where a batch is hardly
faster than plain decoding, by the tokens and seconds of its own steps, it backs off, and tries again later with the
requests that come. Every back-off that follows another is twice as long.
"""

import math
from collections import defaultdict
from dataclasses import dataclass


@dataclass
class _LoadRecord:
    """Steps at a number of rows while speculating; `plain_s` is what plain steps would take for as many tokens."""

    num_blocks: int = 0  # rows times steps
    plain_s: float = 0.0
    seconds: float = 0.0
    next_length: int = 0
    """Steps of the next back-off; 0 for the shortest."""
    steps_left: int = 0
    """Steps left of the present back-off; 0 while speculating."""


class Backoff:
    """Decides for every load (numbers of rows that are alike to a factor of 1.4) whether to speculate.

    window: blocks after which it decides. min_gain: over plain decoding; less does not pay, since what prompts take
    longer is not in it. shortest, longest: steps of a back-off.
    """

    def __init__(
        self, *, window: int = 1024, min_gain: float = 0.02, shortest: int = 256, longest: int = 4096
    ) -> None:
        self._window, self._min_gain = window, min_gain
        self._shortest, self._longest = shortest, longest
        self._loads = defaultdict[int, _LoadRecord](_LoadRecord)

    def active(self, rows: int) -> bool:
        """True if the next step, of so many rows, decodes plainly."""
        return rows > 0 and self._loads[_load(rows)].steps_left > 0

    def observe(self, rows: int, num_tokens: int, seconds: float, plain_s: float) -> None:
        """Learn from a step without prompts, which emitted so many tokens; a plain one takes plain_s."""
        load = self._loads[_load(rows)]
        if load.steps_left:
            load.steps_left -= 1
            return
        load.num_blocks += rows
        load.plain_s += num_tokens / rows * plain_s
        load.seconds += seconds
        if load.num_blocks >= self._window:
            pays = load.plain_s >= (1 + self._min_gain) * load.seconds
            length = load.next_length or self._shortest
            again = (
                _LoadRecord() if pays else _LoadRecord(next_length=min(2 * length, self._longest), steps_left=length)
            )
            self._loads[_load(rows)] = again


def _load(rows: int) -> int:
    return round(math.log2(rows))
