"""Reliability of acceptance probabilities: counts of nodes, worked by hand and simulated."""

import numpy as np
import pytest
import torch

from blockpilot.control.acceptance import NUM_WEIGHTS, UNTRAINED, Prior
from blockpilot.policy.outcomes import Proposed, fit_prior, outcomes_of
from blockpilot.policy.reliability import Bin, mean_error, reliability


def worked(*ranks: int) -> Proposed:
    """One step: probabilities .6 and .4, then .9 and .1 below each."""
    log_probs = torch.tensor([[[0.6, 0.4], [0.9, 0.1]]]).log()
    return Proposed(torch.tensor([ranks], dtype=torch.int8), log_probs, log_probs, torch.tensor([False]))


def test_nodes_of_worked_steps() -> None:
    """The second choice is right, then the first choice below it."""
    bins = reliability(None, worked(1, 0))
    # wrong: .6, .6*.9, .6*.1 and .4*.1; right: .4 and .4*.9
    assert [of_bin.num_nodes for of_bin in bins] == [2, 1, 1, 1, 1]
    assert [of_bin.expected for of_bin in bins] == pytest.approx([(0.06 + 0.04) / 2, 0.36, 0.4, 0.54, 0.6])
    assert [of_bin.accepted for of_bin in bins] == [0, 1, 1, 0, 0]
    assert mean_error(bins) == pytest.approx((2 * 0.05 + 0.64 + 0.6 + 0.54 + 0.6) / 6)
    assert sum(of_bin.num_nodes for of_bin in reliability(None, worked(1, -2))) == 2  # no nodes in an unknown slot


def test_chances_after_a_later_choice_are_those_of_its_context() -> None:
    """Prior by which nothing is right below a later (not first) choice."""
    weights = np.zeros((2, NUM_WEIGHTS))
    weights[:, 7:11] = -30.0
    lowest: Bin = reliability(Prior(weights), worked(1, 0))[0]
    assert lowest.num_nodes == 3  # .6*.1, and both nodes below the second choice
    assert lowest.expected == pytest.approx(0.06 / 3, abs=1e-4)


def simulated(num: int, seed: int, sharpness: float) -> Proposed:
    """Steps of a draft whose logits are `sharpness` times the true ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num, 2, 4, generator=generator).sort(dim=-1, descending=True).values
    ranks = logits.softmax(dim=-1).flatten(0, 1).multinomial(1, generator=generator).view(num, 2).char()
    log_probs = (sharpness * logits).log_softmax(dim=-1)
    return Proposed(ranks, log_probs, log_probs, torch.zeros(num).bool())


def test_true_chances_are_reliable() -> None:
    bins = reliability(None, simulated(3000, 0, sharpness=1))
    assert sum(of_bin.num_nodes for of_bin in bins) == 3000 * 15
    assert all(abs(of_bin.expected - of_bin.accepted) < 0.02 for of_bin in bins if of_bin.num_nodes > 1000)


def test_a_fitted_prior_is_more_reliable_than_a_draft_that_errs() -> None:
    steps = simulated(1000, 1, sharpness=2)
    fitted = mean_error(reliability(fit_prior(outcomes_of(simulated(3000, 0, sharpness=2))), steps))
    unfitted = mean_error(reliability(None, steps))
    assert unfitted > 0.04
    assert fitted < 0.5 * unfitted
    for untrained, of_draft in zip(reliability(UNTRAINED, steps), reliability(None, steps), strict=True):
        assert untrained == pytest.approx(of_draft, abs=1e-3)
