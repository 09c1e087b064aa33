"""Decoder layers of a target or draft over packed tokens and a SlotCache, in torch on any device.

They compute the same as the model, from the same weights, with fewer calls: one product for queries, keys and values,
one for gate and up; one call per layer stores keys and values. native_layers.py is the version in C.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig

from blockpilot.models.cache import SlotView, head_dim, num_kv_heads
from blockpilot.models.expert_form import RouterForm
from blockpilot.models.experts import Mixture
from blockpilot.models.graphs import MOST_TOKENS
from blockpilot.models.kernels import Product, prepared
from blockpilot.models.packing import Packing, folded
from blockpilot.models.rotary import Rotary
from blockpilot.native.products import INPUTS, Padding


class Mask:
    """Attention mask of a packing: visible [R, 1, width, length] is true for columns that a token attends to."""

    def __init__(self, packing: Packing, visible: Tensor, groups: int, dtype: torch.dtype) -> None:
        self.packing, self.visible = packing, visible.contiguous()
        self._groups, self._dtype = groups, dtype

    @cached_property
    def bias(self) -> Tensor:
        """[R, 1, groups * width, length], to add to scores."""
        return folded(self.visible, self._groups, self._dtype)


class LayerForm(NamedTuple):
    """Differences between families in the arithmetic of their layers."""

    eps: float
    scale: float
    """Scale of attention scores."""
    offset: float
    """Added to norm weights: 1 in Gemma 3."""
    gelu: bool
    """The activation of MLPs is GELU (its tanh approximation), not SiLU."""
    in_float: bool
    """Products with norm weights are in float32 (Gemma)."""

    @classmethod
    def of(cls, config: Any) -> Self:
        if config.model_type == "gemma3_text":
            return cls(config.rms_norm_eps, config.query_pre_attn_scalar**-0.5, 1.0, gelu=True, in_float=True)
        if config.model_type == "gemma4_text":
            return cls(config.rms_norm_eps, 1.0, 0.0, gelu=True, in_float=True)
        return cls(config.rms_norm_eps, head_dim(config) ** -0.5, 0.0, gelu=False, in_float=False)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of [N, hidden]."""
        if self.in_float:
            return self._in_float(x, weight)
        return functional.rms_norm(x, x.shape[-1:], weight, self.eps)

    def norm_heads(self, heads: Tensor, weights: Tensor) -> None:
        """RMSNorm of heads [N, heads, head_dim], in place, by weights [heads, head_dim]."""
        if self.in_float:
            heads.copy_(self._in_float(heads, weights))
        else:
            torch.mul(functional.rms_norm(heads, heads.shape[-1:], eps=self.eps), weights, out=heads)

    def _in_float(self, x: Tensor, weight: Tensor) -> Tensor:
        normed = functional.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
        return normed.mul_(self.offset + weight.float()).to(x.dtype)


class ExpertNorms(NamedTuple):
    """Norm weights [hidden] for inputs and outputs of a layer with experts in parallel with an MLP (Gemma 4)."""

    experts_in: Tensor
    router_in: Tensor
    experts_out: Tensor
    mlp_out: Tensor

    @classmethod
    def of(cls, module: Any) -> Self:
        norm = RouterForm.of(module.router).norm
        assert norm is not None
        names = "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "post_feedforward_layernorm_1"
        experts_in, experts_out, mlp_out = (_copied(getattr(module, name)) for name in names)
        return cls(experts_in, norm, experts_out, mlp_out)


class InputWeights(NamedTuple):
    """Weights of the gated per-layer input that a layer adds at its end (small Gemma 4 models)."""

    gate: Product
    projection: Product
    norm: Tensor
    """Norm weights [hidden] of the output."""

    @classmethod
    def of(cls, module: Any) -> Self:
        inputs = Padding.to_multiple(module.per_layer_projection.in_features)
        hidden = Padding.to_multiple(module.per_layer_projection.out_features)
        gate = prepared(module, "per_layer_input_gate", outputs=inputs)
        projection = prepared(module, "per_layer_projection", inputs=inputs, outputs=hidden)
        return cls(gate, projection, _copied(module.post_per_layer_input_norm))


