"""Rows packed side by side: nothing is lost or mixed up, and the target computes what it does for rows apart."""

import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blockpilot.models import packing
from blockpilot.models.graphs import Box, BoxPlaces
from blockpilot.models.packing import Packing, folded, grouped_attention

CPU = torch.device("cpu")


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_padding_and_back(sizes: list[int]) -> None:
    packing = Packing(sizes, [10 * r for r in range(len(sizes))], CPU)
    tokens = torch.arange(sum(sizes))
    rows = tokens.split(sizes)
    padded = packing.pad(tokens)
    assert padded.shape == (len(sizes), max(sizes))
    for row, of_row in zip(padded, rows, strict=True):
        assert row[: len(of_row)].equal(of_row)
        assert (row[len(of_row) :] == of_row[-1]).all()
    assert packing.pack(padded).equal(tokens)
    assert packing.firsts == [int(row[0]) for row in rows]
    assert packing.positions.tolist() == [10 * r + i for r, size in enumerate(sizes) for i in range(size)]
    assert packing.length == max(10 * r + size for r, size in enumerate(sizes))


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    has_trees=st.booleans(),
    window=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_a_window_leaves_out_earlier_tokens(sizes: list[int], has_trees: bool, window: int, seed: int) -> None:
    """Masks of chains and trees, by the positions of queries and columns, in a double loop; boxes give the same."""
    choice = random.Random(seed)
    starts = [choice.randint(0, 20) for _ in sizes]
    trees = [[choice.randint(0, i) for i in range(size - 1)] for size in sizes]
    packing = Packing(sizes, starts, CPU, trees if has_trees else None)
    box = Box.around(packing, range(len(sizes)), len(sizes), 300)
    assert box is not None
    rows = box.places(packing, range(len(sizes)), 300)
    in_box = box.visible(BoxPlaces(*rows[:5]), window)
    narrowed, visible = packing.visible_in(window), packing.visible
    for row, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        at_columns = {column: column for column in range(start)}
        at_columns |= {start + i: start + depth for i, depth in enumerate(packing.depths[row])}
        for i in range(size):
            for column, position in at_columns.items():
                is_near = start + packing.depths[row][i] - position < window
                assert narrowed[row, 0, i, column] == (visible[row, 0, i, column] and is_near)
                assert in_box[row, 0, i, column] == narrowed[row, 0, i, column]


@pytest.mark.parametrize(("rows", "width"), [(1, 3), (1, 12), (4, 1), (4, 3), (7, 12)])
@torch.inference_mode()
def test_bfloat16_attends_as_float32_up_to_its_rounding(
    rows: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whichever way is quicker there, to a part of a longer cache, some rows at a time."""
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


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=24))
@example(sizes=[9] + [1] * 23)
@example(sizes=[1] * 8 + [8, 2] * 4)
def test_every_row_attends_as_alone(sizes: list[int]) -> None:
    """However much wider some rows are than others."""
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
        of_row = query[None, first : first + size].transpose(1, 2)
        alone = grouped_attention(of_row, key[one], value[one], bias, 0.3)[0].transpose(0, 1)
        assert torch.allclose(attended[first : first + size], alone, atol=1e-5)
