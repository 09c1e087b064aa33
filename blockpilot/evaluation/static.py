"""Best fixed block size of every batch size: the most tokens per second by measured tau and step cost.

A step in which all rows verify chains of B tokens emits tau(B) tokens per row and takes `StepPrice.chains_s` seconds.
Block sizes are chosen on the same prompts that the intervals are over. The intervals cover the uncertainty of tau,
but not the bias of the selection.
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
    """The block size with the most expected tokens per second at one batch size."""

    batch_size: int
    block_size: int
    tau: Interval
    speedup: Interval
    """Expected speed-up over plain decoding (AR)."""
    over_single: Interval
    """Expected speed-up over the best single block size for all batch sizes."""


class StaticChoices(NamedTuple):
    """Choices by ascending batch size, and the single block size with the largest geometric mean of speed-ups."""

    choices: list[StaticChoice]
    single: int


def choose_static(
    totals: Mapping[int, PromptTotals], price: StepPrice, batch_sizes: Sequence[int], *, idle_draft: float = 0.0
) -> StaticChoices:
    """Best block size of each batch size; ties go to the smallest.

    totals: by block size. Plain decoding (block size 1, one token per step) is always a candidate. idle_draft: share
    of a plain step by which a loaded draft slows block size 1 down, if it drafts at any other batch size. Raises
    ValueError for fewer than two prompts.
    """
    num_prompts = len(next(iter(totals.values())).steps) if totals else 0
    if num_prompts < 2:
        raise ValueError(f"{num_prompts} prompts: intervals need at least 2")
    plain_decoding = {1: PromptTotals(np.ones(num_prompts), np.ones(num_prompts))}
    by_size = dict(sorted((dict(totals) | plain_decoding).items()))
    cost = {size: [price.relative([size], batch_size)[0] for batch_size in batch_sizes] for size in by_size}

    def speedup_of(size: int, index: int) -> float:
        return by_size[size].tau / cost[size][index]

    def best_size(index: int) -> int:
        return max(by_size, key=lambda size: speedup_of(size, index))

    indices = range(len(batch_sizes))
    single = max(by_size, key=lambda size: sum(math.log(speedup_of(size, i)) for i in indices))
    single_cost = cost[single]
    if any(best_size(i) > 1 for i in indices):
        cost[1] = [(1 + idle_draft) * seconds for seconds in cost[1]]
    choices = []
    for i, batch_size in enumerate(batch_sizes):
        size = best_size(i)
        best_totals, single_totals = by_size[size], by_size[single]
        tau = _interval([best_totals.emitted], [best_totals.steps])
        gain = _interval([best_totals.emitted, single_totals.steps], [best_totals.steps, single_totals.emitted])
        speedup, over_single = _scaled(tau, 1 / cost[size][i]), _scaled(gain, single_cost[i] / cost[size][i])
        choices.append(StaticChoice(batch_size, size, tau, speedup, over_single))
    return StaticChoices(choices, single)


def ranges(choices: Sequence[StaticChoice]) -> list[tuple[int, int, int]]:
    """Ranges of equal block sizes as (first batch size, last batch size, block size), without gaps."""
    starts = [c for i, c in enumerate(choices) if not i or c.block_size != choices[i - 1].block_size]
    ends = [next_start.batch_size - 1 for next_start in starts[1:]] + [choices[-1].batch_size]
    return [(start.batch_size, end, start.block_size) for start, end in zip(starts, ends, strict=True)]


def _interval(above: Sequence[Array], below: Sequence[Array]) -> Interval:
    return interval([part[None] for part in above], [part[None] for part in below])


def _scaled(figure: Interval, factor: float) -> Interval:
    return Interval(*(factor * bound for bound in figure))
