"""Best fixed block size of every batch size: the most tokens a second by measured acceptance and the price of a step.

A step in which all rows verify chains of B tokens emits tau(B) tokens a row and takes `StepPrice.chains_s` seconds.
The block sizes are chosen on all prompts, and the intervals are over the same prompts: they say how sure tau is, not
what the choice itself gains by chance.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.control.price import StepPrice
from blockpilot.evaluation.statistics import NUM_RESAMPLES, Interval, interval, resampling_weights

Array = NDArray[np.float64]


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
    speedups: dict[int, list[float]]
    """By block size: expected speed-ups over plain decoding, in the order of `choices`."""


def tau_resamples(
    emitted: Mapping[int, Sequence[int]], steps: Mapping[int, Sequence[int]], num_resamples: int = NUM_RESAMPLES
) -> dict[int, Array]:
    """By block size tau [1 + resamples]: of all prompts, then of resamples of them, the same for all block sizes.

    emitted, steps: tokens and verify steps of each prompt by block size. Plain decoding (block size 1) emits one
    token a step, whether or not it is among them. ValueError for fewer than two prompts.
    """
    num_prompts = len(next(iter(steps.values()), ()))
    if num_prompts < 2:
        raise ValueError(f"{num_prompts} prompts: intervals need at least 2")
    weights = resampling_weights(num_prompts, num_resamples, seed=0)
    taus = {size: (weights @ np.array(emitted[size])) / (weights @ np.array(steps[size])) for size in sorted(steps)}
    return {1: np.ones(1 + num_resamples)} | {size: tau for size, tau in taus.items() if size > 1}


def choose_static(taus: Mapping[int, Array], price: StepPrice, batch_sizes: Sequence[int]) -> StaticChoices:
    """Best block size of each batch size; the smallest of equal ones. taus: of `tau_resamples`, 1 among them."""
    relative = {size: [price.relative([size], rows)[0] for rows in batch_sizes] for size in taus}
    speedups = {size: [float(taus[size][0]) / seconds for seconds in relative[size]] for size in taus}
    single = max(sorted(taus), key=lambda size: float(np.log(speedups[size]).sum()))
    choices = []
    for i, rows in enumerate(batch_sizes):
        best = max(sorted(taus), key=lambda size: speedups[size][i])
        of_best, of_single = (taus[size] / relative[size][i] for size in (best, single))
        choices.append(
            StaticChoice(rows, best, interval(taus[best]), interval(of_best), interval(of_best / of_single))
        )
    return StaticChoices(choices, single, speedups)


def ranges(choices: Sequence[StaticChoice]) -> list[tuple[int, int, int]]:
    """(first batch size, last, block size) of every run of equal block sizes; each ends where the next one begins."""
    starts = [c for i, c in enumerate(choices) if not i or c.block_size != choices[i - 1].block_size]
    ends = [following.batch_size - 1 for following in starts[1:]] + [choices[-1].batch_size]
    return [(start.batch_size, end, start.block_size) for start, end in zip(starts, ends, strict=True)]
