"""The policy's network: one hidden layer on what is known before a choice.

BlockPilot (arXiv 2606.31315) reads the target's distribution after the prompt (kind `prompt`). Its first layer is as
wide as the vocabulary, and a prompt's distribution is nearly all zeros, so the layer is a weighted embedding bag over
the token ids whose probability passes a threshold. That is exactly the dense layer on the thresholded distribution.
The layer starts at zero; a token id that never occurred in training therefore still has a row of zeros, and only the
other rows (the support) are stored. The paper's residual layer after the ReLU is linear and so is one with the head.

Kind `step` reads what the draft is about to draft from: its context vector at the last position before the anchor,
the anchor's embedding, and a few scalars of the prompt.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

Kind = Literal["prompt", "step"]
"""prompt: one block size for the whole answer, out of the distribution after the prompt. step: tokens of the next
step with each candidate, before every step."""
SCALARS = ("entropy", "log_num_prompt_tokens", "temperature")
STRETCH = 64  # token ids


class SparseProbs(NamedTuple):
    """A batch of B thresholded distributions, one after the other."""

    ids: Tensor
    """[N] int64 token ids."""
    probs: Tensor
    """[N] float32, their probabilities."""
    offsets: Tensor
    """[B] int64, where each distribution starts in `ids`."""


class PolicyFeatures(NamedTuple):
    """What is known of B requests. Kind `prompt` reads `probs`, kind `step` the others."""

    probs: SparseProbs
    context: Tensor
    """[B, draft hidden] float32, at the position before the anchor."""
    anchor: Tensor
    """[B, target hidden] float32, the target's embedding of the anchor."""
    scalars: Tensor
    """[B, len(SCALARS)] float32, of the prefill."""

    def to(self, device: torch.device) -> "PolicyFeatures":
        """The same features on the device."""
        probs = SparseProbs(*(t.to(device) for t in self.probs))
        return PolicyFeatures(probs, *(t.to(device) for t in self[1:]))

    @property
    def dense(self) -> Tensor:
        """Context, anchor and scalars side by side, [B, their widths together]."""
        return torch.cat([self.context, self.anchor, self.scalars], dim=1)


def sparse_probs(probs: Tensor, threshold: float) -> SparseProbs:
    """The entries of one distribution [V] that are at least `threshold`, as a batch of one.

    Most stretches of a vocabulary have none, which their largest entry tells in one quick pass.
    """
    short = -len(probs) % STRETCH
    stretches = (functional.pad(probs, (0, short)) if short else probs).view(-1, STRETCH)
    (some,) = torch.nonzero(stretches.amax(dim=1) >= threshold, as_tuple=True)
    row, column = torch.nonzero(stretches[some] >= threshold, as_tuple=True)
    ids = some[row] * STRETCH + column
    return SparseProbs(ids, probs[ids], torch.zeros(1, dtype=torch.int64, device=probs.device))


def scalars(probs: Tensor, num_prompt_tokens: int, temperature: float) -> list[float]:
    """SCALARS of one request; the entropy (nats) is that of the entries given, which pass the threshold."""
    return [float(torch.special.entr(probs).sum()), math.log(num_prompt_tokens), temperature]


MOST = 2**24  # of any size of a network


@dataclass(frozen=True)
class NetworkShape:
    """What fixes a network's parameters but for the support. Raises ValueError for impossible sizes."""

    kind: Kind
    vocab_size: int
    context_size: int
    """Of the draft's context vector; 0 with kind `prompt`, which does not read it."""
    anchor_size: int
    """Of the target's embeddings; 0 with kind `prompt`, which does not read them."""
    num_outputs: int
    hidden: int

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind {self.kind!r}: must be one of {', '.join(get_args(Kind))}")
        for name in ("vocab_size", "context_size", "anchor_size", "num_outputs", "hidden"):
            size = getattr(self, name)
            if type(size) is not int:
                raise ValueError(f"{name} {size!r}: must be a whole number")
            if self.kind == "prompt" and name in ("context_size", "anchor_size"):
                allowed, rule = size == 0, "must be 0"
            else:
                allowed, rule = 1 <= size <= MOST, f"must be 1 to {MOST}"
            if not allowed:
                raise ValueError(f"{name} {size} with kind {self.kind!r}: {rule}")

    @property
    def width(self) -> int:
        """Inputs of the first layer."""
        return self.vocab_size if self.kind == "prompt" else self.context_size + self.anchor_size + len(SCALARS)


