"""Statistics of decoding runs: from sums per method and prompt to figures with intervals (`tables.py` prints them).

Runs are stored as sums and divided once, at the end: every figure is a ratio of totals. Its 95% interval is Student's
t of its logarithm, which has its nominal coverage also with few prompts, unlike bootstrap quantiles. The variance
is the jackknife's over prompts, so methods that ran the same prompts are compared in pairs; the degrees of freedom
follow from Kish's effective number of prompts (1965). The variances between repeats, and between two engines that do
the same work, are added (Satterthwaite 1946).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

LEVEL = 0.95

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Totals:
    """Sums over the requests of a run. "Later" steps are those without a prefill."""

    num_requests: int
    num_tokens: int  # emitted
    total_s: float  # the requests' shares of the engine's time
    num_later_tokens: int
    num_later_steps: float  # the requests' shares of the engine's steps
    later_s: float
    num_verified: int  # verify steps, summed over rows
    num_emitted: int  # tokens emitted by verify steps: all but the prefills'
    sum_block_sizes: int  # of the verify steps
    num_equal: int  # requests with the same tokens as under the reference method


class MethodRun(NamedTuple):
    """One run of a method on one prompt."""

    method: str
    prompt: int
    repeat: int
    totals: Totals


class Interval(NamedTuple):
    """A figure over all prompts and its 95% interval.

    All NaN if nothing was counted; low and high are NaN if the counts come from a single prompt, or are 0.
    """

    value: float
    low: float
    high: float


# Numerator and denominator of every figure, fields of Totals.
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
    speedup: Interval  # tokens_per_s over the baseline's
    share_equal: float  # share of texts equal to the reference's
    mean_block_size: float  # per verify step


class Variance(NamedTuple):
    """Estimated variance of a figure's logarithm."""

    value: float
    freedom: float
    """Degrees of freedom of the estimate."""


class Comparison:
    """Runs of several methods over the same prompts.

    control: two methods that do the same work. A difference between them beyond its own interval is machine noise,
    which is added to the variance of all ratios. Raises ValueError for fewer than two prompts, or if the methods have
    not run the same prompts and repeats.
    """

    def __init__(self, runs: Sequence[MethodRun], control: tuple[str, str] | None = None) -> None:
        cells_by_method: dict[str, list[tuple[int, int]]] = {}
        for run in runs:
            cells_by_method.setdefault(run.method, []).append((run.repeat, run.prompt))
        self.methods = tuple(cells_by_method)
        for method, cells in cells_by_method.items():
            if sorted(cells) != sorted(set(cells_by_method[self.methods[0]])):
                raise ValueError(f"method {method!r} ran other prompts or repeats than {self.methods[0]!r}")
        self.num_prompts = len({run.prompt for run in runs})
        if self.num_prompts < 2:
            raise ValueError(f"{self.num_prompts} prompts: intervals need at least 2")
        self._control = control
        self._counts = {method: _counts([run for run in runs if run.method == method]) for method in cells_by_method}

    def figure(self, name: str, method: str) -> Interval:
        """Figure `name` of RATIOS for one method."""
        return interval(*self._parts(name, method))

    def ratio(self, name: str, method: str, baseline: str) -> Interval:
        """Figure `name` of one method over that of another, paired by prompt."""
        machine_noise = []
        if self._control is not None and method != baseline and {method, baseline} != set(self._control):
            above, below = self._paired(name, *self._control)
            if all(part.sum() > 0 for part in (*above, *below)):
                unpaired = math.log(_ratio(above, below)) ** 2 - _over_prompts(above, below).value
                machine_noise.append(Variance(max(0.0, unpaired), 1))
        return interval(*self._paired(name, method, baseline), machine_noise)

    def figures(self, baseline: str) -> list[Figures]:
        """Figures of every method, in the order of the runs; speed-ups are over `baseline`."""
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

    def _paired(self, name: str, method: str, baseline: str) -> tuple[list[Array], list[Array]]:
        """Numerators and denominators of the ratio of two methods' figures, [repeats, prompts] each."""
        above, below = self._parts(name, method)
        baseline_above, baseline_below = self._parts(name, baseline)
        return [*above, *baseline_below], [*below, *baseline_above]

    def _parts(self, name: str, method: str) -> tuple[list[Array], list[Array]]:
        """Numerators and denominators of a figure, [repeats, prompts] each."""
        if method not in self._counts:
            raise ValueError(f"method {method!r}: must be one of {', '.join(self.methods)}")
        above, below = (self._counts[method][part] for part in RATIOS[name])
        return [above], [below]


def ratio_of_totals(above: Sequence[float], below: Sequence[float]) -> Interval:
    """sum(above) / sum(below) with its interval over prompts; entries are sums of one prompt each."""
    return interval([np.array([above], dtype=float)], [np.array([below], dtype=float)])


