"""Choices of a draft: those that depend on the one before, and what the draft itself thinks of them."""

from typing import NamedTuple

import torch
from torch import Tensor

from blockpilot.types import Candidates


class Linked(NamedTuple):
    """Choices of N positions after each of P contexts: `candidates` [N * P, k], position by position.

    places [N, P, k] say which context of the next position a choice leads to; -1: none, nothing follows it.
    """

    candidates: Candidates
    places: Tensor


def own_chances(candidates: Candidates) -> Tensor:
    """Chances [1, N, k] that the target makes each of a draft's choices; they fall along k.

    At temperature 0 the draft's probabilities. Where tokens are drawn the noise has decided already, if the
    distributions agree; how clearly it has says how far they may differ. 0 where the draft's scores are no numbers.
    """
    chances = torch.where(candidates.drawn[:, None], candidates.scores.softmax(dim=-1), candidates.log_probs.exp())
    return chances.nan_to_num(0.0)[None]
