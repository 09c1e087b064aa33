"""The LM head of a draft: the target's, or those of its rows whose tokens the draft may propose.

With a large vocabulary the head is most of what a draft's pass reads, and nearly all of its rows are never wanted. A
draft may therefore come with a vocabulary of its own, the target's most frequent tokens (as in EAGLE-3, arXiv
2503.01840, and FR-Spec, arXiv 2502.14856). The target scores all tokens as ever, so the text does not change: a token
outside the vocabulary is never drafted, only never accepted.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockpilot.drafts.markov import MarkovHead
from blockpilot.models.kernels import Product


class DraftHead:
    """hidden [M, hidden] -> logits [M, target's vocabulary], -inf for tokens that the draft does not propose."""

    def __init__(self, target: PreTrainedModel, vocabulary: Tensor | None, markov: MarkovHead | None = None) -> None:
        self.markov = markov
        self._vocab_size = target.config.vocab_size
        self.tokens = None if vocabulary is None else vocabulary.sort().values
        """Ids of the draft's vocabulary in their order; None where it is the target's."""
        head = target.get_output_embeddings()
        self._own: Callable[[Tensor], Tensor] = head if self.tokens is None else _some_rows(head, self.tokens)

    def __call__(self, hidden: Tensor) -> Tensor:
        found = self.of_own(hidden)
        if self.tokens is None:
            return found
        every = found.new_full((len(found), self._vocab_size), -math.inf)
        return every.index_copy_(1, self.tokens, found)

    def of_own(self, hidden: Tensor) -> Tensor:
        """Logits of the draft's own vocabulary alone, [M, len(tokens)]."""
        return self._own(hidden)


@torch.no_grad()
def _some_rows(head: Any, rows: Tensor) -> Product:
    weight, bias = head.weight[rows], head.bias
    part = nn.Linear(head.in_features, len(rows), bias=bias is not None, device="meta")
    part.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        part.bias = nn.Parameter(bias[rows], requires_grad=False)
    return Product([part])
