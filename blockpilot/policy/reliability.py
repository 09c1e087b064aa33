"""Reliability of chances: nodes of draft trees by decile of the chance that they had, and how many were accepted.

A tree is bought by the products of its choices' chances, so these are what must be right, not only single choices.
"""

from itertools import islice
from typing import NamedTuple

import torch

from blockpilot.drafts.choices import own_chances
from blockpilot.engine.trees import best_first, drawn_apart
from blockpilot.policy.nodes import NodeModel, Proposed
from blockpilot.types import Candidates

NUM_NODES = 15  # of a tree
NUM_BINS = 10


class Bin(NamedTuple):
    """Nodes whose chances lie in the same tenth."""

    num_nodes: int
    expected: float
    """Mean chance."""
    accepted: float
    """Share that the target chose, and all above them."""


@torch.no_grad()
def reliability(model: NodeModel | None, steps: Proposed) -> list[Bin]:
    """Bins that hold nodes, of trees grown by a model's chances or by the draft's own."""
    num_steps, depth, num_choices = steps.scores.shape
    tokens = torch.zeros(num_steps * depth, 0, dtype=torch.int64)
    scores, log_probs = (each.float().flatten(0, 1) for each in (steps.scores, steps.log_probs))
    found = Candidates(tokens, scores, log_probs, steps.drawn.repeat_interleave(depth))
    chances = own_chances(found) if model is None else model.chances(found, [depth] * num_steps)
    by_step = chances.view(len(chances), num_steps, depth, num_choices).transpose(0, 1).tolist()
    bins = [[0, 0.0, 0] for _ in range(NUM_BINS)]
    for of_step, ranks in zip(by_step, steps.ranks.tolist(), strict=True):
        accepted = [True]
        for node in islice(best_first(drawn_apart([list(range(num_choices))] * depth, of_step)), NUM_NODES):
            right = ranks[node.depth - 1]
            accepted.append(accepted[node.parent] and node.token == right)
            if right != -2:
                into = bins[min(int(node.chance * NUM_BINS), NUM_BINS - 1)]
                into[0] += 1
                into[1] += node.chance
                into[2] += accepted[-1]
    return [Bin(int(num), expected / num, came / num) for num, expected, came in bins if num]
