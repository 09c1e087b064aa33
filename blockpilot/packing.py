"""Rows of different lengths in one pass of the target without padding.

Tokens of R rows lie side by side in one sequence [1, N, ...]: what a layer does token by token (projections, MLPs,
experts, norms: nearly all of its work) costs N tokens, whatever the longest row is. Only attention needs the rows
apart, so only its queries are padded, for the time of the kernel; every row then meets its own keys.

Attention comes in through transformers' registry of attention functions. A call without a `packing` is stock sdpa.
"""

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
EXTRA_ROW = 12  # slots of padding that cost a CPU as much as one more row


class Packing:
    """Where the tokens of R rows lie: row r has sizes[r] of them, after those of the rows before it."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes = tuple(sizes)
        self.width = max(sizes)
        ends = list(accumulate(self.sizes))
        self.firsts = [end - size for end, size in zip(ends, self.sizes, strict=True)]
        self.num_tokens = ends[-1]
        rows = [row for row, size in enumerate(self.sizes) for _ in range(size)]
        self.rows = torch.tensor(rows, device=device)
        """[N]: the row of every token."""
        self.offsets = torch.arange(self.num_tokens, device=device) - self.per_token(self.firsts)
        """[N]: the place of every token in its row."""
        self._uniform = self.num_tokens == self.width * len(self.sizes)
        self._narrow = _narrow_width(self.sizes) if device.type == "cpu" else self.width
        self._wide = torch.tensor([r for r, size in enumerate(self.sizes) if size > self._narrow], device=device)

    @cached_property
    def _index(self) -> Tensor:
        """[R, width]: the token at every place of the padded rows."""
        firsts, sizes = (torch.tensor(of_rows, device=self.rows.device) for of_rows in (self.firsts, self.sizes))
        columns = torch.arange(self.width, device=self.rows.device)
        return firsts[:, None] + torch.minimum(columns, sizes[:, None] - 1)

    def per_token(self, of_rows: Sequence[int]) -> Tensor:
        """A number of every row [R] as that of its tokens, [N]."""
        return torch.tensor(of_rows, device=self.rows.device)[self.rows]

    def positions(self, starts: Sequence[int]) -> Tensor:
        """[N]: those of rows that run on from starts [R]."""
        return self.per_token(starts) + self.offsets

    def length(self, starts: Sequence[int]) -> int:
        """One past the largest of the positions."""
        return max(start + size for start, size in zip(starts, self.sizes, strict=True))

    def pad(self, packed: Tensor) -> Tensor:
        """[N, ...] -> [R, width, ...]; a row's padding repeats its last token."""
        return packed.unflatten(0, (len(self.sizes), self.width)) if self._uniform else packed[self._index]

    def pack(self, padded: Tensor) -> Tensor:
        """[R, width, ...] -> [N, ...]"""
        return padded.flatten(0, 1) if self._uniform else padded[self.rows, self.offsets]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Packed query [1, heads, N, head_dim] -> [1, N, heads, head_dim].

        key and value are [R, kv_heads, L, head_dim], mask [R, 1, width, L]. Where a few rows are much wider than the
        others, all rows attend with their first tokens, and the wide ones again with all.
        """
        queries, narrow, wide = self.pad(query[0].transpose(0, 1)).transpose(1, 2), self._narrow, self._wide
        attended = grouped_attention(queries[:, :, :narrow], key, value, mask[:, :, :narrow], scale)
        if len(wide):
            padded = torch.empty_like(queries)
            padded[:, :, :narrow] = attended
            padded[wide] = grouped_attention(queries[wide], key[wide], value[wide], mask[wide], scale)
            attended = padded
        return self.pack(attended.transpose(1, 2))[None]


def _narrow_width(sizes: Sequence[int]) -> int:
    """The width up to which padding all rows, and attending with the wider ones again, costs the least on a CPU."""
    extra = max(sizes) + EXTRA_ROW
    return min(sorted(set(sizes)), key=lambda w: len(sizes) * w + sum(size > w for size in sizes) * extra)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What a transformers model calls: `Packing.attend`, or stock sdpa for a call without a packing."""
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
    attended = functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=mask.repeat(1, 1, groups, 1), scale=scale
    )
    apart: Tensor = attended.unflatten(2, (groups, width)).flatten(1, 2)
    return apart


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
