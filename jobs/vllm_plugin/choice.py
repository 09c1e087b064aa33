"""Choice of the drafted tokens that every request of vLLM's batch verifies in the next step.

A policy of kind `prompt` says after the prompt how many of them are worth their while when the machine is free, and
that is the most that the request ever verifies. Where a price of a step is known, each step buys as many of them as
pay at the load of the moment, by running means of acceptance; under load that is none.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blockpilot.control.controller import StepOutcome
from blockpilot.control.forecasts import RunningForecast, RunningMeans
from blockpilot.control.live import LiveController
from blockpilot.control.cost import Load, StepPrice
from blockpilot.types import Prefill

PromptPolicy = Callable[[Prefill], int]


class Chooser(NamedTuple):
    """What chooses: a policy, none for as deep as the draft goes, and running means at a price, none for no price."""

    policy: PromptPolicy | None
    means: RunningMeans
    controller: LiveController | None

    @staticmethod
    def of(policy: PromptPolicy | None, price: StepPrice | None, num_drafted: int) -> "Chooser":
        """num_drafted: tokens that the draft proposes at most."""
        means = RunningMeans(num_drafted)
        return Chooser(policy, means, LiveController(means, price) if price else None)


@dataclass
class DraftedRow:
    """Choice for one request."""

    most: int
    """Drafted tokens that a step verifies at most."""
    depth: int
    """Those of the next step."""
    waits: bool
    """For its first logits."""
    forecast: RunningForecast | None
    """None for a request that has chosen by itself; it is not priced."""


class VerifiedRow(NamedTuple):
    """Result of a step for one request."""

    num_verified: int
    """Drafted tokens; 0 in the prefill."""
    num_emitted: int


class BatchChoice:
    """Choices for all requests of an engine, by id. `chooser` may be replaced by another thread: later prefills and
    steps go by the new one.
    """

    def __init__(self, chooser: Chooser, num_drafted: int) -> None:
        self.chooser = chooser
        self._num_drafted = num_drafted
        self._rows: dict[str, DraftedRow] = {}

    def admit(self, key: str, block_size: int | None) -> None:
        """Take in a request, with the block size that it asks for if it does."""
        if block_size is not None:
            most = min(block_size - 1, self._num_drafted)
            self._rows[key] = DraftedRow(most, most, waits=False, forecast=None)
            return
        most, chooser = self._num_drafted, self.chooser
        forecast = RunningForecast(chooser.means)
        self._rows[key] = DraftedRow(most, most, waits=chooser.policy is not None, forecast=forecast)

    def forget(self, keys: Iterable[str]) -> None:
        """Requests that have ended."""
        for key in keys:
            self._rows.pop(key, None)

    def waits(self, key: str) -> bool:
        """True while the policy needs the request's first logits."""
        return key in self._rows and self._rows[key].waits

    def decide(self, key: str, prefill: Prefill) -> None:
        """Let the policy choose for a request."""
        row, policy = self._rows.get(key), self.chooser.policy
        if row is not None and policy is not None:
            row.most = row.depth = min(policy(prefill) - 1, self._num_drafted)
            row.waits = False

    def width(self, keys: Iterable[str]) -> int:
        """Tokens that the draft proposes for all of these requests alike: as many as the one that wants most."""
        return max((self._rows[key].depth for key in keys if key in self._rows), default=self._num_drafted)

    def depths(self, keys: Sequence[str]) -> dict[str, int]:
        """Drafted tokens of each request that the next step verifies."""
        rows = {key: self._rows[key] for key in keys if key in self._rows}
        controller = self.chooser.controller
        priced = [row for row in rows.values() if row.forecast is not None]
        if controller is not None and priced:
            controller.begin()
            if controller.speculates:
                fixed = [row.depth for row in rows.values() if row.forecast is None]
                beside = Load(len(fixed), sum(fixed), sum(fixed))
                depths = controller.depths([_reach(row) for row in priced], beside)
            else:
                depths = [0] * len(priced)
            for row, depth in zip(priced, depths, strict=True):
                row.depth = depth
        return {key: row.depth for key, row in rows.items()}

    def learn(self, rows: Mapping[str, VerifiedRow], width: int, num_prompt_tokens: int, seconds: float) -> Load:
        """Learn from a step that verified these rows, drafted `width` tokens for each, and took in prompts."""
        num_accepted = num_priced = 0
        for key, row in rows.items():
            known = self._rows.get(key)
            if known is not None and known.forecast is not None and row.num_emitted:
                num_priced += 1
                num_accepted += row.num_emitted - 1
                known.forecast.observe(row.num_verified, row.num_verified, row.num_emitted - 1)
        load = Load(len(rows), len(rows) * width, sum(row.num_verified for row in rows.values()))
        num_tokens = sum(row.num_emitted for row in rows.values())
        if self.chooser.controller is not None:
            outcome = StepOutcome(load, num_prompt_tokens, num_priced, num_accepted, num_tokens, len(rows))
            self.chooser.controller.learn(outcome, seconds)
        return load


def _reach(row: DraftedRow) -> Sequence[float]:
    assert row.forecast is not None
    return row.forecast.reach[: row.most]
