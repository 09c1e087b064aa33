"""Key/value cache of a fixed batch: every sequence owns a slot, every final token the column of its position.

Entries are scattered by (slot, column) and read by column, so rejected tokens need no rollback: a column is rewritten
before any query that may see it. A query sees the columns before its row's anchor, which are final, and those of its
own block that it follows (the mask's work). Drafted tokens of a tree lie in the order of its nodes; those that are
accepted move to the columns of their positions (`relocate`).

Active slots are kept dense (0 .. n-1) by moving the last one into a hole, so a forward pass reads plain views.
"""

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor

from blockpilot.device import sent
from blockpilot.models.graphs import Box, BoxPlaces, Graphs
from blockpilot.models.packing import Packing
from blockpilot.native.products import Padding


class SlotCache:
    """Keys and values of a model's layers for `num_slots` texts of at most `length` tokens; zeros at first.

    A tree fills more columns than positions: that many may be spare. Layers in C pad the
    `halves` of a head.
    """

    def __init__(
        self,
        config: Any,
        num_slots: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        num_spare: int = 0,
        halves: Padding | None = None,
    ) -> None:
        self.max_length = length
        self._halves = halves or Padding(head_dim(config) // 2, head_dim(config) // 2)
        of_slot = num_kv_heads(config), length + num_spare, 2 * self._halves.padded
        shape = (config.num_hidden_layers, 2, num_slots, *of_slot)
        # Zeros, not empty: masked columns are multiplied by zero, and garbage may hold NaN.
        self.layers = torch.zeros(shape, dtype=dtype, device=device)
        """[layers, 2, num_slots, kv_heads, length, head_dim], keys and then values."""
        self.by_token = [self.layers[i].permute(1, 3, 0, 2, 4) for i in range(len(self.layers))]
        """Each layer as a view [num_slots, length, 2, kv_heads, head_dim]."""
        self.graphs: Graphs | None = None
        """Captures passes of few tokens: tokens then leave the last column free."""

    @property
    def num_columns(self) -> int:
        return self.layers.shape[4]

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values together."""
        return self.layers.nbytes

    def unpadded(self, length: int) -> Tensor:
        """Keys and values of the first `length` columns, [layers, 2, num_slots, kv_heads, length, head_dim]."""
        return self._halves.cut(self.layers[..., :length, :])

    def bare(self) -> Self:
        """The same memory without graphs: what graphs refer to, so that no cycle keeps it alive."""
        same = copy(self)
        same.graphs = None
        return same

    def view(self, slots: Tensor, columns: Tensor, rows: "slice | Tensor", length: int) -> "SlotView":
        """The cache as one forward pass sees it, whose token i lies in slot slots[i], column columns[i], both [N].

        `rows` are the slots that are read, on the host where it knows them, each up to column `length`, which is one
        past the largest (the caller knows it without waiting for the device).
        """
        return SlotView(self, slots, columns, rows, length)

    def relocate(self, slots: Tensor, sources: Tensor, destinations: Tensor) -> None:
        """Copy columns within their slots, all [M]: none is overwritten before it is copied."""
        # The right side is a copy. Slots and columns are joined elementwise: [M, layers, 2, kv_heads, head_dim].
        self.layers[:, :, slots, :, destinations] = self.layers[:, :, slots, :, sources]

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` columns of slot `source` over slot `destination`."""
        self.layers[:, :, destination, :, :length] = self.layers[:, :, source, :, :length]

    def clear(self, slot: int) -> None:
        """Forget what a failed row has left: by torch masked columns are multiplied by zero, and 0 * NaN is NaN."""
        self.layers[:, :, slot] = 0


class Pages:
    """Keys and values of `num` runs of `size` columns, kept apart from the slots of a cache that they come from."""

    def __init__(self, cache: SlotCache, num: int, size: int) -> None:
        layers, kinds, _, heads, _, dim = cache.layers.shape
        self._cache, self._size = cache, size
        self._pages = cache.layers.new_empty(num, layers, kinds, heads, size, dim)

    @property
    def num_bytes(self) -> int:
        return self._pages.nbytes

    def store(self, page: int, slot: int, column: int) -> None:
        """Copy a slot's columns from `column` on."""
        self._pages[page] = self._columns(slot, column)

    def load(self, page: int, slot: int, column: int) -> None:
        """Copy a page to a slot's columns from `column` on."""
        self._columns(slot, column).copy_(self._pages[page])

    def _columns(self, slot: int, column: int) -> Tensor:
        return self._cache.layers[:, :, slot, :, column : column + self._size]


InBox = Callable[[Tensor, Box, BoxPlaces, Packing, "SlotView"], tuple[Tensor, ...]]
"""Hidden states [R * W, hidden] of a box, its places, its packing, its view of the cache -> outputs [R * W, ...]."""


class SlotView:
    """What attention layers call to store the pass's keys and values and to read all up to the longest row.

    `length` is the number of columns read.
    """

    def __init__(self, cache: SlotCache, slots: Tensor, columns: Tensor, rows: "slice | Tensor", length: int) -> None:
        self.length = length
        self.cache = cache
        self._places = slots, columns
        self._rows = rows if isinstance(rows, slice) else sent(rows, cache.layers.device)
        self._given = rows

    @property
    def host_slots(self) -> Sequence[int] | None:
        """The slot of every row that is read; None where only the device knows."""
        if isinstance(self._given, slice):
            return range(self.layers.shape[2])[self._given]
        return self._given.tolist() if self._given.device.type == "cpu" else None

    @property
    def num_heads(self) -> int:
        """Heads of keys, and of values."""
        return self.cache.layers.shape[3]

    @property
    def num_columns(self) -> int:
        """Columns of the whole cache, read or not."""
        return self.cache.layers.shape[4]

    @property
    def max_length(self) -> int:
        """Tokens of the longest text that the cache can hold."""
        return self.cache.max_length

    @property
    def layers(self) -> Tensor:
        """The whole cache, [layers, 2, num_slots, kv_heads, length, head_dim]."""
        return self.cache.layers

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """Slot and column of every token, both [N]."""
        return self._places

    @property
    def row_slots(self) -> Tensor:
        """The slot of every row that is read, [R]."""
        return torch.arange(self.layers.shape[2], device=self.layers.device)[self._rows]

    def store(self, new: Tensor, layer_idx: int) -> None:
        """Store keys and values [N, 2, kv_heads, head_dim] of the pass's tokens."""
        self.cache.by_token[layer_idx].index_put_(self._places, new)

    def read(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, kv_heads, length, head_dim]."""
        keys, values = self.cache.layers[layer_idx, :, self._rows, :, : self.length]
        return keys, values

    def by_graph(self, layers: InBox, key: Hashable, hidden: Tensor, packing: Packing) -> tuple[Tensor, ...] | None:
        """Outputs [N, ...] of `layers` for a packing's hidden states [N, hidden], by a graph of its box.

        None where the cache has no graphs, or none for this packing. `key` stands for `layers`.
        """
        graphs, slots, num_columns = self.cache.graphs, self.host_slots, self.num_columns
        if graphs is None or slots is None:
            return None
        box = Box.around(packing, slots, self.layers.shape[2], num_columns)
        if box is None:
            return None
        cache, device = self.cache.bare(), hidden.device

        def in_box(boxed: Tensor, places: BoxPlaces) -> tuple[Tensor, ...]:
            view = cache.view(box.slots(device), places.columns, slice(0, box.rows), box.length)
            # Layers add to the hidden states in place; those of the box are the graph's static input.
            return layers(boxed.clone(), box, places, box.packing(device), view)

        return graphs.of_box((key, box), in_box, hidden, box, box.places(packing, slots, num_columns))


def read_slots(slots: Sequence[int]) -> "slice | Tensor":
    """Ascending slots for a view to read: the first ones of a cache as a slice, which copies nothing."""
    return slice(0, len(slots)) if slots[-1] == len(slots) - 1 else torch.tensor(slots)


def num_kv_heads(config: Any) -> int:
    """Heads of keys, and of values; as many as of queries where a configuration does not say."""
    return int(config.num_key_value_heads or config.num_attention_heads)


def head_dim(config: Any) -> int:
    """Size of an attention head; some configurations only imply it."""
    explicit = getattr(config, "head_dim", None)
    return int(explicit or config.hidden_size // config.num_attention_heads)
