"""Reliability of chances: nodes of draft trees by decile of the chance that they had, and how many were accepted.

A tree is selected by the products of its choices' chances, so these are what must be right, not only single choices.
"""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from blockpilot.control.acceptance import AcceptanceModel, Array, Prior
from blockpilot.drafts.choices import own_chances
from blockpilot.engine.trees import best_first, choices_of, drawn_apart
from blockpilot.policy.outcomes import Proposed
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


def reliability(prior: Prior | None, steps: Proposed) -> list[Bin]:
    """Bins that hold nodes, of trees grown by the chances of a prior that learns nothing, or by the draft's own."""
    num_steps, depth, num_choices = steps.scores.shape
    chances = _chances(prior, steps)
    by_step = chances.reshape(len(chances), num_steps, depth, num_choices).swapaxes(0, 1).tolist()
    bins = [[0, 0.0, 0] for _ in range(NUM_BINS)]
    for of_step, ranks in zip(by_step, steps.ranks.tolist(), strict=True):
        accepted = [True]
        for node in islice(
            best_first(choices_of(drawn_apart([list(range(num_choices))] * depth, of_step))), NUM_NODES
        ):
            right = ranks[node.depth - 1]
            accepted.append(accepted[node.parent] and node.token == right)
            if right != -2:
                into = bins[min(int(node.chance * NUM_BINS), NUM_BINS - 1)]
                into[0] += 1
                into[1] += node.chance
                into[2] += accepted[-1]
    return [Bin(int(num), expected / num, came / num) for num, expected, came in bins if num]


def mean_error(bins: Sequence[Bin]) -> float:
    """Mean distance, over nodes, of a bin's chance from the share accepted; there must be some nodes."""
    total = sum(each.num_nodes for each in bins)
    return sum(each.num_nodes * abs(each.expected - each.accepted) for each in bins) / total


def _chances(prior: Prior | None, steps: Proposed) -> Array:
    """[contexts, steps * depth, k]."""
    num_steps, depth, _ = steps.scores.shape
    tokens = torch.zeros(num_steps * depth, 0, dtype=torch.int64)
    scores, log_probs = (each.float().flatten(0, 1) for each in (steps.scores, steps.log_probs))
    found = Candidates(tokens, scores, log_probs, steps.drawn.repeat_interleave(depth))
    if prior is None:
        own: Array = own_chances(found).numpy()
        return own
    known, slots = np.ones(len(tokens), dtype=bool), np.tile(np.arange(depth), num_steps)
    return AcceptanceModel(max(depth, 1), prior).propose(known, found, slots).chances
