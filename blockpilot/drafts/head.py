"""The LM head of a draft: its own, the target's, or those of its rows whose tokens the draft may propose.

With a large vocabulary the head is most of what a draft's pass reads, and nearly all of its rows are never wanted. A
draft may therefore come with a vocabulary of its own, the target's most frequent tokens (as in EAGLE-3, arXiv
2503.01840, and FR-Spec, arXiv 2502.14856). The target scores all tokens as ever, so the text does not change: a token
outside the vocabulary is never drafted, only never accepted.
"""

from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockpilot.drafts.edges import Edges
from blockpilot.models.kernels import Product
from blockpilot.native.ranking import Subset


class DraftHead:
    """hidden [M, hidden] -> logits [M, K] of the tokens that the draft may propose: its `subset`, or None for all.

    `head` gives the logits of `tokens` [K], ids of the draft's vocabulary, ascending; None where it is the target's.
    """

    def __init__(
        self,
        head: Callable[[Tensor], Tensor],
        tokens: Tensor | None,
        vocab_size: int,
        edges: Edges | None = None,
    ) -> None:
        is_whole = tokens is None or torch.equal(tokens.cpu(), torch.arange(vocab_size))
        self.subset = None if tokens is None or is_whole else Subset.of(tokens, vocab_size)
        self.edges, self._head = edges, head

    @classmethod
    def of_target(cls, target: PreTrainedModel, vocabulary: Tensor | None, edges: Edges | None = None) -> Self:
        """The target's, or its rows of a vocabulary."""
        tokens, head = None if vocabulary is None else vocabulary.sort().values, target.get_output_embeddings()
        proposing = head if tokens is None else _some_rows(head, tokens)
        return cls(proposing, tokens, target.config.vocab_size, edges)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


def is_copy(module: nn.Module | None, target_module: nn.Module) -> bool:
    """True for embeddings or an LM head of a draft that are the target's over again."""
    return module is not None and torch.equal(cast(Tensor, module.weight), cast(Tensor, target_module.weight))


@torch.no_grad()
def _some_rows(head: Any, rows: Tensor) -> Product:
    weight, bias = head.weight[rows], head.bias
    part = nn.Linear(head.in_features, len(rows), bias=bias is not None, device="meta")
    part.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        part.bias = nn.Parameter(bias[rows], requires_grad=False)
    return Product([part])
