"""Calibration while decoding: how much of what was expected came."""

import math


class TrackRecord:
    """Ratio of what came to what was expected, with a prior, which may be a record of more than this one.

    Of drafted tokens that were expected to be accepted, for instance, in a request, or in all that a policy sees. A
    policy meets other prompts than those that it has learned from. And what it expects too much of is drafted more
    than what it expects too little of, so that even a policy that is right on average gets less than it expects.
    """

    def __init__(self, doubt: float, memory: float = math.inf, prior: "TrackRecord | float" = 1.0) -> None:
        """doubt: what must be expected before the record weighs as much as `prior`, a record or its ratio.
        memory: additions after which it fades.
        """
        self._doubt, self._keep, self._prior = doubt, 1 - 1 / memory, prior
        self._expected = self._came = 0.0

    @property
    def ratio(self) -> float:
        """Ratio of what came to what was expected."""
        before = self._prior.ratio if isinstance(self._prior, TrackRecord) else self._prior
        return (self._doubt * before + self._came) / (self._doubt + self._expected)

    def add(self, expected: float, came: float) -> None:
        """Count something, in the prior, too; where nothing was expected, with zeros, the rest fades."""
        self._expected = self._keep * self._expected + expected
        self._came = self._keep * self._came + came
        if isinstance(self._prior, TrackRecord):
            self._prior.add(expected, came)
