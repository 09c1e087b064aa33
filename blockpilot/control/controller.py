"""Controller of an engine: it plans how deep rows draft, selects what of it is verified, and learns from the outcome.

The engine knows these calls and nothing of costs and probabilities. A controller holds all adaptive state: another
draft, or a fresh start, is another controller.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from blockpilot.control.acceptance import AcceptanceModel, Array, Paths, Proposal
from blockpilot.control.choose import RowPlan, Trees, best_drafting, choose_nodes, plan_rows
from blockpilot.control.cost import NOMINAL, LiveCost, Load, StepPrice
from blockpilot.types import Candidates, CandidateSet, Prefill

PLAN_EVERY = 8  # steps
PROBE_EVERY = 128  # steps of one kind, plain or drafting, after which one of the other shows what that takes now
EXPLORE_EVERY = 4  # drafting steps, of which one has a row that drafts as deep as it may
EXPLORE_SHARE = 0.008  # of a plain step's seconds, that drafts which seem not worth theirs may cost


class Planned(NamedTuple):
    """Rows that a controller chooses for: their kinds [R] (`AcceptanceModel.kinds`), and how deep each may draft."""

    kinds: Array
    deepest: Array


NO_ROWS = Planned(np.zeros(0, dtype=int), np.zeros(0, dtype=int))


class Verified(NamedTuple):
    """What was verified below what the target chose.

    Choices [M] of a proposal, flat places in it, later choices above each, and which of them the target made. Tokens
    of paths: their inputs [P, len(OF_PATH)], which were drawn [P], and which the target chose.
    """

    choices: Array
    laters: Array
    right: Array
    path_inputs: Array
    path_drawn: Array
    path_right: Array


class StepOutcome(NamedTuple):
    """Load and results of a step."""

    load: Load
    num_prompt_tokens: int = 0
    verified: Verified | None = None
    """Of rows that were planned."""
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
        self._plans: RowPlan | None = None  # of every kind, of as many rows beside the same others
        self._num_planned = 0  # steps since
        self._num_drafts = 0  # steps that drafted
        self._spare_s = 0.0  # that drafts may cost
        self._grown = list[Trees]()
        self._proposal: Proposal | None = None
        self._num_alike = 0  # steps in a row that drafted, or below 0 that did not

    def follow(self, paths: Paths) -> Paths:
        """Paths with the chances of their tokens, cut where they are hardly reached."""
        return self.model.follow(paths)

    def kinds(self, drawn: Array, paths: Paths | None) -> Array:
        """Kinds of rows [R] that are `drawn` [R] (0 or 1), by which plans differ."""
        return self.model.kinds(drawn, paths)

    def plan(self, rows: Planned, beside: Load) -> Array:
        """Positions [R] that the next step's draft proposes tokens for; `beside` is what other rows take in.

        Means over steps move slowly, so plans hold for PLAN_EVERY steps of as many rows.
        """
        changed = beside != self._beside or len(rows.kinds) != len(self._planned.kinds)
        if self._plans is None or changed or self._num_planned >= PLAN_EVERY:
            self._observe()
            self._plans = plan_rows(self.model.expected(), len(rows.kinds), self.price, beside)
            self._beside, self._num_planned = beside, 0
        self._num_planned += 1
        depths = self._depths(self._plans, rows, beside)
        self._explore(depths, rows.deepest)
        if self._live is not None and not beside.num_drafted and abs(self._num_alike) >= PROBE_EVERY:
            drafts = bool(depths.any())
            if drafts == (self._num_alike > 0):
                depths = np.zeros_like(depths) if drafts else np.minimum(1, rows.deepest)
        return self._begin(rows, depths)

    def _depths(self, plans: RowPlan, rows: Planned, beside: Load) -> Array:
        """The best depths; now and then those of drafts that seem not worth their seconds, at a bounded cost.

        Else what drafts bring would stay unknown as soon as one text made them seem poor.
        """
        drafting = best_drafting(plans, *rows, self.price, beside)
        if drafting.saved_s <= 0 and drafting.depths.any():
            self._spare_s += EXPLORE_SHARE * self.price.seconds(beside._replace(rows=beside.rows + len(rows.kinds)))
            cost_s = max(self.price.launch_s, -drafting.saved_s)  # what comes of it may be nothing
            if self._spare_s < cost_s:
                return np.zeros_like(drafting.depths)
            self._spare_s -= cost_s
        return drafting.depths

    def _explore(self, depths: Array, deepest: Array) -> None:
        """Now and then let one row draft to its end: what deeper drafts bring would else be known from long ago.

        Not of a draft that takes a pass for each depth.
        """
        if self.price.is_sequential or not depths.any():
            return
        self._num_drafts += 1
        turn, left = divmod(self._num_drafts, EXPLORE_EVERY)
        if not left:
            row = turn % len(depths)
            depths[row] = deepest[row]

    def _begin(self, rows: Planned, depths: Array) -> Array:
        self._planned, self._proposal = rows, None
        return depths

    def _observe(self) -> None:
        """Take in what drafts have added since the latest plans."""
        if not self._grown:
            return
        trees = Trees._make(map(np.concatenate, zip(*self._grown, strict=True)))
        rows, places = (trees.taken & (trees.depths >= 0)).nonzero()
        of_nodes = trees.kinds[rows], trees.depths[rows, places], trees.chances[rows, places]
        self.model.observe(trees.kinds, trees.drafted, *of_nodes)
        self._grown = []

    def propose(self, known: Array, found: Candidates, slots: Array) -> Proposal:
        """Probabilities of a draft's choices, in slots [N] below the anchor; the draft's own where `known` [N] is
        False: of rows that were not planned.
        """
        self._proposal = self.model.propose(known, found, slots)
        return self._proposal

    def select(self, trees: Trees, drafted: Load) -> Array:
        """Number of nodes to verify of every tree, [R]."""
        if self._grown and self._grown[-1].chances.shape[1] != trees.chances.shape[1]:  # of another engine
            self._observe()
        self._grown.append(trees)
        return choose_nodes(trees, self.price, drafted, self._rates(trees))

    def _rates(self, trees: Trees) -> Array:
        assert self._plans is not None
        rates: Array = self._plans.rate[trees.kinds]
        return rates

    def learn(self, outcome: StepOutcome, seconds: float) -> None:
        """Learn from a step that took so long."""
        if (found := outcome.verified) is not None:
            if self._proposal is not None and len(found.choices):
                self.model.learn(self._proposal, *found[:3])
            if len(found.path_right):
                self.model.learn_paths(*found[3:])
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
