"""What a choice of block size can give: the arithmetic of a table of tokens and seconds, choice by block size.

A line of the table is a choice: a request, or a step. The table says what the best fixed block size, a random one and
an oracle would have got on exactly those runs, as tokens in all over seconds in all. The oracle knows the outcome,
noise included, so it is a bound and never a result; of a policy, look-ups say no more than whether it is worth
decoding with. With taus as the tokens and one second for each, rates are mean taus, as in published tables.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.evaluation.ratio import largest_ratio
from blockpilot.evaluation.statistics import Interval, interval

Array = NDArray[np.float64]
Columns = NDArray[np.int64]


class Table(NamedTuple):
    """tokens and seconds [choices, candidates]."""

    tokens: Array
    seconds: Array

    def rate(self, chosen: Columns) -> float:
        """Tokens a second of the columns [choices] that were chosen."""
        return float(_at(self.tokens, chosen).sum() / _at(self.seconds, chosen).sum())


class Potential(NamedTuple):
    """Rates over all choices of a table."""

    fixed: dict[int, float]
    """By block size."""
    best_fixed: int
    random: float
    """Expected of candidates drawn at random."""
    oracle: float
    """The largest there is: an upper bound."""

    @property
    def best_fixed_rate(self) -> float:
        return self.fixed[self.best_fixed]

    @property
    def headroom(self) -> float:
        """The oracle's gain over the best fixed block size, as a share of the latter."""
        return self.oracle / self.best_fixed_rate - 1


def potential(table: Table, candidates: Sequence[int]) -> Potential:
    """Of a table with a column for each candidate; of equal block sizes the smallest is the best fixed one."""
    tokens, seconds = table
    fixed = dict(zip(candidates, (tokens.sum(axis=0) / seconds.sum(axis=0)).tolist(), strict=True))
    best = max(fixed, key=lambda size: (fixed[size], -size))
    return Potential(fixed, best, float(tokens.sum() / seconds.sum()), table.rate(oracle(table)))


def oracle(table: Table) -> Columns:
    """The column of every choice [choices] that makes tokens in all over seconds in all the largest."""

    def maximise(rate: float) -> tuple[Columns, float]:
        chosen: Columns = (table.tokens - rate * table.seconds).argmax(axis=1)
        return chosen, table.rate(chosen)

    return largest_ratio(maximise)[0]


def gain(table: Table, chosen: Columns, fixed: Columns) -> Interval:
    """Rate of the columns `chosen` over that of `fixed`, less one, with its 95% interval over choices."""
    (tokens, seconds), (fixed_tokens, fixed_seconds) = (
        [_at(values, columns)[None] for values in table] for columns in (chosen, fixed)
    )
    return Interval(*(end - 1 for end in interval([tokens, fixed_seconds], [seconds, fixed_tokens])))


def _at(values: Array, chosen: Columns) -> Array:
    picked: Array = np.take_along_axis(values, chosen[:, None], axis=1)[:, 0]
    return picked
