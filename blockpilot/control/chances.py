"""Chances of a draft's choices without a policy: what the draft itself thinks of them."""

import torch
from torch import Tensor

from blockpilot.types import Candidates


def own_chances(found: Candidates) -> Tensor:
    """Chances [1, N, k] that the target makes each of a draft's choices; they fall along k.

    At temperature 0 the draft's probabilities. Where tokens are drawn the noise has decided already, if the
    distributions agree; how clearly it has says how far they may differ. 0 where the draft's scores are no numbers.
    """
    chances = torch.where(found.drawn[:, None], found.scores.softmax(dim=-1), found.log_probs.exp())
    return chances.nan_to_num(0.0)[None]
