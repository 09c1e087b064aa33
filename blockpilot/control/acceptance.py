"""Acceptance: the chances that drafted tokens are accepted, before the draft runs and after it.

Before it: how many tokens each depth of a draft brings a row, by running means over all rows and in the row at hand.
After it: a chance for every choice, by a logistic regression of what the draft says of it, learned while decoding
from what was verified. What was drafted and not verified says nothing. A training is a better prior, nothing else.

Draft probabilities are calibrated at temperature 0; where tokens are drawn, later choices are less often right than a
draft says. So slots that are drawn have coefficients of their own, and the prior of the others is firm.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.drafts.choices import own_chances
from blockpilot.types import Candidates

Array = NDArray[Any]

NUM_CONTEXTS = 3  # none, one, or more choices above that are no first ones
OF_CHOICE = "log_prob", "to_first", "to_next", "inverse_depth"  # what is known of a choice beside its own logit
NUM_WEIGHTS = 1 + len(OF_CHOICE) + 2 * NUM_CONTEXTS + 1  # the own logit, OF_CHOICE, context and rank, recent
LEAST_SCORE, LEAST_CHANCE = -30.0, 1e-4
PRIOR_VARIANCE = (1e-3, 2e-2)  # of the weights, for slots that are not drawn and for those that are
FIRST_GUESS = 0.75  # share of reached positions that are accepted, before anything was seen
DOUBT, MEMORY = 4.0, 1000.0  # steps: of the first guess, and of what all rows bring beside the row at hand
RECENT = 0.8  # of a row's surprise, kept from step to step


@dataclass(frozen=True, eq=False)
class Prior:
    """What is known before anything was decoded: weights [2, NUM_WEIGHTS] of choices, by `drawn`."""

    weights: Array


UNTRAINED = Prior(np.zeros((2, NUM_WEIGHTS)))


@dataclass
class _Means:
    """Running means of what each depth brings: sums over steps that fade, by `drawn` [2, D]."""

    brought: Array
    steps: Array

    @classmethod
    def of(cls, deepest: int) -> "_Means":
        return cls(np.zeros((2, deepest)), np.zeros((2, deepest)))


class Proposal(NamedTuple):
    """Choices of N slots after P choices each, [N * P, k], and what is known of them on the host."""

    known: Array
    """[N * P, k, 1 + len(OF_CHOICE)]."""
    drawn: Array
    """[N * P] 0 or 1."""
    surprise: Array
    """[N * P], of the rows."""
    chances: Array
    """[NUM_CONTEXTS, N * P, k], by the choices above that are no first ones; they fall along k."""


@dataclass
class AcceptanceModel:
    """Chances of one draft's tokens, for rows by id. `deepest`: positions that it proposes tokens for at most."""

    deepest: int
    prior: Prior = UNTRAINED
    _ids: tuple[int, ...] = ()
    _index: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.deepest < 1:
            raise ValueError(f"deepest {self.deepest}: must be at least 1")
        self.weights = self.prior.weights.astype(float)
        self._precision = np.stack([np.eye(NUM_WEIGHTS) / variance for variance in PRIOR_VARIANCE])
        self._guess = FIRST_GUESS ** np.arange(1, self.deepest + 1)
        self._all = _Means.of(self.deepest)
        self._brought, self._steps = np.zeros((0, self.deepest)), np.zeros((0, self.deepest))  # of each row
        self._surprise = np.zeros(0)

    def _follow(self, ids: Sequence[int]) -> None:
        """Keep what is known of these rows, in their order; others are over."""
        if (ids := tuple(ids)) == self._ids:
            return
        old = np.array([self._index.get(each, -1) for each in ids], dtype=int)
        fresh = (old < 0)[:, None]
        for name in ("_brought", "_steps"):
            padded = np.vstack([getattr(self, name), np.zeros((1, self.deepest))])
            setattr(self, name, np.where(fresh, 0.0, padded[old]))
        self._surprise = np.where(fresh[:, 0], 0.0, np.append(self._surprise, 0.0)[old])
        self._ids, self._index = ids, {each: i for i, each in enumerate(ids)}

    # --- before the draft ---

    def depth_means(self, ids: Sequence[int], drawn: Sequence[bool]) -> Array:
        """Tokens that each depth is expected to bring to every row, [R, deepest]; they fall with the depth."""
        self._follow(ids)
        of_all = (DOUBT * self._guess + self._all.brought) / (DOUBT + self._all.steps)
        prior = of_all[np.asarray(drawn, dtype=int)]
        means: Array = (DOUBT * prior + self._brought) / (DOUBT + self._steps)
        return np.minimum.accumulate(means, axis=1)

    # --- after it ---

    def propose(self, rows: Array, found: Candidates, slots: Array) -> Proposal:
        """Chances of what the draft found, [N, k]: the row [N] of each slot among those of the latest call, and its
        place [N] below the anchor, from 0 on. Those of row -1, of which nothing is known, are the draft's own.
        """
        surprise = np.append(self._surprise, 0.0)[rows]
        scores, log_probs, drawn = (each.numpy(force=True) for each in (found.scores, found.log_probs, found.drawn))
        known, kinds = knowledge(scores, log_probs, drawn, slots), drawn.astype(int)
        weights = self.weights[kinds]
        logits = known[..., 0] + (known @ weights[:, : known.shape[-1], None])[..., 0]
        logits = logits + (weights[:, -1] * surprise)[:, None]
        of_context = weights[:, known.shape[-1] : -1].reshape(-1, NUM_CONTEXTS, 2)
        by_context = np.repeat(logits[None], NUM_CONTEXTS, axis=0)
        by_context[..., 0] += of_context[..., 0].T
        by_context[..., 1:] += of_context[..., 1].T[..., None]
        chances = logistic(by_context)
        chances[:, np.isneginf(scores)] = 0.0  # what cannot be drawn
        chances /= np.maximum(chances.sum(axis=-1, keepdims=True), 1.0)
        if (rows < 0).any():
            chances[:, rows < 0] = own_chances(found).numpy(force=True)[:, rows < 0]
        return Proposal(known, kinds, surprise, np.minimum.accumulate(chances, axis=-1))

    def learn(self, proposal: Proposal, choices: Array, laters: Array, right: Array) -> None:
        """Learn from choices [M] that were verified below what the target chose, flat places in [N * P, k].

        laters [M] as the chances are; right [M] are those that the target made. One step of Newton's method from
        what the precision so far says (online Laplace approximation).
        """
        slot, rank = np.divmod(choices, proposal.known.shape[1])
        kinds, inputs = proposal.drawn[slot], np.zeros((len(choices), NUM_WEIGHTS))
        width = proposal.known.shape[2]
        inputs[:, :width] = proposal.known[slot, rank]
        inputs[np.arange(len(choices)), width + 2 * np.minimum(laters, NUM_CONTEXTS - 1) + (rank > 0)] = 1.0
        inputs[:, -1] = proposal.surprise[slot]
        for kind in (0, 1):
            if len(of_kind := np.flatnonzero(kinds == kind)):
                x = inputs[of_kind]
                chance = logistic(x[:, 0] + x @ self.weights[kind])
                self._precision[kind] += (x * (chance * (1 - chance))[:, None]).T @ x
                self.weights[kind] += np.linalg.solve(self._precision[kind], x.T @ (right[of_kind] - chance))

    def observe(self, drawn: Array, depths: Array, brought: Array, surprise: Array) -> None:
        """Learn how much each depth brings the rows [R] of the latest call: they drafted depths [R] positions, where
        the chances of what was verified add up to brought [R, deepest]. surprise [R]: tokens accepted beyond those.
        """
        seen = np.arange(self.deepest) < depths[:, None]
        keep = 1 - 1 / MEMORY
        for kind in (0, 1):
            of_kind = drawn == kind
            self._all.brought[kind] = keep * self._all.brought[kind] + (brought * seen)[of_kind].sum(axis=0)
            self._all.steps[kind] = keep * self._all.steps[kind] + seen[of_kind].sum(axis=0)
        self._brought += brought * seen
        self._steps += seen
        self._surprise = RECENT * self._surprise + (1 - RECENT) * surprise


def knowledge(scores: Array, log_probs: Array, drawn: Array, slots: Array) -> Array:
    """The own logit and OF_CHOICE of every choice [N, k], float64 [N, k, 1 + len(OF_CHOICE)].

    The draft's own chance is its probability at temperature 0. Where tokens are drawn the noise has decided already,
    if the distributions agree; how clearly it has says how far they may differ.
    """
    found = np.zeros((*scores.shape, 1 + len(OF_CHOICE)))
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
    """Cannot overflow."""
    return 0.5 + 0.5 * np.tanh(0.5 * values)
