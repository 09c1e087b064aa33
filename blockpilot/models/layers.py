"""The layers of a decoder, target or draft, over packed tokens and a SlotCache, by torch on any device.

They compute what the model computes, from the same weights, in few calls: queries, keys and values come from one
product, gate and up from another; keys and values are stored by one call a layer. native_layers.py does so in C.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig

from blockpilot.models.cache import SlotCache, SlotView, head_dim, num_kv_heads
from blockpilot.models.kernels import PreparedExperts, Product, prepared, prepared_experts
from blockpilot.models.packing import Packing, folded
from blockpilot.native.products import INPUTS, Padding


class Rotary(NamedTuple):
    """Rotation of heads by their positions, [N, 1, head_dim]: cosines, and sines whose first half is negated."""

    cosines: Tensor
    sines: Tensor

    @classmethod
    def of(cls, embedding: nn.Module, hidden: Tensor, positions: Tensor) -> Self:
        """For tokens at positions [N], by a model's own rotary embedding, in the dtype of `hidden`."""
        cosines, sines = (table[0, :, None] for table in embedding(hidden, positions[None]))  # [N, 1, head_dim]
        negated, straight = sines.chunk(2, dim=-1)
        return cls(cosines.contiguous(), torch.cat([-negated, straight], dim=-1))

    def at(self, positions: Tensor) -> Self:
        """Rows of these positions, of a table by position."""
        return type(self)(self.cosines[positions], self.sines[positions])


class RotaryTable:
    """A model's rotary embedding, worked out once for all positions of a cache.

    Embeddings of the kinds "dynamic" and "longrope" depend on the longest text. Here that is the longest that the
    cache can hold, as in vLLM, so that no row's numbers depend on the rows beside it or on when they came.
    """

    def __init__(self, embedding: Any) -> None:
        self._embedding = embedding
        self._table: Rotary | None = None
        self._length = 0  # of texts, that the table is for
        kind = getattr(embedding, "rope_type", "default")
        self._depends_on_longest = "dynamic" in kind or kind == "longrope"

    def table(self, cache: SlotCache | SlotView, hidden: Tensor) -> Rotary:
        """For the positions of a cache, and maybe more, in the dtype of `hidden`."""
        table, length = self._table, cache.max_length
        is_long = self._length == length if self._depends_on_longest else self._length >= length
        if (
            table is None
            or not is_long
            or len(table.cosines) < cache.num_columns
            or table.cosines.dtype != hidden.dtype
        ):
            positions = torch.arange(cache.num_columns, device=hidden.device).clamp_(max=length - 1)
            table, self._length = Rotary.of(self._embedding, hidden, positions), length
            self._table = table
        return table


class Mask:
    """Attention mask of a packing: `visible` [R, 1, width, length], the columns that each token sees."""

    def __init__(self, packing: Packing, visible: Tensor, groups: int, dtype: torch.dtype) -> None:
        self.packing, self.visible = packing, visible.contiguous()
        self._groups, self._dtype = groups, dtype

    @cached_property
    def bias(self) -> Tensor:
        """[R, 1, groups * width, length], to add to scores."""
        return folded(self.visible, self._groups, self._dtype)


class LayerWeights:
    """Weights of a pre-norm layer of a transformers model, or of a draft; its linear layers are prepared in place."""

    def __init__(self, module: Any, config: PretrainedConfig) -> None:
        norms = module.input_layernorm, module.post_attention_layernorm
        self.before, self.after = (norm.weight.detach().clone() for norm in norms)
        """Norm weights [hidden]: copies, which layers.c can point to."""
        self.of_heads = _head_norms(module.self_attn, config)
        """Norm weights of queries and keys [query and key heads, head_dim]; None where there are none."""
        heads, hidden = half_heads(config), Padding.to_multiple(config.hidden_size)
        self.qkv = prepared(module.self_attn, "q_proj", "k_proj", "v_proj", outputs=heads)
        self.out = prepared(module.self_attn, "o_proj", inputs=heads, outputs=hidden)
        self.gate_up: Product | None = None
        self.down: Product | None = None
        self.experts: PreparedExperts | None = None
        """In place of gate_up and down, where the layer is a mixture of experts and these are in C."""
        self._mlp = module.mlp
        if hasattr(module.mlp, "gate_proj"):
            inner = Padding.to_multiple(module.mlp.gate_proj.out_features)
            self.gate_up = prepared(module.mlp, "gate_proj", "up_proj", outputs=inner)
            self.down = prepared(module.mlp, "down_proj", inputs=inner, outputs=hidden)
        else:
            self.experts = prepared_experts(module.mlp)

    def mlp(self, x: Tensor) -> Tensor:
        """SwiGLU, or the model's own mixture of experts: [N, hidden] -> [N, hidden]."""
        if self.gate_up is None or self.down is None:
            return cast(Tensor, self._mlp(x[None])[0])
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate).mul_(up))


