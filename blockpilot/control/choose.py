"""Forecasts: how many tokens a request is expected to emit a step with each candidate block size, and what to make of
it at the present load.

A policy with a value head gives a forecast instead of a block size. Nothing has to be predicted again when the load
changes: the seconds of a step do, and with them the best choice.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from blockpilot.control.price import StepCosts
    from blockpilot.engine.engine import Prefill
    from blockpilot.policy.learned import CandidateSet


Array = NDArray[np.float64]
_NEVER = 1e5  # tokens: what no row emits


class Reader(Protocol):
    """A policy that predicts every step anew."""

    def read(self, forecasts: Sequence[Any], contexts: Tensor, anchors: Tensor) -> None:
        """Set the taus of some of its forecasts for their next step.

        contexts [R, draft hidden] are the context vectors of the positions before the anchors, anchors
        [R, target hidden] the target's embeddings of the anchors.
        """


class Forecast(Protocol):
    """What is expected of one request, from its prefill to its end."""

    @property
    def candidates(self) -> "CandidateSet": ...

    @property
    def reader(self) -> Reader | None:
        """What predicts every step of the request anew; None where nothing does."""

    @property
    def taus(self) -> Sequence[float]:
        """Tokens that the next step is expected to emit with each candidate, the bonus token included."""

    def observe(self, block_size: int, num_accepted: int) -> None:
        """Learn from a step of the request."""


class StaticForecast:
    """The same for every step of a request."""

    reader = None

    def __init__(self, candidates: "CandidateSet", taus: Sequence[float]) -> None:
        self.candidates = candidates
        self.taus = tuple(taus)

    def observe(self, block_size: int, num_accepted: int) -> None:
        pass


def choose(
    forecasts: Sequence[Forecast], costs: "StepCosts | None", context: int, others: Sequence[int] = ()
) -> list[int]:
    """The block sizes of a step that are expected to make the most tokens a second of the whole batch.

    Of equals the smallest. `others` are the sizes of rows that do not choose; they are taken to emit one token.
    `context` is the rows' mean length. Prompts that the step takes in, too, do not matter: their seconds are spent
    anyway, and a token saves what it would save in another step. Without costs every step is taken to cost the same.
    """
    if not forecasts:
        return []
    if costs is None:
        return [f.candidates[max(range(len(f.taus)), key=lambda k: (f.taus[k], -k))] for f in forecasts]
    options = [dict(zip(f.candidates, f.taus, strict=True)) for f in forecasts] + [{size: 1.0} for size in others]
    sizes = sorted({1}.union(*options))
    tokens = np.array([[of_row.get(size, -math.inf) for size in sizes] for of_row in options]).clip(min=-_NEVER)
    alike = tokens.sum(axis=0) / costs.alike_s(sizes, len(options), context)
    best = int(alike.argmax())
    chosen = [best] * len(options)
    if len(options) > 1:
        mixing_s = costs.mixing_s(sizes, len(options), context)
        chosen = _most_a_second(tokens, np.array(sizes) - 1, *mixing_s, rate=float(alike[best])) or chosen
    return [sizes[k] for k in chosen[: len(forecasts)]]


def _most_a_second(
    tokens: Array, drafted: NDArray[np.int64], first_s: Array, each_s: Array, rate: float
) -> list[int] | None:
    """Which option of every row [R] makes the most tokens in all over seconds in all; None if less than `rate`.

    tokens [R, K] are those of every row's options, which draft drafted[k] tokens, ascending. A step whose widest
    option is k takes first_s[k] if one row takes it, and each_s[k] for every further token drafted. A rate is reached
    if tokens less that many times the seconds come to nothing (Dinkelbach); for a given rate and widest option rows
    choose apart, and if none chose that option, the one does that loses the least by it.
    """
    widest, rows = np.arange(len(drafted)), np.arange(len(tokens))
    token_s, too_wide = each_s[:, None] * drafted, drafted > drafted[:, None]  # [widest, option]
    chosen: list[int] | None = None
    while True:
        worth = np.where(too_wide, -(_NEVER**2), tokens[:, None] - rate * token_s)  # [row, widest, option]
        options: NDArray[np.int64] = worth.argmax(axis=2)
        nobody = widest[(options != widest).all(axis=0)]
        loss = worth.max(axis=2) - worth[:, widest, widest]
        options[loss.argmin(axis=0)[nobody], nobody] = nobody
        emitted = tokens[rows[:, None], options].sum(axis=0)
        seconds = first_s + each_s * (drafted[options].sum(axis=0) - drafted)
        best = (emitted - rate * seconds).argmax()
        found, reached = options[:, best].tolist(), emitted[best] / seconds[best]
        if reached < rate or found == chosen:
            return chosen
        chosen, rate = found, reached


class TrackRecord:
    """How much of what was expected came: a share, with a prior, which may be a record of more than this one.

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
        """What came over what was expected."""
        before = self._prior.ratio if isinstance(self._prior, TrackRecord) else self._prior
        return (self._doubt * before + self._came) / (self._doubt + self._expected)

    def add(self, expected: float, came: float) -> None:
        """Count something, in the prior, too; where nothing was expected, with zeros, the rest fades."""
        self._expected = self._keep * self._expected + expected
        self._came = self._keep * self._came + came
        if isinstance(self._prior, TrackRecord):
            self._prior.add(expected, came)


# A baseline that learns nothing beforehand


class EVController:
    """Picks block sizes by running means alone: what llama-server-like runtimes do (the "EV controller").

    For every slot it counts how often a draft that was reached was accepted, over all requests and in the request at
    hand, and expects tokens by the chance that all drafts up to a slot are. Now and then a request tries the next
    larger candidate, since slots that are never drafted teach nothing.
    """

    FIRST_GUESS = 0.75  # share accepted, before anything was seen
    DOUBT = 4.0  # drafts reached: of the first guess, and of all requests so far beside the one at hand
    PROBE_EVERY = 16  # steps

    def __init__(self, candidates: "CandidateSet") -> None:
        self.candidates = candidates
        self.records = [TrackRecord(self.DOUBT, prior=self.FIRST_GUESS) for _ in range(1, candidates[-1])]
        """Accepted of reached drafts, by slot, from the first after the anchor."""

    def __call__(self, prefill: "Prefill") -> "RunningMeans":
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
        probed = self._probed()
        return [by_size[size - 1] if probed in (None, size) else -math.inf for size in self.candidates]

    def _probed(self) -> int | None:
        """The candidate to try whatever is expected of it, every so often: the next larger than the last one."""
        if self._num_steps % EVController.PROBE_EVERY < EVController.PROBE_EVERY - 1:
            return None
        return next((size for size in self.candidates if size > self._last), None)

    def observe(self, block_size: int, num_accepted: int) -> None:
        self._num_steps += 1
        self._last = block_size
        reached = min(num_accepted + 1, block_size - 1)
        for slot, record in enumerate(self._records[:reached]):
            record.add(1, slot < num_accepted)
