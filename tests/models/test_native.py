"""Layers in C beside those of torch: the same numbers up to rounding, and torch where C cannot be."""

import logging
import shutil
import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config

from blockpilot.models import native
from blockpilot.models.cache import SlotCache
from blockpilot.models.native import NativeOperations, NativeProduct, native_product, operations_for
from blockpilot.models.operations import Mask, Operations, Rotary
from blockpilot.models.packing import Packing

CPU, DIM, LENGTH = torch.device("cpu"), 32, 40
TORCH = Operations()
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def compiled(dtype: torch.dtype) -> Operations:
    found = operations_for(dtype, CPU, 64, DIM)
    if not isinstance(found, NativeOperations):
        pytest.skip("no compiler, or no CPU for it")
    return found


def close(found: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCE[found.dtype]
    return found.dtype == expected.dtype and torch.allclose(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
@pytest.mark.skipif(not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="no such CPU")
def test_a_machine_with_a_compiler_has_them() -> None:
    assert isinstance(operations_for(torch.float32, CPU, 64, DIM), NativeOperations)
    assert type(operations_for(torch.float32, CPU, 60, DIM)) is Operations
    assert type(operations_for(torch.float32, CPU, 64, 48)) is Operations
    assert type(operations_for(torch.float16, CPU, 64, DIM)) is Operations


def product_of(weight: Tensor, bias: Tensor | None = None) -> NativeProduct:
    found = native_product(weight, bias)
    if found is None:
        pytest.skip("no compiler, or no CPU for it")
    return found


@settings(deadline=None)
@given(
    rows=st.integers(0, 70), inputs=st.integers(1, 9), outputs=st.integers(1, 9), bias=st.booleans(), data=st.data()
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products(dtype: torch.dtype, rows: int, inputs: int, outputs: int, bias: bool, data: st.DataObject) -> None:
    """Of any shape as torch makes them; a row's bits are the same among any others, NaN or not, by any threads."""
    torch.manual_seed(rows)
    weight = torch.randn(16 * outputs, 32 * inputs).div(32 * inputs).to(dtype)
    x = torch.randn(rows, 32 * inputs).to(dtype)
    added = torch.randn(16 * outputs).to(dtype) if bias else None
    product = product_of(weight, added)
    found = product(x)
    assert close(found, functional.linear(x, weight, added))
    assert product.unpacked().equal(weight)
    if rows:
        first = data.draw(st.integers(0, rows - 1))
        last = data.draw(st.integers(first + 1, rows))
        assert product(x[first:last]).equal(found[first:last])
        x[:first], x[last:] = torch.nan, torch.inf
        assert product(x)[first:last].equal(found[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_by_threads(dtype: torch.dtype) -> None:
    product, x = product_of(torch.randn(16 * 7, 64).to(dtype)), torch.randn(20, 64).to(dtype)
    before, found = torch.get_num_threads(), []
    try:
        for num in (1, 2, 3, 9):
            torch.set_num_threads(num)
            found.append(product(x))
    finally:
        torch.set_num_threads(before)
    assert all(each.equal(found[0]) for each in found)


@pytest.mark.parametrize("shape", [(17, 32), (16, 33), (8, 32)])
def test_torch_where_a_product_has_another_shape(shape: tuple[int, int]) -> None:
    assert native_product(torch.zeros(shape), None) is None
    assert native_product(torch.zeros(16, 32, dtype=torch.float64), None) is None
    assert native_product(torch.zeros(16, 32, device="meta"), None) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 700])
@pytest.mark.parametrize("with_delta", [True, False])
def test_add_norm(dtype: torch.dtype, rows: int, with_delta: bool) -> None:
    torch.manual_seed(rows)
    hidden, delta = torch.randn(2, rows, 64).to(dtype)
    hidden[0, 0] = torch.nan  # spoils its own row and no other
    weight = torch.randn(64).to(dtype)
    sums, normed = [], []
    for operations in (compiled(dtype), TORCH):
        sums.append(hidden.clone())
        normed.append(operations.add_norm(sums[-1], delta if with_delta else None, weight, 1e-5))
    assert normed[0][0].isnan().all()
    assert sums[0][0, 0].isnan()
    assert close(normed[0][1:], normed[1][1:])
    assert sums[0][1:].equal(sums[1][1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norms", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 7, 200])
def test_rotate_and_store(dtype: torch.dtype, with_norms: bool, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    config = Qwen3Config(num_hidden_layers=2, num_key_value_heads=2, num_attention_heads=6, head_dim=DIM)
    heads = torch.randn(num_tokens, 6 + 2 * 2, DIM).to(dtype)
    norms = torch.randn(8, DIM).to(dtype) if with_norms else None
    rotary = Rotary(*torch.randn(2, num_tokens, 1, DIM).to(dtype))
    places = torch.randperm(5 * LENGTH)[:num_tokens]
    slots, columns = places // LENGTH, places % LENGTH
    queries, kept = [], []
    for operations in (compiled(dtype), TORCH):
        cache = SlotCache(config, 5, LENGTH, dtype, CPU)
        view = cache.view(slots, columns, slice(0, 5), LENGTH)
        queries.append(operations.rotate_and_store(heads.clone(), norms, 1e-5, rotary, view, 1))
        kept.append(cache.layers)
    assert close(*queries)
    assert close(*kept)
    assert not kept[0][0].any()
    assert torch.equal(kept[0].any(dim=-1), kept[1].any(dim=-1))


@pytest.mark.parametrize("place", [(5, 0), (-1, 0), (0, LENGTH), (0, -1)])
def test_nothing_is_written_outside_the_cache(place: tuple[int, int]) -> None:
    cache = SlotCache(Qwen3Config(num_hidden_layers=1, head_dim=DIM), 5, LENGTH, torch.float32, CPU)
    slots, columns = (torch.tensor([number]) for number in place)
    with pytest.raises(IndexError, match="cache of 5 slots and 40 columns"):
        cache.view(slots, columns, slice(0, 5), LENGTH).places  # noqa: B018


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6), groups=st.integers(1, 5), seed=st.integers(0, 99))
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(dtype: torch.dtype, sizes: list[int], groups: int, seed: int) -> None:
    """Of rows of any widths, each token to any columns, in part of a longer cache; NaN stays in its own head."""
    torch.manual_seed(seed)
    starts = torch.randint(0, LENGTH - 12, (len(sizes),)).tolist()
    packing = Packing(sizes, starts, CPU)
    visible = torch.rand(len(sizes), 1, packing.width, LENGTH) < 0.5
    visible[..., 0] = True
    visible = visible[..., : packing.length]
    kept = torch.randn(2, len(sizes), 2, LENGTH, DIM).to(dtype)
    key, value = kept[:, :, :, : packing.length]
    query = torch.randn(packing.num_tokens, 2 * groups + 3, DIM).to(dtype)[:, : 2 * groups]
    mask = Mask(packing, visible, groups, dtype)
    found, expected = (x.attend(query, key, value, 0.3, mask) for x in (compiled(dtype), TORCH))
    assert close(found, expected)
    spoilt = query.clone()
    spoilt[0, 0] = torch.nan
    other = compiled(dtype).attend(spoilt, key, value, 0.3, mask)
    assert other[0, :DIM].isnan().all()
    assert other[0, DIM:].equal(found[0, DIM:])
    assert other[1:].equal(found[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_to_columns_with_others_between(dtype: torch.dtype) -> None:
    """As to neighbouring ones, to the bit: of a tree what a token follows lies apart, in a text it does not."""
    torch.manual_seed(0)
    key, value = torch.randn(2, 1, 2, LENGTH, DIM).to(dtype)
    query, packing = torch.randn(1, 4, DIM).to(dtype), Packing([1], [LENGTH - 1], CPU)
    seen = torch.rand(LENGTH) < 0.5
    together = torch.cat([seen.nonzero()[:, 0], (~seen).nonzero()[:, 0]])
    found = []
    for order, visible in ((slice(None), seen), (together, seen[together])):
        mask = Mask(packing, visible[None, None, None], 2, dtype)
        found.append(compiled(dtype).attend(query, key[:, :, order], value[:, :, order], 0.3, mask))
    assert found[0].equal(found[1])


@pytest.mark.parametrize("error", [FileNotFoundError(2, "no cc"), subprocess.TimeoutExpired("cc", 60)])
def test_torch_where_there_is_no_compiler(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    native._library.cache_clear()
    monkeypatch.setattr(subprocess, "run", failing)
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert type(operations_for(torch.float32, CPU, 64, DIM)) is Operations
    finally:
        native._library.cache_clear()
    (line,) = caplog.messages  # once
    assert line.startswith("decoder layers by torch, which is slower:")
