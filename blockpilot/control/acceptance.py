"""Acceptance model: the probability that drafted tokens are accepted, before the draft runs and after it.

Before it: the nodes that each depth of a draft is expected to add to a row's tree, by running means over all rows and
in the row at hand. After it: a probability for every choice, by a logistic regression on what the draft says of it,
learned online from what was verified. What was drafted and not verified is censored. Training gives a better prior.

Draft probabilities are calibrated at temperature 0; where tokens are drawn, later choices are less often right than a
draft says. So slots that are drawn have coefficients of their own, and the prior of the others is firm.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.drafts.choices import own_chances
from blockpilot.native.growing import NUM_CONTEXTS, choice_chances
from blockpilot.types import Candidates

Array = NDArray[Any]

OF_CHOICE = "log_prob", "to_first", "to_next", "inverse_depth"  # what is known of a choice beside its own logit
NUM_KNOWN = 1 + len(OF_CHOICE)
NUM_WEIGHTS = NUM_KNOWN + 2 * NUM_CONTEXTS + 1  # then context (later choices above: 0, 1, more) by rank, and surprise
LEAST_SCORE, LEAST_CHANCE = -30.0, 1e-4
PRIOR_VARIANCE = (1e-3, 2e-2)  # of the weights, for slots that are not drawn and for those that are
LEARN_EVERY = 16  # steps whose outcomes are learned from together
THRESHOLDS = np.geomspace(0.01, 0.8, 9)  # of the probability of nodes that depths are counted by
FIRST_GUESS = 0.75  # share of reached positions that are accepted, before anything was seen
DOUBT, MEMORY = 4.0, 1000.0  # steps: of the first guess, and of what all rows show beside the row at hand
RECENT = 0.8  # of a row's surprise, kept from step to step


@dataclass(frozen=True, eq=False)
class Prior:
    """What is known before anything was decoded: weights [2, NUM_WEIGHTS] of choices, by `drawn`."""

    weights: Array


UNTRAINED = Prior(np.zeros((2, NUM_WEIGHTS)))


class Expected(NamedTuple):
    """Nodes that each depth of a draft is expected to add to every row's tree, by their least probability [J].

    sums [R, D, J] of the probabilities of nodes at least so probable, and counts [R, D, J] of them.
    """

    thresholds: Array
    sums: Array
    counts: Array


class Proposal(NamedTuple):
    """Choices of N slots after P choices each, [N * P, k], and what is known of them on the host."""

    scores: Array
    log_probs: Array
    drawn: Array
    slots: Array
    """[N * P], places below the anchor, from 0 on."""
    surprise: Array
    """[N * P], of the rows."""
    chances: Array
    """[NUM_CONTEXTS, N * P, k], by the choices above that are no first ones; they fall along k."""


class Observed(NamedTuple):
    """Choices [M] that were verified below what the target chose: inputs [M, NUM_WEIGHTS] of the regression, drawn [M]
    0 or 1, and which were right [M].
    """

    inputs: Array
    drawn: Array
    right: Array


@dataclass
class AcceptanceModel:
    """Probabilities of one draft's tokens, for rows by id. deepest: positions that it proposes tokens for at most."""

    deepest: int
    prior: Prior = UNTRAINED
    _ids: tuple[int, ...] = ()
    _index: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.deepest < 1:
            raise ValueError(f"deepest {self.deepest}: must be at least 1")
        self.weights = self.prior.weights.astype(float)
        self._precision = np.stack([np.eye(NUM_WEIGHTS) / variance for variance in PRIOR_VARIANCE])
        guess = FIRST_GUESS ** np.arange(1, self.deepest + 1)[:, None]
        above = guess >= THRESHOLDS
        self._guess = np.stack([guess * above, above.astype(float)])  # [2 (sums, counts), D, J]: of a chain
        self._of_all = np.zeros((2, *self._guess.shape))  # fading sums over steps, by `drawn`
        self._steps_of_all = np.zeros((2, self.deepest))
        self._of_rows, self._steps = np.zeros((0, *self._guess.shape)), np.zeros((0, self.deepest))
        self._surprise = np.zeros(0)
        self._unlearned = list[Observed]()

    def _follow(self, ids: tuple[int, ...]) -> None:
        """Keep what is known of these rows, in their order; others are over."""
        if ids == self._ids:
            return
        old = np.array([self._index.get(each, -1) for each in ids], dtype=int)  # -1: zeros that are appended
        self._of_rows, self._steps, self._surprise = (
            np.concatenate([values, np.zeros((1, *values.shape[1:]))])[old]
            for values in (self._of_rows, self._steps, self._surprise)
        )
        self._ids, self._index = ids, {each: i for i, each in enumerate(ids)}

    # --- before the draft ---

    def expected(self, ids: tuple[int, ...], drawn: Array) -> Expected:
        """Nodes that each depth is expected to add, of rows [R] by their ids; drawn [R] 0 or 1."""
        self._follow(ids)
        steps = self._steps_of_all[:, None, :, None]
        of_all = (DOUBT * self._guess + self._of_all) / (DOUBT + steps)
        found = (DOUBT * of_all[drawn] + self._of_rows) / (DOUBT + self._steps[:, None, :, None])
        return Expected(THRESHOLDS, found[:, 0], found[:, 1])

    def observe(self, drawn: Array, depths: Array, rows: Array, at: Array, chances: Array) -> None:
        """Learn what depths [R], drafted by the rows of the latest call, brought: nodes [M] of `rows`, at depths `at`
        and with these probabilities.
        """
        num_rows, num_bins = len(depths), len(THRESHOLDS) + 1
        inside = at <= self.deepest
        bins = np.searchsorted(THRESHOLDS, chances, side="right")
        flat = ((rows * self.deepest + at - 1) * num_bins + bins)[inside]
        shape = num_rows, self.deepest, num_bins
        both = [np.bincount(flat, of, math.prod(shape)).reshape(shape) for of in (chances[inside], None)]
        seen = np.arange(self.deepest) < depths[:, None]
        found = np.stack(both, axis=1)[..., ::-1].cumsum(axis=-1)[..., -2::-1] * seen[:, None, :, None]
        self._of_rows += found
        self._steps += seen
        keep = 1 - 1 / MEMORY
        for kind in set(drawn.tolist()):
            of_kind = drawn == kind
            self._of_all[kind] = keep * self._of_all[kind] + found[of_kind].sum(axis=0)
            self._steps_of_all[kind] = keep * self._steps_of_all[kind] + seen[of_kind].sum(axis=0)

    # --- after it ---

    def propose(self, rows: Array, found: Candidates, slots: Array) -> Proposal:
        """Probabilities of a draft's choices, [N, k]: `rows` [N] are places among those of the latest call, slots [N]
        places below the anchor. Those of row -1, of which nothing is known, are the draft's own.
        """
        surprise = np.append(self._surprise, 0.0)[rows]
        scores, log_probs, drawn = (each.numpy(force=True) for each in (found.scores, found.log_probs, found.drawn))
        own = rows < 0
        chances = choice_chances(scores, log_probs, drawn, slots, own, surprise, self.weights)
        if chances is None:
            chances = self._chances(scores, log_probs, drawn, slots, surprise)
            chances[:, own] = own_chances(found).numpy(force=True)[:, own]
        return Proposal(scores, log_probs, drawn, slots, surprise, chances)

    def _chances(self, scores: Array, log_probs: Array, drawn: Array, slots: Array, surprise: Array) -> Array:
        """As growing.c computes them."""
        known, weights = knowledge(scores, log_probs, drawn, slots), self.weights[drawn.astype(int)]
        logits = known[..., 0] + (known @ weights[:, :NUM_KNOWN, None])[..., 0] + (weights[:, -1] * surprise)[:, None]
        of_context = weights[:, NUM_KNOWN:-1].reshape(-1, NUM_CONTEXTS, 2)
        by_context = np.repeat(logits[None], NUM_CONTEXTS, axis=0)
        by_context[..., 0] += of_context[..., 0].T
        by_context[..., 1:] += of_context[..., 1].T[..., None]
        chances = logistic(by_context)
        chances[:, ~(scores > -np.inf)] = 0.0  # what cannot be drawn, or is no number
        chances /= np.maximum(chances.sum(axis=-1, keepdims=True), 1.0)
        return np.minimum.accumulate(chances, axis=-1)

    def learn(self, proposal: Proposal, choices: Array, laters: Array, right: Array) -> None:
        """Learn from choices [M] that were verified below what the target chose, flat places in [N * P, k].

        laters [M] are the later choices above each; right [M] those that the target made.
        """
        slots, ranks = np.divmod(choices, proposal.scores.shape[1])
        of_slots = (values[slots] for values in proposal[:4])
        inputs = np.zeros((len(choices), NUM_WEIGHTS))
        inputs[:, :NUM_KNOWN] = knowledge(*of_slots)[np.arange(len(choices)), ranks]
        contexts = NUM_KNOWN + 2 * np.minimum(laters, NUM_CONTEXTS - 1) + (ranks > 0)
        inputs[np.arange(len(choices)), contexts] = 1.0
        inputs[:, -1] = proposal.surprise[slots]
        self._unlearned.append(Observed(inputs, proposal.drawn[slots].astype(int), right))
        if len(self._unlearned) >= LEARN_EVERY:
            self.learn_from(Observed(*map(np.concatenate, zip(*self._unlearned, strict=True))))
            self._unlearned = []

    def learn_from(self, outcomes: Observed) -> None:
        """One step of Newton's method from what the precision so far says (online Laplace approximation)."""
        for kind in set(outcomes.drawn.tolist()):
            of_kind = outcomes.drawn == kind
            x = outcomes.inputs[of_kind]
            chance = logistic(x[:, 0] + x @ self.weights[kind])
            self._precision[kind] += (x * (chance * (1 - chance))[:, None]).T @ x
            error = outcomes.right[of_kind] - chance
            self.weights[kind] += np.linalg.solve(self._precision[kind], x.T @ error)

    def surprise(self, accepted: Array) -> None:
        """Learn how many tokens more than expected were accepted of the rows [R] of the latest call."""
        self._surprise = RECENT * self._surprise + (1 - RECENT) * accepted


