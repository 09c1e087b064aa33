"""Layers of a hybrid decoder (Qwen3.5, Qwen3.5-MoE) over packed tokens and a StateCache, in torch on any device.

Most layers are gated DeltaNets (delta_net.py) with a recurrent state. Every fourth is attention with keys and values,
gated outputs, and rotary embeddings of only the first part of a head. native_hybrid.py is the version in C.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from blockpilot.models import delta_net
from blockpilot.models.cache import SlotView, head_dim, num_kv_heads
from blockpilot.models.delta_net import DeltaNetWeights, StatePass
from blockpilot.models.experts import Mixture
from blockpilot.models.kernels import prepared
from blockpilot.models.layers import Mask, attend_parts
from blockpilot.models.rotary import Rotary
from blockpilot.models.states import Accept, StateCache, StateShape
from blockpilot.native.products import Padding


def norm_weight(norm: Any) -> Tensor:
    """Weight of a Qwen3_5RMSNorm in float32; the module stores weight - 1."""
    return cast(Tensor, 1 + norm.weight.detach().float())


class GatedAttentionWeights:
    """Weights of a Qwen3_5Attention; its linear layers are prepared in place."""

    def __init__(self, module: Any) -> None:
        self.qkv = prepared(module, "q_proj", "k_proj", "v_proj")
        """Queries interleaved with their gates by head, then keys, then values."""
        self.out = prepared(module, "o_proj")
        self.norms = torch.stack([norm_weight(module.q_norm), norm_weight(module.k_norm)])
        """[2, head_dim], of queries and of keys, in float32."""


class HybridWeights:
    """Weights of a Qwen3_5DecoderLayer or Qwen3_5MoeDecoderLayer: one of `delta_net` and `attention`, and the MLP."""

    def __init__(self, module: Any, shape: StateShape, index: int) -> None:
        self.index = index
        """Index among the layers of its kind, and in the cache."""
        self.attention_in = norm_weight(module.input_layernorm)
        self.mlp_in = norm_weight(module.post_attention_layernorm)
        self.delta_net = DeltaNetWeights(module.linear_attn, shape) if hasattr(module, "linear_attn") else None
        self.attention = GatedAttentionWeights(module.self_attn) if self.delta_net is None else None
        self.mixture = Mixture(module.mlp) if hasattr(module.mlp, "experts") else None
        """Experts, if any; `gate_up` and `down` are then the shared expert, and `shared_gate` gates its output."""
        self.shared_gate = None if self.mixture is None else prepared(module.mlp, "shared_expert_gate")
        mlp = module.mlp if self.mixture is None else module.mlp.shared_expert
        self.gate_up, self.down = prepared(mlp, "gate_proj", "up_proj"), prepared(mlp, "down_proj")


class HybridPass(NamedTuple):
    """Inputs of a pass that all layers share."""

    cache: SlotView
    order: StatePass
    masks: Sequence[Mask]
    rotary: Rotary
    native: Any = None
    """Additional inputs of layers in C."""

    @property
    def states(self) -> StateCache:
        return cast(StateCache, self.cache.cache)


class HybridLayers:
    """All layers of a hybrid model and the norm after them."""

    most_captured = 0  # no CUDA graphs: see Decoder

    def __init__(self, modules: Sequence[Any], norm: Any, config: Any) -> None:
        self.shape, self._eps, self._dim = StateShape.of(config), config.rms_norm_eps, head_dim(config)
        self._queries, self._kv = config.num_attention_heads, num_kv_heads(config)
        indices = dict.fromkeys(config.layer_types, 0)
        self._layers = list[HybridWeights]()
        for module, kind in zip(modules, config.layer_types, strict=True):
            self._layers.append(HybridWeights(module, self.shape, indices[kind]))
            indices[kind] += 1
        self._norm = norm_weight(norm)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def halves(self) -> list[Padding]:
        """Padding of the halves of each attention layer's heads in the cache."""
        return self._attention_halves(Padding(self._dim // 2, self._dim // 2))

    def _attention_halves(self, halves: Padding) -> list[Padding]:
        return [halves for layer in self._layers if layer.attention is not None]

    def __call__(
        self,
        hidden: Tensor,
        rotaries: Sequence[Rotary],
        cache: SlotView,
        masks: Sequence[Sequence[Mask]],
        feature_layers: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Run all layers on hidden states [N, hidden], in place, as `DecoderLayers` does.

        Rows before the packing's cut are blocks: only the cache's `accept` advances their states beyond the anchors.
        """
        in_pass = self._begin(rotaries[0], cache, masks[0])
        delta, after, accepts = None, dict[int, Tensor](), list[Accept]()
        # Each norm also adds the output of the sublayer before it: `delta` is added by the next one.
        for i, layer in enumerate(self._layers):
            x = self._add_norm(hidden, delta, layer.attention_in)
            if layer.delta_net is None:
                attended = self._attend(layer, x, in_pass)
            else:
                attended, accept = self._recur(layer.delta_net, layer.index, x, in_pass)
                accepts.append(accept)
            delta = self._mlp(layer, self._add_norm(hidden, attended, layer.mlp_in), in_pass)
            if i in feature_layers:
                after[i] = hidden + delta
        normed = self._add_norm(hidden, delta, self._norm)
        after[len(self._layers) - 1] = normed  # transformers norms the last layer's output, too
        # If all blocks are only anchors, the states have already advanced.
        if in_pass.order.num_block_tokens > int((~in_pass.order.is_text).sum()):
            in_pass.states.accept_states = partial(_accept_all, accepts)
        if not feature_layers:
            return normed, hidden.new_empty(len(hidden), 0)
        return normed, torch.cat([after[i] for i in feature_layers], dim=-1)

    def _begin(self, rotary: Rotary, cache: SlotView, masks: Sequence[Mask]) -> HybridPass:
        slots = cache.row_slots
        order = StatePass([mask.packing for mask in masks], slots, self.shape.kernel)
        in_pass = HybridPass(cache, order, masks, rotary)
        in_pass.states.begin([int(slots[row]) for row in order.new_rows])
        in_pass.states.accept_states = None  # left by a pass that failed before its paths were known
        return in_pass

    def _add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add `delta` to `hidden`, both [N, hidden], in place; returns the sum's RMSNorm."""
        if delta is not None:
            hidden.add_(delta)
        return self._norm_of(hidden, weight)

    def _norm_of(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm whose product with the weight is in float32."""
        size = x.float().square().mean(dim=-1, keepdim=True)
        return (x.float() * torch.rsqrt(size + self._eps) * weight).to(x.dtype)

    def _mlp(self, layer: HybridWeights, x: Tensor, in_pass: HybridPass) -> Tensor:
        """MLP, or experts plus the gated shared expert: [N, hidden] -> [N, hidden]."""
        gate, up = layer.gate_up(x).chunk(2, dim=-1)
        out = layer.down(functional.silu(gate) * up)
        if layer.mixture is None or layer.shared_gate is None:
            return out
        return layer.mixture(x) + layer.shared_gate(x).sigmoid() * out

    def _attend(self, layer: HybridWeights, x: Tensor, in_pass: HybridPass) -> Tensor:
        """Attention output [N, hidden] of normed states [N, hidden]; stores their keys and values first."""
        assert layer.attention is not None
        weights, num, kv = layer.attention, self._queries, self._kv
        # 1. Each query is followed by its gate; then come keys, then values.
        heads = weights.qkv(x).view(len(x), -1, self._dim)
        queries, gates = heads[:, : 2 * num : 2], heads[:, 1 : 2 * num : 2]
        keys, values = heads[:, 2 * num : 2 * num + kv], heads[:, 2 * num + kv :]
        # 2. Norms and rotation, before keys and values are stored.
        queries, keys = (
            self._rotated(self._norm_of(projected, norm), in_pass.rotary)
            for projected, norm in zip((queries, keys), weights.norms, strict=True)
        )
        in_pass.cache.store(torch.stack([keys, values], dim=1), layer.index)
        # 3. Attention reads the pass's own tokens from the cache, too.
        cached = in_pass.cache.read(layer.index)
        attended = attend_parts(in_pass.masks, queries, *cached, self._dim**-0.5)
        return weights.out(attended * gates.sigmoid().flatten(1))

    def _rotated(self, heads: Tensor, rotary: Rotary) -> Tensor:
        num = rotary.cosines.shape[-1]
        first, rest = heads[..., :num], heads[..., num:]
        first = torch.addcmul(first * rotary.cosines, first.roll(num // 2, -1), rotary.sines)
        return torch.cat([first, rest], dim=-1)

    def _recur(self, net: DeltaNetWeights, index: int, x: Tensor, in_pass: HybridPass) -> tuple[Tensor, Accept]:
        """Output [N, hidden] of a gated DeltaNet, and the function that advances its states by accepted tokens."""
        projected, order = net.project(x), in_pass.order
        layer_states = in_pass.states.windows[index], in_pass.states.matrices[index]
        out, blocks = delta_net.run(net, projected, order, *layer_states)
        gated = delta_net.gated_norm(net, out, projected, self._eps)
        windows, matrices = layer_states
        return net.out(gated), partial(delta_net.accept, blocks, order, windows=windows, matrices=matrices)


def _accept_all(accepts: Sequence[Accept], paths: Sequence[Sequence[int]]) -> None:
    if any(len(path) > 1 for path in paths):
        for accept in accepts:
            accept(paths)
