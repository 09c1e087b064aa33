"""KV cache of a fixed batch: each sequence owns a slot, and each accepted token the column of its position.

Entries are scattered by (slot, column) and read by column, so rejected tokens need no rollback: a column is rewritten
before any query can attend to it. A query's mask covers the columns before its row's anchor, which hold accepted
tokens, and its ancestors in the block. Drafted tokens of a tree are in the order of its nodes; accepted tokens move
to the columns of their positions (`accept`).

Active slots are dense (0 .. n-1): the last one moves into a freed one, so a forward pass reads views without copies.
"""

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from blockpilot.device import sent, tensor_on
from blockpilot.models.graphs import MOST_TOKENS, Box, BoxTokens, Graphs
from blockpilot.models.packing import Packing
from blockpilot.native.products import Padding


class SlotCache:
    """Keys and values of a model's layers for `num_slots` texts of at most `length` tokens, initially zero.

    num_spare: additional columns, for trees, which use more columns than positions. halves: for layers in C, the
    padding of the two halves of a head, per layer.
    """

    def __init__(
        self,
        config: Any,
        num_slots: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        num_spare: int = 0,
        halves: Sequence[Padding] | None = None,
    ) -> None:
        self.max_length, heads = length, self.key_heads(config)
        self._halves = halves or [Padding(head.dim // 2, head.dim // 2) for head in heads]
        owners, groups = key_layers(config)[: len(heads)], dict[tuple[int, int, int], list[int]]()
        for i, (head, half) in enumerate(zip(heads, self._halves, strict=True)):
            if owners[i] == i:
                groups.setdefault((head.num, length + num_spare, 2 * half.padded), []).append(i)
        groups = groups or {(0, length + num_spare, 0): []}  # a draft without layers
        index_of = {layer: (i, j) for i, layers in enumerate(groups.values()) for j, layer in enumerate(layers)}
        self._group_index = [index_of[owner] for owner in owners]
        # Zeros, not empty: masked columns are multiplied by zero, and garbage may hold NaN.
        sizes = [(len(layers), 2, num_slots, *shape) for shape, layers in groups.items()]
        self.hold([torch.zeros(size, dtype=dtype, device=device) for size in sizes])
        self.graphs: Graphs | None = None
        """CUDA graphs for passes of few tokens; they need the last column of every slot for padding."""

    def hold(self, groups: Sequence[Tensor]) -> None:
        """Use this memory for keys and values."""
        self.groups = groups
        """One [layers, 2, num_slots, kv_heads, length, head_dim] per shape of heads; keys, then values."""
        self.by_layer = [groups[group][index] for group, index in self._group_index]
        """Views of each layer's keys and values [2, num_slots, kv_heads, length, head_dim]."""
        self.by_token = [layer.permute(1, 3, 0, 2, 4) for layer in self.by_layer]
        """The same views, permuted to [num_slots, length, 2, kv_heads, head_dim]."""

    @staticmethod
    def key_heads(config: Any) -> "Sequence[KeyHeads]":
        """KV heads of the layers that have keys and values."""
        return key_heads(config)

    @property
    def layers(self) -> Tensor:
        """The only tensor of `groups`, for a model whose layers all have heads of one shape."""
        (layers,) = self.groups
        return layers

    @property
    def device(self) -> torch.device:
        return self.groups[0].device

    @property
    def num_slots(self) -> int:
        return self.groups[0].shape[2]

    @property
    def num_columns(self) -> int:
        return self.groups[0].shape[4]

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(group.nbytes for group in self.groups)

    def unpadded(self, length: int) -> Tensor:
        """`layers` cut to the first `length` columns, without the padding of heads."""
        return self._halves[0].cut(self.layers[..., :length, :])

    def bare(self) -> Self:
        """Copy without graphs that shares the memory, so that graphs can refer to it without a reference cycle."""
        same = copy(self)
        same.graphs = None
        return same

    def view(self, slots: Tensor, columns: Tensor, rows: "slice | Tensor", length: int) -> "SlotView":
        """View for one forward pass, whose token i is in slot slots[i] and column columns[i], both [N].

        rows: the slots that are read, on the host if available. length: one past the largest column that is read; a
        parameter, so that the host does not wait for the device.
        """
        return SlotView(self, slots, columns, rows, length)

    def accept(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Move the tokens of the accepted paths [R] of the last pass's blocks to the columns of their positions.

        starts [R]: first columns of the blocks, which are in the first slots. A path begins with its anchor, 0.
        """
        moves = list[tuple[int, int, int]]()
        for slot, (start, path) in enumerate(zip(starts, paths, strict=False)):
            for depth, node in enumerate(path):
                # The chain of first children is in its final columns already (trees.tree_order).
                if node != depth:
                    moves.append((slot, start + node, start + depth))
        if moves:
            self._relocate(*tensor_on(self.device, moves).T)

    def _relocate(self, slots: Tensor, sources: Tensor, destinations: Tensor) -> None:
        """Copy columns within their slots, all arguments [M]; columns are read before any is written."""
        # The right side is a copy. Slots and columns are paired elementwise: [M, layers, 2, kv_heads, head_dim].
        for group in self.groups:
            group[:, :, slots, :, destinations] = group[:, :, slots, :, sources]

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` columns of slot `source` over slot `destination`."""
        for group in self.groups:
            group[:, :, destination, :, :length] = group[:, :, source, :, :length]

    def clear(self, slot: int) -> None:
        """Zero a slot after a failed row: torch multiplies masked columns by zero, and 0 * NaN is NaN."""
        for group in self.groups:
            group[:, :, slot] = 0


class Pages:
    """Memory of `num` pages; a page is a copy of `size` consecutive columns of a cache slot."""

    def __init__(self, cache: SlotCache, num: int, size: int) -> None:
        self._cache, self._size = cache, size
        self._pages = list[Tensor]()
        for group in cache.groups:
            layers, kinds, _, heads, _, dim = group.shape
            self._pages.append(group.new_empty(num, layers, kinds, heads, size, dim))

    @property
    def num_bytes(self) -> int:
        return sum(pages.nbytes for pages in self._pages)

    def store(self, page: int, slot: int, column: int) -> None:
        """Copy a slot's columns [column, column + size) to a page."""
        for pages, columns in zip(self._pages, self._columns(slot, column), strict=True):
            pages[page] = columns

    def load(self, page: int, slot: int, column: int) -> None:
        """Copy a page to a slot's columns [column, column + size)."""
        for pages, columns in zip(self._pages, self._columns(slot, column), strict=True):
            columns.copy_(pages[page])

    def _columns(self, slot: int, column: int) -> list[Tensor]:
        return [group[:, :, slot, :, column : column + self._size] for group in self._cache.groups]


InBox = Callable[[Tensor, Box, BoxTokens, Packing, "SlotView"], tuple[Tensor, ...]]
"""Hidden states [R * W, hidden], their box, its tokens, packing and cache view -> outputs [R * W, ...]."""


class SlotView:
    """Cache view of one pass: attention layers store the pass's keys and values, and read `length` columns."""

    def __init__(self, cache: SlotCache, slots: Tensor, columns: Tensor, rows: "slice | Tensor", length: int) -> None:
        self.length = length
        self.cache = cache
        self._token_indices = slots, columns
        self._rows = rows if isinstance(rows, slice) else sent(rows, cache.device)
        self._host_rows = rows

    @property
    def host_slots(self) -> Sequence[int] | None:
        """Slots of the rows that are read; None if they are only on the device."""
        if isinstance(self._host_rows, slice):
            return range(self.cache.num_slots)[self._host_rows]
        return self._host_rows.tolist() if self._host_rows.device.type == "cpu" else None

    @property
    def num_columns(self) -> int:
        """Number of columns of the cache, including those that are not read."""
        return self.cache.num_columns

    @property
    def max_length(self) -> int:
        """Maximum tokens of a text in the cache."""
        return self.cache.max_length

    @property
    def token_indices(self) -> tuple[Tensor, Tensor]:
        """Slot and column of every token, both [N]."""
        return self._token_indices

    @property
    def row_slots(self) -> Tensor:
        """The slot of every row that is read, [R]."""
        if not isinstance(self._rows, slice):
            return self._rows
        return torch.arange(*self._rows.indices(self.cache.num_slots), device=self.cache.device)

    def store(self, new: Tensor, layer_idx: int) -> None:
        """Store keys and values [N, 2, kv_heads, head_dim] of the pass's tokens."""
        self.cache.by_token[layer_idx].index_put_(self._token_indices, new)

    def read(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, kv_heads, length, head_dim]."""
        keys, values = self.cache.by_layer[layer_idx][:, self._rows, :, : self.length]
        return keys, values

    def by_graph(
        self, layers: InBox, key: Hashable, hidden: Tensor, packing: Packing, most: int = MOST_TOKENS
    ) -> tuple[Tensor, ...] | None:
        """Outputs [N, ...] of `layers` for a packing's hidden states [N, hidden], by the CUDA graph of its box.

        None if the cache has no graphs, or if the packing fits no box of at most `most` tokens. `key` identifies
        `layers`.
        """
        graphs, slots, num_columns = self.cache.graphs, self.host_slots, self.num_columns
        if graphs is None or slots is None:
            return None
        box = Box.around(packing, slots, self.cache.num_slots, num_columns)
        if box is None or box.rows * box.width > most:
            return None
        cache, device = self.cache.bare(), hidden.device

        def in_box(boxed: Tensor, box_tokens: BoxTokens) -> tuple[Tensor, ...]:
            view = cache.view(box.slots(device), box_tokens.columns, slice(0, box.rows), box.length)
            # A copy: layers add to the hidden states in place, and `boxed` is the static input of the graph.
            return layers(boxed.clone(), box, box_tokens, box.packing(device), view)

        return graphs.run_box((key, box), in_box, hidden, box, box.tokens(packing, slots, num_columns))


def read_slots(slots: Sequence[int]) -> "slice | Tensor":
    """`rows` of a view for ascending slots: a slice, which reads without a copy, if they are the first of a cache."""
    return slice(0, len(slots)) if slots[-1] == len(slots) - 1 else torch.tensor(slots)


class KeyHeads(NamedTuple):
    """Number of KV heads of a layer, and their size."""

    num: int
    dim: int


def key_heads(config: Any) -> list[KeyHeads]:
    """KV heads of every layer."""
    num_layers = int(config.num_hidden_layers)
    if not has_layer_configs(config):
        return [KeyHeads(num_kv_heads(config), head_dim(config))] * num_layers
    return [KeyHeads(num_kv_heads(layer), head_dim(layer)) for layer in config.per_layer_config]


def key_layers(config: Any) -> list[int]:
    """Per layer, the layer whose keys and values it reads: itself, or an earlier one of its type (Gemma 4)."""
    modes, last, layers = getattr(config, "kv_sharing_modes", None), dict[str, int](), list[int]()
    for i in range(int(config.num_hidden_layers)):
        if modes is None or modes[i] != "reuse":
            last[config.layer_types[i] if modes else ""] = i
        layers.append(last[config.layer_types[i]] if modes and modes[i] == "reuse" else i)
    return layers


def has_layer_configs(config: Any) -> bool:
    """True if layers have heads of different shapes: transformers then gives shapes only per layer."""
    return bool(getattr(config, "is_heterogeneous", False))


def layer_config(config: Any, layer: int) -> Any:
    """Configuration of a layer."""
    return config.per_layer_config[layer] if has_layer_configs(config) else config


def num_kv_heads(config: Any) -> int:
    """Number of KV heads; by default the number of query heads."""
    return int(config.num_key_value_heads or config.num_attention_heads)


def head_dim(config: Any) -> int:
    """Size of an attention head; by default hidden_size / num_attention_heads."""
    explicit = getattr(config, "head_dim", None)
    return int(explicit or config.hidden_size // config.num_attention_heads)
