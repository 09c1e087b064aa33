"""The policy's network: a residual MLP on what is known of a request after its prefill.

BlockPilot (arXiv 2606.31315) reads the target's distribution after the prompt. Its first layer is as wide as the
vocabulary, and a prompt's distribution is nearly all zeros, so the layer is a weighted embedding bag over the token
ids whose probability passes a threshold. That is exactly the dense layer on the thresholded distribution. The layer
starts at zero; a token id that never occurred in training therefore still has a row of zeros, and only the other rows
(the support) are stored.

Besides or instead, the network reads what the draft is about to draft from: its context vector at the last position
before the anchor and the anchor's embedding, and a few scalars.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

Input = Literal["probs", "context", "anchor", "scalars"]
INPUTS: tuple[Input, ...] = get_args(Input)
SCALARS = ("entropy", "log_num_prompt_tokens", "temperature")
MAX_DEPTH = 8


class SparseProbs(NamedTuple):
    """A batch of B thresholded distributions, one after the other."""

    ids: Tensor
    """[N] int64 token ids."""
    probs: Tensor
    """[N] float32, their probabilities."""
    offsets: Tensor
    """[B] int64, where each distribution starts in `ids`."""


class Features(NamedTuple):
    """What is known of B requests after their prefill."""

    probs: SparseProbs
    context: Tensor
    """[B, draft hidden] float32, at the position before the anchor; [B, 0] where nothing is drafted."""
    anchor: Tensor
    """[B, target hidden] float32, the target's embedding of the anchor; [B, 0] where it is not known."""
    scalars: Tensor
    """[B, len(SCALARS)] float32, of the prefill."""

    def to(self, device: torch.device) -> "Features":
        probs = SparseProbs(*(t.to(device) for t in self.probs))
        return Features(probs, self.context.to(device), self.anchor.to(device), self.scalars.to(device))


STRETCH = 64  # token ids


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


def no_probs(num: int, device: torch.device) -> SparseProbs:
    """`num` empty distributions, for a network that reads none."""
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return SparseProbs(nothing, torch.zeros(0, device=device), torch.zeros(num, dtype=torch.int64, device=device))


def scalars(probs: Tensor, num_prompt_tokens: int, temperature: float) -> list[float]:
    """SCALARS of one request; the entropy (nats) is that of the entries given, which pass the threshold."""
    return [float(torch.special.entr(probs).sum()), math.log(num_prompt_tokens), temperature]