class LayerWeights:
    """Weights of a pre-norm layer of a transformers model, or of a draft; its linear layers are prepared in place."""

    def __init__(self, module: Any, config: PretrainedConfig) -> None:
        self.form = LayerForm.of(config)
        # Gemma's layers also norm sublayer outputs; post_attention_layernorm has another meaning elsewhere.
        norms_outputs, post_attention = hasattr(module, "pre_feedforward_layernorm"), module.post_attention_layernorm
        self.attention_in = _copied(module.input_layernorm)
        self.mlp_in = _copied(module.pre_feedforward_layernorm if norms_outputs else post_attention)
        """Norm weights [hidden], before attention and before the MLP: copies that layers.c can point to."""
        self.attention_out = _copied(post_attention) if norms_outputs else None
        self.mlp_out = _copied(module.post_feedforward_layernorm) if norms_outputs else None
        """Norm weights [hidden] of the outputs of attention and MLP; None if they are not normed."""
        attention, self.dim = module.self_attn, head_dim(config)
        self.num_queries, self.num_kv = config.num_attention_heads, num_kv_heads(config)
        self.head_norms = _head_norms(attention, config)
        """Norm weights of queries and keys [query and key heads, head_dim]; None if the model has none."""
        self.norms_values = hasattr(attention, "v_norm")
        """Values are normed, without weights (Gemma 4)."""
        scalar = getattr(module, "layer_scalar", None)
        self.scalar = 1.0 if scalar is None else float(scalar)
        """Factor of the layer's output (Gemma 4)."""
        sinks = getattr(attention, "sinks", None)
        self.sinks: Tensor | None = None if sinks is None else sinks.detach().clone()
        """Attention sinks [query heads]: extra scores in the softmax (gpt-oss); None if the model has none."""
        heads, hidden = half_heads(config), Padding.to_multiple(config.hidden_size)
        self.halves = heads
        """Padding of the halves of a head in C."""
        names = [name for name in ("q_proj", "k_proj", "v_proj") if getattr(attention, name, None) is not None]
        self.qkv = prepared(attention, *names, outputs=heads)
        """Queries, then keys, then values. No values if they are the keys before their norm; only queries if the
        layer reads the keys and values of an earlier one."""
        self.num_made = (len(names) - 1) * self.num_kv
        """Number of key and value heads in `qkv`."""
        self.out = prepared(attention, "o_proj", inputs=heads, outputs=hidden)
        self.gate_up: Product | None = None
        self.down: Product | None = None
        self.mixture: Mixture | None = None
        """Experts: replace gate_up and down, or run in parallel with them if there are `expert_norms`."""
        self.expert_norms = ExpertNorms.of(module) if hasattr(module, "router") else None
        if hasattr(module.mlp, "gate_proj"):
            inner = Padding.to_multiple(module.mlp.gate_proj.out_features)
            self.gate_up = prepared(module.mlp, "gate_proj", "up_proj", outputs=inner)
            self.down = prepared(module.mlp, "down_proj", inputs=inner, outputs=hidden)
        else:
            self.mixture = Mixture(module.mlp)
        if self.expert_norms is not None:
            self.mixture = Mixture(module)
        self.inputs = InputWeights.of(module) if hasattr(module, "per_layer_input_gate") else None
        self.convolutions: list[Any] = [getattr(module, name, None) for name in ("attention_conv", "mlp_conv")]
        """`BlockConvolution`s (DFlash 2, drafts/dflash.py) around attention and the MLP; None if there are none."""
        for convolution in filter(None, self.convolutions):
            prepared(convolution, "kernel_projection")

    @property
    def num_inputs(self) -> int:
        """Width of the layer's per-layer input of a token; 0 if it has none."""
        return 0 if self.inputs is None else self.inputs.gate.sizes[0]

    def mlp(self, x: Tensor) -> Tensor:
        """SwiGLU, GeGLU, or a mixture of experts: [N, hidden] -> [N, hidden]."""
        if self.gate_up is None:
            assert self.mixture is not None
            return self.mixture(x)
        assert self.down is not None
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        gate = functional.gelu(gate, approximate="tanh") if self.form.gelu else functional.silu(gate)
        return self.down(gate.mul_(up))


