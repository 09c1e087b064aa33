"""The layers of a decoder on a GPU, by kernels in Triton between the products of matrices.

Each override replaces several kernels of torch (layers.py), to which a layer returns without it. Attention needs the
mask of a box (graphs.py): prompts, and layers with a window, attend by torch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockpilot.models import triton_kernels
from blockpilot.models.cache import SlotView
from blockpilot.models.layers import DecoderLayers, LayerWeights, Mask, Rotary


class FusedLayers(DecoderLayers):
    """Layers with SiLU and plain norms: Llama, Qwen3 and Qwen3-MoE, and drafts like them."""

    def __call__(
        self,
        hidden: Tensor,
        rotaries: Sequence[Rotary],
        cache: SlotView,
        masks: Sequence[Sequence[Mask]],
        feature_layers: Sequence[int],
        first_input: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        with torch.cuda.device_of(hidden):  # where Triton launches
            return super().__call__(hidden, rotaries, cache, masks, feature_layers, first_input)

    def project(self, x: Tensor, rotary: Rotary, cache: SlotView) -> None:
        with torch.cuda.device_of(x):
            super().project(x, rotary, cache)

    def _add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        return triton_kernels.add_norm(hidden, delta, weight, self._form.eps)

    def _store(self, index: int, x: Tensor, rotary: Rotary, cache: SlotView) -> Tensor:
        layer, of_layer = self._layers[index], cache.layers[index]
        heads = layer.qkv(x).view(len(x), -1, self._dim)
        triton_kernels.rotate_and_store(
            heads, layer.head_norms, *rotary, of_layer, *cache.token_indices, self._form.eps
        )
        return heads[:, : -2 * cache.num_heads]

    def _attend(self, index: int, x: Tensor, rotary: Rotary, cache: SlotView, masks: Sequence[Mask]) -> Tensor:
        seen = masks[0].seen
        if seen is None:
            return super()._attend(index, x, rotary, cache, masks)
        queries = self._store(index, x, rotary, cache)
        attended = triton_kernels.attend(queries, cache.layers[index], seen, self._form.scale)
        return self._layers[index].out(attended)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        if layer.gate_up is None or layer.down is None:
            return super()._mlp(layer, x)
        return layer.down(triton_kernels.silu_times(layer.gate_up(x)))
