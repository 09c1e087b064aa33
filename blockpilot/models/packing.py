"""Rows of different lengths in one pass of the target without padding.

Tokens of R rows lie side by side in one sequence [1, N, ...]: what a layer does token by token (projections, MLPs,
experts, norms: nearly all of its work) costs N tokens, whatever the longest row is. Only attention needs the rows
apart, so only its queries are padded, for the time of the kernel; every row then meets its own keys. Rows that are
much wider than others, prompts beside blocks, are a packing of their own in the same pass.

Attention comes in through transformers' registry of attention functions. A call without a `packing` is stock sdpa.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ATTENTION = "blockpilot_packed"
MOST_SCORES = 1 << 20  # of a batched product; more of them leave the caches


class Packing:
    """Where the tokens of R rows lie: row r has sizes[r] of them, from position starts[r] on."""

    def __init__(self, sizes: Sequence[int], starts: Sequence[int], device: torch.device) -> None:
        self.sizes = tuple(sizes)
        self.width = max(sizes)
        ends = list(accumulate(self.sizes))
        self.firsts = [end - size for end, size in zip(ends, self.sizes, strict=True)]
        self.num_tokens = ends[-1]
        self.length = max(start + size for start, size in zip(starts, sizes, strict=True))
        """One past the largest position."""
        rows = [row for row, size in enumerate(self.sizes) for _ in range(size)]
        self.rows = torch.tensor(rows, device=device)
        """[N]: the row of every token."""
        self.offsets = torch.arange(self.num_tokens, device=device) - self._per_token(self.firsts)
        """[N]: the place of every token in its row."""
        self.positions = self._per_token(starts) + self.offsets
        """[N]"""
        self._uniform = self.num_tokens == self.width * len(self.sizes)

    @cached_property
    def _tokens(self) -> Tensor:
        """[R * width]: the token at every place of the padded rows."""
        firsts, sizes = (torch.tensor(of_rows, device=self.rows.device) for of_rows in (self.firsts, self.sizes))
        columns = torch.arange(self.width, device=self.rows.device)
        return (firsts[:, None] + torch.minimum(columns, sizes[:, None] - 1)).flatten()

    @cached_property
    def _places(self) -> Tensor:
        """[N]: the place of every token in the padded rows."""
        return self.rows * self.width + self.offsets

    @cached_property
    def after_first(self) -> Tensor:
        """[N - R]: all tokens but the first of every row: of blocks, the drafted ones."""
        spans = zip(self.firsts, self.sizes, strict=True)
        return torch.tensor([i for first, n in spans for i in range(first + 1, first + n)], device=self.rows.device)

    def _per_token(self, of_rows: Sequence[int]) -> Tensor:
        """A number of every row [R] as that of its tokens, [N]."""
        return torch.tensor(of_rows, device=self.rows.device)[self.rows]

    def pad(self, packed: Tensor) -> Tensor:
        """[N, ...] -> [R, width, ...]; a row's padding repeats its last token."""
        places = packed if self._uniform else packed.index_select(0, self._tokens)
        padded: Tensor = places.unflatten(0, (len(self.sizes), self.width))
        return padded

    def pack(self, padded: Tensor) -> Tensor:
        """[R, width, ...] -> [N, ...]"""
        places = padded.flatten(0, 1)
        return places if self._uniform else places.index_select(0, self._places)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Packed query [1, heads, N, head_dim] -> [1, N, heads, head_dim].

        key and value are [R, kv_heads, L, head_dim], mask [R, 1, width, L].
        """
        queries = self.pad(query[0].transpose(0, 1)).transpose(1, 2)
        return self.pack(grouped_attention(queries, key, value, mask, scale).transpose(1, 2))[None]


class SideBySide:
    """Packings one after the other in one pass, each attending by itself: blocks, and the wider prompts."""

    def __init__(self, parts: Sequence[Packing]) -> None:
        self.parts = tuple(parts)
        self.length = max(part.length for part in parts)
        self.positions = torch.cat([part.positions for part in parts])
        """[N], of all tokens."""
        firsts = accumulate((len(part.sizes) for part in parts[:-1]), initial=0)
        self.rows = torch.cat([part.rows + first for part, first in zip(parts, firsts, strict=True)])
        """[N]: the row of every token, counted over all parts."""

    def pad(self, packed: Tensor) -> Tensor:
        """[N, ...] -> [M, ...]: the padded rows of every part, one after the other."""
        numbers = packed.split([part.num_tokens for part in self.parts])
        return torch.cat([part.pad(of_part).flatten(0, 1) for part, of_part in zip(self.parts, numbers, strict=True)])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        """As `Packing.attend`, with a mask [1, 1, M, L] of the padded rows."""
        attended, token, row, line = [], 0, 0, 0
        for part in self.parts:
            num_rows, num_lines = len(part.sizes), len(part.sizes) * part.width
            keys, values = (kept[row : row + num_rows, :, : part.length] for kept in (key, value))
            lines = mask[0, 0, line : line + num_lines, : part.length].unflatten(0, (num_rows, 1, part.width))
            queries = query[:, :, token : token + part.num_tokens]
            attended.append(part.attend(queries, keys, values, lines, scale))
            token, row, line = token + part.num_tokens, row + num_rows, line + num_lines
        return torch.cat(attended, dim=1)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: SideBySide | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What a transformers model calls: `SideBySide.attend`, or stock sdpa for a call without a packing."""
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    assert attention_mask is not None
    return packing.attend(query, key, value, attention_mask, options["scaling"]), None


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """query [R, heads, W, head_dim], key and value [R, kv_heads, L, head_dim], mask [R, 1, W, L] -> as query.

    The queries that share keys are laid one after the other: nothing of the cache is copied for them.
    """
    groups, width = query.shape[1] // key.shape[1], query.shape[2]
    folded = query.unflatten(1, (key.shape[1], groups)).flatten(2, 3)
    lines = mask.repeat(1, 1, groups, 1)
    if _products_are_quicker(query):
        num = max(1, MOST_SCORES // (query.shape[1] * width * key.shape[2]))
        parts = zip(folded.split(num), key.split(num), value.split(num), lines.split(num), strict=True)
        attended = torch.cat([_by_products(*part, scale=scale) for part in parts])
    else:
        attended = functional.scaled_dot_product_attention(folded, key, value, attn_mask=lines, scale=scale)
    apart: Tensor = attended.unflatten(2, (groups, width)).flatten(1, 2)
    return apart


def _products_are_quicker(query: Tensor) -> bool:
    """Than the flash kernel of torch, which on a CPU takes two to three times as long in bfloat16 (LOG.md).

    It has less to get ready where one row or two have a few queries [R, heads, W, head_dim].
    """
    cpu = query.device.type == "cpu" and query.dtype == torch.bfloat16
    return cpu and not torch.is_grad_enabled() and (len(query) > 2 or query.shape[2] > 8)


def _by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention as transformers' eager one: query [R, kv_heads, M, head_dim], mask [R, 1, M, L] -> as query.

    Scores are rounded to bfloat16 before their softmax, which moves a target's distribution no further from that of
    float32 than the flash kernel does (LOG.md).
    """
    bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -math.inf)
    bias = bias.expand(-1, key.shape[1], -1, -1).flatten(0, 1)
    keys, values = (kept.contiguous().flatten(0, 1) for kept in (key, value))  # products copy others slowly
    scores = torch.baddbmm(bias, query.flatten(0, 1), keys.transpose(1, 2), alpha=scale)
    attended = torch.bmm(scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype), values)
    apart: Tensor = attended.unflatten(0, query.shape[:2])
    return apart


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