def knowledge(scores: Array, log_probs: Array, drawn: Array, slots: Array) -> Array:
    """The own logit and OF_CHOICE of every choice [N, k], float64 [N, k, NUM_KNOWN].

    The draft's own probability, at temperature 0. Where tokens are drawn the noise has decided already, if the
    distributions agree; how clearly it has says how far they may differ.
    """
    found = np.zeros((*scores.shape, NUM_KNOWN))
    scores, log_probs = (
        np.maximum(np.nan_to_num(values, nan=LEAST_SCORE), LEAST_SCORE) for values in (scores, log_probs)
    )
    shares = np.exp(scores - scores[:, :1])
    own = np.where(drawn[:, None], shares / shares.sum(axis=1, keepdims=True), np.exp(log_probs))
    own = own.clip(LEAST_CHANCE, 1 - LEAST_CHANCE)
    found[..., 0], found[..., 1], found[..., 2] = np.log(own / (1 - own)), log_probs, scores - scores[:, :1]
    found[:, :-1, 3] = scores[:, :-1] - scores[:, 1:]
    found[..., 4] = (1 / (1 + slots))[:, None]
    return found


def logistic(values: Array) -> Array:
    """The logistic function, without overflow."""
    return 0.5 + 0.5 * np.tanh(0.5 * values)
