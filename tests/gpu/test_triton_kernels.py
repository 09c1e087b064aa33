"""Every kernel in Triton against plain torch, in both dtypes.

Without a GPU, Triton's interpreter runs them on the CPU: TRITON_INTERPRET=1, where Triton is installed.
"""

import math
import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from blockpilot.models.graphs import MOST_WIDTH, SeenColumns

kernels = pytest.importorskip("blockpilot.models.triton_kernels", exc_type=ImportError)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
CAN_RUN = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CAN_RUN, reason="needs a GPU")]
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# Heads of queries, of keys, and their size.
HEADS = {"tiny": (4, 2, 12), "smollm2": (9, 3, 64), "qwen3": (32, 8, 128), "one": (5, 1, 32), "no groups": (3, 3, 80)}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def assert_same(result: Tensor, expected: Tensor) -> None:
    assert result.dtype in (torch.float32, torch.bfloat16)
    tolerance = 2e-5 if result.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(result.float(), expected.float(), rtol=tolerance, atol=tolerance)


@both_dtypes
@pytest.mark.parametrize(("num", "size"), [(1, 576), (3, 48), (5, 4096), (200, 2560)])
@pytest.mark.parametrize("adds", [True, False])
def test_add_norm(num: int, size: int, adds: bool, dtype: torch.dtype) -> None:
    hidden, weight = randn(num, size, dtype=dtype), randn(size, dtype=dtype)
    delta = randn(num, size, dtype=dtype) if adds else None
    expected = hidden.clone() if delta is None else hidden + delta
    normed = kernels.add_norm(hidden, delta, weight, EPS)
    assert_same(hidden, expected)
    assert_same(normed, functional.rms_norm(expected.float(), (size,), weight.float(), EPS))


@both_dtypes
@pytest.mark.parametrize("num", [1, 7])
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("name", HEADS)
def test_rotate_and_store(name: str, has_norms: bool, num: int, dtype: torch.dtype) -> None:
    (queries, kv, dim), slots, length = HEADS[name], 4, 20
    heads, cosines, sines = (randn(num, n, dim, dtype=dtype) for n in (queries + 2 * kv, 1, 1))
    weights = randn(queries + kv, dim, dtype=dtype) if has_norms else None
    cache = randn(3, 2, slots, kv, length, dim, dtype=dtype)
    token_slots, columns = torch.randint(slots, (num,)).to(DEVICE), torch.randperm(length)[:num].to(DEVICE)
    # 1. By torch, in float32.
    rotated = heads[:, : queries + kv].float()
    if weights is not None:
        rotated = functional.rms_norm(rotated, (dim,), eps=EPS) * weights.float()
    rotated = rotated * cosines.float() + rotated.roll(dim // 2, -1) * sines.float()
    expected = cache.clone()
    expected[1, 0][token_slots, :, columns] = rotated[:, queries:].to(dtype)
    expected[1, 1][token_slots, :, columns] = heads[:, queries + kv :]
    # 2. By the kernel: nothing else changes in the cache.
    kernels.rotate_and_store(heads, weights, cosines, sines, cache[1], token_slots, columns, EPS)
    assert_same(heads[:, :queries], rotated[:, :queries])
    assert_same(cache, expected)


@both_dtypes
@pytest.mark.parametrize(("num", "inner"), [(1, 96), (3, 1536), (17, 12288)])
def test_silu_times(num: int, inner: int, dtype: torch.dtype) -> None:
    gate_up = randn(num, 2 * inner, dtype=dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    assert_same(kernels.silu_times(gate_up), functional.silu(gate) * up)


def box_of(rows: int, width: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random trees: follows, starts and ends [R, W]; the first row begins at column 0, the last one is full."""
    follows = torch.ones(rows, width, dtype=torch.int64)
    starts = torch.randint(length - width, (rows,))
    sizes = torch.randint(1, width + 1, (rows,))
    starts[0], sizes[-1] = 0, width
    for row in range(rows):
        for token in range(1, int(sizes[row])):
            parent = int(torch.randint(token, ()))
            follows[row, token] = (1 << token) | follows[row, parent]
    return follows, starts[:, None].expand(-1, width), (starts + sizes)[:, None].expand(-1, width)


@both_dtypes
@pytest.mark.parametrize("sees_all", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (4, 1), (3, 4), (2, 7), (1, 16), (2, MOST_WIDTH)])
@pytest.mark.parametrize("name", HEADS)
def test_attend(name: str, rows: int, width: int, sees_all: bool, dtype: torch.dtype) -> None:
    (heads, kv, dim), length = HEADS[name], 300
    groups, scale = heads // kv, dim**-0.5
    follows, starts, ends = box_of(rows, width, length)
    cache = randn(2, 2, rows + 1, kv, length, dim, dtype=dtype)
    for row in range(rows):
        cache[1, :, row, :, ends[row, 0] :] = math.nan  # nothing reads beyond a row's end
    queries = randn(rows * width, heads + 2 * kv, dim, dtype=dtype)[:, :heads]
    places = [values.contiguous().flatten().to(DEVICE) for values in (follows, starts, ends)]
    seen = SeenColumns(None if sees_all else places[0], *places[1:], rows, min(length, int(ends.max()) + 40))
    attended = kernels.attend(queries, cache[1], seen, scale).unflatten(0, (rows, width))
    for row in range(rows):
        end = int(ends[row, 0])
        inside = torch.arange(end) - starts[row, 0]
        visible = (inside < 0) | (follows[row, :, None] >> inside.clamp(min=0) & 1 > 0) | sees_all
        keys, values = cache[1, :, row, :, :end].float().repeat_interleave(groups, dim=1)
        own = queries[row * width :][:width].float().transpose(0, 1)
        expected = functional.scaled_dot_product_attention(own, keys, values, visible.to(DEVICE), scale=scale)
        assert_same(attended[row], expected.transpose(0, 1).flatten(1))


@pytest.mark.parametrize("width", [2, 8, MOST_WIDTH])
def test_a_token_attends_alike_in_any_box(width: int) -> None:
    """In float32 its numbers are those of a row of one token, bit for bit."""
    (heads, kv, dim), length, rows = HEADS["qwen3"], 300, 3
    start = 200
    cache = randn(2, rows, kv, length, dim, dtype=torch.float32)
    queries = randn(rows * width, heads, dim, dtype=torch.float32)
    offsets = torch.arange(width, device=DEVICE).repeat(rows)
    starts = torch.full_like(offsets, start)
    chains = SeenColumns((2 << offsets) - 1, starts, starts + width, rows, length)
    attended = kernels.attend(queries, cache, chains, dim**-0.5)
    for token in range(width):
        own = torch.full((rows,), start + token, device=DEVICE)
        alone = SeenColumns(torch.ones_like(own), own, own + 1, rows, start + token + 1)
        assert attended[token::width].equal(kernels.attend(queries[token::width], cache, alone, dim**-0.5))
