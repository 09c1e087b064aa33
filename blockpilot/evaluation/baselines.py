"""Baselines that learn nothing beforehand: the same forecast for every step, and running means of acceptance."""

import math
from collections.abc import Sequence
from itertools import accumulate

from blockpilot.adaptive.calibration import TrackRecord
from blockpilot.types import CandidateSet, Prefill


class StaticForecast:
    """The same for every step of a request."""

    reader = None

    def __init__(self, candidates: CandidateSet, taus: Sequence[float]) -> None:
        self.candidates = candidates
        self.taus = tuple(taus)

    def observe(self, block_size: int, num_accepted: int) -> None:
        pass


class EVController:
    """Picks block sizes by running means alone: what llama-server-like runtimes do (the "EV controller").

    For every slot it counts how often a draft that was reached was accepted, over all requests and in the request at
    hand, and expects tokens by the chance that all drafts up to a slot are. Now and then a request tries the next
    larger candidate, since slots that are never drafted teach nothing.
    """

    FIRST_GUESS = 0.75  # share accepted, before anything was seen
    DOUBT = 4.0  # drafts reached: of the first guess, and of all requests so far beside the one at hand
    PROBE_EVERY = 16  # steps

    def __init__(self, candidates: CandidateSet) -> None:
        self.candidates = candidates
        self.records = [TrackRecord(self.DOUBT, prior=self.FIRST_GUESS) for _ in range(1, candidates[-1])]
        """Accepted of reached drafts, by slot, from the first after the anchor."""

    def __call__(self, prefill: Prefill) -> "RunningMeans":
        return RunningMeans(self)


class RunningMeans:
    """The forecast of one request under an EVController."""

    reader = None

    def __init__(self, controller: EVController) -> None:
        self.candidates = controller.candidates
        self._records = [TrackRecord(EVController.DOUBT, prior=of_all) for of_all in controller.records]
        self._num_steps = 0
        self._last = 1

    @property
    def taus(self) -> Sequence[float]:
        chances = accumulate((record.ratio for record in self._records), lambda a, b: a * b)
        by_size = list(accumulate(chances, initial=1.0))  # [b - 1]: tokens of a step with block size b
        probed = None  # every so often the next larger than the last one, whatever is expected of it
        if (self._num_steps + 1) % EVController.PROBE_EVERY == 0:
            probed = next((size for size in self.candidates if size > self._last), None)
        return [by_size[size - 1] if probed in (None, size) else -math.inf for size in self.candidates]

    def observe(self, block_size: int, num_accepted: int) -> None:
        self._num_steps += 1
        self._last = block_size
        reached = min(num_accepted + 1, block_size - 1)
        for slot, record in enumerate(self._records[:reached]):
            record.add(1, slot < num_accepted)
