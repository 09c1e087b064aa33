"""Acceptance model: the probability that drafted tokens are accepted, before the draft runs and after it.

Before it: the nodes that each depth of a draft is expected to add to a tree, by running means. After it: a
probability for every choice, by a logistic regression on what the draft says of it, learned online from what was
verified. What was drafted and not verified is censored. Training gives a better prior.

Draft probabilities are calibrated at temperature 0; where tokens are drawn, later choices are less often right than a
draft says. So slots that are drawn have means and coefficients of their own. Means of each row, and heads on the
draft's context vector, made the choice of depths worse (LOG.md).
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.drafts.choices import own_chances
from blockpilot.native.growing import NUM_CONTEXTS, choice_chances
from blockpilot.types import Candidates

Array = NDArray[Any]

OF_CHOICE = "log_prob", "to_first", "to_next", "inverse_depth"  # what is known of a choice beside its own logit
NUM_KNOWN = 1 + len(OF_CHOICE)
NUM_WEIGHTS = NUM_KNOWN + 2 * NUM_CONTEXTS  # then context (later choices above: 0, 1, more) by rank (first, later)
LEAST_SCORE, LEAST_CHANCE = -30.0, 1e-4
PRIOR_VARIANCE = (5e-3, 5e-3)  # of the weights, for slots that are not drawn and for those that are
LEARN_EVERY = 16  # steps whose outcomes are learned from together
THRESHOLDS = np.geomspace(0.01, 0.8, 9)  # of the probability of nodes that depths are counted by
FIRST_GUESS = 0.75  # share of reached positions that are accepted, before anything was seen
DOUBT, MEMORY = 4.0, 1000.0  # drafts: of the first guess, and of the running means
HALF_LIFE = 1024  # steps without a draft so deep, after which half of what drafts have shown is forgotten


@dataclass(frozen=True, eq=False)
class Prior:
    """Weights [2, NUM_WEIGHTS] of choices, by `drawn`, before anything was decoded."""

    weights: Array


UNTRAINED = Prior(np.zeros((2, NUM_WEIGHTS)))


class Expected(NamedTuple):
    """Nodes that each depth is expected to add to the trees of some rows, by their least probability, thresholds [J].

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
    """[N * P]"""
    slots: Array
    """[N * P], places below the anchor, from 0 on."""
    chances: Array
    """[NUM_CONTEXTS, N * P, k], by the choices above that are no first ones; they fall along k."""


class Observed(NamedTuple):
    """Choices [M] that were verified below what the target chose, in slots of which these scores and log_probs [M, k]
    were known; ranks [M] among them, later choices above, and which were right.
    """

    scores: Array
    log_probs: Array
    drawn: Array
    slots: Array
    ranks: Array
    laters: Array
    right: Array