def interval(above: Sequence[Array], below: Sequence[Array], extra: Sequence[Variance] = ()) -> Interval:
    """Ratio with its interval: product of the totals of `above` over that of `below`, [repeats, prompts] each.

    extra: further variances of the ratio's logarithm.
    """
    value = _ratio(above, below)
    if not math.isfinite(value) or any((part.sum(axis=0) == part.sum()).any() for part in (*above, *below)):
        return Interval(value, math.nan, math.nan)
    variances = [_over_prompts(above, below), _over_repeats(above, below), *extra]
    variance = sum(v.value for v in variances)
    if variance == 0:
        return Interval(value, value, value)
    freedom = variance**2 / sum(v.value**2 / v.freedom for v in variances)
    factor = math.exp(stdtrit(freedom, (1 + LEVEL) / 2) * math.sqrt(variance))
    return Interval(value, value / factor, value * factor)


def _ratio(above: Sequence[Array], below: Sequence[Array]) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.prod([part.sum() for part in above]) / np.prod([part.sum() for part in below])
    return float(value) if np.isfinite(value) else math.nan


def _over_prompts(above: Sequence[Array], below: Sequence[Array]) -> Variance:
    """Jackknife variance of the logarithm over prompts."""
    shares = np.array([part.sum(axis=0) / part.sum() for part in (*above, *below)])
    logs = np.log1p(-shares)
    left_out_logs = logs[: len(above)].sum(axis=0) - logs[len(above) :].sum(axis=0)
    num_prompts = shares.shape[1]
    equal_prompts = 1 / np.square(shares.mean(axis=0)).sum()
    return Variance(float((num_prompts - 1) * left_out_logs.var()), max(1.0, float(equal_prompts) - 1))


def _over_repeats(above: Sequence[Array], below: Sequence[Array]) -> Variance:
    """Variance between whole repeats beyond that of their prompts: two-way analysis of variance."""
    shares = np.array([part / part.sum() for part in (*above, *below)])  # [totals, repeats, prompts]
    parts = shares[: len(above)].sum(axis=0) - shares[len(above) :].sum(axis=0)  # of the logarithm
    repeats, num_prompts = parts.shape
    if repeats == 1:
        return Variance(0.0, 1)
    residuals = parts - parts.mean(axis=0) - parts.mean(axis=1, keepdims=True) + parts.mean()
    expected = num_prompts * np.square(residuals).sum() / (num_prompts - 1)
    observed = np.square(parts.sum(axis=1) - parts.sum() / repeats).sum()
    # parts.sum(axis=1) are the repeats' deviations divided by `repeats`; this is the variance of their mean.
    return Variance(max(0.0, float(observed - expected)) * repeats / (repeats - 1), repeats - 1)


def _counts(runs: Sequence[MethodRun]) -> dict[str, Array]:
    """Every field of Totals, [repeats, prompts]."""
    repeats, prompts = (sorted({getattr(run, name) for run in runs}) for name in ("repeat", "prompt"))
    counts = {field.name: np.zeros((len(repeats), len(prompts))) for field in fields(Totals)}
    for run in runs:
        for name, column in counts.items():
            column[repeats.index(run.repeat), prompts.index(run.prompt)] = getattr(run.totals, name)
    return counts


class CrossChosen(NamedTuple):
    """Cross-validated choice of a method: for each half of the prompts the fastest method on the other half."""

    methods: tuple[str, str]
    runs: list[MethodRun]
    """The chosen methods' runs, under one new name."""


def chosen_across(runs: Sequence[MethodRun], methods: Sequence[str], name: str) -> CrossChosen:
    """The best of fixed `methods` without hindsight: no prompt takes part in the choice of its own method.

    Prompts alternate between the halves; ties go to the first method. Raises ValueError if one half is empty.
    """
    halves = [[run for run in runs if run.method in methods and run.prompt % 2 == half] for half in (0, 1)]
    if not all(halves):
        raise ValueError("runs of one half of the prompts: a choice needs the other one, too")
    fastest = []
    for others in reversed(halves):
        totals = {m: [run.totals for run in others if run.method == m] for m in methods}
        speed = {
            m: sum(t.num_tokens for t in method_totals) / sum(t.total_s for t in method_totals)
            for m, method_totals in totals.items()
        }
        fastest.append(max(methods, key=speed.__getitem__))
    chosen = [
        run._replace(method=name) for half, m in zip(halves, fastest, strict=True) for run in half if run.method == m
    ]
    return CrossChosen((fastest[0], fastest[1]), chosen)


def fastest_block_size(tau: Mapping[int, float], step_s: Mapping[int, float]) -> int:
    """The block size with the most tokens per second, tau / step_s; ties go to the smallest.

    Raises ValueError if no block size is in both mappings.
    """
    common = sorted(set(tau) & set(step_s))
    if not common:
        raise ValueError(f"block sizes {sorted(tau)} and {sorted(step_s)}: none is in both")
    return max(common, key=lambda size: tau[size] / step_s[size])
