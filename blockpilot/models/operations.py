"""Operations of a decoder layer between its products: norms, rotation, storing keys and values, attention.

`Operations` does it by torch, on any device; `native.NativeOperations` does the same on a CPU in fewer, fused calls.
"""

from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from blockpilot.models.cache import SlotView
from blockpilot.models.packing import Packing, folded


class Rotary(NamedTuple):
    """Rotation of heads by their positions, [N, 1, head_dim]: cosines, and sines whose first half is negated."""

    cosines: Tensor
    sines: Tensor

    @classmethod
    def of(cls, embedding: nn.Module, hidden: Tensor, positions: Tensor) -> Self:
        """For tokens at positions [N], by a model's own rotary embedding, in the dtype of `hidden`."""
        cosines, sines = (table[0, :, None] for table in embedding(hidden, positions[None]))
        negated, straight = sines.chunk(2, dim=-1)
        return cls(cosines.contiguous(), torch.cat([-negated, straight], dim=-1))


class Mask:
    """Attention mask of a packing: `visible` [R, 1, width, length], the columns that each token sees."""

    def __init__(self, packing: Packing, visible: Tensor, groups: int, dtype: torch.dtype) -> None:
        self.packing, self.visible = packing, visible.contiguous()
        self._groups, self._dtype = groups, dtype

    @cached_property
    def bias(self) -> Tensor:
        """[R, 1, groups * width, length], to add to scores."""
        return folded(self.visible, self._groups, self._dtype)


class Operations:
    """By torch: a handful of calls each."""

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `delta` to `hidden`, both [N, hidden], in place; returns the sum's RMSNorm."""
        if delta is not None:
            hidden.add_(delta)
        return functional.rms_norm(hidden, hidden.shape[-1:], weight, eps)

    def rotate_and_store(
        self, heads: Tensor, norms: Tensor | None, eps: float, rotary: Rotary, cache: SlotView, layer_idx: int
    ) -> Tensor:
        """Store the keys and values of heads [N, heads + 2 * kv_heads, head_dim], and return the queries.

        Queries and keys are normed first, where there are `norms` [heads + kv_heads, head_dim], and rotated;
        in place.
        """
        num_kv, dim = cache.num_heads, heads.shape[-1]
        turned, new = heads[:, :-num_kv], heads[:, -2 * num_kv :]
        if norms is not None:
            torch.mul(functional.rms_norm(turned, (dim,), eps=eps), norms, out=turned)
        torch.addcmul(turned * rotary.cosines, turned.roll(dim // 2, -1), rotary.sines, out=turned)
        cache.store(new.unflatten(1, (2, num_kv)), layer_idx)
        return heads[:, : -2 * num_kv]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Mask) -> Tensor:
        """Packed query [N, heads, head_dim] -> [N, heads * head_dim].

        key and value are [R, kv_heads, length, head_dim].
        """
        return mask.packing.attend(query, key, value, mask.bias, scale).flatten(1)
