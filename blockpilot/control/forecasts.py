"""Forecasts that learn nothing beforehand: running means of acceptance."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from blockpilot.control.calibration import TrackRecord
from blockpilot.types import Prefill


class RunningMeans:
    """The policy that needs no training: how often each depth is reached, over all requests and in the one at hand.

    A draft's own probabilities say what its tokens are worth once it has run; these say how deep to run it. What is
    not drafted fades towards the first guess, so it is tried again.
    """

    FIRST_GUESS = 0.75  # share of reached positions that are accepted, before anything was seen
    DOUBT = 4.0  # positions reached: of the first guess, and of all requests so far beside the one at hand
    MEMORY = 1000.0  # steps

    def __init__(self, deepest: int) -> None:
        """deepest: positions that a draft proposes tokens for, at most."""
        if deepest < 1:
            raise ValueError(f"deepest {deepest}: must be at least 1")
        self.records = [TrackRecord(self.DOUBT, self.MEMORY, self.FIRST_GUESS) for _ in range(deepest)]
        """Accepted of reached positions, from the first after the anchor."""

    def __call__(self, prefill: Prefill) -> "RunningForecast":
        return RunningForecast(self)


class RunningForecast:
    """The forecast of one request by RunningMeans."""

    reader = None

    def __init__(self, policy: RunningMeans) -> None:
        self._records = [TrackRecord(policy.DOUBT, policy.MEMORY, of_all) for of_all in policy.records]

    @property
    def reach(self) -> Sequence[float]:
        return list(accumulate((record.ratio for record in self._records), mul))

    def observe(self, depth: int, num_verified: int, num_accepted: int) -> None:
        for place, record in enumerate(self._records):
            record.add(float(place <= num_accepted and place < depth), float(place < num_accepted))
