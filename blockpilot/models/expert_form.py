"""Differences between families in their experts: the layout of the weights, and the activation."""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional


class ExpertForm(NamedTuple):
    """Layout and activation of experts: Qwen's, or gpt-oss's."""

    is_interleaved: bool
    """A module's weights are [experts, inputs, outputs], and gates and ups alternate (gpt-oss). Else they are
    [experts, outputs, inputs], gates before ups."""
    limit: float = 0.0
    """Bound of gates and ups before the activation; 0 for none."""
    alpha: float = 1.0

    @classmethod
    def of(cls, experts: Any) -> Self:
        """Form of a transformers module of experts."""
        return cls(True, experts.limit, experts.alpha) if hasattr(experts, "limit") else cls(False)

    def outputs_first(self, weights: Tensor) -> Tensor:
        """Weights as in the module -> a view [..., outputs, inputs]; and back."""
        return weights.mT if self.is_interleaved else weights

    def gates_first(self, rows: Tensor) -> Tensor:
        """Rows of one expert [2 * inner, ...], or its biases, as in the module -> gates, then ups."""
        return torch.cat([rows[::2], rows[1::2]]) if self.is_interleaved else rows

    def as_in_module(self, rows: Tensor) -> Tensor:
        """The inverse of `gates_first`."""
        return torch.stack(rows.chunk(2), dim=1).flatten(0, 1) if self.is_interleaved else rows

    def split(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [..., 2 * inner] as in the module -> gates and ups [..., inner]."""
        if self.is_interleaved:
            return gate_up[..., ::2], gate_up[..., 1::2]
        gates, ups = gate_up.chunk(2, dim=-1)
        return gates, ups

    def gated(self, gates: Tensor, ups: Tensor) -> Tensor:
        """SwiGLU, or gpt-oss's, clamped and with 1 added to the ups."""
        if not self.limit:
            return functional.silu(gates) * ups
        gates, ups = gates.clamp(max=self.limit), ups.clamp(-self.limit, self.limit)
        return gates * torch.sigmoid(gates * self.alpha) * (ups + 1)
