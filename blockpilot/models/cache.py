"""Key/value cache of a fixed batch: every sequence owns a slot, every token a column at its own position.

Entries are scattered by (slot, position) and read by position, so rejected tokens need no rollback: a column is
rewritten before any query that may see it. A query at position p sees columns up to p only (the mask's work), and
the columns up to p are final by then. What a padded row stores beyond its end is harmless for the same reason.

Active slots are kept dense (0 .. n-1) by moving the last one into a hole, so a forward pass reads plain views.
"""

from typing import Any

import torch
from torch import Tensor


class SlotCache:
    """Keys and values of a model's layers, each [num_slots, kv_heads, length, head_dim]; empty at first."""

    def __init__(self, config: Any, num_slots: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        num_heads = config.num_key_value_heads or config.num_attention_heads
        shape = (config.num_hidden_layers, num_slots, num_heads, length, head_dim(config))
        # Zeros, not empty: masked columns are multiplied by zero, and garbage may hold NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values together."""
        return 2 * self.keys.nbytes

    def view(self, slots: Tensor, positions: Tensor, rows: "slice | Tensor", length: int) -> "SlotView":
        """The cache as one forward pass sees it, whose token i lies in slot slots[i] at positions[i].

        Both have the shape [R, W] of the pass, or one that broadcasts to it. `rows` are the slots that are read, each
        up to column `length`, which is one past the largest position (the caller knows it without waiting for the
        device).
        """
        return SlotView(self, slots, positions, rows, length)

    def view_rows(self, positions: Tensor, length: int) -> "SlotView":
        """`view` of slots 0 .. R-1, a row of tokens at positions [R, W] each."""
        slots = torch.arange(len(positions), device=positions.device)[:, None]
        return self.view(slots, positions, slice(0, len(positions)), length)

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` columns of slot `source` over slot `destination`."""
        for entries in (self.keys, self.values):
            entries[:, destination, :, :length] = entries[:, source, :, :length]


class SlotView:
    """What attention layers call: `update` stores the pass's keys and values and returns all up to the longest row.

    The object a transformers model takes as `past_key_values`; `length` is the number of columns returned.
    """

    def __init__(
        self, cache: SlotCache, slots: Tensor, positions: Tensor, rows: "slice | Tensor", length: int
    ) -> None:
        self.length = length
        self._cache = cache
        self._slots, self._positions, self._rows = slots, positions, rows

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Store [R, heads, W, head_dim] and return both as [rows, heads, length, head_dim]."""
        all_keys, all_values = self._cache.keys[layer_idx], self._cache.values[layer_idx]
        all_keys[self._slots, :, self._positions] = keys.transpose(1, 2)
        all_values[self._slots, :, self._positions] = values.transpose(1, 2)
        return all_keys[self._rows, :, : self.length], all_values[self._rows, :, : self.length]


def head_dim(config: Any) -> int:
    """Size of an attention head; some configurations only imply it."""
    explicit = getattr(config, "head_dim", None)
    return int(explicit or config.hidden_size // config.num_attention_heads)
