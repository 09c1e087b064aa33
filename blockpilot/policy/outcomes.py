"""Fit of the acceptance model's prior to the outcomes that a sweep has recorded.

The acceptance model (`control/acceptance.py`) learns while it decodes. A prior starts it from the weights that it
would converge to: the regularised maximum-likelihood weights for the same features.
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

DECAY = 1e-4  # nats per choice
MAX_ITERATIONS, MAX_HALVINGS = 50, 30  # of Newton's method
TOLERANCE = 1e-12  # expected gain of another iteration, nats per choice
CHUNK = 65_536  # slots whose features are in memory at once


class Proposed(NamedTuple):
    """E steps of a draft with k choices for each of D slots, and which choices were right.

    ranks [E, D] int8: index of the right choice, -1 if none of the k is right, -2 if unknown; slots after a negative
    rank were never reached. scores and log_probs [E, D, k]. drawn [E] bool: True if tokens are sampled (T > 0).
    """

    ranks: Tensor
    scores: Tensor
    log_probs: Tensor
    drawn: Tensor

    def __len__(self) -> int:
        return len(self.ranks)


class Outcomes(NamedTuple):
    """S slots that were reached (all choices before them were right), and which of their choices was right.

    ranks [S] int64: index of the right choice among the k proposed ones, -1 for none; depths, num_passed [S].
    """

    candidates: Candidates
    depths: Tensor
    num_passed: Tensor
    """Number of right choices before the slot that were not the first choice of their slot."""
    ranks: Tensor

    def __len__(self) -> int:
        return len(self.ranks)


class Losses(NamedTuple):
    """Cross entropy of predicting which choices are right, nats per slot: by a prior, and by the draft's own
    probabilities. NaN without outcomes.
    """

    trained: float
    own: float


def outcomes_of(steps: Proposed) -> Outcomes:
    """Outcomes of the slots that the steps reached."""
    ranks, scores, log_probs, drawn = steps
    is_right = (ranks >= 0).long().cumprod(dim=1)
    reached = functional.pad(is_right, (1, 0), value=1)[:, :-1].bool() & (ranks >= -1)
    num_passed = functional.pad((ranks > 0).long().cumsum(dim=1), (1, 0))[:, :-1]
    step, depth = reached.nonzero(as_tuple=True)
    no_tokens = torch.zeros(len(depth), 0, dtype=torch.int64)
    candidates = Candidates(no_tokens, scores[reached].float(), log_probs[reached].float(), drawn[step])
    return Outcomes(candidates, depth, num_passed[reached], ranks[reached].long())


def fit_prior(outcomes: Outcomes, decay: float = DECAY) -> Prior:
    """The prior that minimises the mean cross entropy over choices plus `decay` times its squared weights.

    The weights for sampled slots, or for greedy slots, are 0 if there are no outcomes of that kind.
    """
    return Prior(np.stack([_minimise(outcomes, kind, decay) for kind in (0, 1)]))


def losses(prior: Prior, outcomes: Outcomes) -> Losses:
    """Losses of a prior, and of the draft's own probabilities, on outcomes."""
    if not len(outcomes):
        return Losses(np.nan, np.nan)
    trained, own = (
        sum(_loss(outcomes, kind, weights) for kind, weights in enumerate(candidate.weights)) / len(outcomes)
        for candidate in (prior, UNTRAINED)
    )
    return Losses(trained, own)


# --- slots of one kind: 0 greedy, 1 sampled ---


class _Chunk(NamedTuple):
    """Choices [M]: the draft's own logits, the regression's inputs [M, NUM_WEIGHTS], and which were right."""

    draft_logits: Array
    inputs: Array
    right: Array


class _Slope(NamedTuple):
    """A loss with its gradient and Hessian."""

    loss: float
    gradient: Array
    hessian: Array


def _minimise(outcomes: Outcomes, kind: int, decay: float) -> Array:
    """Weights [NUM_WEIGHTS] that minimise the loss, by Newton's method with backtracking line search."""
    weights = np.zeros(NUM_WEIGHTS)
    slope = _slope(outcomes, kind, weights, decay)
    for _ in range(MAX_ITERATIONS):
        step = np.linalg.solve(slope.hessian, slope.gradient)
        gain = float(slope.gradient @ step)
        for halving in range(MAX_HALVINGS):
            share = 0.5**halving
            next_slope = _slope(outcomes, kind, weights - share * step, decay)
            if next_slope.loss <= slope.loss - 0.25 * share * gain:
                break
        else:  # because of rounding, no step lowers the loss any more
            break
        weights, slope = weights - share * step, next_slope
        if gain < TOLERANCE:
            break
    return weights


def _slope(outcomes: Outcomes, kind: int, weights: Array, decay: float) -> _Slope:
    """Loss of one kind's choices, divided by the number of all choices, plus the decay; with its derivatives."""
    num_choices = max(1, outcomes.candidates.scores.numel())
    loss, gradient = decay * float(weights @ weights), 2 * decay * weights
    hessian = 2 * decay * np.eye(NUM_WEIGHTS)
    for draft_logits, inputs, right in _chunks(outcomes, kind):
        logits = draft_logits + inputs @ weights
        probs = logistic(logits)
        loss += float(_cross_entropy(logits, right).sum()) / num_choices
        gradient = gradient + inputs.T @ (probs - right) / num_choices
        hessian += (inputs * (probs * (1 - probs))[:, None]).T @ inputs / num_choices
    return _Slope(loss, gradient, hessian)


def _loss(outcomes: Outcomes, kind: int, weights: Array) -> float:
    """Cross entropy of one kind's choices, nats in total."""
    losses_of_chunks = (
        _cross_entropy(draft_logits + inputs @ weights, right)
        for draft_logits, inputs, right in _chunks(outcomes, kind)
    )
    return float(sum(part.sum() for part in losses_of_chunks))


def _cross_entropy(logits: Array, right: Array) -> Array:
    nats: Array = np.logaddexp(0, logits) - right * logits
    return nats


def _chunks(outcomes: Outcomes, kind: int) -> Iterator[_Chunk]:
    """Choices of sampled slots (kind 1) or greedy slots (kind 0), CHUNK slots at a time."""
    candidates = outcomes.candidates
    for index in (candidates.drawn.long() == kind).nonzero()[:, 0].split(CHUNK):
        scores, log_probs, drawn = (
            values[index].numpy() for values in (candidates.scores, candidates.log_probs, candidates.drawn)
        )
        features = knowledge(scores, log_probs, drawn, outcomes.depths[index].numpy())
        num_slots, k, width = features.shape
        ranks, num_passed = np.tile(np.arange(k), num_slots), outcomes.num_passed[index].numpy().repeat(k)
        inputs = inputs_of(features.reshape(-1, width), ranks, num_passed)
        right = outcomes.ranks[index].numpy()[:, None] == np.arange(k)
        yield _Chunk(features[..., 0].ravel(), inputs, right.ravel().astype(float))
