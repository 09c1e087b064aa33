"""Upper bound for choosing the block size, from a table of tokens and seconds by choice and block size.

A row of the table is one choice, for a request or for a step. The table gives the rates (total tokens over total
seconds) of the best fixed block size, a random one and an oracle on exactly these runs. The oracle uses the outcome,
noise included, so its rate is a bound and never a result. Rates of a policy from the table only tell whether it is
worth decoding with. With taus as tokens and one second each, rates are mean taus, as in published tables.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.evaluation.statistics import Interval, interval

Array = NDArray[np.float64]
Columns = NDArray[np.int64]


class Table(NamedTuple):
    """tokens and seconds [choices, candidates]."""

    tokens: Array
    seconds: Array

    def rate(self, chosen: Columns) -> float:
        """Tokens per second with the columns `chosen` [choices]."""
        return float(_at(self.tokens, chosen).sum() / _at(self.seconds, chosen).sum())


class Potential(NamedTuple):
    """Rates over all choices of a table."""

    fixed: dict[int, float]
    """Rate by block size."""
    best_fixed: int
    """The block size with the highest rate."""
    random: float
    """Expected rate of candidates chosen at random."""
    oracle: float
    """Largest possible rate: an upper bound."""


def potential(table: Table, candidates: Sequence[int]) -> Potential:
    """Rates of a table with one column per candidate; ties go to the smallest block size."""
    tokens, seconds = table
    fixed = dict(zip(candidates, (tokens.sum(axis=0) / seconds.sum(axis=0)).tolist(), strict=True))
    best_fixed = max(fixed, key=lambda size: (fixed[size], -size))
    return Potential(fixed, best_fixed, float(tokens.sum() / seconds.sum()), table.rate(oracle(table)))


def oracle(table: Table) -> Columns:
    """The column of every choice [choices] that maximises total tokens over total seconds.

    Dinkelbach's algorithm (1967): a rate is feasible if some columns have sum(tokens - rate * seconds) >= 0. The
    columns that maximise this sum have at least that rate; their rate is tried next. A few rounds are enough.
    """
    chosen: Columns = table.tokens.argmax(axis=1)
    rate, best = -math.inf, chosen
    while (chosen_rate := table.rate(chosen)) > rate:
        rate, best = chosen_rate, chosen
        chosen = (table.tokens - rate * table.seconds).argmax(axis=1)
    return best


def gain(table: Table, chosen: Columns, fixed: Columns) -> Interval:
    """Relative gain in rate of the columns `chosen` over `fixed`, with its 95% interval over choices."""
    (tokens, seconds), (fixed_tokens, fixed_seconds) = (
        [_at(values, columns)[None] for values in table] for columns in (chosen, fixed)
    )
    return Interval(*(end - 1 for end in interval([tokens, fixed_seconds], [seconds, fixed_tokens])))


def _at(values: Array, chosen: Columns) -> Array:
    selected: Array = np.take_along_axis(values, chosen[:, None], axis=1)[:, 0]
    return selected
