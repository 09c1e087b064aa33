"""Acceptance model: the probability that drafted tokens are accepted, before the draft runs and after it.

Before the draft: running means of the nodes that each depth is expected to add to a tree. After it: a probability for
every choice, by a logistic regression on the draft's scores, learned online from verified nodes. Drafted nodes that
are not verified are censored. Training gives a better prior.

Draft probabilities are calibrated at temperature 0. At higher temperatures, later choices are accepted less often
than the draft's probabilities say, so greedy and sampled tokens (`drawn`) have separate means and coefficients. Means
for each row, and heads on the draft's context vector, made the choice of depths worse (LOG.md).
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.drafts.choices import draft_probs
from blockpilot.native.growing import NUM_CONTEXTS, choice_chances, cut_paths
from blockpilot.types import Candidates

Array = NDArray[Any]

OF_CHOICE = "log_prob", "to_first", "to_next", "inverse_depth"  # inputs of a choice, after its logit by the draft
NUM_KNOWN = 1 + len(OF_CHOICE)
NUM_WEIGHTS = NUM_KNOWN + 2 * NUM_CONTEXTS  # then one-hot: later choices above (0, 1, more) x rank (first, later)
LEAST_SCORE, LEAST_CHANCE = -30.0, 1e-4
PRIOR_VARIANCE = 5e-3  # of these weights
OF_MATCH = "length", "agree", "held"  # inputs of a match
OF_PATH = "one", *OF_MATCH, "later", "own", "first", "not_first", "absent"  # inputs of a path token
PATH_WEIGHTS = np.array(
    [
        [-1.5, 4.12, 0.39, 0.63, 0.24, 1.63, 0.86, 0.14, -0.73],
        [-2.29, 3.3, 0.69, 0.92, 0.29, 2.47, 1.4, 0.79, -0.98],
    ]
)
"""Initial weights [2, len(OF_PATH)] of the path regression, by `drawn`; fitted to 110 answers of SmolLM2-135M at
temperature 0 and 110 at 1, half of the weight on prompt sets whose answers copy from the prompt.
"""
PATH_VARIANCE = 0.02
LEAST_REACHED = 0.02  # probability, before the draft, below which a path is cut
THRESHOLDS = np.geomspace(0.01, 0.8, 9)  # probabilities above which the nodes of a depth are counted
FIRST_GUESS = 0.75  # acceptance probability of a position, before any observation
GAINS = 0.0, 2.0, 6.0  # expected tokens of a path: bounds between the kinds of rows with a path
NUM_KINDS = 2 * (1 + len(GAINS))
NUM_REMEMBERED = 1e5  # outcomes that the regressions remember: traffic changes
DOUBT, MEMORY = 4.0, 1000.0  # in drafts: weight of the first guess, memory of the running means


@dataclass(frozen=True, eq=False)
class Prior:
    """Initial weights [2, NUM_WEIGHTS] of the choice regression, by `drawn`."""

    weights: Array


UNTRAINED = Prior(np.zeros((2, NUM_WEIGHTS)))


class Paths(NamedTuple):
    """Paths from prompt lookup for R rows: tokens [R, M] int32, sizes[r] of row r, that followed an earlier match.

    known [R, 3]: regression inputs (OF_MATCH): length of the match in tokens, share of matches followed by the same
    first token, and recent accuracy of the first tokens of paths in this row. drawn [R]: 1 for rows with a
    temperature above 0, else 0. gains [R]: tokens that paths are expected to add, estimated before the draft.
    """

    tokens: Array
    sizes: Array
    known: Array
    drawn: Array
    gains: Array


class Expected(NamedTuple):
    """Nodes that each depth is expected to add to a row's tree, by thresholds [J] of their probability.

    counts: number of nodes above each threshold; sums: sum of their probabilities; both [1 + D, J], or [K, 1 + D, J]
    for K kinds of rows. Depth 0 has the nodes that need no draft.
    """

    thresholds: Array
    sums: Array
    counts: Array


class Proposal(NamedTuple):
    """Choices [N * P, k] for N slots after each of P choices: scores and acceptance probabilities, on the host."""

    scores: Array
    log_probs: Array
    drawn: Array
    """[N * P]"""
    slots: Array
    """[N * P]: index of the slot below the anchor, from 0."""
    chances: Array
    """[NUM_CONTEXTS, N * P, k], by the number of later (not first) choices above; descending along k."""

    def observed(self, choices: Array, num_later: Array, right: Array) -> "ObservedChoices":
        """Outcomes of choices [M], given as flat indices in [N * P, k].

        num_later [M]: numbers of later choices above each; right [M]: choices that were accepted.
        """
        lists, ranks = np.divmod(choices, self.scores.shape[1])
        return ObservedChoices._make([*(values[lists] for values in self[:4]), ranks, num_later, right])


class ObservedChoices(NamedTuple):
    """Verified choices [M] below accepted nodes: scores and log_probs [M, k] of their slots' choices, their ranks [M]
    among these, the numbers of later choices above, and which were accepted (`right`).
    """

    scores: Array
    log_probs: Array
    drawn: Array
    slots: Array
    ranks: Array
    num_later: Array
    right: Array


class Regression:
    """Online logistic regression, with separate weights [2, inputs] for greedy and sampled tokens."""

    def __init__(self, weights: Array, variance: float) -> None:
        self.weights = weights.astype(float, order="C")
        self._prior = np.eye(weights.shape[1]) / variance
        self._precision = np.stack([self._prior] * 2)

    def learn(self, inputs: Array, drawn: Array, right: Array, offsets: Array | float = 0.0) -> None:
        """One step of Newton's method with the accumulated precision (online Laplace approximation).

        M outcomes: inputs [M, inputs], drawn [M] and right [M]; offsets [M] are added to the logits.
        """
        errors = right - logistic(offsets + (inputs * self.weights[drawn.astype(int)]).sum(axis=1))
        for kind in (0, 1):
            if not (mask := drawn == kind).any():
                continue
            x, chance = inputs[mask], (right - errors)[mask]
            forgotten = min(1.0, len(x) / NUM_REMEMBERED)
            self._precision[kind] += forgotten * (self._prior - self._precision[kind])
            self._precision[kind] += (x * (chance * (1 - chance))[:, None]).T @ x
            self.weights[kind] += np.linalg.solve(self._precision[kind], x.T @ errors[mask])


class AcceptanceModel:
    """Acceptance probabilities of one draft's tokens. deepest: maximum drafted positions; 0 without a draft."""

    def __init__(self, deepest: int, prior: Prior = UNTRAINED) -> None:
        if deepest < 0:
            raise ValueError(f"deepest {deepest}: must be at least 0")
        self.deepest = deepest
        self.choices = Regression(prior.weights, PRIOR_VARIANCE)
        self.paths = Regression(PATH_WEIGHTS, PATH_VARIANCE)
        guess = FIRST_GUESS ** np.arange(1, deepest + 1)[:, None]
        above = guess >= THRESHOLDS
        # Exponentially decayed sums by kind: probabilities and counts of nodes [2, 1 + D, J], drafts [1 + D].
        initial = np.zeros((2, deepest + 1, len(THRESHOLDS)))
        initial[:, 1:] = DOUBT * np.stack([guess * above, above])
        self._nodes = np.stack([initial] * NUM_KINDS)
        self._drafts = np.full((NUM_KINDS, deepest + 1), DOUBT)
        self._drafts[:, 0] = 1e-3  # no first guess for nodes that need no draft

    @property
    def weights(self) -> Array:
        """Current weights of the choice regression, as in `Prior`."""
        return self.choices.weights

    # --- before the draft ---

    def cut_paths(self, paths: Paths, least: float = 0.0) -> Paths:
        """Paths with expected gains, cut where their probability is below LEAST_REACHED, or `least` if it is higher.

        RuntimeError without C.
        """
        least = max(least, LEAST_REACHED)
        sizes, gains = cut_paths(paths.sizes, paths.known, paths.drawn, self.paths.weights, least)
        return paths._replace(sizes=sizes, gains=gains)

    def kinds(self, drawn: Array, paths: Paths | None) -> Array:
        """Kinds of rows [R], by `drawn` [R] (0 or 1) and by the expected gains of their paths."""
        if paths is None:
            return drawn
        kinds: Array = drawn + 2 * np.searchsorted(GAINS, paths.gains, side="right") * (paths.sizes > 0)
        return kinds

    def expected(self) -> Expected:
        """Nodes that each depth is expected to add to a tree, for every kind of rows."""
        means = self._nodes / self._drafts[:, None, :, None]
        return Expected(THRESHOLDS, means[:, 0], means[:, 1])

    def observe(self, kinds: Array, drafted: Array, node_kinds: Array, depths: Array, chances: Array) -> None:
        """Update the running means with the trees of rows of these kinds [R], drafted to depths `drafted` [R].

        Nodes [M] of all trees: the kinds of their rows, depths (0 for a path's node) and probabilities.
        """
        shape = NUM_KINDS, self.deepest + 1, len(THRESHOLDS) + 1
        bins = np.searchsorted(THRESHOLDS, chances, side="right")
        flat = (node_kinds * shape[1] + depths) * shape[2] + bins
        both = [np.bincount(flat, weights, math.prod(shape)).reshape(shape) for weights in (chances, None)]
        at_least = np.stack(both, axis=1)[..., ::-1].cumsum(axis=-1)[..., -2::-1]
        reached = np.bincount(kinds * shape[1] + drafted, minlength=NUM_KINDS * shape[1])
        num_drafts = reached.reshape(NUM_KINDS, -1)[:, ::-1].cumsum(axis=1)[:, ::-1]
        decay = 1 - np.minimum(1, num_drafts / MEMORY)
        self._nodes = decay[:, None, :, None] * self._nodes + at_least * (num_drafts > 0)[:, None, :, None]
        self._drafts = decay * self._drafts + num_drafts

    # --- after the draft ---

    def propose(self, planned: Array, choices: Candidates, slots: Array) -> Proposal:
        """Acceptance probabilities of a draft's choices [N, k] in slots [N] below the anchor.

        They are the draft's probabilities where planned [N] is False.
        """
        tensors = choices.scores, choices.log_probs
        scores, log_probs = (np.ascontiguousarray(t.numpy(force=True), dtype=np.float32) for t in tensors)
        drawn = choices.drawn.numpy(force=True)
        chances = choice_chances(scores, log_probs, drawn, slots, planned, self.choices.weights)
        if chances is None:
            chances = self._chances(scores, log_probs, drawn, slots)
            chances[:, ~planned] = draft_probs(choices).numpy(force=True)[:, ~planned]
        return Proposal(scores, log_probs, drawn, slots, chances)

    def _chances(self, scores: Array, log_probs: Array, drawn: Array, slots: Array) -> Array:
        """Python version of `choice_chances` (native/growing.c)."""
        features, weights = knowledge(scores, log_probs, drawn, slots), self.choices.weights[drawn.astype(int)]
        logits = features[..., 0] + (features @ weights[:, :NUM_KNOWN, None])[..., 0]
        context_weights = weights[:, NUM_KNOWN:].reshape(-1, NUM_CONTEXTS, 2)
        by_context = np.repeat(logits[None], NUM_CONTEXTS, axis=0)
        by_context[..., 0] += context_weights[..., 0].T
        by_context[..., 1:] += context_weights[..., 1].T[..., None]
        chances = logistic(by_context)
        chances[:, ~(scores > -np.inf)] = 0.0  # cannot be sampled, or NaN
        chances /= np.maximum(chances.sum(axis=-1, keepdims=True), 1.0)
        return np.minimum.accumulate(chances, axis=-1)

    def learn(self, observed: ObservedChoices) -> None:
        """Learn from verified choices."""
        features = knowledge(*observed[:4])[np.arange(len(observed.ranks)), observed.ranks]
        inputs = inputs_of(features, observed.ranks, observed.num_later)
        self.choices.learn(inputs, observed.drawn, observed.right, inputs[:, 0])

    def learn_paths(self, inputs: Array, drawn: Array, right: Array) -> None:
        """Learn from verified path tokens [M] below accepted nodes: inputs [M, len(OF_PATH)], drawn and right [M]."""
        self.paths.learn(inputs, drawn, right)


