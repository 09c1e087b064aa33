"""Packed rows: padding and masks are right, and attention equals that of separate rows."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blockpilot.models import packing
from blockpilot.models.graphs import Box, BoxTokens
from blockpilot.models.packing import Packing, folded, grouped_attention

CPU = torch.device("cpu")


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_padding_and_back(sizes: list[int]) -> None:
    packing = Packing(sizes, [10 * r for r in range(len(sizes))], CPU)
    tokens = torch.arange(sum(sizes))
    rows = tokens.split(sizes)
    padded = packing.pad(tokens)
    assert padded.shape == (len(sizes), max(sizes))
    for row, row_tokens in zip(padded, rows, strict=True):
        assert row[: len(row_tokens)].equal(row_tokens)
        assert (row[len(row_tokens) :] == row_tokens[-1]).all()
    assert packing.pack(padded).equal(tokens)
    assert packing.firsts == [int(row[0]) for row in rows]
    assert packing.positions.tolist() == [10 * r + i for r, size in enumerate(sizes) for i in range(size)]
    assert packing.length == max(10 * r + size for r, size in enumerate(sizes))


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 10), st.integers(0, 20)), min_size=1, max_size=5),
    has_trees=st.booleans(),
    window=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_a_token_sees_the_context_and_its_ancestors(
    rows: list[tuple[int, int]], has_trees: bool, window: int, seed: int
) -> None:
    """Visible columns of chains and trees, by walks to the anchor; of windows, by positions; the same in boxes."""
    choice, (sizes, starts) = random.Random(seed), zip(*rows, strict=True)
    trees = [[choice.randint(0, i) if has_trees else i for i in range(size - 1)] for size in sizes]
    packing = Packing(sizes, starts, CPU, trees if has_trees else None)
    box = Box.around(packing, range(len(sizes)), len(sizes), 300)
    assert box is not None
    in_box = box.visible(BoxTokens(*box.tokens(packing, range(len(sizes)), 300)[:5]), window)
    visible, narrowed = packing.visible, packing.visible_in(window)
    for row, (size, start) in enumerate(rows):
        for i in range(size):
            path = [i]
            while path[0]:
                path.insert(0, trees[row][path[0] - 1])
            seen = {column: column for column in range(start)}
            seen |= {start + node: start + depth for depth, node in enumerate(path)}
            position = start + len(path) - 1
            near = sorted(column for column, at in seen.items() if position - at < window)
            assert visible[row, 0, i].nonzero()[:, 0].tolist() == sorted(seen)
            assert narrowed[row, 0, i].nonzero()[:, 0].tolist() == near
            assert in_box[row, 0, i].nonzero()[:, 0].tolist() == near
            token = packing.firsts[row] + i
            assert (int(packing.columns[token]), int(packing.positions[token])) == (start + i, position)


@pytest.mark.parametrize(("rows", "width"), [(1, 3), (1, 12), (4, 1), (4, 3), (7, 12)])
@torch.inference_mode()
def test_bfloat16_attends_as_float32_up_to_its_rounding(
    rows: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention by the faster method for each shape, to a part of a longer cache, some rows at a time."""
    monkeypatch.setattr(packing, "MOST_SCORES", 300)
    torch.manual_seed(rows * width)
    query, cached = torch.randn(rows, 6, width, 64).bfloat16(), torch.randn(2, rows, 2, 40, 64).bfloat16()
    mask = torch.rand(rows, 1, width, 30) < 0.7
    mask[..., 0] = True
    key, value = cached[:, :, :, :30]
    attended = grouped_attention(query, key, value, folded(mask, 3, torch.bfloat16), 0.125)
    expected = grouped_attention(query.float(), key.float(), value.float(), folded(mask, 3, torch.float32), 0.125)
    assert attended.dtype == torch.bfloat16
    assert torch.allclose(attended.float(), expected, atol=0.02, rtol=0.02)


@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    cut=st.integers(0, 40),
)
@example(sizes=[8000] + [3] * 31, cut=0)
def test_texts_that_attend_together_have_similar_sizes_or_are_short(sizes: list[int], cut: int) -> None:
    cut = min(cut, len(sizes))
    sizes = [min(size, 16) for size in sizes[:cut]] + sizes[cut:]
    parts = Packing(sizes, [0] * len(sizes), CPU, cut=cut).parts
    assert [size for part in parts for size in part.sizes] == sizes
    assert [part.num_blocks for part in parts] == [cut, *[0] * (len(parts) - 1)]
    for part in parts[cut > 0 :]:
        assert len(part.sizes) * part.width <= max(packing.FEW_PADDED, 2 * part.num_tokens)
    for part, after in pairwise(parts[cut > 0 :]):
        joined = (*part.sizes, after.sizes[0])
        assert len(joined) * max(joined) > max(packing.FEW_PADDED, 2 * sum(joined))


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=24))
@example(sizes=[9] + [1] * 23)
@example(sizes=[1] * 8 + [8, 2] * 4)
def test_every_row_attends_as_alone(sizes: list[int]) -> None:
    """Same attention as alone, regardless of how much wider some rows are than others."""
    torch.manual_seed(len(sizes))
    length = 12
    starts = torch.randint(0, length - 9 + 1, (len(sizes),)).tolist()
    packing = Packing(sizes, starts, CPU)
    query = torch.randn(sum(sizes), 4, 8)
    key, value = torch.randn(len(sizes), 2, length, 8), torch.randn(len(sizes), 2, length, 8)
    queries = packing.pad(packing.positions)
    mask = (torch.arange(length) <= queries[:, :, None])[:, None]
    attended = packing.attend(query, key, value, folded(mask, 2, torch.float32), 0.3)
    for row, (first, size) in enumerate(zip(packing.firsts, sizes, strict=True)):
        one = slice(row, row + 1)
        bias = folded(mask[one, :, :size], 2, torch.float32)
        row_query = query[None, first : first + size].transpose(1, 2)
        alone = grouped_attention(row_query, key[one], value[one], bias, 0.3)[0].transpose(0, 1)
        assert torch.allclose(attended[first : first + size], alone, atol=1e-5)
