"""Reliability of chances: what is counted, worked by hand and by chance."""

import pytest
import torch

from blockpilot.policy.nodes import Proposed
from blockpilot.policy.reliability import reliability


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