def inputs_of(features: Array, ranks: Array, num_later: Array) -> Array:
    """Regression inputs [M, NUM_WEIGHTS] of choices with features [M, NUM_KNOWN], ranks [M] and numbers of later
    choices above [M]. The first input is also the offset of the logit.
    """
    inputs = np.zeros((len(ranks), NUM_WEIGHTS))
    inputs[:, :NUM_KNOWN] = features
    inputs[np.arange(len(ranks)), NUM_KNOWN + 2 * np.minimum(num_later, NUM_CONTEXTS - 1) + (ranks > 0)] = 1.0
    return inputs


def knowledge(scores: Array, log_probs: Array, drawn: Array, slots: Array) -> Array:
    """Features of every choice [N, k]: its logit by the draft, and OF_CHOICE; float64 [N, k, NUM_KNOWN].

    At temperature 0 the logit is that of the draft's probability. At higher ones the noise has already decided the
    token if the distributions agree; the margins between the noisy scores tell how much they may differ.
    """
    features = np.zeros((*scores.shape, NUM_KNOWN))
    scores, log_probs = (
        np.maximum(np.nan_to_num(values, nan=LEAST_SCORE), LEAST_SCORE) for values in (scores, log_probs)
    )
    shares = np.exp(scores - scores[:, :1])
    probs = np.where(drawn[:, None], shares / shares.sum(axis=1, keepdims=True), np.exp(log_probs))
    probs = probs.clip(LEAST_CHANCE, 1 - LEAST_CHANCE)
    features[..., 0], features[..., 1] = np.log(probs / (1 - probs)), log_probs
    features[..., 2] = scores - scores[:, :1]
    features[:, :-1, 3] = scores[:, :-1] - scores[:, 1:]
    features[..., 4] = (1 / (1 + slots))[:, None]
    return features


def logistic(values: Array) -> Array:
    """The logistic function, without overflow."""
    return 0.5 + 0.5 * np.tanh(0.5 * values)
