"""What decoding runs add up to: sums per method and prompt -> figures with intervals (`tables.py` prints them).

Runs are kept as sums and divided once, at the end: every figure is a ratio of two totals. All methods ran the same
prompts, so they are compared on the same resamples of the prompts: a paired bootstrap (Efron 1979), percentile
intervals of 95%.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 2000
_QUANTILES = (0.025, 0.975)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Totals:
    """Sums over the requests of a run. "Later" leaves out the steps in which some request's prompt was taken in."""

    num_requests: int
    num_tokens: int  # all that was emitted
    total_s: float  # their shares of the engine's time
    num_later_tokens: int
    num_later_steps: float  # their shares of the engine's steps
    later_s: float
    num_verified: int  # verify steps, of each row
    num_emitted: int  # tokens emitted by them: all but the prefill's
    sum_block_sizes: int  # of the verify steps
    num_equal: int  # requests whose tokens are those of the reference method


class MethodRun(NamedTuple):
    """One method over one prompt, once."""

    method: str
    prompt: int
    repeat: int
    totals: Totals


class Interval(NamedTuple):
    """A figure of all prompts and its 95% interval over prompts; not a number where nothing was counted."""

    value: float
    low: float
    high: float


# Every figure: what to add up, and what to divide it by.
RATIOS = {
    "tau": ("num_emitted", "num_verified"),
    "tokens_per_s": ("num_tokens", "total_s"),
    "decode_tokens_per_s": ("num_later_tokens", "later_s"),
    "step_s": ("later_s", "num_later_steps"),
    "share_equal": ("num_equal", "num_requests"),
    "mean_block_size": ("sum_block_sizes", "num_verified"),
}


@dataclass(frozen=True)
class Figures:
    """One method's row of a report."""

    method: str
    tau: Interval
    tokens_per_s: Interval  # end to end: prefill and policy included
    decode_tokens_per_s: Interval
    speedup: Interval  # of tokens_per_s over the baseline's
    share_equal: float  # of texts that are the reference's
    mean_block_size: float  # of a verify step


class Comparison:
    """Runs of several methods over the same prompts, with one set of resamples for all of them.

    Raises ValueError when there are fewer than two prompts or a method has not run what the first one has.
    """

    def __init__(self, runs: Sequence[MethodRun], *, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> None:
        done: dict[str, list[tuple[int, int]]] = {}
        for run in runs:
            done.setdefault(run.method, []).append((run.prompt, run.repeat))
        self.methods = tuple(done)
        for method, places in done.items():
            if sorted(places) != sorted(set(done[self.methods[0]])):
                raise ValueError(f"method {method!r} ran other prompts or repeats than {self.methods[0]!r}")
        prompts = sorted({run.prompt for run in runs})
        if len(prompts) < 2:
            raise ValueError(f"{len(prompts)} prompts: intervals need at least 2")
        self._sums = {method: _sums([run for run in runs if run.method == method], prompts) for method in done}
        self._weights = resampling_weights(len(prompts), num_resamples, seed)

    def figure(self, name: str, method: str) -> Interval:
        """A figure of RATIOS for one method."""
        return interval(self._resampled(name, method))

    def ratio(self, name: str, method: str, baseline: str) -> Interval:
        """A figure of one method over the same of another, paired by prompt."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return interval(self._resampled(name, method) / self._resampled(name, baseline))

    def figures(self, baseline: str) -> list[Figures]:
        """A row for every method, in the order of the runs; speed-ups are over `baseline`."""
        return [
            Figures(
                method,
                self.figure("tau", method),
                self.figure("tokens_per_s", method),
                self.figure("decode_tokens_per_s", method),
                self.ratio("tokens_per_s", method, baseline),
                self.figure("share_equal", method).value,
                self.figure("mean_block_size", method).value,
            )
            for method in self.methods
        ]

    def _resampled(self, name: str, method: str) -> Array:
        """The figure itself, then its value in every resample."""
        if method not in self._sums:
            raise ValueError(f"method {method!r}: must be one of {', '.join(self.methods)}")
        above, below = (self._weights @ self._sums[method][part] for part in RATIOS[name])
        with np.errstate(divide="ignore", invalid="ignore"):
            return above / below


def ratio_of_totals(above: Sequence[float], below: Sequence[float]) -> Interval:
    """sum(above) / sum(below) with its interval over the entries, which are those of one prompt each."""
    weights = resampling_weights(len(above), NUM_RESAMPLES, seed=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return interval((weights @ np.array(above, dtype=float)) / (weights @ np.array(below, dtype=float)))


def resampling_weights(num_prompts: int, num_resamples: int, seed: int) -> Array:
    """How often each prompt counts [1 + resamples, prompts]; first every prompt once, which is the figure itself."""
    draws = np.random.default_rng(seed).multinomial(
        num_prompts, np.full(num_prompts, 1 / num_prompts), size=num_resamples
    )
    return np.vstack([np.ones(num_prompts), draws])


def _sums(runs: Sequence[MethodRun], prompts: Sequence[int]) -> dict[str, Array]:
    """For every field of Totals its sum over the repeats of each prompt, [prompts]."""
    place = {prompt: i for i, prompt in enumerate(prompts)}
    sums = {field.name: np.zeros(len(prompts)) for field in fields(Totals)}
    for run in runs:
        for name, column in sums.items():
            column[place[run.prompt]] += getattr(run.totals, name)
    return sums


def interval(values: Array) -> Interval:
    """values[0] with the quantiles of the others; resamples in which nothing was counted are left out."""
    resamples = values[1:][np.isfinite(values[1:])]
    if not (math.isfinite(values[0]) and len(resamples)):
        return Interval(math.nan, math.nan, math.nan)
    low, high = np.quantile(resamples, _QUANTILES)
    return Interval(float(values[0]), float(low), float(high))


def fastest_block_size(tau: Mapping[int, float], step_s: Mapping[int, float]) -> int:
    """The block size with the most tokens a second, tau / step_s, among those in both; the smallest of equals.

    Raises ValueError where no block size is in both.
    """
    both = sorted(set(tau) & set(step_s))
    if not both:
        raise ValueError(f"block sizes {sorted(tau)} and {sorted(step_s)}: none is in both")
    return max(both, key=lambda size: tau[size] / step_s[size])