@dataclass(frozen=True)
class Shape:
    """What fixes a network's parameters but for the support."""

    inputs: tuple[Input, ...]
    vocab_size: int
    context_size: int
    anchor_size: int
    num_outputs: int
    hidden: int = 2048
    depth: int = 2

    def __post_init__(self) -> None:
        if not self.inputs or [name for name in INPUTS if name in self.inputs] != list(self.inputs):
            raise ValueError(f"inputs {self.inputs}: must be some of {INPUTS}, in this order")
        for name in ("vocab_size", "context_size", "anchor_size", "num_outputs", "hidden", "depth"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name} {getattr(self, name)!r}: must be a whole number")
        if not 1 <= self.depth <= MAX_DEPTH:
            raise ValueError(f"depth {self.depth}: must be 1 to {MAX_DEPTH}")
        for name in ("vocab_size", "num_outputs", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1")
        for name, size in (("context", self.context_size), ("anchor", self.anchor_size)):
            if name in self.inputs and size < 1:
                raise ValueError(f"inputs {self.inputs}: {name} is not known, a dense sweep that drafts records it")

    @property
    def num_dense(self) -> int:
        """Width of the dense inputs together."""
        sizes = {"context": self.context_size, "anchor": self.anchor_size, "scalars": len(SCALARS)}
        return sum(sizes.get(name, 0) for name in self.inputs)


class PolicyNetwork(nn.Module):
    """First layer-ReLU-Dropout-[Linear + residual] x (depth - 1)-Linear; the paper's has a depth of 2.

    `support` [S] int64, increasing: the token ids whose column of the first layer may differ from zero. Dense inputs
    are standardised, and outputs are those of standardised targets (`standardise`).
    """

    support: Tensor
    row_of_id: Tensor
    mean: Tensor
    std: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, shape: Shape, support: Tensor, dropout: float = 0.2) -> None:
        super().__init__()
        self.shape = shape
        hidden = shape.hidden
        self.register_buffer("support", support, persistent=False)
        if "probs" in shape.inputs:
            row_of_id = torch.full((shape.vocab_size,), -1, dtype=torch.int32)
            row_of_id[support] = torch.arange(len(support), dtype=torch.int32)
            self.register_buffer("row_of_id", row_of_id, persistent=False)
            self.rows = nn.Parameter(torch.zeros(len(support), hidden))
        if shape.num_dense:
            self.dense = nn.Linear(shape.num_dense, hidden, bias=False)
            self.register_buffer("mean", torch.zeros(shape.num_dense))
            self.register_buffer("std", torch.ones(shape.num_dense))
        width = shape.num_dense or shape.vocab_size
        self.bias = nn.Parameter(torch.empty(hidden).uniform_(-1, 1) / math.sqrt(width))
        self.mix = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(shape.depth - 1))
        self.head = nn.Linear(hidden, shape.num_outputs)
        self.register_buffer("shift", torch.zeros(shape.num_outputs))
        self.register_buffer("scale", torch.ones(shape.num_outputs))
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Features) -> Tensor:
        """Features of B requests -> [B, num_outputs]."""
        hidden = self.bias.expand(len(features.scalars), -1)
        if "probs" in self.shape.inputs:
            hidden = hidden + self.bags(features.probs)
        if self.shape.num_dense:
            hidden = hidden + self.dense((self.dense_inputs(features) - self.mean) / self.std)
        hidden = self.dropout(torch.relu(hidden))
        for layer in self.mix:
            hidden = hidden + layer(hidden)
        outputs: Tensor = self.head(hidden) * self.scale + self.shift
        return outputs

    def dense_inputs(self, features: Features) -> Tensor:
        """[B, num_dense], before they are standardised."""
        chosen = {"context": features.context, "anchor": features.anchor, "scalars": features.scalars}
        return torch.cat([chosen[name] for name in self.shape.inputs if name in chosen], dim=1)

    def standardise(self, features: Features, targets: Tensor | None) -> None:
        """Take means and deviations from training data: of dense inputs, and of targets [B, num_outputs] if given.

        A target that is always the same (B=1 emits one token a step) is then predicted exactly.
        """
        if self.shape.num_dense:
            inputs = self.dense_inputs(features)
            self.mean.copy_(inputs.mean(dim=0))
            std = inputs.std(dim=0, correction=0)
            self.std.copy_(torch.where(std > 0, std, 1.0))
        if targets is not None:
            self.shift.copy_(targets.mean(dim=0))
            self.scale.copy_(targets.std(dim=0, correction=0))

    @torch.no_grad()
    def folded(self) -> "FoldedNetwork":
        """The same function in fewer operations."""
        weight, bias = self.head.weight.double(), self.head.bias.double()
        for layer in reversed(self.mix):
            assert isinstance(layer, nn.Linear)
            bias = bias + weight @ layer.bias.double()
            weight = weight + weight @ layer.weight.double()
        first, offset = None, self.bias.double()
        if self.shape.num_dense:
            first = self.dense.weight.double() / self.std.double()
            offset = offset - first @ self.mean.double()
            first = first.float()
        scale = self.scale.double()
        tail = (scale[:, None] * weight).float(), (scale * bias + self.shift.double()).float()
        return FoldedNetwork(self, first, offset.float(), *tail)

    def bags(self, probs: SparseProbs) -> Tensor:
        """What the distributions add to the first layer: [B, hidden]."""
        rows = self.row_of_id[probs.ids]
        weights = torch.where(rows >= 0, probs.probs, 0.0)
        return functional.embedding_bag(
            rows.clamp(min=0).long(), self.rows, probs.offsets, mode="sum", per_sample_weights=weights
        )


@dataclass(frozen=True)
class FoldedNetwork:
    """A network as policies run it, before every step of a batch.

    Nothing follows the layers after the first but the head: they are linear, here as in the paper, and become one
    with it. Means and deviations go into the weights, too.
    """

    network: PolicyNetwork
    first: Tensor | None
    """[hidden, num_dense], of dense inputs as they are."""
    offset: Tensor
    """[hidden]"""
    weight: Tensor
    """[num_outputs, hidden]"""
    bias: Tensor
    """[num_outputs]"""

    @property
    def device(self) -> torch.device:
        return self.bias.device

    def __call__(self, features: Features) -> Tensor:
        """Features of B requests -> [B, num_outputs]."""
        hidden = self.offset
        if self.first is not None:
            hidden = functional.linear(self.network.dense_inputs(features), self.first, hidden)
        if "probs" in self.network.shape.inputs:
            hidden = hidden + self.network.bags(features.probs)
        return functional.linear(hidden.relu(), self.weight, self.bias)
