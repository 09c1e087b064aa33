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
from blockpilot.native.growing import NUM_CONTEXTS, choice_chances, follow_paths
from blockpilot.types import Candidates

Array = NDArray[Any]

OF_CHOICE = "log_prob", "to_first", "to_next", "inverse_depth"  # what is known of a choice beside its own logit
NUM_KNOWN = 1 + len(OF_CHOICE)
NUM_WEIGHTS = NUM_KNOWN + 2 * NUM_CONTEXTS  # then context (later choices above: 0, 1, more) by rank (first, later)
LEAST_SCORE, LEAST_CHANCE = -30.0, 1e-4
PRIOR_VARIANCE = 5e-3  # of these weights
OF_MATCH = "length", "agree", "held"  # what is known of a match
OF_PATH = "one", *OF_MATCH, "later", "own", "first", "not_first", "absent"  # inputs of a path's token
PATH_WEIGHTS = np.array(
    [
        [-1.5, 4.12, 0.39, 0.63, 0.24, 1.63, 0.86, 0.14, -0.73],
        [-2.29, 3.3, 0.69, 0.92, 0.29, 2.47, 1.4, 0.79, -0.98],
    ]
)
"""By `drawn`: fitted to 110 answers of SmolLM2-135M at temperature 0 and 110 at 1, half of the weight on prompt sets
whose answers copy.
"""
PATH_VARIANCE = 0.02
LEAST_REACHED = 0.02  # probability, before the draft, of a path's token; what follows it is cut off
LEARN_EVERY = 16  # steps whose outcomes are learned from together
THRESHOLDS = np.geomspace(0.01, 0.8, 9)  # of the probability of nodes that depths are counted by
FIRST_GUESS = 0.75  # share of reached positions that are accepted, before anything was seen
GAINS = 0.0, 2.0, 6.0  # tokens that a path is expected to add: bounds between kinds of rows that have one
NUM_KINDS = 2 * (1 + len(GAINS))
DOUBT, MEMORY = 4.0, 1000.0  # drafts: of the first guess, and of the running means


@dataclass(frozen=True, eq=False)
class Prior:
    """Weights of choices [2, NUM_WEIGHTS], by `drawn`, before anything was decoded."""

    weights: Array


UNTRAINED = Prior(np.zeros((2, NUM_WEIGHTS)))


class Paths(NamedTuple):
    """Tokens [R, M] int32 that may follow R rows, sizes[r] of row r: they followed where its text stood before.

    known [R, 3] are inputs of their probabilities: tokens that both places share at their ends, the share of such
    places that the first token followed, and how often it held in this row lately. drawn [R] 0 or 1. gains [R]:
    tokens that they are expected to add, as far as is known before the draft.
    """

    tokens: Array
    sizes: Array
    known: Array
    drawn: Array
    gains: Array


