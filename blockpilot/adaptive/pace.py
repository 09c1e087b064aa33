"""Kalman filter (1960) of the pace of steps: how much longer they take than was measured, by kind.

The seconds of a step over its measured costs vary for two reasons. All steps take longer where texts are longer than
those measured or something else is busy, by up to a half, within a few steps. And a kind of step may take longer than
others do: in a server event loops and clients lengthen a short step by more than a long one. Only the second matters
to a choice, and comparing plain steps of one moment with drafting ones of another takes the first for it. So both are
estimated together, over

    log(seconds / measured) = level + offset[kind, rows] + noise

where the level wanders, and what is known of an offset fades: with time it is likely to be near zero again.
"""

import math

import numpy as np

PLAIN, ALIKE, MIXED, BACKED_OFF = "plain", "alike", "mixed", "backed off"
"""Steps of rows that could draft and do not, that draft blocks of one size, of several; of rows that never draft."""

FIRST_LEVEL, LEVEL_STEP, NOISE = 3.0, 0.05, 0.1  # standard deviations, the second from step to step
OUTLIER = 3.0  # standard deviations: what is further off counts as much as this
# Variances of what the offsets of a kind are made of: one each of what kinds have in common, one of their own.
_IN_COMMON, _OWN = 0.2**2, {PLAIN: 0.03**2, BACKED_OFF: 0.03**2, ALIKE: 0.05**2, MIXED: 0.2**2}
_DRAFTING = {PLAIN: False, BACKED_OFF: False, ALIKE: True, MIXED: True}


class Pace:
    """The filter; rows count as alike to a factor of 1.2, and half of an offset is common to all numbers of rows.

    fading: steps after which 1/e is left of what was known of offsets.
    """

    def __init__(self, most_rows: int, *, fading: int = 4096) -> None:
        loads = range(_load(most_rows) + 1)
        self._places = {(kind, load): 1 + i for i, (kind, load) in enumerate((k, n) for k in _OWN for n in loads)}
        of_kinds = np.array(
            [[_IN_COMMON * (_DRAFTING[a] == _DRAFTING[b]) + _OWN[a] * (a == b) for b in _OWN] for a in _OWN]
        )
        prior = np.zeros((1 + len(self._places),) * 2)
        prior[1:, 1:] = np.kron(of_kinds, np.ones((len(loads),) * 2) + np.eye(len(loads))) / 2
        self._mean, self._covariance = np.zeros(len(prior)), prior.copy()
        self._covariance[0, 0] = FIRST_LEVEL**2
        keep = np.array([1.0] + [math.exp(-1 / fading)] * len(self._places))
        self._keep, self._keep_covariance = keep, np.outer(keep, keep)
        self._fresh = (1 - keep[-1] ** 2) * prior
        self._fresh[0, 0] = LEVEL_STEP**2

    def observe(self, kind: str, rows: int, ratio: float) -> None:
        """Learn from a step that took `ratio` times its measured costs."""
        self._mean *= self._keep
        self._covariance = self._keep_covariance * self._covariance + self._fresh
        seen = [0, self._places[kind, _load(rows)]]
        with_seen = self._covariance[:, seen].sum(axis=1)
        variance = with_seen[seen].sum() + NOISE**2
        surprise = math.log(ratio) - self._mean[seen].sum()
        limit = OUTLIER * math.sqrt(variance)
        self._mean += with_seen * (min(max(surprise, -limit), limit) / variance)
        self._covariance -= np.outer(with_seen, with_seen) / variance

    def factor(self, kind: str, rows: int) -> float:
        """What a step takes now, in its measured costs."""
        return math.exp(self._mean[0] + self._mean[self._places[kind, _load(rows)]])

    def optimistic(self, kind: str, rows: int, beside: str) -> float:
        """The factor less one standard deviation of what is not known of it beside another kind."""
        a, b = self._places[kind, _load(rows)], self._places[beside, _load(rows)]
        variance = self._covariance[a, a] + self._covariance[b, b] - 2 * self._covariance[a, b]
        return self.factor(kind, rows) * math.exp(-math.sqrt(max(variance, 0)))


def _load(rows: int) -> int:
    return round(2 * math.log2(rows))
