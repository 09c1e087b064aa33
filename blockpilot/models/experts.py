"""Mixture of experts in torch, on any device: an expert multiplies all of its tokens together.

Shapes do not depend on the selected experts, and the host does not wait for them, so CUDA graphs can capture the
layers. If torch's grouped product is a loop over experts (GPUs before Hopper, types other than bfloat16), few tokens
multiply copies of their selected experts instead. native_experts.py is the version in C.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from blockpilot.models.expert_form import ExpertForm, RouterForm
from blockpilot.models.graphs import MOST_TOKENS
from blockpilot.models.kernels import prepared_experts, router_of

MOST_COPIED = 2**30  # bytes of the copied experts


class Mixture:
    """Router and experts of a transformers mixture, without Qwen3.5's shared expert."""

    def __init__(self, block: Any) -> None:
        self.prepared = prepared_experts(block)
        """Experts in C, which replace those of the block; None without C."""
        self._router, self._experts = router_of(block), block.experts
        form = RouterForm.of(self._router)
        router = form.weight
        self._indices, self._most_copied = torch.arange(len(router), device=router.device), 0
        if self.prepared is None:
            self._form = ExpertForm.of(block.experts)
            if not _has_grouped_kernel(router):
                expert_bytes = sum(
                    weight[0].nbytes for weight in (block.experts.gate_up_proj, block.experts.down_proj)
                )
                self._most_copied = max(1, MOST_COPIED // (form.num_chosen * expert_bytes))
        self.most_captured = min(self._most_copied or MOST_TOKENS, MOST_TOKENS)
        """Maximum number of tokens of a CUDA graph."""

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """Weighted sum of the selected experts' outputs, [N, hidden] -> [N, hidden].

        routed: input of the router, by default `x`.
        """
        _, weights, ids = self._router(x if routed is None else routed)
        if self.prepared is not None:
            mixed: Tensor = self.prepared(x, ids, weights)
            return mixed
        run = self._by_copies if len(x) <= self._most_copied else self._by_groups
        outputs = run(x, ids.flatten(), ids.shape[1])
        # Outputs of a token's experts are adjacent: their weighted sum is one small product.
        return torch.bmm(weights[:, None].to(x.dtype), outputs.unflatten(0, ids.shape))[:, 0]

    def _by_groups(self, x: Tensor, ids: Tensor, num_chosen: int) -> Tensor:
        """Outputs [N * k, hidden] of the experts ids [N * k] for tokens x [N, hidden], k experts each."""
        # Rows ordered by expert: an expert's rows are one group of the product.
        sorted_ids, order = ids.sort()
        ends = torch.searchsorted(sorted_ids, self._indices, right=True, out_int32=True)  # of the experts' rows

        def multiply(name: str, rows: Tensor) -> Tensor:
            weights = self._form.outputs_first(getattr(self._experts, name)).mT
            return self._biased(name, functional.grouped_mm(rows, weights, offs=ends), sorted_ids)

        outputs = multiply("down_proj", self._gated(multiply("gate_up_proj", x[order // num_chosen])))
        return torch.empty_like(outputs).index_copy_(0, order, outputs)

    def _by_copies(self, x: Tensor, ids: Tensor, num_chosen: int) -> Tensor:
        """The same as `_by_groups`, but every row multiplies its own copy of the expert."""

        def multiply(name: str, rows: Tensor) -> Tensor:
            weights = self._form.outputs_first(getattr(self._experts, name)[ids])
            return self._biased(name, torch.bmm(weights, rows[..., None])[..., 0], ids)

        return multiply("down_proj", self._gated(multiply("gate_up_proj", x.repeat_interleave(num_chosen, dim=0))))

    def _biased(self, name: str, products: Tensor, ids: Tensor) -> Tensor:
        """Products [N * k, outputs] of the experts `ids` with their biases, if they have any."""
        biases: Tensor | None = getattr(self._experts, f"{name}_bias", None)
        return products if biases is None else products + biases[ids]

    def _gated(self, gate_up: Tensor) -> Tensor:
        return self._form.gated(*self._form.split(gate_up))


def _has_grouped_kernel(weight: Tensor) -> bool:
    """True if grouped products with this weight do not wait for the host."""
    if weight.device.type != "cuda":
        return True
    return weight.dtype == torch.bfloat16 and torch.cuda.get_device_capability(weight.device)[0] in (9, 10)
