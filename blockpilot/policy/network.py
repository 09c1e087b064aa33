"""Network of policies of kind `prompt`: one hidden layer on the target's distribution after the prompt.

From BlockPilot (arXiv 2606.31315). The input is as wide as the vocabulary, but nearly all probabilities are zero. The
first layer is therefore a weighted embedding bag over the token ids whose probability passes a threshold, which
equals the dense layer on the thresholded distribution. The layer starts at zero, so token ids that never occur in
training keep a row of zeros; only the other rows (the support) are stored. The paper's residual layer after the ReLU
is linear, so it is merged into the head.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

TILE = 64  # token ids per tile; a tile's largest probability is compared first
MAX_SIZE = 2**24  # of any dimension of a network


class SparseProbs(NamedTuple):
    """Batch of B thresholded distributions, concatenated."""

    ids: Tensor
    """[N] int64 token ids."""
    probs: Tensor
    """[N] float32, their probabilities."""
    offsets: Tensor
    """[B] int64, where each distribution starts in `ids`."""

    def to(self, device: torch.device) -> "SparseProbs":
        """The same distributions on the device."""
        return SparseProbs(*(t.to(device) for t in self))


def sparse_probs(probs: Tensor, threshold: float) -> SparseProbs:
    """The entries of one distribution [V] that are at least `threshold`, as a batch of one.

    A first pass over the maxima of tiles excludes most of the vocabulary.
    """
    padding = -len(probs) % TILE
    tiles = (functional.pad(probs, (0, padding)) if padding else probs).view(-1, TILE)
    (hits,) = torch.nonzero(tiles.amax(dim=1) >= threshold, as_tuple=True)
    row, column = torch.nonzero(tiles[hits] >= threshold, as_tuple=True)
    ids = hits[row] * TILE + column
    return SparseProbs(ids, probs[ids], torch.zeros(1, dtype=torch.int64, device=probs.device))


@dataclass(frozen=True)
class NetworkShape:
    """Dimensions of a network, without the size of its support. Raises ValueError for sizes out of range."""

    vocab_size: int
    num_outputs: int
    hidden: int

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_outputs", "hidden"):
            size = getattr(self, name)
            if type(size) is not int:
                raise ValueError(f"{name} {size!r}: must be a whole number")
            if not 1 <= size <= MAX_SIZE:
                raise ValueError(f"{name} {size}: must be 1 to {MAX_SIZE}")


class PolicyNetwork(nn.Module):
    """Maps SparseProbs to logits [B, num_outputs]: first layer, ReLU, dropout, linear head.

    `support` [S] int64, ascending: the token ids whose row of the first layer may differ from zero.
    """

    support: Tensor
    row_of_id: Tensor

    def __init__(self, shape: NetworkShape, support: Tensor, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        row_of_id = torch.full((shape.vocab_size,), -1, dtype=torch.int32)
        row_of_id[support] = torch.arange(len(support), dtype=torch.int32)
        self.register_buffer("support", support, persistent=False)
        self.register_buffer("row_of_id", row_of_id, persistent=False)
        self.rows = nn.Parameter(torch.zeros(len(support), shape.hidden))
        self.bias = nn.Parameter(torch.empty(shape.hidden).uniform_(-1, 1) / math.sqrt(shape.vocab_size))
        self.head = nn.Linear(shape.hidden, shape.num_outputs)

    def forward(self, probs: SparseProbs) -> Tensor:
        """Logits [B, num_outputs]."""
        layers = self.layers()
        return layers.outputs(functional.dropout(layers.hidden(probs), self.dropout, self.training))

    def layers(self) -> "Layers":
        """The network's tensors, in the form that decoding uses."""
        return Layers(self.row_of_id, self.rows, self.bias, self.head.weight, self.head.bias)


class Layers(NamedTuple):
    """A network's tensors as a tuple: attribute look-ups in a torch module take as long as a small step."""

    row_of_id: Tensor
    """[vocabulary] int32: the row of `first` of each token id, -1 if it has none."""
    first: Tensor
    """[S, hidden]"""
    first_bias: Tensor
    head: Tensor
    """[num_outputs, hidden]"""
    head_bias: Tensor

    def hidden(self, probs: SparseProbs) -> Tensor:
        """Hidden units [B, hidden]."""
        rows = self.row_of_id[probs.ids]
        weights = torch.where(rows >= 0, probs.probs, 0.0)
        bags = functional.embedding_bag(
            rows.clamp(min=0).long(), self.first, probs.offsets, mode="sum", per_sample_weights=weights
        )
        return (self.first_bias + bags).relu()

    def outputs(self, hidden: Tensor) -> Tensor:
        """Logits [B, num_outputs]."""
        return functional.linear(hidden, self.head, self.head_bias)
