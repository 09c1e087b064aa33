"""The LM head of a draft: the target's, or those of its rows whose tokens the draft may propose.

With a large vocabulary the head is most of what a draft's pass reads, and nearly all of its rows are never wanted. A
draft may therefore come with a vocabulary of its own, the target's most frequent tokens (as in EAGLE-3, arXiv
2503.01840, and FR-Spec, arXiv 2502.14856). The target scores all tokens as ever, so the text does not change: a token
outside the vocabulary is never drafted, only never accepted.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockpilot.models.kernels import Product


class DraftHead:
    """hidden [M, hidden] -> logits [M, target's vocabulary], -inf for tokens that the draft does not propose."""

    def __init__(self, target: PreTrainedModel, vocabulary: Tensor | None) -> None:
        self._target, self._vocabulary = target, vocabulary
        self._rows = None if vocabulary is None else _some_rows(target.get_output_embeddings(), vocabulary)

    def __call__(self, hidden: Tensor) -> Tensor:
        if self._rows is None or self._vocabulary is None:
            logits: Tensor = self._target.get_output_embeddings()(hidden)
            return logits
        found = self._rows(hidden)
        every = found.new_full((len(found), self._target.config.vocab_size), -math.inf)
        return every.index_copy_(1, self._vocabulary, found)


@torch.no_grad()
def _some_rows(head: Any, rows: Tensor) -> Product:
    weight, bias = head.weight[rows], head.bias
    part = nn.Linear(head.in_features, len(rows), bias=bias is not None, device="meta")
    part.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        part.bias = nn.Parameter(bias[rows], requires_grad=False)
    return Product([part])
