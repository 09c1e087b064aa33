"""Kernels of a decoder's layers for GPUs, in Triton: what lies between two products of matrices is one kernel.

All sums are in float32, in an order that depends on the sizes of the model only, and results are rounded once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from blockpilot.models.graphs import SeenColumns

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_SPLIT, MOST_SPLITS = 128, 32  # columns of a part of attention, and parts of a row


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add `delta` to `hidden`, both [N, hidden], in place; returns the sum's RMSNorm."""
    num, size = hidden.shape
    normed = torch.empty_like(hidden)
    assert hidden.is_contiguous()
    assert delta is None or delta.is_contiguous()
    block = next_power_of_2(size)
    _add_norm[(num,)](
        hidden,
        hidden if delta is None else delta,
        weight,
        normed,
        eps,
        SIZE=size,
        HAS_DELTA=delta is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 256)),
    )
    return normed


def rotate_and_store(
    heads: Tensor,
    weights: Tensor | None,
    cosines: Tensor,
    sines: Tensor,
    layer: Tensor,
    slots: Tensor,
    columns: Tensor,
    eps: float,
) -> None:
    """Norm and rotate queries and keys, the queries in place, and store keys and values in a layer's cache.

    heads [N, queries + 2 * kv, head_dim]; weights [queries + kv, head_dim] of their norms, None without norms;
    cosines and sines [N, 1, head_dim]; layer [2, slots, kv, length, head_dim]; slots and columns [N].
    """
    num, num_heads, dim = heads.shape
    num_kv = layer.shape[2]
    assert heads.is_contiguous()
    assert all(values.is_contiguous() for values in (cosines, sines, slots, columns))
    assert layer.stride(4) == 1
    _rotate_and_store[(num, num_heads)](
        heads,
        heads if weights is None else weights,
        cosines,
        sines,
        layer,
        slots,
        columns,
        eps,
        *layer.stride()[:4],
        QUERIES=num_heads - 2 * num_kv,
        KV=num_kv,
        HALF=dim // 2,
        HAS_NORM=weights is not None,
        BLOCK=next_power_of_2(dim // 2),
        num_warps=1,
    )


def silu_times(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of [N, 2 * inner], times the second half."""
    num, inner = len(gate_up), gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    product, block = gate_up.new_empty(num, inner), 1024
    _silu_times[(num, triton.cdiv(inner, block))](gate_up, product, INNER=inner, BLOCK=block, num_warps=4)
    return product


def attend(queries: Tensor, layer: Tensor, seen: SeenColumns, scale: float) -> Tensor:
    """Attention of queries [R * W, heads, head_dim] of a box to the columns of the first R slots of a layer's cache.

    layer [2, slots, kv, length, head_dim]. Returns [R * W, heads * head_dim].
    """
    (num, heads, dim), (_, _, num_kv, num_columns, _) = queries.shape, layer.shape
    width, groups = num // seen.rows, heads // num_kv
    assert queries.stride()[1:] == (dim, 1)
    assert all(values is None or values.is_contiguous() for values in seen[:3])
    assert layer.stride(4) == 1
    # 1. Every row in parts of `split` columns, a size that depends on nothing but the cache.
    split = max(LEAST_SPLIT, next_power_of_2(num_columns) // MOST_SPLITS)
    num_splits = triton.cdiv(seen.length, split)
    partial = torch.empty(num_splits, num, heads, dim, dtype=torch.float32, device=queries.device)
    weights = torch.empty(num_splits, num, heads, 2, dtype=torch.float32, device=queries.device)
    # In float32 tiles have one shape, so that a token's sums are the same in any box.
    exact = queries.dtype == torch.float32
    rows = 16 if exact else min(64, max(16, next_power_of_2(width * groups)))
    block_dim = max(16, next_power_of_2(dim))
    sizes: dict[str, Any] = {"HEADS": heads, "GROUPS": groups, "DIM": dim, "BLOCK_DIM": block_dim, "SPLIT": split}
    _attend_parts[(seen.rows * triton.cdiv(width * groups, rows), num_kv, num_splits)](
        queries,
        layer,
        layer[1],
        seen.starts if seen.follows is None else seen.follows,
        seen.starts,
        seen.ends,
        partial,
        weights,
        scale,
        num,
        width,
        queries.stride(0),
        *layer.stride()[1:4],
        **sizes,
        SEES_ALL=seen.follows is None,
        ROWS=rows,
        COLUMNS=32 if exact else 64,
        num_warps=4,
        num_stages=2,
    )
    # 2. The parts of a row together.
    attended, most = queries.new_empty(num, heads * dim), next_power_of_2(triton.cdiv(num_columns, split))
    _join_parts[(num, heads)](partial, weights, seen.ends, attended, num, **sizes, PARTS=most, num_warps=4)
    return attended


@triton.jit
def _add_norm(hidden, delta, weight, normed, eps, SIZE: tl.constexpr, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * SIZE
    index = tl.arange(0, BLOCK)
    inside = index < SIZE
    x = tl.load(hidden + start + index, mask=inside, other=0.0)
    if HAS_DELTA:
        # Rounded, as the sum that later layers read.
        x = (x.to(tl.float32) + tl.load(delta + start + index, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(hidden + start + index, x, mask=inside)
    x = x.to(tl.float32)
    x = x * (1 / tl.sqrt(tl.sum(x * x, axis=0) / SIZE + eps))
    x = x * tl.load(weight + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + start + index, x.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_and_store(
    heads,
    weights,
    cosines,
    sines,
    layer,
    slots,
    columns,
    eps,
    of_kind,
    of_slot,
    of_head,
    of_column,
    QUERIES: tl.constexpr,
    KV: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.arange(0, BLOCK)
    inside = index < HALF
    own = heads + (token * (QUERIES + 2 * KV) + head) * (2 * HALF)
    first = tl.load(own + index, mask=inside, other=0.0)
    second = tl.load(own + HALF + index, mask=inside, other=0.0)
    if head < QUERIES + KV:
        x, y = first.to(tl.float32), second.to(tl.float32)
        if HAS_NORM:
            scale = 1 / tl.sqrt((tl.sum(x * x, axis=0) + tl.sum(y * y, axis=0)) / (2 * HALF) + eps)
            of_norm = weights + head * (2 * HALF)
            x = x * scale * tl.load(of_norm + index, mask=inside, other=0.0).to(tl.float32)
            y = y * scale * tl.load(of_norm + HALF + index, mask=inside, other=0.0).to(tl.float32)
        # The first half of the sines is negated in their table.
        turn = token * (2 * HALF) + index
        first_cos = tl.load(cosines + turn, mask=inside, other=0.0).to(tl.float32)
        first_sin = tl.load(sines + turn, mask=inside, other=0.0).to(tl.float32)
        second_cos = tl.load(cosines + turn + HALF, mask=inside, other=0.0).to(tl.float32)
        second_sin = tl.load(sines + turn + HALF, mask=inside, other=0.0).to(tl.float32)
        first = (x * first_cos + y * first_sin).to(first.dtype)
        second = (y * second_cos + x * second_sin).to(second.dtype)
    out = own
    if head >= QUERIES:
        kind = (head - QUERIES) // KV
        slot, column = tl.load(slots + token), tl.load(columns + token)
        out = layer + kind * of_kind + slot * of_slot + (head - QUERIES - kind * KV) * of_head + column * of_column
    tl.store(out + index, first, mask=inside)
    tl.store(out + HALF + index, second, mask=inside)


@triton.jit
def _silu_times(gate_up, product, INNER: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < INNER
    gate = tl.load(gate_up + token * (2 * INNER) + index, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * (2 * INNER) + INNER + index, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1 + tl.exp(-gate)) * up
    tl.store(product + token * INNER + index, result.to(product.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num", "width"])
def _attend_parts(
    queries,
    all_keys,
    all_values,
    follows,
    starts,
    ends,
    partial,
    weights,
    scale,
    num,
    width,
    of_token,
    of_slot,
    of_head,
    of_column,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    SEES_ALL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # 1. Query rows of one head of keys: those of its group of heads, token by token.
    tiles = tl.cdiv(width * GROUPS, ROWS)
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    kv_head, part = tl.program_id(1), tl.program_id(2)
    first = row.to(tl.int64) * width
    end = tl.load(ends + first)
    begin = part * SPLIT
    if begin >= end:
        return
    index = tile * ROWS + tl.arange(0, ROWS)
    offset = index // GROUPS
    is_query = offset < width
    token = first + offset
    head = kv_head * GROUPS + index % GROUPS
    dims = tl.arange(0, BLOCK_DIM)
    inside = dims < DIM
    query = tl.load(
        queries + (token * of_token + head * DIM)[:, None] + dims[None, :],
        mask=is_query[:, None] & inside[None, :],
        other=0.0,
    )
    if not SEES_ALL:
        start = tl.load(starts + first)
        bits = tl.load(follows + token, mask=is_query, other=0)
    # 2. Softmax over the part's columns, a few at a time.
    base = row.to(tl.int64) * of_slot + kv_head.to(tl.int64) * of_head
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    for some in range(begin, tl.minimum(begin + SPLIT, end), COLUMNS):
        column = some + tl.arange(0, COLUMNS).to(tl.int64)
        is_stored = column < end
        places = base + (column * of_column)[:, None] + dims[None, :]
        is_number = is_stored[:, None] & inside[None, :]
        keys = tl.load(all_keys + places, mask=is_number, other=0.0)
        values = tl.load(all_values + places, mask=is_number, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * (scale * LOG2_E)
        visible = is_query[:, None] & is_stored[None, :]
        if not SEES_ALL:
            of_row = column - start
            is_followed = (bits[:, None] >> tl.maximum(of_row, 0)[None, :]) & 1
            visible = visible & ((of_row < 0)[None, :] | (is_followed > 0))
        scores = tl.where(visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        # Rows that see nothing so far have no largest score.
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        decay = tl.exp2(best - shift)
        chances = tl.exp2(scores - shift[:, None])
        total = total * decay + tl.sum(chances, axis=1)
        result = result * decay[:, None]
        result = tl.dot(chances.to(values.dtype), values, result, input_precision="ieee")
        best = new_best
    # 3. Unnormalised results, with the largest score and the sum of the chances.
    place = part.to(tl.int64) * num * HEADS + token * HEADS + head
    tl.store(partial + (place * DIM)[:, None] + dims[None, :], result, mask=is_query[:, None] & inside[None, :])
    tl.store(weights + place * 2, best, mask=is_query)
    tl.store(weights + place * 2 + 1, total, mask=is_query)


@triton.jit(do_not_specialize=["num"])
def _join_parts(
    partial,
    weights,
    ends,
    attended,
    num,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    PARTS: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, BLOCK_DIM)
    inside = dims < DIM
    parts = tl.arange(0, PARTS)
    is_part = parts < tl.cdiv(tl.load(ends + token), SPLIT)
    places = (parts.to(tl.int64) * num + token) * HEADS + head
    best = tl.load(weights + places * 2, mask=is_part, other=float("-inf"))
    factors = tl.exp2(best - tl.max(best, axis=0))  # every token sees itself, so the largest is a number
    total = tl.sum(factors * tl.load(weights + places * 2 + 1, mask=is_part, other=0.0), axis=0)
    numbers = tl.load(
        partial + (places * DIM)[:, None] + dims[None, :], mask=is_part[:, None] & inside[None, :], other=0.0
    )
    result = tl.sum(numbers * factors[:, None], axis=0) / total
    place = token * HEADS + head
    tl.store(attended + place * DIM + dims, result.to(attended.dtype.element_ty), mask=inside)
