"""Outcomes of drafts, and the prior that is fitted to them."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from blockpilot.control.acceptance import NUM_WEIGHTS, UNTRAINED, AcceptanceModel, Array
from blockpilot.policy.outcomes import DECAY, Outcomes, Proposed, fit_prior, losses, outcomes_of
from blockpilot.types import Candidates

K = 4
MISCALIBRATED = np.array([-0.3, 0.2, 0.1, -0.1, 0.3, 0.4, -0.5, -0.2, -0.7, -0.9, -0.3])
"""True weights in most tests."""


def test_outcomes_are_of_slots_that_were_reached() -> None:
    ranks = torch.tensor([[0, 2, 1, -1], [-1, 0, 0, 0], [0, 0, -2, -2]], dtype=torch.int8)
    scores = torch.arange(3 * 4 * 2).view(3, 4, 2).half()
    outcomes = outcomes_of(Proposed(ranks, scores, scores - 100, torch.tensor([True, False, False])))
    assert outcomes.ranks.tolist() == [0, 2, 1, -1, -1, 0, 0]
    assert outcomes.depths.tolist() == [0, 1, 2, 3, 0, 0, 1]
    assert outcomes.num_passed.tolist() == [0, 0, 1, 2, 0, 0, 0]
    candidates = outcomes.candidates
    assert candidates.scores[:, 0].tolist() == [0, 2, 4, 6, 8, 16, 18]
    assert candidates.log_probs[:, 0].tolist() == [-100, -98, -96, -94, -92, -84, -82]
    assert candidates.drawn.tolist() == [True] * 4 + [False] * 3


def test_rows_without_recorded_choices_have_no_outcomes() -> None:
    nothing = torch.zeros(3, 0, 0)
    outcomes = outcomes_of(Proposed(torch.zeros(3, 0, dtype=torch.int8), nothing, nothing, torch.zeros(3).bool()))
    assert len(outcomes) == 0
    assert not fit_prior(outcomes).weights.any()
    assert all(map(math.isnan, losses(UNTRAINED, outcomes)))


# --- simulated outcomes ---


class Simulated(NamedTuple):
    """Outcomes, and the true acceptance probability of every choice [S, K]."""

    outcomes: Outcomes
    chances: Array


def slow_inputs(outcomes: Outcomes) -> tuple[Array, Array]:
    """Features computed choice by choice: the draft's logits [S, K], and inputs [S, K, NUM_WEIGHTS]."""
    candidates, own_logits, inputs = outcomes.candidates, [], []
    scores, log_probs = candidates.scores.double().numpy(), candidates.log_probs.double().numpy()
    for s, (depth, passed) in enumerate(zip(outcomes.depths.tolist(), outcomes.num_passed.tolist(), strict=True)):
        probs = np.exp(scores[s]) / np.exp(scores[s]).sum() if candidates.drawn[s] else np.exp(log_probs[s])
        for j in range(K):
            logit = math.log(probs[j] / (1 - probs[j]))
            gap = scores[s, j] - scores[s, j + 1] if j + 1 < K else 0.0
            of_choice = [logit, log_probs[s, j], scores[s, j] - scores[s, 0], gap, 1 / (1 + depth)]
            context = [float((at, later) == (min(passed, 2), j > 0)) for at in range(3) for later in (0, 1)]
            own_logits.append(logit)
            inputs.append(of_choice + context)
    return np.reshape(own_logits, (-1, K)), np.reshape(inputs, (-1, K, NUM_WEIGHTS))


def slow_chances(outcomes: Outcomes, weights: Array) -> Array:
    """Acceptance probabilities [S, K] for weights [2, NUM_WEIGHTS]."""
    logits, inputs = slow_inputs(outcomes)
    of_slots = weights[outcomes.candidates.drawn.long().numpy()]
    chances: Array = 1 / (1 + np.exp(-logits - (inputs * of_slots[:, None]).sum(axis=-1)))
    return chances


def simulated(num: int, truth: Array, seed: int, *, drawn: bool | None = None) -> Simulated:
    """Slots whose choices are right with the probabilities of a prior with weights `truth` [NUM_WEIGHTS].
    `drawn` None: every other slot is sampled.
    """
    draws = torch.Generator().manual_seed(seed)
    log_probs = ((torch.randn(num, K + 3, generator=draws) * 1.5).log_softmax(dim=1) - 0.3).sort(descending=True)[0]
    log_probs = log_probs[:, :K].contiguous()
    is_drawn = torch.arange(num) % 2 == 0 if drawn is None else torch.full((num,), drawn)
    noise = torch.randn(num, K, generator=draws).sort(descending=True)[0]
    candidates = Candidates(torch.zeros(num, 0), log_probs + noise * is_drawn[:, None], log_probs, is_drawn)
    depths, passed = (torch.randint(0, most, (num,), generator=draws) for most in (7, 4))
    outcomes = Outcomes(candidates, depths, passed, torch.zeros(num, dtype=torch.int64))
    chances = slow_chances(outcomes, np.stack([truth, truth]))
    chances /= np.maximum(chances.sum(axis=1, keepdims=True), 1.0)
    ranks = (torch.rand(num, 1, generator=draws).numpy() > chances.cumsum(axis=1)).sum(axis=1)
    return Simulated(with_ranks(outcomes, torch.from_numpy(np.where(ranks < K, ranks, -1))), chances)


