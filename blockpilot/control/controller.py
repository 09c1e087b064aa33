"""Controller of an engine: it plans how deep rows draft, selects what of it is verified, and learns from the outcome.

The engine knows these calls and nothing of costs and probabilities. A controller holds all adaptive state: another
draft, or a fresh start, is another controller.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from blockpilot.control.acceptance import AcceptanceModel, Array, Proposal
from blockpilot.control.choose import Depths, Trees, choose_depths, choose_nodes
from blockpilot.control.cost import NOMINAL, LiveCost, Load, StepPrice
from blockpilot.types import Candidates, CandidateSet, Prefill

PLAN_EVERY = 8  # steps
PROBE_EVERY = 128  # steps of one kind, plain or drafting, after which one of the other shows what that takes now


class Planned(NamedTuple):
    """Rows that a controller chooses for: which draw tokens, and how deep each may draft."""

    drawn: Array
    """[R] 0 or 1."""
    deepest: Array
    """[R]"""


NO_ROWS = Planned(np.zeros(0, dtype=int), np.zeros(0, dtype=int))


class Verified(NamedTuple):
    """Choices [M] of a proposal, flat places in it, that were verified below what the target chose: how many later
    choices are above each, and which of them the target made.
    """

    choices: Array
    laters: Array
    right: Array


NOTHING_VERIFIED = Verified(*(np.zeros(0, dtype=kind) for kind in (int, int, bool)))


class StepOutcome(NamedTuple):
    """Load and results of a step."""

    load: Load
    num_prompt_tokens: int = 0
    verified: Verified = NOTHING_VERIFIED
    """Choices of rows that were planned."""
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
        self.drafts = False
        """True if the latest step drafted. May be read by any thread."""
        self._live = LiveCost(self.price) if follows and price is not None and price is not NOMINAL else None
        self._planned, self._beside = NO_ROWS, Load(0)
        self._plan: Depths | None = None
        self._num_planned = 0  # steps that kept to it
        self._grown = list[Trees]()  # since then
        self._proposal: Proposal | None = None
        self._num_alike = 0  # steps in a row that drafted, or below 0 that did not

    def plan(self, rows: Planned, beside: Load) -> Array:
        """Positions [R] that the next step's draft proposes tokens for; `beside` is what other rows take in.

        Means over steps move slowly, so a plan holds for PLAN_EVERY steps of rows alike.
        """
        changed = beside != self._beside or not np.array_equal(rows.drawn, self._planned.drawn)
        if changed or self._plan is None or self._num_planned >= PLAN_EVERY:
            self._observe()
            if self._plan is not None:
                kinds, firsts = np.unique(self._planned.drawn, return_index=True)
                self.model.forget(kinds, self._plan.depths[firsts], self._num_planned)
            most = np.full(len(rows.deepest), self.model.deepest)
            self._plan = choose_depths(self.model.expected(rows.drawn), most, self.price, beside)
            self._beside, self._num_planned = beside, 0
        self._num_planned += 1
        depths = np.minimum(self._plan.depths, rows.deepest)
        if self._live is not None and not beside.num_drafted and abs(self._num_alike) >= PROBE_EVERY:
            drafts = bool(depths.any())
            if drafts == (self._num_alike > 0):
                depths = np.zeros_like(depths) if drafts else np.minimum(1, rows.deepest)
        return self._begin(rows, depths)

    def _begin(self, rows: Planned, depths: Array) -> Array:
        self._planned, self._proposal = rows, None
        return depths

    def _observe(self) -> None:
        """Take in what drafts have added since the latest plan."""
        if not self._grown:
            return
        nodes = list[Array]()
        for trees in self._grown:
            # Not what a constraint forces beyond the draft.
            rows, places = (trees.taken & (trees.depths <= trees.drafted[:, None])).nonzero()
            nodes.append(np.stack([trees.drawn[rows], trees.depths[rows, places], trees.chances[rows, places]]))
        drawn, drafted = (np.concatenate([getattr(t, name) for t in self._grown]) for name in ("drawn", "drafted"))
        of_nodes, depths, chances = np.concatenate(nodes, axis=1)
        self.model.observe(drawn, drafted, of_nodes.astype(int), depths.astype(int), chances)
        self._grown = []

    def propose(self, known: Array, found: Candidates, slots: Array) -> Proposal:
        """Probabilities of a draft's choices, in slots [N] below the anchor; the draft's own where `known` [N] is
        False: of rows that were not planned.
        """
        self._proposal = self.model.propose(known, found, slots)
        return self._proposal

    def select(self, trees: Trees, drafted: Load) -> Array:
        """Number of nodes to verify of every tree, [R]."""
        self._grown.append(trees)
        assert self._plan is not None
        return choose_nodes(trees, self.price, drafted, self._plan.rate)

    def learn(self, outcome: StepOutcome, seconds: float) -> None:
        """Learn from a step that took so long."""
        if self._proposal is not None and len(outcome.verified.choices):
            self.model.learn(self._proposal, *outcome.verified)
        load = outcome.load
        if not load.rows or outcome.num_prompt_tokens or outcome.has_captured:
            return
        self.drafts = load.num_drafted > 0
        if self._live is not None:
            self._live.observe(load, seconds)
            self.price = self._live.price
        before = self._num_alike if self.drafts == (self._num_alike > 0) else 0
        self._num_alike = before + (1 if self.drafts else -1)


@dataclass(frozen=True)
class FixedPolicy:
    """The same block size for every request."""

    block_size: int

    def __post_init__(self) -> None:
        CandidateSet((self.block_size,))

    def __call__(self, prefill: Prefill) -> int:
        return self.block_size
