"""LM head of a draft: the checkpoint's, the target's, or the target's rows of a smaller vocabulary.

With a large vocabulary the head is most of what a draft's pass reads, and most tokens are rare. A draft may therefore
have a smaller vocabulary, the target's most frequent tokens (as in EAGLE-3, arXiv 2503.01840, and FR-Spec, arXiv
2502.14856). The target still scores all tokens, so the text does not change: other tokens are just never drafted.
"""

from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockpilot.drafts.edges import Edges
from blockpilot.models.decoder import capped, soft_cap
from blockpilot.models.kernels import Product
from blockpilot.native.ranking import Subset


class DraftHead:
    """hidden [M, hidden] -> logits [M, K] of the draft's vocabulary: its `subset`, or None for all tokens.

    tokens [K]: ascending ids of the draft's vocabulary; None for the target's. cap: soft cap of the logits.
    """

    def __init__(
        self,
        head: Callable[[Tensor], Tensor],
        tokens: Tensor | None,
        vocab_size: int,
        edges: Edges | None = None,
        cap: float | None = None,
    ) -> None:
        is_whole = tokens is None or torch.equal(tokens.cpu(), torch.arange(vocab_size))
        self.subset = None if tokens is None or is_whole else Subset.of(tokens, vocab_size)
        self.edges, self._head, self._cap = edges, head, cap

    @classmethod
    def from_target(cls, target: PreTrainedModel, vocabulary: Tensor | None, edges: Edges | None = None) -> Self:
        """The target's head with its soft cap, or its rows of a vocabulary."""
        tokens, head = None if vocabulary is None else vocabulary.sort().values, target.get_output_embeddings()
        proposing = head if tokens is None else _some_rows(head, tokens)
        return cls(proposing, tokens, target.config.vocab_size, edges, soft_cap(target.config))

    def __call__(self, hidden: Tensor) -> Tensor:
        return capped(self._head(hidden), self._cap)


def is_copy(module: nn.Module | None, target_module: nn.Module) -> bool:
    """True if embeddings or LM head of a draft equal the target's."""
    return module is not None and torch.equal(cast(Tensor, module.weight), cast(Tensor, target_module.weight))


@torch.no_grad()
def _some_rows(head: Any, rows: Tensor) -> Product:
    weight, bias = head.weight[rows], head.bias
    part = nn.Linear(head.in_features, len(rows), bias=bias is not None, device="meta")
    part.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        part.bias = nn.Parameter(bias[rows], requires_grad=False)
    return Product([part])
