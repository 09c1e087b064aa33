"""Candidates of a draft that depend on the token before them, and the draft's own probabilities."""

from typing import NamedTuple

import torch
from torch import Tensor

from blockpilot.types import Candidates


class ConditionalCandidates(NamedTuple):
    """Candidates [N * P, k] of N positions after each of P contexts, position by position.

    next_lists [N, P, k]: the context of the next position that a choice leads to; -1: nothing follows it.
    """

    candidates: Candidates
    next_lists: Tensor


def draft_probs(candidates: Candidates) -> Tensor:
    """Acceptance probabilities [1, N, k] of candidates by the draft alone, descending along k.

    At temperature 0 these are the draft's probabilities. For sampled tokens they are the softmax of the noisy scores:
    draft and target share the noise, so a large margin between scores means that the target probably samples the same
    token. 0 where the scores are NaN.
    """
    chances = torch.where(candidates.drawn[:, None], candidates.scores.softmax(dim=-1), candidates.log_probs.exp())
    return chances.nan_to_num(0.0)[None]
