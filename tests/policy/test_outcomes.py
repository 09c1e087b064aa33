"""Outcomes of drafts, and the prior that is fitted to them."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from blockpilot.control.acceptance import NUM_WEIGHTS, UNTRAINED, AcceptanceModel, Array, Prior
from blockpilot.drafts.choices import own_chances
from blockpilot.policy import outcomes as module
from blockpilot.policy.outcomes import DECAY, Outcomes, Proposed, fit_prior, losses, outcomes_of
from blockpilot.types import Candidates

K = 4
MISCALIBRATED = np.array([-0.3, 0.2, 0.1, -0.1, 0.3, 0.4, -0.5, -0.2, -0.7, -0.9, -0.3])
"""Weights of the truth in most tests."""


def test_outcomes_are_of_slots_that_were_reached() -> None:
    ranks = torch.tensor([[0, 2, 1, -1], [-1, 0, 0, 0], [0, 0, -2, -2]], dtype=torch.int8)
    scores = torch.arange(3 * 4 * 2).view(3, 4, 2).half()
    found = outcomes_of(Proposed(ranks, scores, scores - 100, torch.tensor([True, False, False])))
    assert found.ranks.tolist() == [0, 2, 1, -1, -1, 0, 0]
    assert found.depths.tolist() == [0, 1, 2, 3, 0, 0, 1]
    assert found.num_passed.tolist() == [0, 0, 1, 2, 0, 0, 0]
    assert found.found.scores[:, 0].tolist() == [0, 2, 4, 6, 8, 16, 18]
    assert found.found.log_probs[:, 0].tolist() == [-100, -98, -96, -94, -92, -84, -82]
    assert found.found.drawn.tolist() == [True] * 4 + [False] * 3


def test_rows_without_recorded_choices_have_no_outcomes() -> None:
    nothing = torch.zeros(3, 0, 0)
    found = outcomes_of(Proposed(torch.zeros(3, 0, dtype=torch.int8), nothing, nothing, torch.zeros(3).bool()))
    assert len(found) == 0
    assert not fit_prior(found).weights.any()
    assert all(map(math.isnan, losses(UNTRAINED, found)))


# --- simulated outcomes ---


class Simulated(NamedTuple):
    """Outcomes, and the true chance of every choice [S, K]."""

    outcomes: Outcomes
    chances: Array


def slow_inputs(outcomes: Outcomes) -> tuple[Array, Array]:
    """The features written down choice by choice: own logits [S, K], and inputs [S, K, NUM_WEIGHTS]."""
    found, own_logits, inputs = outcomes.found, [], []
    scores, log_probs = found.scores.double().numpy(), found.log_probs.double().numpy()
    for s, (depth, passed) in enumerate(zip(outcomes.depths.tolist(), outcomes.num_passed.tolist(), strict=True)):
        own = np.exp(scores[s]) / np.exp(scores[s]).sum() if found.drawn[s] else np.exp(log_probs[s])
        for j in range(K):
            logit = math.log(own[j] / (1 - own[j]))
            gap = scores[s, j] - scores[s, j + 1] if j + 1 < K else 0.0
            of_choice = [logit, log_probs[s, j], scores[s, j] - scores[s, 0], gap, 1 / (1 + depth)]
            context = [float((at, later) == (min(passed, 2), j > 0)) for at in range(3) for later in (0, 1)]
            own_logits.append(logit)
            inputs.append(of_choice + context)
    return np.reshape(own_logits, (-1, K)), np.reshape(inputs, (-1, K, NUM_WEIGHTS))


def slow_chances(outcomes: Outcomes, weights: Array) -> Array:
    """[S, K] of weights [2, NUM_WEIGHTS]."""
    own, inputs = slow_inputs(outcomes)
    of_slots = weights[outcomes.found.drawn.long().numpy()]
    found: Array = 1 / (1 + np.exp(-own - (inputs * of_slots[:, None]).sum(axis=-1)))
    return found


def simulated(num: int, truth: Array, seed: int, *, drawn: bool | None = None) -> Simulated:
    """Slots whose choices are right as often as a prior with these weights [NUM_WEIGHTS] says; `drawn` None: every
    other slot is.
    """
    draws = torch.Generator().manual_seed(seed)
    log_probs = ((torch.randn(num, K + 3, generator=draws) * 1.5).log_softmax(dim=1) - 0.3).sort(descending=True)[0]
    log_probs = log_probs[:, :K].contiguous()
    is_drawn = torch.arange(num) % 2 == 0 if drawn is None else torch.full((num,), drawn)
    noise = torch.randn(num, K, generator=draws).sort(descending=True)[0]
    found = Candidates(torch.zeros(num, 0), log_probs + noise * is_drawn[:, None], log_probs, is_drawn)
    depths, passed = (torch.randint(0, most, (num,), generator=draws) for most in (7, 4))
    outcomes = Outcomes(found, depths, passed, torch.zeros(num, dtype=torch.int64))
    chances = slow_chances(outcomes, np.stack([truth, truth]))
    chances /= np.maximum(chances.sum(axis=1, keepdims=True), 1.0)
    ranks = (torch.rand(num, 1, generator=draws).numpy() > chances.cumsum(axis=1)).sum(axis=1)
    return Simulated(with_ranks(outcomes, torch.from_numpy(np.where(ranks < K, ranks, -1))), chances)


def with_ranks(outcomes: Outcomes, ranks: torch.Tensor) -> Outcomes:
    return Outcomes(*outcomes[:3], ranks)


# --- the fit ---


def test_it_recovers_the_weights_of_the_truth() -> None:
    """Within what 20,000 slots tell: log_prob and the own logit say nearly the same, others are sure to 0.1."""
    outcomes, _ = simulated(20_000, MISCALIBRATED, 0, drawn=False)
    prior = fit_prior(outcomes, decay=1e-9)
    assert prior.weights.shape == (2, NUM_WEIGHTS)
    error = np.abs(prior.weights[0] - MISCALIBRATED)
    assert error[3:].max() < 0.15
    assert error[:3].max() < 0.35
    assert np.abs(MISCALIBRATED).max() > 0.8  # no weights at all would fail
    test = simulated(2000, MISCALIBRATED, 1, drawn=False)
    assert np.abs(slow_chances(test.outcomes, prior.weights) - test.chances).mean() < 0.01


def test_it_is_the_minimum_that_a_slow_search_finds() -> None:
    outcomes, _ = simulated(300, MISCALIBRATED, 2)
    right, kinds = outcomes.ranks.numpy()[:, None] == np.arange(K), outcomes.found.drawn.long().numpy()
    own, inputs = slow_inputs(outcomes)

    def objective(flat: Array) -> float:
        logits = own + (inputs * flat.reshape(2, -1)[kinds][:, None]).sum(axis=-1)
        return float((np.logaddexp(0, logits) - right * logits).mean() + DECAY * (flat**2).sum())

    slow = minimize(objective, np.zeros(2 * NUM_WEIGHTS), method="L-BFGS-B", options={"maxfun": 10**5})
    found = fit_prior(outcomes).weights
    assert objective(found.ravel()) <= slow.fun + 1e-9
    np.testing.assert_allclose(found, slow.x.reshape(2, -1), atol=0.02)


def test_of_a_draft_that_errs_it_describes_new_outcomes_better_than_the_draft() -> None:
    prior = fit_prior(simulated(4000, MISCALIBRATED, 0).outcomes)
    test, truth = simulated(4000, MISCALIBRATED, 1)
    trained, own = losses(prior, test)
    best = -(truth * np.log(truth) + (1 - truth) * np.log1p(-truth)).sum(axis=1).mean()
    assert best - 0.02 < trained < best + 0.02
    assert own > trained + 0.1
    assert losses(UNTRAINED, test).trained == pytest.approx(own)


def test_a_draft_that_does_not_err_is_left_alone() -> None:
    """But for noise: 11 weights of each kind cost half a nat each, over all slots together."""
    calibrated = np.zeros(NUM_WEIGHTS)
    prior = fit_prior(simulated(8000, calibrated, 0).outcomes)
    test, truth = simulated(4000, calibrated, 1)
    trained, own = losses(prior, test)
    assert trained < own + 0.005
    assert np.abs(slow_chances(test, prior.weights) - truth).mean() < 0.015


def test_slots_that_are_drawn_are_learned_apart() -> None:
    outcomes, _ = simulated(400, MISCALIBRATED, 2, drawn=False)
    weights = fit_prior(outcomes).weights
    assert np.abs(weights[0]).min() > 0
    assert not weights[1].any()
    both = simulated(400, MISCALIBRATED, 2).outcomes
    assert np.abs(fit_prior(both).weights).min() > 0


def test_equal_outcomes_give_equal_priors_however_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    one, same = (fit_prior(simulated(300, MISCALIBRATED, 2).outcomes).weights for _ in range(2))
    assert np.array_equal(one, same)
    monkeypatch.setattr(module, "CHUNK", 7)
    outcomes = simulated(300, MISCALIBRATED, 2).outcomes
    np.testing.assert_allclose(fit_prior(outcomes).weights, one, atol=1e-8)
    assert losses(Prior(one), outcomes)[1] == pytest.approx(losses(UNTRAINED, outcomes)[0])


@pytest.mark.parametrize("rank", [-1, 0, K - 1])
def test_outcomes_that_are_all_alike_have_finite_weights(rank: int) -> None:
    outcomes, _ = simulated(500, MISCALIBRATED, 3)
    alike = with_ranks(outcomes, torch.full((500,), rank))
    prior = fit_prior(alike)
    assert np.isfinite(prior.weights).all()
    assert losses(prior, alike).trained < 0.1 * losses(UNTRAINED, alike).trained


def test_choices_that_cannot_be_drawn_do_no_harm() -> None:
    outcomes, _ = simulated(500, MISCALIBRATED, 4)
    found, ranks = outcomes.found, outcomes.ranks.clamp(max=1)
    for values in (found.scores, found.log_probs):
        values[:, 2:] = -torch.inf
    prior = fit_prior(with_ranks(outcomes, ranks))
    assert np.isfinite(prior.weights).all()
    assert np.abs(prior.weights).max() < 5


def test_losses_of_the_draft_are_those_of_its_own_chances() -> None:
    outcomes, _ = simulated(50, MISCALIBRATED, 5)
    chances = own_chances(outcomes.found)[0].numpy()
    slow = 0.0
    for of_slot, rank in zip(chances, outcomes.ranks.tolist(), strict=True):
        slow -= sum(math.log(chance if j == rank else 1 - chance) for j, chance in enumerate(of_slot))
    assert losses(UNTRAINED, outcomes).own == pytest.approx(slow / 50, rel=1e-6)


def test_decoding_begins_with_the_chances_that_were_fitted() -> None:
    """As far as they add up to no more than 1 and fall along a slot, which the fit does not ask for."""
    prior = fit_prior(simulated(2000, MISCALIBRATED, 0).outcomes)
    test, _ = simulated(300, MISCALIBRATED, 1)
    model = AcceptanceModel(7, prior)
    chances = model.propose(np.ones(300, dtype=bool), test.found, test.depths.numpy()).chances
    used = chances[test.num_passed.clamp(max=2).numpy(), np.arange(300)]
    fitted = slow_chances(test, prior.weights)
    expected = fitted / np.maximum(fitted.sum(axis=1, keepdims=True), 1.0)
    np.testing.assert_allclose(used, np.minimum.accumulate(expected, axis=1), rtol=1e-4, atol=1e-4)
