"""Rotary embeddings of a model, as a table by position."""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from blockpilot.models.cache import SlotCache, SlotView


class Rotary(NamedTuple):
    """Rotation of heads by their positions, [N, 1, head_dim]: cosines, and sines whose first half is negated."""

    cosines: Tensor
    sines: Tensor

    @classmethod
    def of(cls, embedding: nn.Module, hidden: Tensor, positions: Tensor, *layer_type: str) -> Self:
        """Rotation for tokens at positions [N] by a model's rotary embedding, in the dtype of `hidden`.

        layer_type: only if the embedding depends on it.
        """
        tables = embedding(hidden, positions[None], *layer_type)
        cosines, sines = (table[0, :, None] for table in tables)  # [N, 1, head_dim]
        if cosines.shape[-1] == len(getattr(embedding, "inv_freq", ())):  # of one half only (gpt-oss)
            cosines, sines = (table.repeat(1, 1, 2) for table in (cosines, sines))
        negated, straight = sines.chunk(2, dim=-1)
        return cls(cosines.contiguous(), torch.cat([-negated, straight], dim=-1))

    def at(self, positions: Tensor) -> Self:
        """Entries of a table at these positions [N]."""
        return type(self)(self.cosines[positions], self.sines[positions])


class RotaryTable:
    """A model's rotary embedding, computed once for all positions of a cache.

    Embeddings of type "dynamic" and "longrope" depend on the longest text. Here that is the maximum length of the
    cache, as in vLLM, so that a row's result does not depend on the other rows of the batch.

    layer_type: used if the embedding depends on it, like Gemma 3's.
    """

    def __init__(self, embedding: Any, layer_type: str | None = None) -> None:
        kind = getattr(embedding, "rope_type", "default")
        self._embedding, self._layer_type = embedding, (layer_type,) if layer_type and isinstance(kind, dict) else ()
        self._table: Rotary | None = None
        self._length = 0  # maximum length of a text that the table was computed for
        kind = kind[layer_type] if isinstance(kind, dict) else kind
        self._depends_on_longest = "dynamic" in kind or kind == "longrope"

    def table(self, cache: SlotCache | SlotView, hidden: Tensor) -> Rotary:
        """Table that covers the positions of a cache, in the dtype of `hidden`."""
        table, length = self._table, cache.max_length
        is_long = self._length == length if self._depends_on_longest else self._length >= length
        if (
            table is None
            or not is_long
            or len(table.cosines) < cache.num_columns
            or table.cosines.dtype != hidden.dtype
        ):
            positions = torch.arange(cache.num_columns, device=hidden.device).clamp_(max=length - 1)
            embedding = self._embedding
            if self._depends_on_longest:  # a new one: it keeps the frequencies of the longest text that it has seen
                embedding = type(embedding)(embedding.config).to(hidden.device)
            table, self._length = Rotary.of(embedding, hidden, positions, *self._layer_type), length
            self._table = table
        return table
