"""The prepared form of a decoder, target or draft: its layers as few calls over packed tokens, on a SlotCache.

It computes what the model computes, from the same weights. What does not depend on the layer (rotary
tables, masks, padding, where keys go) is worked out once a pass; queries, keys and values come from one product, gate
and up from another; keys and values are stored by one call a layer.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from blockpilot.models.cache import SlotView, head_dim
from blockpilot.models.kernels import leave_file, prepared, use_huge_pages
from blockpilot.models.native import operations_for
from blockpilot.models.operations import Mask, Operations, Rotary
from blockpilot.models.packing import SideBySide

FAMILIES = ("llama", "qwen3", "qwen3_moe")


AttentionCall = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Queries [N, heads, head_dim], keys and values [R, kv_heads, L, head_dim] and a scale -> [N, heads * head_dim]."""


class DecoderLayer:
    """A pre-norm layer of a transformers model of FAMILIES, or of a draft."""

    def __init__(self, layer: Any, index: int, config: PretrainedConfig, operations: Operations) -> None:
        self._index, self._operations = index, operations
        self._dim, self._eps = head_dim(config), config.rms_norm_eps
        self._norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self._head_norm = _head_norm(layer.self_attn, config.num_attention_heads, config.num_key_value_heads)
        self._qkv = prepared(layer.self_attn, "q_proj", "k_proj", "v_proj")
        self._out = prepared(layer.self_attn, "o_proj")
        self._mlp = _dense(layer.mlp) if hasattr(layer.mlp, "gate_proj") else _experts(layer.mlp)

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, rotary: Rotary, cache: SlotView, attention: AttentionCall
    ) -> Tensor:
        """Add delta, what the layer before found, to hidden, both [N, hidden]; returns what this layer finds.

        hidden becomes the sum that this layer's is to be added to; keys and values are stored.
        """
        before, after = self._norms
        x = self._operations.add_norm(hidden, delta, before, self._eps)
        queries = self.project(x, rotary, cache)
        attended = attention(queries, *cache.read(self._index), self._dim**-0.5)
        found = self._out(attended)
        return self._mlp(self._operations.add_norm(hidden, found, after, self._eps))

    def project(self, x: Tensor, rotary: Rotary, cache: SlotView) -> Tensor:
        """Store keys and values of [N, hidden] in the cache; returns the queries [N, heads, head_dim]."""
        heads = self._qkv(x).view(len(x), -1, self._dim)
        return self._operations.rotate_and_store(heads, self._head_norm, self._eps, rotary, cache, self._index)


def _head_norm(attention: Any, num_queries: int, num_kv: int) -> Tensor | None:
    """Weights [query and key heads, head_dim] of the norms of queries and keys; None where there are none."""
    if not hasattr(attention, "q_norm"):
        return None
    weights = attention.q_norm.weight.expand(num_queries, -1), attention.k_norm.weight.expand(num_kv, -1)
    return torch.cat(weights).detach()


def _dense(mlp: Any) -> Callable[[Tensor], Tensor]:
    """SwiGLU."""
    gate_up, down = prepared(mlp, "gate_proj", "up_proj"), prepared(mlp, "down_proj")

    def run(hidden: Tensor) -> Tensor:
        gate, up = gate_up(hidden).chunk(2, dim=-1)
        return down(functional.silu(gate).mul_(up))

    return run


def _experts(mlp: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model's own mixture of experts."""
    return lambda hidden: cast(Tensor, mlp(hidden[None])[0])


class Decoder:
    """The layers of a model, its embeddings and its LM head. Raises ValueError for a family that it does not know.

    The model's linear layers are prepared in place, once; it stays an ordinary model to call.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel) -> None:
        check_family(model.config)
        body, config = cast(Any, model.model), model.config
        self._operations = operations_for(model.dtype, model.device, config.hidden_size, head_dim(config))
        self._layers = [DecoderLayer(layer, i, config, self._operations) for i, layer in enumerate(body.layers)]
        self._norm, self._rotary, self.embed = body.norm, body.rotary_emb, body.embed_tokens
        self._groups = config.num_attention_heads // config.num_key_value_heads
        is_new = type(model.lm_head) is nn.Linear
        self.head = prepared(model, "lm_head")
        if self.head.is_packed and is_new:
            leave_file(model)
            use_huge_pages()

    def __call__(
        self, tokens: Tensor, packing: SideBySide, cache: SlotView, kept: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Hidden states [N, hidden] of packed tokens [N]: normed, and by number after the layers `kept`."""
        hidden = self.embed(tokens)
        rotary = Rotary.of(self._rotary, hidden, packing.positions)
        masks = [Mask(part, part.visible, self._groups, hidden.dtype) for part in packing.parts]
        attention = partial(_attend_parts, self._operations, masks)
        delta, after = None, {}
        for i, layer in enumerate(self._layers):
            delta = layer(hidden, delta, rotary, cache, attention)
            if i in kept:
                after[i] = hidden + delta
        normed = self._operations.add_norm(hidden, delta, self._norm.weight, self._norm.variance_epsilon)
        if len(self._layers) - 1 in after:
            after[len(self._layers) - 1] = normed  # as transformers gives the last layer's
        return normed, after


def _attend_parts(
    operations: Operations, masks: Sequence[Mask], query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Tensor:
    """Every part of a packing by itself, to its own rows: an AttentionCall."""
    if len(masks) == 1:
        return operations.attend(query, key, value, scale, masks[0])
    attended, row = [], 0
    queries = query.split([mask.packing.num_tokens for mask in masks])
    for mask, own in zip(masks, queries, strict=True):
        rows = slice(row, row + len(mask.packing.sizes))
        keys, values = (kept[rows, :, : mask.packing.length] for kept in (key, value))
        attended.append(operations.attend(own, keys, values, scale, mask))
        row = rows.stop
    return torch.cat(attended)


def check_family(config: PretrainedConfig) -> None:
    """Raise ValueError for a model that this engine cannot run exactly."""
    if config.model_type not in FAMILIES:
        raise ValueError(f"target family {config.model_type!r}: supported are {', '.join(FAMILIES)}")
    layer_types = getattr(config, "layer_types", None) or []
    if "sliding_attention" in layer_types:
        raise ValueError("target with sliding-window layers: only full attention is supported")
