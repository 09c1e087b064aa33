"""Controller of an engine: plans how deep rows draft, selects the nodes to verify, and learns from the outcomes.

The engine makes these calls and handles neither costs nor probabilities. A controller holds all adaptive state: a new
draft or a fresh start needs a new controller.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from blockpilot.control.acceptance import AcceptanceModel, Array, ObservedChoices, Paths, Proposal
from blockpilot.control.choose import (
    Drafting,
    RowPlan,
    Trees,
    best_drafting,
    choose_nodes,
    least_cost_s,
    plan_rows,
)
from blockpilot.control.cost import NOMINAL, LiveCost, Load, StepPrice
from blockpilot.native.growing import Nodes
from blockpilot.types import Candidates, CandidateSet, Prefill

UPDATE_EVERY = 16  # steps per update of the plans, and learned steps per update of the regressions
UPDATE_DIVISOR = 4  # updates are more frequent at first: after 1 / UPDATE_DIVISOR of the steps so far
NUM_EARLY, LEARN_EVERY = 256, 4  # all of the first NUM_EARLY steps are learned from, then one in LEARN_EVERY
PROBE_EVERY = 128  # steps of one kind, plain or drafting, after which a step of the other kind measures its cost
EARLY_PROBE, PROBE_SHARE = 16, 4  # without a measured cost: after EARLY_PROBE + 1 / PROBE_SHARE of the steps so far
EXPLORE_EVERY = 4  # in one of this many drafting steps, one row drafts to its maximum depth
EXPLORE_SHARE = 0.004  # of the plain step cost, to spend on drafts whose expected gain is below their cost
MERGE_SHARE = (
    0.02  # of the plain step cost: time to merge paths into a step, to grow trees of them, to learn from them
)


class Planned(NamedTuple):
    """Rows that a controller plans: their kinds [R] (`AcceptanceModel.kinds`) and maximum depths [R]."""

    kinds: Array
    max_depths: Array


class DepthPlan(NamedTuple):
    """Plan of a step: depths [R] of the planned rows, and tokens per second [K] of every kind of row.

    A node is verified if it saves more time at the rate of its row's kind than it costs (`Controller.select`).
    """

    depths: Array
    rates: Array


NO_RATES = np.zeros(0)
"""Rates of a step without planned rows."""


class PathLimits(NamedTuple):
    """Limits of paths from lookup.

    least_chance: acceptance probability at which a token saves as much time as it costs. merge_tokens: number of
    accepted tokens that saves as much time as merging paths into a step costs.
    """

    least_chance: float
    merge_tokens: float


class Plans(NamedTuple):
    """Plans of every kind of row, and cached `Drafting` by the rows' kinds and maximum depths.

    explored_s: seconds that every step adds to the budget for exploration. least_cost_s: result of
    `choose.least_cost_s`.
    """

    kind_plans: RowPlan
    path_limits: PathLimits
    explored_s: float
    least_cost_s: float
    drafting_of: dict[tuple[bytes, bytes], Drafting]


class VerifiedNodes(NamedTuple):
    """Outcomes of the verified nodes below accepted ones.

    Choices [M] of a proposal: flat indices, the numbers of later choices above each, and which were accepted
    (`right`). Path tokens [P]: inputs [P, len(OF_PATH)], 1 for sampled or 0 for greedy, and which were accepted.
    """

    choice_index: Array
    num_later: Array
    right: Array
    path_inputs: Array
    path_sampled: Array
    path_right: Array


class StepOutcome(NamedTuple):
    """Load and results of a step."""

    load: Load
    num_prompt_tokens: int = 0
    proposal: Proposal | None = None
    """The draft's choices, which `verified` refers to; None if no row drafted."""
    verified: Callable[[], VerifiedNodes] | None = None
    """Outcomes of the planned rows, computed when the controller learns from them."""
    has_captured: bool = False
    """A CUDA graph was captured in the step, which takes longer than the step itself."""


