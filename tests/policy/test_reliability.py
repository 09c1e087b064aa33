"""Reliability of chances: what is counted, worked by hand and by chance."""

import numpy as np
import pytest
import torch

from blockpilot.control.acceptance import NUM_WEIGHTS, UNTRAINED, Prior
from blockpilot.policy.outcomes import Proposed, fit_prior, outcomes_of
from blockpilot.policy.reliability import Bin, mean_error, reliability


def test_nodes_of_one_step_worked_by_hand() -> None:
    """Chances .6 and .4, below each .9 and .1; right is the second choice, then its first."""
    log_probs = torch.tensor([[[0.6, 0.4], [0.9, 0.1]]]).log()
    steps = Proposed(torch.tensor([[1, 0]], dtype=torch.int8), log_probs, log_probs, torch.tensor([False]))
    found = reliability(None, steps)
    # .6, .6*.9 and .6*.1, which are wrong; .4, .4*.9 and .4*.1, of which the first two are right
    assert [each.num_nodes for each in found] == [2, 1, 1, 1, 1]
    assert [each.expected for each in found] == pytest.approx([(0.06 + 0.04) / 2, 0.36, 0.4, 0.54, 0.6])
    assert [each.accepted for each in found] == [0, 1, 1, 0, 0]


def test_unknown_slots_count_nothing() -> None:
    log_probs = torch.tensor([[[0.6, 0.4], [0.9, 0.1]]]).log()
    steps = Proposed(torch.tensor([[1, -2]], dtype=torch.int8), log_probs, log_probs, torch.tensor([False]))
    assert sum(each.num_nodes for each in reliability(None, steps)) == 2


def test_true_chances_are_reliable() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(3000, 2, 4, generator=generator).softmax(dim=-1).sort(dim=-1, descending=True).values
    ranks = probs.flatten(0, 1).multinomial(1, generator=generator).view(3000, 2).char()
    found = reliability(None, Proposed(ranks, probs.log(), probs.log(), torch.zeros(3000).bool()))
    assert sum(each.num_nodes for each in found) == 3000 * 15
    assert all(abs(each.expected - each.accepted) < 0.02 for each in found if each.num_nodes > 1000)


def overconfident(num: int, seed: int) -> Proposed:
    """A draft whose probabilities are twice as sharp, in logits, as what is right."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num, 2, 4, generator=generator).sort(dim=-1, descending=True).values
    ranks = logits.softmax(dim=-1).flatten(0, 1).multinomial(1, generator=generator).view(num, 2).char()
    said = (2 * logits).log_softmax(dim=-1)
    return Proposed(ranks, said, said, torch.zeros(num).bool())


def test_a_fitted_prior_is_more_reliable_than_a_draft_that_errs() -> None:
    prior = fit_prior(outcomes_of(overconfident(3000, 0)))
    trained, own = (mean_error(reliability(each, overconfident(1000, 1))) for each in (prior, None))
    assert own > 0.04
    assert trained < 0.5 * own


def test_an_untrained_prior_is_as_reliable_as_the_draft() -> None:
    steps = overconfident(200, 2)
    for one, other in zip(reliability(UNTRAINED, steps), reliability(None, steps), strict=True):
        assert one == pytest.approx(other, abs=1e-3)


def test_chances_after_a_later_choice_are_those_of_its_context() -> None:
    """This prior says that nothing is right below one."""
    weights = np.zeros((2, NUM_WEIGHTS))
    weights[:, 7:11] = -30.0
    log_probs = torch.tensor([[[0.6, 0.4], [0.9, 0.1]]]).log()
    steps = Proposed(torch.tensor([[1, 0]], dtype=torch.int8), log_probs, log_probs, torch.tensor([False]))
    found = reliability(Prior(weights), steps)
    assert found[0].num_nodes == 3  # .6*.1, and below the second choice both
    assert found[0].expected == pytest.approx(0.06 / 3, abs=1e-4)


def test_the_mean_error_is_over_nodes() -> None:
    assert mean_error([Bin(30, 0.1, 0.2), Bin(10, 0.9, 0.6)]) == pytest.approx((30 * 0.1 + 10 * 0.3) / 40)
