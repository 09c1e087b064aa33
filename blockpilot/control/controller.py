"""Controller of an engine: it plans how deep rows draft, selects what of it is verified, and learns from the outcome.

The engine knows these calls and nothing of costs and probabilities. A controller holds all adaptive state: another
draft, or a fresh start, is another controller. Rows are told by their ids, and are forgotten when a plan leaves them
out.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from blockpilot.control.acceptance import AcceptanceModel, Array, Proposal
from blockpilot.control.choose import Trees, choose_depths, choose_nodes
from blockpilot.control.cost import NOMINAL, LiveCost, Load, StepPrice
from blockpilot.types import Candidates, CandidateSet, Prefill

PROBE_EVERY = 128  # steps of one kind, plain or drafting, after which one of the other shows what that takes now


class Planned(NamedTuple):
    """Rows that a controller chooses for: their ids, which draw tokens, and how deep each may draft."""

    ids: tuple[int, ...]
    drawn: Array
    """[R] 0 or 1."""
    deepest: Array
    """[R]"""


NO_ROWS = Planned((), np.zeros(0, dtype=int), np.zeros(0, dtype=int))


class Verified(NamedTuple):
    """Nodes of a step's trees [M]: their rows' places among those planned, and probabilities; flat places of their
    choices in a proposal, -1 for tokens that no draft chose; later choices above; which of them come after what the
    target chose, and which the target chose.
    """

    rows: Array
    chances: Array
    choices: Array
    laters: Array
    reached: Array
    right: Array


NOTHING_VERIFIED = Verified(*(np.zeros(0, dtype=kind) for kind in (int, float, int, int, bool, bool)))


class StepOutcome(NamedTuple):
    """Load and results of a step."""

    load: Load
    num_prompt_tokens: int = 0
    verified: Verified = NOTHING_VERIFIED
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
        self._planned, self._depths = NO_ROWS, NO_ROWS.deepest
        self._proposal: Proposal | None = None
        self._num_alike = 0  # steps in a row that drafted, or below 0 that did not

    def plan(self, rows: Planned, beside: Load) -> Array:
        """Positions [R] that the next step's draft proposes tokens for; `beside` is what other rows take in."""
        depths, _ = choose_depths(self.model.expected(rows.ids, rows.drawn), rows.deepest, self.price, beside)
        if self._live is not None and not beside.num_drafted and abs(self._num_alike) >= PROBE_EVERY:
            drafts = bool(depths.any())
            if drafts == (self._num_alike > 0):
                depths = np.zeros_like(depths) if drafts else np.minimum(1, rows.deepest)
        return self._begin(rows, depths)

    def _begin(self, rows: Planned, depths: Array) -> Array:
        self._planned, self._depths, self._proposal = rows, depths, None
        return depths

    def propose(self, rows: Array, found: Candidates, slots: Array) -> Proposal:
        """Probabilities of a draft's choices: rows [N] are places among those planned, -1 for others; slots [N] are
        places below the anchor.
        """
        self._proposal = self.model.propose(rows, found, slots)
        return self._proposal

    def select(self, trees: Trees, drafted: Load) -> Array:
        """How many nodes of every tree are verified, [R]."""
        rows, places = trees.taken.nonzero()
        nodes = trees.rows[rows], trees.depths[rows, places], trees.chances[rows, places]
        self.model.observe(self._planned.drawn, self._depths, *nodes)
        return choose_nodes(trees, self.price, drafted)

    def learn(self, outcome: StepOutcome, seconds: float) -> None:
        """Learn from a step that took so long."""
        if len(outcome.verified.rows):
            self._learn_acceptance(outcome.verified)
        load = outcome.load
        if not load.rows or outcome.num_prompt_tokens or outcome.has_captured:
            return
        self.drafts = load.num_drafted > 0
        if self._live is not None:
            self._live.observe(load, seconds)
            self.price = self._live.price
        self._num_alike = (self._num_alike if self.drafts == (self._num_alike > 0) else 0) + (
            1 if self.drafts else -1
        )

    def _learn_acceptance(self, verified: Verified) -> None:
        surprise = np.bincount(verified.rows, verified.right - verified.chances, len(self._planned.ids))
        self.model.surprise(surprise)
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
