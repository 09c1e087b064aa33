"""Rules that others ship or publish, to be measured beside ours: same engine, live price, back-off and exact text."""

from collections.abc import Iterable, Sequence
from heapq import merge
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from blockpilot.control.choose import Offered
from blockpilot.control.cost import TILE, Array, Load, StepPrice, passes
from blockpilot.control.live import LiveController
from blockpilot.drafts.choices import own_chances
from blockpilot.types import Candidates, Prefill


class DepthController(LiveController):
    """Verifies chains as deep as they are drafted: by running means, what Ollama and llama-server-like runtimes do.

    For requests of layout "chain".
    """

    def buy(self, offered: Sequence[Iterable[Offered]], most: int) -> list[list[Offered]]:
        return [list(islice(of_row, most)) for of_row in offered]


class _WholeDraft(LiveController):
    """Every row drafts all that its draft can."""

    def depths(self, reaches: Sequence[Sequence[float]], beside: Load) -> list[int]:
        deepest = max(beside.num_passes, passes(map(len, reaches), self.price.is_sequential))
        num_drafted = sum(map(len, reaches)) + beside.num_drafted
        self._load = Load(len(reaches) + beside.rows, num_drafted, beside.num_verified, deepest)
        return [len(reach) for reach in reaches]

    def _best(self, chances: Sequence[float], rows: int, load: Load) -> int:
        """Length of the prefix of chances, which fall, that makes the most tokens a second of these rows."""
        tokens = rows + np.cumsum([0.0, *chances])
        return int((tokens / verifying(self.price, load, len(chances))).argmax())


def verifying(price: StepPrice, load: Load, most: int) -> Array:
    """Seconds of a step that verifies 0 to `most` tokens more than `load`."""
    more = np.arange(most + 1)
    more_tiles = (load.num_tokens + more - 1) // TILE - (load.num_tokens - 1) // TILE
    found: Array = price.seconds(load) + more * price.token_s + more_tiles * price.tile_s
    return found


class AdaptiveVerification(_WholeDraft):
    """vLLM's: one budget for the chains of all rows, of the most probable tokens. With `Margins` as policy."""

    def buy(self, offered: Sequence[Iterable[Offered]], most: int) -> list[list[Offered]]:
        rows = [[(token.chance, r, token) for token in islice(of_row, most)] for r, of_row in enumerate(offered)]
        every = list(merge(*rows, key=lambda item: -item[0]))
        bought: list[list[Offered]] = [[] for _ in offered]
        for _, r, token in every[: self._best([chance for chance, _, _ in every], self._load.rows, self._load)]:
            bought[r].append(token)
        return bought


class TreeBudget(_WholeDraft):
    """CaDDTree's (arXiv 2606.01813): a budget for each row's tree, as if it were the only one."""

    def buy(self, offered: Sequence[Iterable[Offered]], most: int) -> list[list[Offered]]:
        num_drafted = self._load.num_drafted // self._load.rows
        bought, alone = [], Load(1, num_drafted, num_passes=self._load.num_passes)
        for of_row in offered:
            nodes = list(islice(of_row, most))
            bought.append(nodes[: self._best([node.chance for node in nodes], 1, alone)])
        return bought


class Margins:
    """Chances of a chain's tokens by the margin of the draft's best score over the next: a logistic regression for
    every position, refit with every step (vLLM's). A policy and its reader.
    """

    def __init__(self, deepest: int) -> None:
        self.deepest = deepest
        self.weights = np.tile([0.5, 0.5], (deepest, 1))  # of margin and 1
        self._covariances = np.tile(np.eye(2), (deepest, 1, 1))

    def __call__(self, prefill: Prefill) -> "MarginForecast":
        return MarginForecast(self)

    def read(self, forecasts: Sequence["MarginForecast"], contexts: Tensor, anchors: Tensor) -> None:
        """Nothing to know before the draft runs."""

    def chances(self, forecasts: Sequence["MarginForecast"], found: Candidates, depths: Sequence[int]) -> Tensor:
        margins = found.scores[:, 0] - found.scores[:, min(1, found.scores.shape[1] - 1)]
        places = np.array([place for depth in depths for place in range(depth)])
        known = np.stack([margins.double().clamp(max=20).numpy(force=True), np.ones(len(places))], axis=1)
        for forecast, of_row in zip(forecasts, np.split(known, np.cumsum(depths)[:-1]), strict=True):
            forecast.known = of_row
        chances = 1 / (1 + np.exp(-(self.weights[places] * known).sum(axis=1)))
        first = torch.from_numpy(chances).to(found.scores)[:, None]
        return torch.cat([first, torch.minimum(first, own_chances(found)[0, :, 1:])], dim=1)[None]

    def refit(self, known: np.ndarray, num_accepted: int) -> None:
        """Learn from the positions of a step that were reached: a Newton step each."""
        for place, x in enumerate(known[: num_accepted + 1]):
            chance = 1 / (1 + np.exp(-self.weights[place] @ x))
            with_x = self._covariances[place] @ x
            weight = chance * (1 - chance)
            self._covariances[place] -= weight * np.outer(with_x, with_x) / (1 + weight * x @ with_x)
            self.weights[place] += self._covariances[place] @ x * ((place < num_accepted) - chance)


class MarginForecast:
    """The forecast of one request under `Margins`."""

    def __init__(self, policy: Margins) -> None:
        self.reader = policy
        self.reach = [1.0] * policy.deepest
        self.known = np.zeros((0, 2))

    def observe(self, depth: int, num_verified: int, num_accepted: int) -> None:
        self.reader.refit(self.known[:num_verified], num_accepted)
