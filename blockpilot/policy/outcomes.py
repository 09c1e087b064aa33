"""Outcomes of a draft's choices, and the prior of the acceptance model that explains them best.

The acceptance model (`control/acceptance.py`) learns while it decodes. What a sweep has recorded lets it begin with
the weights that it would come to: this is their regularised maximum of likelihood, over the same features.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from blockpilot.control.acceptance import NUM_WEIGHTS, UNTRAINED, Prior, inputs_of, knowledge, logistic
from blockpilot.types import Candidates

Array = NDArray[Any]

DECAY = 1e-4  # nats a choice
MAX_ITERATIONS, MAX_HALVINGS = 50, 30  # of Newton's method
TOLERANCE = 1e-12  # nats a choice that another iteration would gain
CHUNK = 65_536  # slots whose features are in memory together


class Proposed(NamedTuple):
    """Steps of a draft that proposed k choices for D slots, and which of them were right.

    ranks [E, D] int8: -1 is none of the k, -2 unknown; what follows either of them was never reached. scores and
    log_probs [E, D, k]. drawn [E] says of which steps tokens are drawn.
    """

    ranks: Tensor
    scores: Tensor
    log_probs: Tensor
    drawn: Tensor

    def __len__(self) -> int:
        return len(self.ranks)


class Outcomes(NamedTuple):
    """Slots whose path was right up to them, and which choice then was.

    ranks [S] int64 is its place among the k that were proposed, -1 for none of them; depths, num_passed [S].
    """

    found: Candidates
    depths: Tensor
    num_passed: Tensor
    """Choices above that are no first ones."""
    ranks: Tensor

    def __len__(self) -> int:
        return len(self.ranks)


class Losses(NamedTuple):
    """Cross entropy of every choice's being right, in nats a slot: by a prior, and by the draft's own probabilities.

    Not a number where there are no outcomes.
    """

    trained: float
    own: float


def outcomes_of(steps: Proposed) -> Outcomes:
    """Slots of the steps that were reached."""
    ranks, scores, log_probs, drawn = steps
    right = (ranks >= 0).long().cumprod(dim=1)
    reached = functional.pad(right, (1, 0), value=1)[:, :-1].bool() & (ranks >= -1)
    passed = functional.pad((ranks > 0).long().cumsum(dim=1), (1, 0))[:, :-1]
    example, place = reached.nonzero(as_tuple=True)
    no_tokens = torch.zeros(len(place), 0, dtype=torch.int64)
    found = Candidates(no_tokens, scores[reached].float(), log_probs[reached].float(), drawn[example])
    return Outcomes(found, place, passed[reached], ranks[reached].long())


def fit_prior(outcomes: Outcomes, decay: float = DECAY) -> Prior:
    """The prior of the least mean cross entropy of every choice's being right, plus `decay` by its squared weights.

    All weights of slots that are drawn, or of those that are not, stay 0 where there are none.
    """
    return Prior(np.stack([_minimise(outcomes, kind, decay) for kind in (0, 1)]))


def losses(prior: Prior, outcomes: Outcomes) -> Losses:
    """Losses of a prior on outcomes."""
    trained, own = (
        sum(_loss(outcomes, kind, each.weights[kind]) for kind in (0, 1)) / len(outcomes) if len(outcomes) else np.nan
        for each in (prior, UNTRAINED)
    )
    return Losses(float(trained), float(own))


# --- of slots of one kind, drawn or not ---


class _Chunk(NamedTuple):
    """Choices [M]: the draft's own logits, what their weights multiply [M, NUM_WEIGHTS], and which were right."""

    own: Array
    inputs: Array
    right: Array


class _Slope(NamedTuple):
    """A loss with its first and second derivatives."""

    loss: float
    gradient: Array
    hessian: Array


def _minimise(outcomes: Outcomes, kind: int, decay: float) -> Array:
    """Newton's method, whose steps are halved until they lead down."""
    weights = np.zeros(NUM_WEIGHTS)
    slope = _slope(outcomes, kind, weights, decay)
    for _ in range(MAX_ITERATIONS):
        step = np.linalg.solve(slope.hessian, slope.gradient)
        gain = float(slope.gradient @ step)
        for halving in range(MAX_HALVINGS):
            share = 0.5**halving
            following = _slope(outcomes, kind, weights - share * step, decay)
            if following.loss <= slope.loss - 0.25 * share * gain:
                break
        else:  # rounding is all that is left
            break
        weights, slope = weights - share * step, following
        if gain < TOLERANCE:
            break
    return weights


def _slope(outcomes: Outcomes, kind: int, weights: Array, decay: float) -> _Slope:
    """Slope of the mean loss over all choices, those of the other kind among them, and of the decay."""
    num = max(1, outcomes.found.scores.numel())
    loss, gradient = decay * float(weights @ weights), 2 * decay * weights
    hessian = 2 * decay * np.eye(NUM_WEIGHTS)
    for own, inputs, right in _chunks(outcomes, kind):
        logits = own + inputs @ weights
        chances = logistic(logits)
        loss += float(_cross_entropy(logits, right).sum()) / num
        gradient = gradient + inputs.T @ (chances - right) / num
        hessian += (inputs * (chances * (1 - chances))[:, None]).T @ inputs / num
    return _Slope(loss, gradient, hessian)


def _loss(outcomes: Outcomes, kind: int, weights: Array) -> float:
    """Nats of all choices together."""
    parts = (_cross_entropy(own + inputs @ weights, right) for own, inputs, right in _chunks(outcomes, kind))
    return float(sum(part.sum() for part in parts))


def _cross_entropy(logits: Array, right: Array) -> Array:
    found: Array = np.logaddexp(0, logits) - right * logits
    return found


def _chunks(outcomes: Outcomes, kind: int) -> Iterator[_Chunk]:
    """The choices of slots that are drawn (kind 1) or not (0), some slots at a time."""
    for index in (outcomes.found.drawn.long() == kind).nonzero()[:, 0].split(CHUNK):
        found, slots = outcomes.found, outcomes.depths[index].numpy()
        scores, log_probs, drawn = (each[index].numpy() for each in (found.scores, found.log_probs, found.drawn))
        known = knowledge(scores, log_probs, drawn, slots)
        num, k, width = known.shape
        ranks, laters = np.tile(np.arange(k), num), outcomes.num_passed[index].numpy().repeat(k)
        inputs = inputs_of(known.reshape(-1, width), ranks, laters)
        right = outcomes.ranks[index].numpy()[:, None] == np.arange(k)
        yield _Chunk(known[..., 0].ravel(), inputs, right.ravel().astype(float))
