"""Reliability diagram of acceptance probabilities: nodes of draft trees in ten bins, and the share accepted in each.

Nodes are selected by the products of their choices' probabilities, so these products must be calibrated, not only the
probabilities of single choices.
"""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from blockpilot.control.acceptance import AcceptanceModel, Array, Prior
from blockpilot.drafts.choices import draft_probs
from blockpilot.engine.trees import best_first, choices_of, independent_slots
from blockpilot.policy.outcomes import Proposed
from blockpilot.types import Candidates

NUM_NODES = 15  # of a tree
NUM_BINS = 10


class Bin(NamedTuple):
    """Nodes with acceptance probabilities in the same interval of width 1 / NUM_BINS."""

    num_nodes: int
    expected: float
    """Mean acceptance probability."""
    accepted: float
    """Share of nodes that were accepted, with all their ancestors."""


def reliability(prior: Prior | None, steps: Proposed) -> list[Bin]:
    """Non-empty bins of trees grown with a fixed prior, or with the draft's own probabilities if `prior` is None."""
    num_steps, depth, num_choices = steps.scores.shape
    probs = _probs(prior, steps)
    probs_by_step = probs.reshape(len(probs), num_steps, depth, num_choices).swapaxes(0, 1).tolist()
    bins = [[0, 0.0, 0] for _ in range(NUM_BINS)]
    for step_probs, ranks in zip(probs_by_step, steps.ranks.tolist(), strict=True):
        accepted = [True]  # of the anchor and every node
        slots = independent_slots([list(range(num_choices))] * depth, step_probs)
        for node in islice(best_first(choices_of(slots)), NUM_NODES):
            right_choice = ranks[node.depth - 1]
            accepted.append(accepted[node.parent] and node.token == right_choice)
            if right_choice != -2:
                bin_sums = bins[min(int(node.chance * NUM_BINS), NUM_BINS - 1)]
                bin_sums[0] += 1
                bin_sums[1] += node.chance
                bin_sums[2] += accepted[-1]
    return [Bin(int(num), expected / num, num_accepted / num) for num, expected, num_accepted in bins if num]


def mean_error(bins: Sequence[Bin]) -> float:
    """Expected calibration error: mean over nodes of |expected - accepted| of their bin; needs at least one node."""
    total = sum(b.num_nodes for b in bins)
    return sum(b.num_nodes * abs(b.expected - b.accepted) for b in bins) / total


def _probs(prior: Prior | None, steps: Proposed) -> Array:
    """Probabilities [contexts, steps * depth, k] that choices are right."""
    num_steps, depth, _ = steps.scores.shape
    tokens = torch.zeros(num_steps * depth, 0, dtype=torch.int64)
    scores, log_probs = (values.float().flatten(0, 1) for values in (steps.scores, steps.log_probs))
    candidates = Candidates(tokens, scores, log_probs, steps.drawn.repeat_interleave(depth))
    if prior is None:
        probs: Array = draft_probs(candidates).numpy()
        return probs
    has_candidates, depths = np.ones(len(tokens), dtype=bool), np.tile(np.arange(depth), num_steps)
    return AcceptanceModel(max(depth, 1), prior).propose(has_candidates, candidates, depths).chances
