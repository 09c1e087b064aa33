"""Differences between families in their experts and routers: layout of the weights, activation, scales."""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import GELUTanh


class ExpertForm(NamedTuple):
    """Layout and activation of experts: Qwen's, or gpt-oss's."""

    is_interleaved: bool
    """Module weights are [experts, inputs, outputs], gates and ups interleaved (gpt-oss). Otherwise they are
    [experts, outputs, inputs], gates before ups."""
    limit: float = 0.0
    """Bound of gates and ups before the activation; 0 for none."""
    alpha: float = 1.0
    gelu: bool = False
    """The activation is GELU (its tanh approximation), not SiLU (Gemma 4)."""

    @classmethod
    def of(cls, experts: Any) -> Self:
        """Form of a transformers module of experts."""
        if hasattr(experts, "limit"):
            return cls(True, experts.limit, experts.alpha)
        return cls(False, gelu=isinstance(getattr(experts, "act_fn", None), GELUTanh))

    def outputs_first(self, weights: Tensor) -> Tensor:
        """Weights as in the module -> a view [..., outputs, inputs]; its own inverse."""
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
        """SwiGLU, GeGLU, or gpt-oss's clamped SwiGLU with 1 added to the ups."""
        if not self.limit:
            return (functional.gelu(gates, approximate="tanh") if self.gelu else functional.silu(gates)) * ups
        gates, ups = gates.clamp(max=self.limit), ups.clamp(-self.limit, self.limit)
        return gates * torch.sigmoid(gates * self.alpha) * (ups + 1)


class RouterForm(NamedTuple):
    """Router: selects the experts with the best scores and weights them by a softmax over all scores."""

    weight: Tensor
    """Weights of the scores, [experts, inputs]."""
    bias: Tensor | None
    num_chosen: int
    is_normed: bool
    """Weights of the selected experts are divided by their sum."""
    norm: Tensor | None = None
    """Norm weights [inputs] of the input; None if it is normed already."""
    scales: Tensor | None = None
    """Factors [experts] of the weights, in float32 (Gemma 4); None if there are none."""

    @classmethod
    def of(cls, router: Any) -> Self:
        """Form of a transformers router."""
        if hasattr(router, "per_expert_scale"):
            norm = (router.scale * router.scalar_root_size).detach()
            scales = router.per_expert_scale.detach().float()
            return cls(router.proj.weight.detach(), None, router.config.top_k_experts, True, norm, scales)
        is_normed = getattr(router, "norm_topk_prob", True)  # only Qwen3-MoE has the choice
        return cls(router.weight.detach(), getattr(router, "bias", None), router.top_k, is_normed)
