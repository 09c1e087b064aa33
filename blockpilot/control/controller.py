"""Controller of an engine: it plans how deep rows draft, selects what of it is verified, and learns what came of that.

The engine knows these three calls and nothing of costs and chances. A controller holds all adaptive state: another
draft, or a fresh start, is another controller. Rows are told by their ids, and are forgotten when a plan leaves them
out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from blockpilot.control.acceptance import AcceptanceModel, Array, Proposal
from blockpilot.control.choose import choose_depths, choose_nodes
from blockpilot.control.cost import NOMINAL, LiveCost, Load, StepPrice
from blockpilot.types import Candidates, CandidateSet, Prefill

TOKENS_DOUBT, TOKENS_KEEP = 20.0, 1 - 1 / 500  # steps; of tokens verified over positions drafted at a depth
PROBE_EVERY = 128  # steps of one kind, plain or drafting, after which one of the other shows what that takes now


class Planned(NamedTuple):
    """Rows that a controller chooses for: their ids, which draw tokens, and how deep each may draft."""

    ids: tuple[int, ...]
    drawn: Array
    """[R] 0 or 1."""
    deepest: Array
    """[R]"""


class Verified(NamedTuple):
    """Nodes of a step's trees [M]: their rows' places among those planned, their depths from 1 on and chances; flat
    places of their choices in a proposal, -1 for tokens that no draft chose; later choices above; which of them come
    after what the target chose, and which the target chose.
    """

    rows: Array
    depths: Array
    chances: Array
    choices: Array
    laters: Array
    reached: Array
    right: Array


NOTHING_VERIFIED = Verified(*(np.zeros(0, dtype=kind) for kind in (int, int, float, int, int, bool, bool)))


class StepOutcome(NamedTuple):
    """Load and results of a step."""

    load: Load
    num_prompt_tokens: int = 0
    verified: Verified | None = None
    """None where nothing was chosen."""
    has_captured: bool = False
    """A CUDA graph was captured in it, which takes longer than the step."""


class Controller:
    """Depths and nodes that make the most tokens a second.

    price: of a step, by default NOMINAL. A measured one follows the seconds of the engine's steps, unless `follows`
    is False; steps of one kind, plain or drafting, do not tell what the other takes, so now and then one is a probe.
    """

    def __init__(self, model: AcceptanceModel, price: StepPrice | None = None, *, follows: bool = True) -> None:
        self.model = model
        self.price = price or NOMINAL
        """May be read by any thread."""
        self._live = LiveCost(self.price) if follows and price is not None and price is not NOMINAL else None
        self._verified_at = np.ones((2, model.deepest))  # fading sums by depth: tokens verified, positions drafted
        self._verified_at[:] = TOKENS_DOUBT
        self._planned, self._depths = Planned((), np.zeros(0), np.zeros(0)), np.zeros(0, dtype=int)
        self._proposal: Proposal | None = None
        self._num_alike = 0  # steps in a row that drafted, or below 0 that did not

    def plan(self, rows: Planned, beside: Load) -> list[int]:
        """Positions that the next step's draft proposes tokens for, of every row; `beside` is what others take in."""
        means = self.model.depth_means(rows.ids, rows.drawn)
        tokens, slots = self._verified_at
        reaches = [of_row[:deepest] for of_row, deepest in zip(means.tolist(), rows.deepest.tolist(), strict=True)]
        depths, _ = choose_depths(reaches, self.price, beside, (tokens / slots).tolist())
        drafts = any(depths)
        if self._live is not None and not beside.num_drafted and abs(self._num_alike) >= PROBE_EVERY:
            if drafts == (self._num_alike > 0):
                depths = [0 if drafts else min(1, len(reach)) for reach in reaches]
        self._planned, self._depths, self._proposal = rows, np.array(depths, dtype=int), None
        return depths

    def propose(self, rows: Array, found: Candidates, slots: Array) -> Proposal:
        """Chances of a draft's choices: rows [N] are places among those planned, -1 for others; slots [N] are places
        below the anchor.
        """
        self._proposal = self.model.propose(rows, found, slots)
        return self._proposal

    def select(self, chances: Sequence[Array], drafted: Load) -> list[int]:
        """How many nodes of every tree are verified, of those by falling chance."""
        return choose_nodes(chances, self.price, drafted)

    def learn(self, outcome: StepOutcome, seconds: float) -> None:
        """Learn from a step that took so long."""
        if outcome.verified is not None:
            self._learn_acceptance(outcome.verified)
        load = outcome.load
        if self._live is None or not load.rows or outcome.num_prompt_tokens or outcome.has_captured:
            return
        self._live.observe(load, seconds)
        self.price = self._live.price
        drafted, before = load.num_drafted > 0, self._num_alike > 0
        self._num_alike = (self._num_alike if drafted == before else 0) + (1 if drafted else -1)

    def _learn_acceptance(self, verified: Verified) -> None:
        num_rows, deepest = len(self._planned.ids), self.model.deepest
        inside = verified.depths <= deepest
        brought = np.zeros((num_rows, deepest))
        place = verified.rows[inside], verified.depths[inside] - 1
        np.add.at(brought, place, verified.chances[inside])
        drafted = np.arange(deepest) < self._depths[:, None]
        self._verified_at *= TOKENS_KEEP
        self._verified_at += TOKENS_DOUBT * (1 - TOKENS_KEEP)
        np.add.at(self._verified_at[0], place[1], 1.0)
        self._verified_at[1] += drafted.sum(axis=0)
        accepted = np.bincount(verified.rows, verified.right, num_rows)
        surprise = accepted - np.bincount(verified.rows, verified.chances, num_rows)
        self.model.observe(self._planned.drawn, self._depths, brought, surprise)
        known = verified.reached & (verified.choices >= 0)
        if self._proposal is not None and known.any():
            choices, laters, right = (each[known] for each in (verified.choices, verified.laters, verified.right))
            self.model.learn(self._proposal, choices, laters, right)


@dataclass(frozen=True)
class FixedPolicy:
    """The same block size for every request."""

    block_size: int

    def __post_init__(self) -> None:
        CandidateSet((self.block_size,))

    def __call__(self, prefill: Prefill) -> int:
        return self.block_size