class AcceptanceModel:
    """Probabilities of one draft's tokens. deepest: positions that it proposes tokens for at most."""

    def __init__(self, deepest: int, prior: Prior = UNTRAINED) -> None:
        if deepest < 1:
            raise ValueError(f"deepest {deepest}: must be at least 1")
        self.deepest = deepest
        self.weights = prior.weights.astype(float, order="C")
        self._precision = np.stack([np.eye(NUM_WEIGHTS) / variance for variance in PRIOR_VARIANCE])
        guess = FIRST_GUESS ** np.arange(1, deepest + 1)[:, None]
        above = guess >= THRESHOLDS
        # Fading sums over steps, by `drawn`: probabilities and counts of nodes [2, 2, D, J], drafts [2, 1, D, 1].
        self._first_nodes = DOUBT * np.stack([guess * above, above])
        self._nodes = np.stack([self._first_nodes] * 2)
        self._drafts = np.full((2, 1, deepest, 1), DOUBT)
        self._unlearned = list[Observed]()

    # --- before the draft ---

    def expected(self, drawn: Array) -> Expected:
        """Nodes that each depth is expected to add, of rows that are `drawn` [R] (0 or 1)."""
        sums, counts = (self._nodes / self._drafts)[drawn].swapaxes(0, 1)
        return Expected(THRESHOLDS, sums, counts)

    def observe(self, drawn: Array, drafted: Array, of_nodes: Array, depths: Array, chances: Array) -> None:
        """Learn what drafts of depths drafted [R] added, of rows that are `drawn` [R]: nodes [M] of rows that are
        `of_nodes`, at these depths and with these probabilities.
        """
        shape = 2, self.deepest, len(THRESHOLDS) + 1
        bins = np.searchsorted(THRESHOLDS, chances, side="right")
        flat = (of_nodes * self.deepest + depths - 1) * shape[-1] + bins
        both = [np.bincount(flat, of, math.prod(shape)).reshape(shape) for of in (chances, None)]
        at_least = np.stack(both, axis=1)[..., ::-1].cumsum(axis=-1)[..., -2::-1]
        reached = np.bincount(drawn * (self.deepest + 1) + drafted, minlength=2 * (self.deepest + 1))
        num_drafts = reached.reshape(2, -1)[:, ::-1].cumsum(axis=1)[:, -2::-1][:, None, :, None]
        keep = 1 - np.minimum(1, num_drafts / MEMORY)
        self._nodes = keep * self._nodes + at_least * (num_drafts > 0)
        self._drafts = keep * self._drafts + num_drafts

    def forget(self, drawn: Array, depths: Array, num_steps: int) -> None:
        """Doubt what is not seen any more: rows that are `drawn` [R] drafted depths [R] only, for so many steps.

        Else a text that drafts fail in would end drafting for all that follow.
        """
        keep = 0.5 ** (num_steps / HALF_LIFE)
        for kind, depth in zip(drawn.tolist(), depths.tolist(), strict=True):
            nodes, drafts, guess = self._nodes[kind, :, depth:], self._drafts[kind, :, depth:], self._first_nodes
            nodes[:] = guess[:, depth:] + keep * (nodes - guess[:, depth:])
            drafts[:] = DOUBT + keep * (drafts - DOUBT)

    # --- after it ---

    def propose(self, known: Array, found: Candidates, slots: Array) -> Proposal:
        """Probabilities of a draft's choices, [N, k]: slots [N] are places below the anchor. The draft's own where
        known [N] is False.
        """
        of_found = (each.numpy(force=True) for each in (found.scores, found.log_probs))
        scores, log_probs = (np.ascontiguousarray(values, dtype=np.float32) for values in of_found)
        drawn = found.drawn.numpy(force=True)
        chances = choice_chances(scores, log_probs, drawn, slots, known, self.weights)
        if chances is None:
            chances = self._chances(scores, log_probs, drawn, slots)
            chances[:, ~known] = own_chances(found).numpy(force=True)[:, ~known]
        return Proposal(scores, log_probs, drawn, slots, chances)

    def _chances(self, scores: Array, log_probs: Array, drawn: Array, slots: Array) -> Array:
        """As growing.c computes them."""
        known, weights = knowledge(scores, log_probs, drawn, slots), self.weights[drawn.astype(int)]
        logits = known[..., 0] + (known @ weights[:, :NUM_KNOWN, None])[..., 0]
        of_context = weights[:, NUM_KNOWN:].reshape(-1, NUM_CONTEXTS, 2)
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
        places, ranks = np.divmod(choices, proposal.scores.shape[1])
        of_places = (values[places] for values in proposal[:4])
        self._unlearned.append(Observed._make([*of_places, ranks, laters, right]))
        if len(self._unlearned) >= LEARN_EVERY:
            self.learn_from(Observed(*map(np.concatenate, zip(*self._unlearned, strict=True))))
            self._unlearned = []

    def learn_from(self, observed: Observed) -> None:
        """One step of Newton's method from what the precision so far says (online Laplace approximation)."""
        known = knowledge(*observed[:4])[np.arange(len(observed.ranks)), observed.ranks]
        inputs = inputs_of(known, observed.ranks, observed.laters)
        for kind in (False, True):
            of_kind = observed.drawn == kind
            x = inputs[of_kind]
            chance = logistic(x[:, 0] + x @ self.weights[int(kind)])
            self._precision[int(kind)] += (x * (chance * (1 - chance))[:, None]).T @ x
            error = observed.right[of_kind] - chance
            self.weights[int(kind)] += np.linalg.solve(self._precision[int(kind)], x.T @ error)


def inputs_of(known: Array, ranks: Array, laters: Array) -> Array:
    """Inputs of the regression [M, NUM_WEIGHTS], of choices of which this is `known` [M, NUM_KNOWN], by later
    choices above. The first is added to the logit as well.
    """
    inputs = np.zeros((len(ranks), NUM_WEIGHTS))
    inputs[:, :NUM_KNOWN] = known
    inputs[np.arange(len(ranks)), NUM_KNOWN + 2 * np.minimum(laters, NUM_CONTEXTS - 1) + (ranks > 0)] = 1.0
    return inputs


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