class Expected(NamedTuple):
    """Nodes that each depth is expected to add to the tree of a row, by their least probability, thresholds [J].

    sums [1 + D, J] of the probabilities of nodes at least so probable, and counts [1 + D, J] of them; of K kinds
    [K, 1 + D, J]. At depth 0 are those that need no draft.
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


class Regression:
    """Logistic regression that learns online, apart for what is drawn and what is not: weights [2, inputs]."""

    def __init__(self, weights: Array, variance: float) -> None:
        self.weights = weights.astype(float, order="C")
        self._precision = np.stack([np.eye(weights.shape[1]) / variance] * 2)

    def learn(self, inputs: Array, drawn: Array, right: Array, offsets: Array | float = 0.0) -> None:
        """One step of Newton's method from what the precision so far says (online Laplace approximation).

        Of M outcomes: inputs [M, inputs], drawn [M] and right [M]; offsets [M] are added to the logits.
        """
        errors = right - logistic(offsets + (inputs * self.weights[drawn.astype(int)]).sum(axis=1))
        for kind in (0, 1):
            if not (of_kind := drawn == kind).any():
                continue
            x, chance = inputs[of_kind], (right - errors)[of_kind]
            self._precision[kind] += (x * (chance * (1 - chance))[:, None]).T @ x
            self.weights[kind] += np.linalg.solve(self._precision[kind], x.T @ errors[of_kind])


class AcceptanceModel:
    """Probabilities of one draft's tokens. deepest: positions that it proposes tokens for at most, 0 of no draft."""

    def __init__(self, deepest: int, prior: Prior = UNTRAINED) -> None:
        if deepest < 0:
            raise ValueError(f"deepest {deepest}: must be at least 0")
        self.deepest = deepest
        self.choices = Regression(prior.weights, PRIOR_VARIANCE)
        self.paths = Regression(PATH_WEIGHTS, PATH_VARIANCE)
        guess = FIRST_GUESS ** np.arange(1, deepest + 1)[:, None]
        above = guess >= THRESHOLDS
        # Fading sums over steps, by kind and depth: probabilities and counts of nodes [2, 1 + D, J], drafts [1 + D].
        first = np.zeros((2, deepest + 1, len(THRESHOLDS)))
        first[:, 1:] = DOUBT * np.stack([guess * above, above])
        self._nodes = np.stack([first] * NUM_KINDS)
        self._drafts = np.full((NUM_KINDS, deepest + 1), DOUBT)
        self._drafts[:, 0] = 1e-3  # nothing is guessed of what needs no draft
        self._unlearned = list[Observed]()
        self._unlearned_paths = list[tuple[Array, Array, Array]]()

    @property
    def weights(self) -> Array:
        """Those of choices now, as a Prior has them."""
        return self.choices.weights

    # --- before the draft ---

    def follow(self, paths: Paths) -> Paths:
        """Paths with what they are expected to add, cut where they are hardly reached. RuntimeError without C."""
        sizes, gains = follow_paths(paths.sizes, paths.known, paths.drawn, self.paths.weights, LEAST_REACHED)
        return paths._replace(sizes=sizes, gains=gains)

    def kinds(self, drawn: Array, paths: Paths | None) -> Array:
        """Kinds of rows [R] by `drawn` [R] (0 or 1) and by the tokens that their paths are expected to add."""
        if paths is None:
            return drawn
        found: Array = drawn + 2 * np.searchsorted(GAINS, paths.gains, side="right") * (paths.sizes > 0)
        return found

    def expected(self) -> Expected:
        """Nodes that each depth is expected to add to the trees of rows of every kind."""
        means = self._nodes / self._drafts[:, None, :, None]
        return Expected(THRESHOLDS, means[:, 0], means[:, 1])

    def observe(self, kinds: Array, drafted: Array, of_nodes: Array, depths: Array, chances: Array) -> None:
        """Learn what drafts of depths drafted [R] added, of rows of these kinds [R]: nodes [M] of rows of the kinds
        `of_nodes`, at these depths (0 of a path) and with these probabilities.
        """
        shape = NUM_KINDS, self.deepest + 1, len(THRESHOLDS) + 1
        bins = np.searchsorted(THRESHOLDS, chances, side="right")
        flat = (of_nodes * shape[1] + depths) * shape[2] + bins
        both = [np.bincount(flat, of, math.prod(shape)).reshape(shape) for of in (chances, None)]
        at_least = np.stack(both, axis=1)[..., ::-1].cumsum(axis=-1)[..., -2::-1]
        reached = np.bincount(kinds * shape[1] + drafted, minlength=NUM_KINDS * shape[1])
        num_drafts = reached.reshape(NUM_KINDS, -1)[:, ::-1].cumsum(axis=1)[:, ::-1]
        keep = 1 - np.minimum(1, num_drafts / MEMORY)
        self._nodes = keep[:, None, :, None] * self._nodes + at_least * (num_drafts > 0)[:, None, :, None]
        self._drafts = keep * self._drafts + num_drafts

    # --- after it ---

    def propose(self, known: Array, found: Candidates, slots: Array) -> Proposal:
        """Probabilities of a draft's choices, [N, k]: slots [N] are places below the anchor. The draft's own where
        known [N] is False.
        """
        of_found = (each.numpy(force=True) for each in (found.scores, found.log_probs))
        scores, log_probs = (np.ascontiguousarray(values, dtype=np.float32) for values in of_found)
        drawn = found.drawn.numpy(force=True)
        chances = choice_chances(scores, log_probs, drawn, slots, known, self.choices.weights)
        if chances is None:
            chances = self._chances(scores, log_probs, drawn, slots)
            chances[:, ~known] = own_chances(found).numpy(force=True)[:, ~known]
        return Proposal(scores, log_probs, drawn, slots, chances)

    def _chances(self, scores: Array, log_probs: Array, drawn: Array, slots: Array) -> Array:
        """As growing.c computes them."""
        known, weights = knowledge(scores, log_probs, drawn, slots), self.choices.weights[drawn.astype(int)]
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
        """Learn from choices at once."""
        known = knowledge(*observed[:4])[np.arange(len(observed.ranks)), observed.ranks]
        inputs = inputs_of(known, observed.ranks, observed.laters)
        self.choices.learn(inputs, observed.drawn, observed.right, inputs[:, 0])

    def learn_paths(self, inputs: Array, drawn: Array, right: Array) -> None:
        """Learn from tokens [M] of paths that were verified below what the target chose: inputs [M, len(OF_PATH)],
        which were drawn [M], and which were right [M].
        """
        self._unlearned_paths.append((inputs, drawn, right))
        if len(self._unlearned_paths) >= LEARN_EVERY:
            self.paths.learn(*map(np.concatenate, zip(*self._unlearned_paths, strict=True)))
            self._unlearned_paths = []


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
