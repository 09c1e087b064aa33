"""Distribution after a prompt on its way from vLLM's worker to its scheduler, which are two processes."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockpilot.sweep.rows import MIN_PROB
from blockpilot.types import Prefill

PREFILLS = "blockpilot_prefills"
"""Attribute of vLLM's messages: of SchedulerOutput the ids of requests whose distribution is wanted, of
ModelRunnerOutput the distributions by id."""


class SparseDistribution(NamedTuple):
    """Token ids with a probability of at least MIN_PROB, theirs, and the sum of all others."""

    ids: NDArray[np.int64]
    probs: NDArray[np.float32]
    tail_mass: float

    @staticmethod
    def of(logits: Tensor) -> "SparseDistribution":
        """The distribution of logits [vocab]."""
        probs = logits.float().softmax(dim=-1)
        (ids,) = torch.nonzero(probs >= MIN_PROB, as_tuple=True)
        kept = probs[ids]
        return SparseDistribution(ids.cpu().numpy(), kept.cpu().numpy(), max(0.0, 1.0 - float(kept.sum())))

    def prefill(self, vocab_size: int, num_prompt_tokens: int, temperature: float) -> Prefill:
        """All that a policy of kind `prompt` sees; the tail is spread evenly, below any policy's threshold."""
        num_others = max(1, vocab_size - len(self.ids))
        probs = torch.full((vocab_size,), self.tail_mass / num_others)
        probs[torch.from_numpy(self.ids)] = torch.from_numpy(self.probs)
        return Prefill(probs.log(), None, num_prompt_tokens, temperature)