def with_ranks(outcomes: Outcomes, ranks: torch.Tensor) -> Outcomes:
    return Outcomes(*outcomes[:3], ranks)


# --- the fit ---


@pytest.mark.parametrize("drawn", [None, False])
def test_the_fit_is_the_minimum_that_a_slow_search_finds(drawn: bool | None) -> None:
    """Sampled slots have separate weights, which stay 0 if no slot is sampled."""
    outcomes, _ = simulated(300, MISCALIBRATED, 2, drawn=drawn)
    right, kinds = outcomes.ranks.numpy()[:, None] == np.arange(K), outcomes.candidates.drawn.long().numpy()
    own_logits, inputs = slow_inputs(outcomes)

    def loss(flat: Array) -> float:
        logits = own_logits + (inputs * flat.reshape(2, -1)[kinds][:, None]).sum(axis=-1)
        return float((np.logaddexp(0, logits) - right * logits).mean())

    def objective(flat: Array) -> float:
        return loss(flat) + DECAY * float((flat**2).sum())

    slow = minimize(objective, np.zeros(2 * NUM_WEIGHTS), method="L-BFGS-B", options={"maxfun": 10**5})
    prior = fit_prior(outcomes)
    weights = prior.weights
    assert losses(prior, outcomes) == pytest.approx((K * loss(weights.ravel()), K * loss(0 * weights.ravel())))
    assert objective(weights.ravel()) <= slow.fun + 1e-9
    np.testing.assert_allclose(weights, slow.x.reshape(2, -1), atol=0.02)
    assert np.abs(weights[0]).min() > 0
    assert weights[1].any() == (drawn is None)


@pytest.mark.parametrize("truth", [MISCALIBRATED, np.zeros(NUM_WEIGHTS)], ids=["miscalibrated", "calibrated"])
def test_a_fitted_prior_is_near_the_truth_on_new_outcomes(truth: Array) -> None:
    """Better than a miscalibrated draft; worse than a calibrated one by no more than the noise of 22 weights."""
    prior = fit_prior(simulated(8000, truth, 0).outcomes)
    test, chances = simulated(4000, truth, 1)
    trained, untrained = losses(prior, test)
    best = -(chances * np.log(chances) + (1 - chances) * np.log1p(-chances)).sum(axis=1).mean()
    assert best - 0.02 < trained < best + 0.02
    assert untrained - trained > (0.1 if truth.any() else -0.005)
    assert np.abs(slow_chances(test, prior.weights) - chances).mean() < 0.015
    assert losses(UNTRAINED, test).trained == pytest.approx(untrained)


def test_the_fit_is_deterministic_and_independent_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = simulated(300, MISCALIBRATED, 2).outcomes
    weights = fit_prior(outcomes).weights
    assert np.array_equal(fit_prior(outcomes).weights, weights)
    monkeypatch.setattr("blockpilot.policy.outcomes.CHUNK", 7)
    np.testing.assert_allclose(fit_prior(outcomes).weights, weights, atol=1e-8)


@pytest.mark.parametrize("rank", [-1, 0, K - 1])
def test_outcomes_that_are_all_alike_have_finite_weights(rank: int) -> None:
    outcomes, _ = simulated(500, MISCALIBRATED, 3)
    alike = with_ranks(outcomes, torch.full((500,), rank))
    prior = fit_prior(alike)
    assert np.isfinite(prior.weights).all()
    assert losses(prior, alike).trained < 0.1 * losses(UNTRAINED, alike).trained


def test_choices_that_cannot_be_drawn_do_no_harm() -> None:
    outcomes, _ = simulated(500, MISCALIBRATED, 4)
    for values in (outcomes.candidates.scores, outcomes.candidates.log_probs):
        values[:, 2:] = -torch.inf
    prior = fit_prior(with_ranks(outcomes, outcomes.ranks.clamp(max=1)))
    assert np.isfinite(prior.weights).all()
    assert np.abs(prior.weights).max() < 5


def test_decoding_begins_with_the_chances_that_were_fitted() -> None:
    """Fitted probabilities, made to sum to at most 1 and to fall along a slot, which the fit does not ensure."""
    prior = fit_prior(simulated(2000, MISCALIBRATED, 0).outcomes)
    test, _ = simulated(300, MISCALIBRATED, 1)
    model = AcceptanceModel(7, prior)
    chances = model.propose(np.ones(300, dtype=bool), test.candidates, test.depths.numpy()).chances
    used = chances[test.num_passed.clamp(max=2).numpy(), np.arange(300)]
    fitted = slow_chances(test, prior.weights)
    expected = fitted / np.maximum(fitted.sum(axis=1, keepdims=True), 1.0)
    np.testing.assert_allclose(used, np.minimum.accumulate(expected, axis=1), rtol=1e-4, atol=1e-4)
