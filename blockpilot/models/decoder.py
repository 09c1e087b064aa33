"""The prepared form of a target: its layers as few calls over packed tokens, on a SlotCache.

It computes what the transformers model computes, from the same weights. What does not depend on the layer (rotary
tables, masks, padding, where keys go) is worked out once a pass; queries, keys and values come from one product, gate
and up from another; keys and values are stored by one call a layer.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from blockpilot.models.cache import SlotView, head_dim
from blockpilot.models.kernels import leave_file, prepared
from blockpilot.models.packing import Attention

FAMILIES = ("llama", "qwen3", "qwen3_moe")


class Rotary(NamedTuple):
    """Rotation of heads by their positions, [N, 1, head_dim]: cosines, and sines whose first half is negated."""

    cosines: Tensor
    sines: Tensor

    def turn(self, heads: Tensor) -> None:
        """Rotate heads [N, H, head_dim] in place."""
        half = heads.shape[-1] // 2
        torch.addcmul(heads * self.cosines, heads.roll(half, -1), self.sines, out=heads)


class DecoderLayer:
    """A pre-norm layer of a transformers model of FAMILIES."""

    def __init__(self, layer: Any, index: int, config: PretrainedConfig) -> None:
        self._index = index
        self._dim, self._eps = head_dim(config), config.rms_norm_eps
        self._num_queries, self._num_kv = config.num_attention_heads, config.num_key_value_heads
        self._norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self._head_norm = _head_norm(layer.self_attn, self._num_queries, self._num_kv)
        self._qkv = prepared(layer.self_attn, "q_proj", "k_proj", "v_proj")
        self._out = prepared(layer.self_attn, "o_proj")
        self._mlp = _dense(layer.mlp) if hasattr(layer.mlp, "gate_proj") else _experts(layer.mlp)

    def __call__(self, hidden: Tensor, rotary: Rotary, cache: SlotView, attention: Attention) -> Tensor:
        """hidden [N, hidden] -> [N, hidden]; stores the layer's keys and values."""
        before, after = self._norms
        heads = self._qkv(_normed(hidden, before, self._eps)).view(len(hidden), -1, self._dim)
        queries, new = heads.split([self._num_queries, 2 * self._num_kv], dim=1)
        turned = heads[:, : self._num_queries + self._num_kv]
        if self._head_norm is not None:
            torch.mul(functional.rms_norm(turned, (self._dim,), eps=self._eps), self._head_norm, out=turned)
        rotary.turn(turned)
        cache.store(new.unflatten(1, (2, self._num_kv)), self._index)
        attended = attention(queries, *cache.read(self._index), self._dim**-0.5)
        hidden = hidden + self._out(attended)
        return hidden + self._mlp(_normed(hidden, after, self._eps))


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


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
        self._layers = [DecoderLayer(layer, i, config) for i, layer in enumerate(body.layers)]
        self._norm, self._rotary, self.embed = body.norm, body.rotary_emb, body.embed_tokens
        self.head = prepared(model, "lm_head")
        if self.head.is_packed:
            leave_file(model)

    def __call__(
        self, tokens: Tensor, positions: Tensor, cache: SlotView, attention: Attention, kept: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Hidden states [N, hidden] of tokens [N] at positions [N]: normed, and by number after the layers `kept`."""
        hidden = self.embed(tokens)
        cosines, sines = (table[0, :, None] for table in self._rotary(hidden, positions[None]))
        negated, straight = sines.chunk(2, dim=-1)
        rotary = Rotary(cosines, torch.cat([-negated, straight], dim=-1))
        after = {}
        for i, layer in enumerate(self._layers):
            hidden = layer(hidden, rotary, cache, attention)
            if i in kept:
                after[i] = hidden
        normed = self._norm(hidden)
        if len(self._layers) - 1 in after:
            after[len(self._layers) - 1] = normed  # as transformers gives the last layer's
        return normed, after


def check_family(config: PretrainedConfig) -> None:
    """Raise ValueError for a model that this engine cannot run exactly."""
    if config.model_type not in FAMILIES:
        raise ValueError(f"target family {config.model_type!r}: supported are {', '.join(FAMILIES)}")
    layer_types = getattr(config, "layer_types", None) or []
    if "sliding_attention" in layer_types:
        raise ValueError("target with sliding-window layers: only full attention is supported")