class PolicyNetwork(nn.Module):
    """First layer - ReLU - dropout - linear head: [B, num_outputs] of PolicyFeatures.

    `support` [S] int64, increasing: the token ids whose column of the first layer may differ from zero. `mean` and
    `std` of the dense features are there while it trains; `fold` takes them into the weights.
    """

    support: Tensor
    row_of_id: Tensor
    mean: Tensor | None
    std: Tensor | None

    def __init__(self, shape: NetworkShape, support: Tensor, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        self.register_buffer("support", support, persistent=False)
        self.register_buffer("mean", None)
        self.register_buffer("std", None)
        if shape.kind == "prompt":
            row_of_id = torch.full((shape.vocab_size,), -1, dtype=torch.int32)
            row_of_id[support] = torch.arange(len(support), dtype=torch.int32)
            self.register_buffer("row_of_id", row_of_id, persistent=False)
            self.rows = nn.Parameter(torch.zeros(len(support), shape.hidden))
        else:
            self.dense = nn.Linear(shape.width, shape.hidden, bias=False)
        self.bias = nn.Parameter(torch.empty(shape.hidden).uniform_(-1, 1) / math.sqrt(shape.width))
        self.head = nn.Linear(shape.hidden, shape.num_outputs)

    def forward(self, features: PolicyFeatures) -> Tensor:
        """[B, num_outputs]."""
        layers, dense = self.layers(), features.dense
        if self.mean is not None and self.std is not None:
            dense = (dense - self.mean) / self.std
        return layers.outputs(functional.dropout(layers.hidden(features.probs, dense), self.dropout, self.training))

    def layers(self) -> "Layers":
        """The tensors of a network, as decoding uses them."""
        rest = self.bias, self.head.weight, self.head.bias
        if self.shape.kind == "prompt":
            return Layers(self.row_of_id, self.rows, *rest)
        return Layers(None, self.dense.weight, *rest)

    def standardise(self, features: PolicyFeatures) -> None:
        """Take means and deviations of the dense features from training data; what never varies keeps its scale."""
        if self.shape.kind == "step":
            std = features.dense.std(dim=0, correction=0)
            self.mean, self.std = features.dense.mean(dim=0), torch.where(std > 0, std, 1.0)

    @torch.no_grad()
    def fold(self) -> None:
        """Take means and deviations into the first layer: the same function of features as they are."""
        if self.mean is None or self.std is None:
            return
        weight = self.dense.weight.double() / self.std.double()
        self.bias.copy_(self.bias.double() - weight @ self.mean.double())
        self.dense.weight.copy_(weight)
        self.mean = self.std = None


class Layers(NamedTuple):
    """A network's tensors. A torch module takes as long to look them up as a small step takes to compute."""

    row_of_id: Tensor | None
    """[vocabulary] int32: the row of `first` of each token id, -1 for none. None with kind `step`."""
    first: Tensor
    """[S, hidden] of kind `prompt`, [hidden, dense features] of kind `step`."""
    first_bias: Tensor
    head: Tensor
    """[num_outputs, hidden]"""
    head_bias: Tensor

    def hidden(self, probs: SparseProbs | None, dense: Tensor) -> Tensor:
        """[B, hidden] of the features that the kind reads: `probs`, or with kind `step` `dense`."""
        if self.row_of_id is None:
            return functional.linear(dense, self.first, self.first_bias).relu()
        assert probs is not None
        rows = self.row_of_id[probs.ids]
        weights = torch.where(rows >= 0, probs.probs, 0.0)
        bags = functional.embedding_bag(
            rows.clamp(min=0).long(), self.first, probs.offsets, mode="sum", per_sample_weights=weights
        )
        return (self.first_bias + bags).relu()

    def outputs(self, hidden: Tensor) -> Tensor:
        """[B, num_outputs]."""
        return functional.linear(hidden, self.head, self.head_bias)
