"""Best fixed block size of every batch size: the most tokens a second by measured acceptance and the price of a step.

A step in which all rows verify chains of B tokens emits tau(B) tokens a row and takes `StepPrice.chains_s` seconds.
The block sizes are chosen on all prompts, and the intervals are over the same prompts: they say how sure tau is, not
what the choice itself gains by chance.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.control.cost import StepPrice
from blockpilot.evaluation.statistics import Interval, interval

Array = NDArray[np.float64]


class PromptTotals(NamedTuple):
    """Emitted tokens and verify steps of each prompt under one block size, [prompts]."""

    emitted: Array
    steps: Array

    @property
    def tau(self) -> float:
        return float(self.emitted.sum() / self.steps.sum())


class StaticChoice(NamedTuple):
    """The block size with the most expected tokens a second at one batch size."""

    batch_size: int
    block_size: int
    tau: Interval
    speedup: Interval
    """Expected, over plain decoding."""
    over_single: Interval
    """Expected, over the best single block size of all batch sizes."""


class StaticChoices(NamedTuple):
    """Choices by ascending batch size, and the single block size with the largest geometric mean of speed-ups."""

    choices: list[StaticChoice]
    single: int


def choose_static(totals: Mapping[int, PromptTotals], price: StepPrice, batch_sizes: Sequence[int]) -> StaticChoices:
    """Best block size of each batch size; the smallest of equal ones.

    totals: by block size. Plain decoding (block size 1) emits one token a step, whether or not it is among them.
    ValueError for fewer than two prompts.
    """
    num_prompts = len(next(iter(totals.values())).steps) if totals else 0
    if num_prompts < 2:
        raise ValueError(f"{num_prompts} prompts: intervals need at least 2")
    plain = {1: PromptTotals(np.ones(num_prompts), np.ones(num_prompts))}
    by_size = dict(sorted((dict(totals) | plain).items()))
    relative = {size: [price.relative([size], rows)[0] for rows in batch_sizes] for size in by_size}
    speedups = {size: [of.tau / seconds for seconds in relative[size]] for size, of in by_size.items()}
    single = max(by_size, key=lambda size: sum(map(math.log, speedups[size])))
    choices = []
    for i, rows in enumerate(batch_sizes):
        best = max(by_size, key=lambda size: speedups[size][i])
        ours, theirs = by_size[best], by_size[single]
        tau = _interval([ours.emitted], [ours.steps])
        gain = _interval([ours.emitted, theirs.steps], [ours.steps, theirs.emitted])
        speedup = _scaled(tau, 1 / relative[best][i])
        over_single = _scaled(gain, relative[single][i] / relative[best][i])
        choices.append(StaticChoice(rows, best, tau, speedup, over_single))
    return StaticChoices(choices, single)


def ranges(choices: Sequence[StaticChoice]) -> list[tuple[int, int, int]]:
    """(first batch size, last, block size) of every run of equal block sizes; each ends where the next one begins."""
    starts = [c for i, c in enumerate(choices) if not i or c.block_size != choices[i - 1].block_size]
    ends = [following.batch_size - 1 for following in starts[1:]] + [choices[-1].batch_size]
    return [(start.batch_size, end, start.block_size) for start, end in zip(starts, ends, strict=True)]


def _interval(above: Sequence[Array], below: Sequence[Array]) -> Interval:
    return interval([part[None] for part in above], [part[None] for part in below])


def _scaled(figure: Interval, factor: float) -> Interval:
    return Interval(*(factor * bound for bound in figure))
