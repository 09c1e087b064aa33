"""Packing: rows of different lengths in one pass of the target without padding.

Tokens of R rows are flattened into one sequence [N, ...]: all token-wise work (projections, MLPs, experts, norms:
nearly all of a layer) costs N tokens, regardless of the longest row. Only attention works by row, so only its
queries are padded, inside the attention call. Prompts are much wider than blocks and attend separately, so that
blocks are not padded to the length of a prompt.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from blockpilot.device import sent, tensor_on

MOST_SCORES = 1 << 20  # scores of a batched product; more do not fit in the CPU's caches

FEW_PADDED = 4096  # tokens of rows that attend together, however different their sizes: more calls would cost more


class Packing:
    """Layout of the tokens of R rows: row r has sizes[r] tokens, from column and position starts[r] on.

    parents: for the first rows, if their tokens form trees, the parents [sizes[r] - 1] of all tokens but the first
    (types.Tree). Such a row fills its columns in order; a token's position is one after its parent's. Rows before
    `cut` are blocks, in which only the first token is accepted; rows from `cut` on are texts, and attend separately
    (`parts`).
    """

    def __init__(
        self,
        sizes: Sequence[int],
        starts: Sequence[int],
        device: torch.device,
        parents: Sequence[Sequence[int]] | None = None,
        cut: int = 0,
    ) -> None:
        self.sizes = tuple(sizes)
        self.width = max(sizes)
        ends = list(accumulate(self.sizes))
        self.firsts = [end - size for end, size in zip(ends, self.sizes, strict=True)]
        self.num_tokens = ends[-1]
        self.length = max(start + size for start, size in zip(starts, sizes, strict=True))
        """One past the largest column."""
        trees = parents or ()
        self.depths = [*map(depths_of, trees), *(list(range(n)) for n in sizes[len(trees) :])]
        """[R]: depths of every row's tokens [sizes[r]]."""
        self.starts, self.parents, self.num_blocks = tuple(starts), parents, cut
        self.on_host = np.empty((4, self.num_tokens), dtype=np.int64)
        """[4, N]: for every token its row, offset in the row, column in the cache, and position in the text."""
        rows, offsets, columns, positions = self.on_host
        rows[:], first_tokens, first_columns = np.array([range(len(sizes)), self.firsts, starts]).repeat(
            sizes, axis=1
        )
        np.subtract(np.arange(self.num_tokens), first_tokens, out=offsets)
        np.add(first_columns, offsets, out=columns)
        positions[:] = columns if parents is None else first_columns + np.concatenate(self.depths)
        self._device = device
        self._uniform = self.num_tokens == self.width * len(self.sizes)

    @cached_property
    def parts(self) -> Sequence["Packing"]:
        """Packings of consecutive rows that attend together: the blocks, then texts of similar sizes."""
        firsts = text_groups(self.sizes, self.num_blocks)
        if self.num_blocks:
            firsts = [0, *firsts]
        if len(firsts) == 1:
            return [self]
        parts = list[Packing]()
        for first, end in zip(firsts, [*firsts[1:], len(self.sizes)], strict=True):
            parents, cut = (self.parents, end) if first < self.num_blocks else (None, 0)
            parts.append(Packing(self.sizes[first:end], self.starts[first:end], self._device, parents, cut))
        return parts

    @cached_property
    def _on_device(self) -> Tensor:
        return sent(torch.from_numpy(self.on_host), self._device)

    @property
    def rows(self) -> Tensor:
        """[N]: the row of every token."""
        return self._on_device[0]

    @property
    def offsets(self) -> Tensor:
        """[N]: the index of every token in its row."""
        if self._uniform:  # no copy to the device, as a CUDA graph requires
            return torch.arange(self.width, device=self._device).repeat(len(self.sizes))
        return self._on_device[1]

    @property
    def columns(self) -> Tensor:
        """[N]"""
        return self._on_device[2]

    @property
    def positions(self) -> Tensor:
        """[N]"""
        return self._on_device[3]

    @cached_property
    def _tokens(self) -> Tensor:
        """[R * width]: the token at every index of the padded rows."""
        sizes, firsts = self.spans
        columns = torch.arange(self.width, device=self._device)
        return (firsts[:, None] + torch.minimum(columns, sizes[:, None] - 1)).flatten()

    @cached_property
    def _padded_indices(self) -> Tensor:
        """[N]: the index of every token in the padded rows."""
        return self.rows * self.width + self.offsets

    @cached_property
    def after_first(self) -> Tensor:
        """[N - R]: all tokens but the first of every row; in blocks these are the drafted tokens."""
        drafted = list[int]()
        for first, size in zip(self.firsts, self.sizes, strict=True):
            drafted += range(first + 1, first + size)
        return tensor_on(self._device, drafted)

    @cached_property
    def visible(self) -> Tensor:
        """Attention mask [R, 1, width, length]: columns before the row, and those of the token and its ancestors."""
        device = self._device
        # 1. Chains: columns up to a token's own, [1, length] <= [R, width, 1].
        if self.parents is None:
            columns = torch.arange(self.length, device=device)
            return (columns <= self.pad(self.columns)[:, :, None])[:, None]
        # 2. Trees: the columns before the row, and inside it a token's ancestors and itself.
        mask = np.zeros((len(self.sizes), 1, self.width, self.length), dtype=bool)
        for row, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            mask[row, 0, :, :start] = True
            bits = np.array(followed_bits(self.parents[row]))[:, None]
            mask[row, 0, :size, start : start + size] = bits >> np.arange(size) & 1
        return sent(torch.from_numpy(mask), device)

    def visible_in(self, window: int | None) -> Tensor:
        """`visible`, restricted to columns of tokens less than `window` positions before."""
        if window is None or self.length <= window:
            return self.visible
        return within(window, self.visible, self.pad(self.positions), tensor_on(self._device, self.starts))

    @cached_property
    def spans(self) -> tuple[Tensor, Tensor]:
        """[R] and [R]: the number of tokens of every row, and its first token."""
        sizes, firsts = tensor_on(self._device, [self.sizes, self.firsts])
        return sizes, firsts

    def pad(self, packed: Tensor) -> Tensor:
        """[N, ...] -> [R, width, ...]; a row's padding repeats its last token."""
        flat = packed if self._uniform else packed.index_select(0, self._tokens)
        padded: Tensor = flat.unflatten(0, (len(self.sizes), self.width))
        return padded

    def pack(self, padded: Tensor) -> Tensor:
        """[R, width, ...] -> [N, ...]"""
        flat = padded.flatten(0, 1)
        return flat if self._uniform else flat.index_select(0, self._padded_indices)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Packed query [N, heads, head_dim] -> [N, heads, head_dim].

        key and value are [R, kv_heads, L, head_dim], bias [R, 1, groups * width, L] from `folded`, sinks
        [heads].
        """
        attended = grouped_attention(self.pad(query).transpose(1, 2), key, value, bias, scale, sinks)
        return self.pack(attended.transpose(1, 2))


def text_groups(sizes: Sequence[int], first: int = 0) -> list[int]:
    """First rows of groups of the rows from `first` on, whose tokens padded to the widest row are at most twice as
    many, or at most FEW_PADDED.
    """
    starts, widest, total = list[int](), 0, 0
    for row, size in enumerate(sizes[first:], first):
        widest, total = max(widest, size), total + size
        if not starts or (row + 1 - starts[-1]) * widest > max(FEW_PADDED, 2 * total):
            starts.append(row)
            widest = total = size
    return starts


def within(window: int, visible: Tensor, positions: Tensor, starts: Tensor) -> Tensor:
    """Mask `visible` [R, 1, width, length], restricted to tokens less than `window` positions before.

    The tokens of a row, at positions [R, width], are in the columns from starts [R] on; in the columns before, a
    token's position is its column.
    """
    (num_rows, width), length = positions.shape, visible.shape[-1]
    # `width` more columns, cut off at the end: a short row's padding may extend beyond the longest row.
    at_columns = torch.arange(length + width, device=visible.device).repeat(num_rows, 1)
    at_columns.scatter_(1, starts[:, None] + torch.arange(width, device=visible.device), positions)
    first_seen = positions - window  # [R, width]; the positions after it are within the window
    return visible & (at_columns[:, None, None, :length] > first_seen[:, None, :, None])


def folded(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Mask [R, 1, W, L] of visible columns -> bias of `grouped_attention` [R, 1, groups * W, L]: 0 or -inf."""
    # One row for each query that shares a key: group by group, W rows each.
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)
    return bias.repeat(1, 1, groups, 1)