def _copied(norm: Any) -> Tensor:
    weight: Tensor = norm.weight.detach().clone()
    return weight


def half_heads(config: PretrainedConfig) -> Padding:
    """Padding of the two halves of a head, whose elements the rotary embedding pairs."""
    return Padding.to_multiple(head_dim(config) // 2, INPUTS // 2)


def _head_norms(attention: Any, config: Any) -> Tensor | None:
    if not hasattr(attention, "q_norm"):
        return None
    weights = [attention.q_norm.weight.expand(config.num_attention_heads, -1)]
    if hasattr(attention, "k_norm"):
        weights.append(attention.k_norm.weight.expand(num_kv_heads(config), -1))
    return torch.cat(weights).detach()


class ContextProjection(NamedTuple):
    """Projection of the target's features to a draft's contexts: a product, and the weights [hidden] of its norm."""

    product: Product
    norm: Tensor


class DecoderLayers:
    """All layers of a model and the norm after them."""

    def __init__(self, layers: Sequence[LayerWeights], norm: Tensor, config: PretrainedConfig) -> None:
        self._layers, self._norm = layers, norm.detach().clone()
        self._form = LayerForm.of(config)
        mixtures = [layer.mixture for layer in layers if layer.mixture is not None]
        most = min((mixture.most_captured for mixture in mixtures), default=MOST_TOKENS)
        # Graphs of mixtures have only been run uncaptured, on a CPU, so they are disabled on GPUs.
        self.most_captured = 0 if mixtures and norm.is_cuda else most
        """Maximum number of tokens of a CUDA graph; 0 for none."""

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def halves(self) -> list[Padding]:
        """Padding of the halves of each layer's heads in the cache."""
        return [Padding(layer.dim // 2, layer.dim // 2) for layer in self._layers]

    def __call__(
        self,
        hidden: Tensor,
        rotaries: Sequence[Rotary],
        cache: SlotView,
        masks: Sequence[Sequence[Mask]],
        feature_layers: Sequence[int],
        first_input: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Final hidden states [N, hidden], normed, and features [N, F * hidden] after the F `feature_layers`.

        Overwrites `hidden` [N, hidden]. rotaries [layers]; masks [layers], each one mask per part of the packing.
        first_input [N, ...]: input of the first layer's attention, by default the normed hidden states. inputs [N,
        layers * P]: per-layer inputs, for layers that have `InputWeights`.
        """
        delta, scalar, after = None, 1.0, dict[int, Tensor]()
        # Each norm also adds the output of the sublayer before it: `delta` is added by the next one.
        for i, layer in enumerate(self._layers):
            x = first_input if i == 0 else None
            x = self._add_norm(hidden, delta, layer.attention_in, scalar) if x is None else x
            attend = partial(self._attend, i, rotary=rotaries[i], cache=cache, masks=masks[i])
            attention_conv, mlp_conv = layer.convolutions
            attended = self._normed(_through(attention_conv, x, masks[i], attend), layer.attention_out)
            delta = _through(mlp_conv, self._add_norm(hidden, attended, layer.mlp_in), masks[i], layer.mlp)
            if layer.expert_norms is not None:
                delta = self._with_experts(layer, hidden, delta, layer.expert_norms)
            delta = self._normed(delta, layer.mlp_out)
            if layer.inputs is not None and inputs is not None:
                gate = functional.gelu(layer.inputs.gate(hidden.add_(delta)), approximate="tanh")
                layer_input = inputs.unflatten(1, (len(self._layers), -1))[:, i]
                delta = self._norm_of(layer.inputs.projection(gate * layer_input), layer.inputs.norm)
            scalar = layer.scalar
            if i in feature_layers:
                after[i] = _scaled(hidden + delta, scalar)
        normed = self._add_norm(hidden, delta, self._norm, scalar)
        after[len(self._layers) - 1] = normed  # transformers norms the last layer's output, too
        if not feature_layers:
            return normed, hidden.new_empty(len(hidden), 0)
        return normed, torch.cat([after[i] for i in feature_layers], dim=-1)

    def project(self, features: Tensor, fused: ContextProjection, rotary: Rotary, cache: SlotView) -> Tensor:
        """Project features [N, F] to contexts [N, hidden], returned; stores their keys and values in all layers."""
        contexts = self._norm_of(fused.product(features), fused.norm)
        for i in range(len(self._layers)):
            self._store(i, contexts, rotary, cache)
        return contexts

    def _attend(self, index: int, x: Tensor, rotary: Rotary, cache: SlotView, masks: Sequence[Mask]) -> Tensor:
        """A layer's attention output [N, hidden] of normed states [N, hidden]; stores their keys and values first."""
        layer, queries = self._layers[index], self._store(index, x, rotary, cache)
        return layer.out(attend_parts(masks, queries, *cache.read(index), self._form.scale, layer.sinks))

    def _store(self, index: int, x: Tensor, rotary: Rotary, cache: SlotView) -> Tensor:
        """Store a layer's keys and values of normed states [N, hidden]; returns the queries [N, heads, head_dim]."""
        layer = self._layers[index]
        num, num_kv = layer.num_queries, layer.num_kv
        heads = layer.qkv(x).view(len(x), -1, layer.dim)  # queries, then keys, then values
        # Queries and keys are normed and rotated together, in place: they are views of one product's output.
        rotated, values = heads[:, : num + num_kv], None  # only queries if the layer has no keys
        if layer.norms_values:
            values = functional.rms_norm(heads[:, -num_kv:].float(), (layer.dim,), eps=self._form.eps).to(x.dtype)
        if layer.head_norms is not None:
            self._form.norm_heads(rotated, layer.head_norms)
        # x * cos + (x with swapped halves) * sin; the first half of sin is negated in the table.
        torch.addcmul(rotated * rotary.cosines, rotated.roll(layer.dim // 2, -1), rotary.sines, out=rotated)
        if not layer.num_made:
            return heads
        if values is None:
            cache.store(heads[:, num:].unflatten(1, (2, num_kv)), index)
        else:
            cache.store(torch.stack([heads[:, num : num + num_kv], values], dim=1), index)
        return heads[:, :num]

    def _add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, scalar: float = 1.0) -> Tensor:
        """Add `delta` to `hidden`, both [N, hidden], and multiply by `scalar`, in place; returns the RMSNorm."""
        if delta is not None:
            _scaled(hidden.add_(delta), scalar)
        return self._norm_of(hidden, weight)

    def _with_experts(self, layer: LayerWeights, hidden: Tensor, delta: Tensor, norms: ExpertNorms) -> Tensor:
        """Sum of `delta`, an MLP's output, and the output of its parallel experts for `hidden`, each normed."""
        assert layer.mixture is not None
        mixed = layer.mixture(self._norm_of(hidden, norms.experts_in), hidden)
        return self._norm_of(delta, norms.mlp_out) + self._norm_of(mixed, norms.experts_out)

    def _normed(self, delta: Tensor, weight: Tensor | None) -> Tensor:
        """Output of a sublayer [N, hidden], normed if there are weights for it."""
        return delta if weight is None else self._norm_of(delta, weight)

    def _norm_of(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self._form.norm(hidden, weight)


def _through(convolution: Any, x: Tensor, masks: Sequence[Mask], sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """Output of a sublayer for x [N, hidden], convolved if there is a convolution."""
    return sublayer(x) if convolution is None else convolution(x, masks[0].packing.offsets, sublayer)


def _scaled(hidden: Tensor, scalar: float) -> Tensor:
    return hidden if scalar == 1 else hidden.mul_(scalar)


def attend_parts(
    masks: Sequence[Mask], query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Attention of queries [N, heads, head_dim], part by part, to rows of key and value [R, kv_heads, L, head_dim].

    sinks: [heads]. Returns [N, heads * head_dim].
    """
    attended, row = [], 0
    queries = query.split([mask.packing.num_tokens for mask in masks])
    for mask, part in zip(masks, queries, strict=True):
        rows = slice(row, row + len(mask.packing.sizes))
        keys, values = (cached[rows, :, : mask.packing.length] for cached in (key, value))
        attended.append(mask.packing.attend(part, keys, values, mask.bias, scale, sinks).flatten(1))
        row = rows.stop
    return torch.cat(attended) if len(attended) > 1 else attended[0]
