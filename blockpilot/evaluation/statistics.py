"""What decoding runs add up to: sums per method and prompt -> figures with intervals (`tables.py` prints them).

Runs are kept as sums and divided once, at the end: every figure is a ratio of totals. Its 95% interval is Student's t
of its logarithm, which covers the truth also with few prompts, where quantiles of a bootstrap do not. The variance is
the jackknife's over prompts, so methods that ran the same prompts are compared in pairs; the degrees of freedom are
those of so many equal prompts as weigh like these (Kish 1965). What whole repeats differ by, and what two engines
differ by that do the same work, is added (Satterthwaite 1946).
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
    """A figure of all prompts and its 95% interval over prompts.

    Not a number where nothing was counted; low and high alone where it was in one prompt, or came to 0.
    """

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


class Variance(NamedTuple):
    """An estimate of a variance, of the logarithm of a figure."""

    value: float
    freedom: float
    """Degrees of freedom of the estimate."""


class Comparison:
    """Runs of several methods over the same prompts.

    control: two of the methods that do the same work; what their figures differ by beyond their own interval is noise
    that all ratios of methods have. Raises ValueError when there are fewer than two prompts or a method has not run
    what the first one has.
    """

    def __init__(self, runs: Sequence[MethodRun], control: tuple[str, str] | None = None) -> None:
        done: dict[str, list[tuple[int, int]]] = {}
        for run in runs:
            done.setdefault(run.method, []).append((run.repeat, run.prompt))
        self.methods = tuple(done)
        for method, places in done.items():
            if sorted(places) != sorted(set(done[self.methods[0]])):
                raise ValueError(f"method {method!r} ran other prompts or repeats than {self.methods[0]!r}")
        self.num_prompts = len({run.prompt for run in runs})
        if self.num_prompts < 2:
            raise ValueError(f"{self.num_prompts} prompts: intervals need at least 2")
        self._control = control
        self._counts = {method: _counts([run for run in runs if run.method == method]) for method in done}

    def figure(self, name: str, method: str) -> Interval:
        """A figure of RATIOS for one method."""
        return interval(*self._parts(name, method))

    def ratio(self, name: str, method: str, baseline: str) -> Interval:
        """A figure of one method over the same of another, paired by prompt."""
        of_machine = []
        if self._control is not None and method != baseline and {method, baseline} != set(self._control):
            above, below = self._paired(name, *self._control)
            if all(part.sum() > 0 for part in (*above, *below)):
                unpaired = math.log(_ratio(above, below)) ** 2 - _over_prompts(above, below).value
                of_machine.append(Variance(max(0.0, unpaired), 1))
        return interval(*self._paired(name, method, baseline), of_machine)

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

    def _paired(self, name: str, method: str, baseline: str) -> tuple[list[Array], list[Array]]:
        (ours, our_divisor), (theirs, their_divisor) = self._parts(name, method), self._parts(name, baseline)
        return [*ours, *their_divisor], [*our_divisor, *theirs]

    def _parts(self, name: str, method: str) -> tuple[list[Array], list[Array]]:
        """Numerators and denominators of a figure, [repeats, prompts] each."""
        if method not in self._counts:
            raise ValueError(f"method {method!r}: must be one of {', '.join(self.methods)}")
        above, below = (self._counts[method][part] for part in RATIOS[name])
        return [above], [below]


def ratio_of_totals(above: Sequence[float], below: Sequence[float]) -> Interval:
    """sum(above) / sum(below) with its interval over the entries, which are those of one prompt each."""
    return interval([np.array([above], dtype=float)], [np.array([below], dtype=float)])


def interval(above: Sequence[Array], below: Sequence[Array], more: Sequence[Variance] = ()) -> Interval:
    """Product of the totals of `above` over that of `below`, [repeats, prompts] each, with its interval.

    more: other variances that its logarithm has.
    """
    value = _ratio(above, below)
    if not math.isfinite(value) or any((part.sum(axis=0) == part.sum()).any() for part in (*above, *below)):
        return Interval(value, math.nan, math.nan)
    variances = [_over_prompts(above, below), _over_repeats(above, below), *more]
    variance = sum(each.value for each in variances)
    if variance == 0:
        return Interval(value, value, value)
    freedom = variance**2 / sum(each.value**2 / each.freedom for each in variances)
    factor = math.exp(stdtrit(freedom, (1 + LEVEL) / 2) * math.sqrt(variance))
    return Interval(value, value / factor, value * factor)


def _ratio(above: Sequence[Array], below: Sequence[Array]) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.prod([part.sum() for part in above]) / np.prod([part.sum() for part in below])
    return float(value) if np.isfinite(value) else math.nan


def _over_prompts(above: Sequence[Array], below: Sequence[Array]) -> Variance:
    """Jackknife: what the logarithm varies by as each of the prompts is left out."""
    shares = np.array([part.sum(axis=0) / part.sum() for part in (*above, *below)])
    logs = np.log1p(-shares)
    without = logs[: len(above)].sum(axis=0) - logs[len(above) :].sum(axis=0)
    num = shares.shape[1]
    equal_prompts = 1 / np.square(shares.mean(axis=0)).sum()
    return Variance(float((num - 1) * without.var()), max(1.0, float(equal_prompts) - 1))


def _over_repeats(above: Sequence[Array], below: Sequence[Array]) -> Variance:
    """Variance between whole repeats beyond that of their prompts: two-way analysis of variance."""
    shares = np.array([part / part.sum() for part in (*above, *below)])  # [totals, repeats, prompts]
    parts = shares[: len(above)].sum(axis=0) - shares[len(above) :].sum(axis=0)  # of the logarithm
    repeats, num = parts.shape
    if repeats == 1:
        return Variance(0.0, 1)
    rest = parts - parts.mean(axis=0) - parts.mean(axis=1, keepdims=True) + parts.mean()
    expected = num * np.square(rest).sum() / (num - 1)
    found = np.square(parts.sum(axis=1) - parts.sum() / repeats).sum()
    # parts.sum(axis=1) are the repeats' deviations over `repeats`, so the variance of their mean is this.
    return Variance(max(0.0, float(found - expected)) * repeats / (repeats - 1), repeats - 1)


def _counts(runs: Sequence[MethodRun]) -> dict[str, Array]:
    """Every field of Totals, [repeats, prompts]."""
    repeats, prompts = (sorted({getattr(run, name) for run in runs}) for name in ("repeat", "prompt"))
    counts = {field.name: np.zeros((len(repeats), len(prompts))) for field in fields(Totals)}
    for run in runs:
        for name, column in counts.items():
            column[repeats.index(run.repeat), prompts.index(run.prompt)] = getattr(run.totals, name)
    return counts


class CrossChosen(NamedTuple):
    """The fastest of some methods: for each half of the prompts the one that was fastest on the other half."""

    methods: tuple[str, str]
    runs: list[MethodRun]
    """Theirs, by a name of their own."""


def chosen_across(runs: Sequence[MethodRun], methods: Sequence[str], name: str) -> CrossChosen:
    """The best of fixed ways without hindsight: no prompt takes part in the choice of its own. The first of equals.

    Prompts alternate between the halves. Raises ValueError where one of them is empty.
    """
    halves = [[run for run in runs if run.method in methods and run.prompt % 2 == half] for half in (0, 1)]
    if not all(halves):
        raise ValueError("runs of one half of the prompts: a choice needs the other one, too")
    best = []
    for others in reversed(halves):
        totals = {m: [run.totals for run in others if run.method == m] for m in methods}
        speed = {m: sum(t.num_tokens for t in of) / sum(t.total_s for t in of) for m, of in totals.items()}
        best.append(max(methods, key=speed.__getitem__))
    chosen = [
        run._replace(method=name) for half, m in zip(halves, best, strict=True) for run in half if run.method == m
    ]
    return CrossChosen((best[0], best[1]), chosen)


def fastest_block_size(tau: Mapping[int, float], step_s: Mapping[int, float]) -> int:
    """The block size with the most tokens a second, tau / step_s, among those in both; the smallest of equals.

    Raises ValueError where no block size is in both.
    """
    both = sorted(set(tau) & set(step_s))
    if not both:
        raise ValueError(f"block sizes {sorted(tau)} and {sorted(step_s)}: none is in both")
    return max(both, key=lambda size: tau[size] / step_s[size])