def depths_of(parents: Sequence[int]) -> list[int]:
    """Depths [1 + n] of a row's tokens: the first is the root, the others have these parents [n]."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


def followed_bits(parents: Sequence[int]) -> list[int]:
    """[1 + n]: bits of the ancestors and the token itself, for every token of a row of at most MAX_BLOCK_SIZE."""
    bits = [1]
    for child, parent in enumerate(parents, 1):
        bits.append(bits[parent] | 1 << child)  # a parent comes before its children
    return bits


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Grouped-query attention: query [R, heads, W, head_dim], key and value [R, kv_heads, L, head_dim] -> as query.

    bias: from `folded`; sinks: [heads]. Queries that share keys become rows of one matrix, so keys and values are not
    repeated per query head. Sinks require a copy of them.
    """
    if sinks is not None:
        inputs = with_sinks(query, key, value, bias, scale, sinks)
        return grouped_attention(*inputs, scale)[..., : query.shape[-1]]
    groups, width = query.shape[1] // key.shape[1], query.shape[2]
    rows = query.unflatten(1, (key.shape[1], groups)).flatten(2, 3)  # [R, kv_heads, groups * W, head_dim]
    if _products_are_faster(query):
        # A few rows at a time, so that their scores stay in the CPU's caches.
        num = max(1, MOST_SCORES // (query.shape[1] * width * key.shape[2]))
        parts = zip(rows.split(num), key.split(num), value.split(num), bias.split(num), strict=True)
        attended = torch.cat([_by_products(*part, scale=scale) for part in parts])
    else:
        attended = functional.scaled_dot_product_attention(rows, key, value, attn_mask=bias, scale=scale)
    by_head: Tensor = attended.unflatten(2, (groups, width)).flatten(1, 2)
    return by_head


def with_sinks(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of `grouped_attention` with one more column, of value 0, whose score for every head is its sink.

    This score is computed by the same product as the others, so that one mask serves all heads: an additional element
    is sink / scale in queries, 1 in the new key, and 0 in the other keys. Heads become 8 elements wider, as kernels
    require; the caller cuts the output.
    """
    query, key, value = (functional.pad(x, (0, 8)) for x in (query, key, value))
    query[..., -8] = (sinks / scale)[:, None]
    key, value = (functional.pad(x, (0, 0, 0, 1)) for x in (key, value))
    key[..., -1, -8] = 1
    return query, key, value, functional.pad(bias, (0, 1))


def _products_are_faster(query: Tensor) -> bool:
    """True if two products are faster than torch's flash kernel for queries [R, heads, W, head_dim].

    On a CPU the kernel takes two to three times as long in bfloat16 (LOG.md), but starts faster for one or two rows
    of a few queries.
    """
    cpu = query.device.type == "cpu" and query.dtype == torch.bfloat16
    return cpu and not torch.is_grad_enabled() and (len(query) > 2 or query.shape[2] > 8)


def _by_products(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Eager attention by two products: query [R, kv_heads, M, head_dim], bias [R, 1, M, L] -> as query.

    Scores are rounded to bfloat16 before their softmax. The target's distribution is then no further from the
    float32 one than with the flash kernel (LOG.md).
    """
    bias = bias.expand(-1, key.shape[1], -1, -1).flatten(0, 1)
    keys, values = (cached.contiguous().flatten(0, 1) for cached in (key, value))  # products are slow on views
    scores = torch.baddbmm(bias, query.flatten(0, 1), keys.transpose(1, 2), alpha=scale)
    attended = torch.bmm(scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype), values)
    by_row: Tensor = attended.unflatten(0, query.shape[:2])
    return by_row