def half_heads(config: PretrainedConfig) -> Padding:
    """Padding of the two halves of a head; rotary embedding pairs a number of one with one of the other."""
    return Padding.to_multiple(head_dim(config) // 2, INPUTS // 2)


def _head_norms(attention: Any, config: Any) -> Tensor | None:
    if not hasattr(attention, "q_norm"):
        return None
    weights = (
        attention.q_norm.weight.expand(config.num_attention_heads, -1),
        attention.k_norm.weight.expand(num_kv_heads(config), -1),
    )
    return torch.cat(weights).detach()


class DecoderLayers:
    """All layers of a model and the norm after them."""

    def __init__(self, layers: Sequence[LayerWeights], norm: Tensor, config: PretrainedConfig) -> None:
        self._layers, self._norm = layers, norm.detach().clone()
        self._dim, self._eps = head_dim(config), config.rms_norm_eps

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def halves(self) -> Padding:
        """Layout of the halves of a head in the cache that these layers read."""
        return Padding(self._dim // 2, self._dim // 2)

    @property
    def is_dense(self) -> bool:
        """No layer is a mixture of experts, which asks the host who gets which token."""
        return all(layer.gate_up is not None for layer in self._layers)

    def __call__(
        self,
        hidden: Tensor,
        rotary: Rotary,
        cache: SlotView,
        masks: Sequence[Sequence[Mask]],
        kept: Sequence[int],
        given: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run tokens [N, hidden], which become those after the last layer; a layer's masks are those of the parts.

        given [N, ...]: what the first layer's attention reads, by default the tokens, normed. Returns hidden states
        [N, hidden], normed, and those after the layers `kept`, [N, len(kept) * hidden].
        """
        found, after = None, dict[int, Tensor]()
        # Each norm also adds the output of the sublayer before it: `found` waits for the next one.
        for i, layer in enumerate(self._layers):
            read = given if i == 0 else None
            read = self._add_norm(hidden, found, layer.before) if read is None else read
            attended = self._attend(i, read, rotary, cache, masks[i])
            found = layer.mlp(self._add_norm(hidden, attended, layer.after))
            if i in kept:
                after[i] = hidden + found
        normed = self._add_norm(hidden, found, self._norm)
        after[len(self._layers) - 1] = normed  # as transformers gives the last layer's
        return normed, torch.cat([after[i] for i in kept], dim=-1) if kept else hidden.new_empty(len(hidden), 0)

    def project(self, x: Tensor, rotary: Rotary, cache: SlotView) -> None:
        """Store every layer's keys and values of [N, hidden]."""
        for i in range(len(self._layers)):
            self._store(i, x, rotary, cache)

    def _attend(self, index: int, x: Tensor, rotary: Rotary, cache: SlotView, masks: Sequence[Mask]) -> Tensor:
        """A layer's attention of tokens [N, hidden], normed, to the cache and themselves: [N, hidden]."""
        queries = self._store(index, x, rotary, cache)
        return self._layers[index].out(attend_parts(masks, queries, *cache.read(index), self._dim**-0.5))

    def _store(self, index: int, x: Tensor, rotary: Rotary, cache: SlotView) -> Tensor:
        """Store a layer's keys and values of [N, hidden], normed; returns its queries [N, heads, head_dim]."""
        layer, num_kv = self._layers[index], cache.num_heads
        heads = layer.qkv(x).view(len(x), -1, self._dim)  # queries, then keys, then values
        # Queries and keys are normed and rotated together, in place: views of one product.
        turned, new = heads[:, :-num_kv], heads[:, -2 * num_kv :]
        if layer.of_heads is not None:
            torch.mul(functional.rms_norm(turned, (self._dim,), eps=self._eps), layer.of_heads, out=turned)
        # x * cos + swapped halves of x * sin, of which the first half is negated in the table.
        torch.addcmul(turned * rotary.cosines, turned.roll(self._dim // 2, -1), rotary.sines, out=turned)
        cache.store(new.unflatten(1, (2, num_kv)), index)
        return heads[:, : -2 * num_kv]

    def _add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add `delta` to `hidden`, both [N, hidden], in place; returns the sum's RMSNorm."""
        if delta is not None:
            hidden.add_(delta)
        return self._norm_of(hidden, weight)

    def _norm_of(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, hidden.shape[-1:], weight, self._eps)


def attend_parts(masks: Sequence[Mask], query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Queries [N, heads, head_dim] of every part to its own rows of [R, kv_heads, L, head_dim]: [N, heads * dim]."""
    attended, row = [], 0
    queries = query.split([mask.packing.num_tokens for mask in masks])
    for mask, own in zip(masks, queries, strict=True):
        rows = slice(row, row + len(mask.packing.sizes))
        keys, values = (kept[rows, :, : mask.packing.length] for kept in (key, value))
        attended.append(mask.packing.attend(own, keys, values, mask.bias, scale).flatten(1))
        row = rows.stop
    return torch.cat(attended) if len(attended) > 1 else attended[0]