class Controller:
    """Chooses the depths and nodes that maximise tokens per second.

    price: step cost, by default NOMINAL. Unless `follows` is False, it is updated from the engine's steps. Plain
    steps do not measure drafting, nor the reverse: PROBE_EVERY of one kind are followed by a probe of the other.
    """

    def __init__(self, model: AcceptanceModel, price: StepPrice | None = None, *, follows: bool = True) -> None:
        self.model = model
        self.price = price or NOMINAL
        """May be read by any thread."""
        self.drafts = False
        """True if the latest step drafted. May be read by any thread."""
        self._live = LiveCost(self.price) if follows else None
        self._plans_of = dict[tuple[int, Load], Plans]()  # by the number of rows, and the load of other rows
        self._path_limits = PathLimits(0.0, 0.0)  # of the previous step: paths are cut before the step's plan
        self._num_planned = 0  # steps planned since the latest update of plans
        self._num_plans = 0  # steps planned in total
        self._num_steps = 0
        self._num_drafts = 0  # steps that drafted
        self._spare_s = 0.0  # budget for exploration
        self._grown = list[Trees]()
        self._unlearned = list[tuple[Proposal | None, Callable[[], VerifiedNodes]]]()
        self._num_alike = 0  # consecutive steps that drafted, or if negative, that did not

    @property
    def _probe_every(self) -> int:
        """Steps of one kind after which a probe is due: fewer at first, if the step cost was not measured."""
        early = PROBE_EVERY if self.price.is_measured else EARLY_PROBE + self._num_steps // PROBE_SHARE
        return min(PROBE_EVERY, early)

    def cut_paths(self, paths: Paths) -> Paths | None:
        """Paths with their expected gains, cut where their tokens would save less than they cost.

        None if all paths together would save less than merging them into the step costs.
        """
        least_chance, merge_tokens = self._path_limits
        cut = self.model.cut_paths(paths, least_chance)
        saved = cut.gains.sum() - least_chance * cut.sizes.sum()
        return cut if saved > merge_tokens else None

    def kinds(self, sampled: Array, paths: Paths | None) -> Array:
        """Kinds of rows [R], given `sampled` [R] (0 or 1) and their paths; there is one plan for each kind."""
        return self.model.kinds(sampled, paths)

    def plan(self, rows: Planned, other_load: Load) -> DepthPlan:
        """Plan of the next step; other_load is the load of the other rows.

        Running means change slowly, so the plans for a load are reused until the next update.
        """
        if _is_due(self._num_planned, self._num_plans):
            self._observe()
            self._plans_of, self._num_planned = {}, 0
        self._num_planned += 1
        self._num_plans += 1
        key = len(rows.kinds), other_load
        if key not in self._plans_of:
            self._plans_of[key] = self._planned(*key)
        plans = self._plans_of[key]
        self._path_limits = plans.path_limits
        depths = self._depths(plans, rows, other_load)
        self._explore(depths, rows.max_depths)
        if self._live is not None and not other_load.num_drafted and abs(self._num_alike) >= self._probe_every:
            drafts = bool(depths.any())
            if drafts == (self._num_alike > 0):
                depths = np.zeros_like(depths) if drafts else np.minimum(1, rows.max_depths)
        return DepthPlan(depths, plans.kind_plans.rate)

    def _planned(self, num_rows: int, other_load: Load) -> Plans:
        """New plans for `num_rows` rows together with the other load."""
        beside = num_rows, self.price, other_load
        kind_plans = plan_rows(self.model.expected(), *beside)
        load = other_load._replace(rows=other_load.rows + num_rows)
        rate, plain_s = float(kind_plans.rate.min()), self.price.seconds(load)
        limits = PathLimits(rate * self.price.mean_token_s(load), rate * MERGE_SHARE * plain_s)
        return Plans(kind_plans, limits, EXPLORE_SHARE * plain_s, least_cost_s(kind_plans, *beside), {})

    def _depths(self, plans: Plans, rows: Planned, other_load: Load) -> Array:
        """Best depths [R]. If no draft saves time, drafts occasionally, at a cost bounded by EXPLORE_SHARE.

        Without this exploration, one text with poor drafts would end drafting, and acceptance would not be observed.
        """
        spare_s = self._spare_s + plans.explored_s
        if plans.least_cost_s > 0 and spare_s < max(self.price.launch_s, plans.least_cost_s):
            self._spare_s = spare_s
            return np.zeros_like(rows.max_depths)
        key = rows.kinds.tobytes(), rows.max_depths.tobytes()
        if key not in plans.drafting_of:
            plans.drafting_of[key] = best_drafting(plans.kind_plans, *rows, self.price, other_load)
        drafting = plans.drafting_of[key]
        if drafting.saved_s <= 0 and drafting.depths.any():
            cost_s = max(self.price.launch_s, -drafting.saved_s)  # the expected gain is uncertain
            self._spare_s = spare_s
            if spare_s < cost_s:
                return np.zeros_like(drafting.depths)
            self._spare_s -= cost_s
        return drafting.depths.copy()

    def _explore(self, depths: Array, max_depths: Array) -> None:
        """Set, in place, one row's depth to its maximum in one of EXPLORE_EVERY drafting steps.

        This keeps the means of large depths up to date. Not for a sequential draft: each depth takes a pass.
        """
        if self.price.is_sequential or not depths.any():
            return
        self._num_drafts += 1
        num_explored, remainder = divmod(self._num_drafts, EXPLORE_EVERY)
        if not remainder:
            row = num_explored % len(depths)
            depths[row] = max_depths[row]

    def _observe(self) -> None:
        """Update the acceptance model with the trees grown since the latest update."""
        if not self._grown:
            return
        kinds, drafted = (np.concatenate([trees[i] for trees in self._grown]) for i in (0, 1))
        nodes = Nodes._make(map(np.concatenate, zip(*(trees.nodes for trees in self._grown), strict=True)))
        depths = nodes.learned_depths
        rows, columns = (nodes.grown & (depths >= 0)).nonzero()
        self.model.observe(kinds, drafted, kinds[rows], depths[rows, columns], nodes.chances[rows, columns])
        self._grown = []

    def propose(self, planned: Array, choices: Candidates, slots: Array) -> Proposal:
        """Acceptance probabilities of choices in slots [N] below the anchor; the draft's if not planned [N]."""
        return self.model.propose(planned, choices, slots)

    def select(self, trees: Trees, rates: Array, drafted: Load) -> Array:
        """Number of nodes to verify of every tree, [R], at the rates [K] of the step's plan.

        drafted: the step's load without these nodes.
        """
        if self._grown and self._grown[-1].nodes.tokens.shape[1] != trees.nodes.tokens.shape[1]:  # another engine
            self._observe()
        self._grown.append(trees)
        return choose_nodes(trees, self.price, drafted, rates[trees.kinds])

    def learn(self, outcome: StepOutcome, seconds: float) -> None:
        """Learn from the outcome of a step, and from its duration in seconds."""
        self._num_steps += 1
        is_learned = self._num_steps <= NUM_EARLY or self._num_steps % LEARN_EVERY == 0
        if outcome.verified is not None and is_learned:
            self._unlearned.append((outcome.proposal, outcome.verified))
        if self._unlearned and _is_due(len(self._unlearned), self._num_steps):
            self._learn_nodes()
        load = outcome.load
        if not load.rows or outcome.num_prompt_tokens or outcome.has_captured:
            return
        self.drafts = load.num_drafted > 0
        if self._live is not None:
            self._live.observe(load, seconds)
            self.price = self._live.price
        num_alike = self._num_alike if self.drafts == (self._num_alike > 0) else 0
        self._num_alike = num_alike + (1 if self.drafts else -1)

    def _learn_nodes(self) -> None:
        """Learn from the outcomes of the latest steps together, since learning from one would take as long."""
        choice_outcomes, path_outcomes = list[ObservedChoices](), list[Sequence[Array]]()
        for proposal, verified in self._unlearned:
            outcomes = verified()
            if proposal is not None and len(outcomes.choice_index):
                choice_outcomes.append(proposal.observed(*outcomes[:3]))
            path_outcomes.append(outcomes[3:])
        if choice_outcomes:
            self.model.learn(ObservedChoices(*map(np.concatenate, zip(*choice_outcomes, strict=True))))
        self.model.learn_paths(*map(np.concatenate, zip(*path_outcomes, strict=True)))
        self._unlearned = []


def _is_due(num_since: int, num_steps: int) -> bool:
    """True if an update is due `num_since` steps after the latest one, given `num_steps` steps so far."""
    return num_since >= min(UPDATE_EVERY, 1 + num_steps // UPDATE_DIVISOR)


@dataclass(frozen=True)
class FixedPolicy:
    """The same block size for every request."""

    block_size: int

    def __post_init__(self) -> None:
        CandidateSet((self.block_size,))

    def __call__(self, prefill: Prefill) -> int:
        return self.block_size
