"""Depths before the draft and nodes after it, against all choices there are."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blockpilot.control.acceptance import Expected
from blockpilot.control.choose import Depths, Trees, _choose_nodes, choose_depths, choose_nodes
from blockpilot.control.cost import TILE, Load, StepPrice, passes
from helpers.prices import linear_price, price

ALONE = Load(0)
ONE_EACH = (1.0,) * 8


def rate(
    depths: Sequence[int],
    reaches: Sequence[Sequence[float]],
    price: StepPrice,
    beside: Load,
    nodes: Sequence[float] = ONE_EACH,
) -> float:
    """Tokens a second of a step; rows beside emit one each."""
    rows = len(depths) + beside.rows
    tokens = rows + sum(sum(reach[:depth]) for reach, depth in zip(reaches, depths, strict=True))
    launched = beside.num_passes if beside.num_drafted else 0
    num_passes = max(launched, passes(depths, price.is_sequential) if any(depths) else 0)
    load = Load(rows, beside.num_drafted + sum(depths), beside.num_verified, num_passes)
    return tokens / (price.seconds(load) + of_tokens(load, price, expected_nodes(depths, nodes)))


def expected_nodes(depths: Sequence[int], nodes: Sequence[float]) -> float:
    """Nodes that will be verified."""
    return sum(sum(nodes[:depth]) for depth in depths)


def of_tokens(load: Load, price: StepPrice, num: float) -> float:
    """Seconds of so many tokens beside a load, whose own tiles are taken back: tokens have shares of them."""
    beyond = max(0, load.num_tokens + num - TILE)
    return num * price.token_s + beyond * price.tile_s / TILE - load.terms[-1] * price.tile_s


def choose_by(
    reaches: Sequence[Sequence[float]], price: StepPrice, beside: Load, nodes: Sequence[float] = ONE_EACH
) -> Depths:
    """Depths of rows whose positions add as much as reaches[r] says, in so many nodes, all of them likely enough."""
    deepest = max(1, *map(len, reaches))
    sums, counts = np.zeros((len(reaches), deepest, 1)), np.zeros((len(reaches), deepest, 1))
    for r, reach in enumerate(reaches):
        sums[r, : len(reach), 0], counts[r, : len(reach), 0] = reach, nodes[: len(reach)]
    return choose_depths(Expected(np.zeros(1), sums, counts), np.array(list(map(len, reaches))), price, beside)


def choose(reaches: Sequence[Sequence[float]], price: StepPrice, beside: Load = ALONE) -> list[int]:
    found: list[int] = choose_by(reaches, price, beside).depths.tolist()
    return found


# --- depths ---

chances = st.floats(0, 1)
falling = st.lists(chances, max_size=4).map(lambda drawn: sorted(drawn, reverse=True))
seconds = st.just(0.0) | st.floats(1e-3, 2.0)
costs = dict.fromkeys(("row_s", "launch_s", "slot_s", "token_s", "tile_s"), seconds)
prices = st.builds(price, base_s=st.floats(0.1, 5), is_sequential=st.booleans(), **costs)
few = st.integers(0, 9)
loads = st.builds(Load, st.integers(0, 3), few, few, st.integers(1, 5)).filter(
    lambda load: load.rows or load == ALONE
)


@settings(deadline=None, max_examples=200)
@example(  # three positions are cheaper together than two, and two than one
    reaches=[[1.0, 1.0, 1.0]], price=price(token_s=1.0), beside=ALONE, nodes=[1.0, 1.0, 0.0, 0.0]
)
@example(  # positions of one row that cost the same: the first is the better one
    reaches=[[1.0], [1.0, 1.0], [1.0, 0.5]],
    price=price(tile_s=1.0),
    beside=Load(1),
    nodes=[3.0, 3.0, 0.0, 0.0],
)
@given(
    reaches=st.lists(falling, min_size=1, max_size=3),
    price=prices,
    beside=loads,
    nodes=st.lists(st.floats(0, 4), min_size=4, max_size=8),
)
def test_the_choice_has_the_highest_rate(
    reaches: list[list[float]], price: StepPrice, beside: Load, nodes: list[float]
) -> None:
    """But about the knee of the price, where it has that of its depths. Rates are sums in another order."""
    every = list(product(*(range(len(reach) + 1) for reach in reaches)))
    rates = {depths: rate(depths, reaches, price, beside, nodes) for depths in every}
    best = max(every, key=lambda depths: rates[depths])
    found = choose_by(reaches, price, beside, nodes)
    assert found.rate == pytest.approx(rates[tuple(found.depths.tolist())], rel=1e-9)
    rows = len(reaches) + beside.rows
    most = rows + beside.num_verified + max(expected_nodes(depths, nodes) for depths in every)
    if not price.tile_s or most <= TILE or rows + beside.num_verified >= TILE:
        assert found.rate == pytest.approx(rates[best], rel=1e-9)


def test_beyond_a_tile_tokens_are_dearer() -> None:
    """Alone a row drafts all 8, which fit into a tile; five rows draft about what fits."""
    reach, knee = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2), price(token_s=0.01, tile_s=8.0)
    assert choose([reach], knee) == [8]
    found = choose_by([reach] * 5, knee, ALONE)
    assert found.rate == pytest.approx(rate(found.depths.tolist(), [reach] * 5, knee, ALONE))
    assert found.rate > rate([8] * 5, [reach] * 5, knee, ALONE)


def test_rows_choose_apart() -> None:
    """One row's long draft costs its neighbours nothing."""
    easy, hard = (0.95, 0.93, 0.9, 0.85), (0.1, 0.05, 0.0, 0.0)
    assert choose([easy, hard], linear_price(0.1)) == [4, 0]
    assert choose([hard, easy, hard, easy], linear_price(0.1)) == [0, 4, 0, 4]
    assert choose([hard, ()], linear_price(0.1), Load(1, 7, 7)) == [0, 0]


def test_nobody_drafts_where_launch_is_too_dear_for_all_together() -> None:
    """Of six rows all draft or none: together they expect 4.8 tokens more, and a pass for one brings 0.8."""
    reach, dear, cheap = (0.5, 0.3), *(price(base_s=1.0, launch_s=launch, slot_s=0.01) for launch in (1.2, 0.5))
    assert choose_by([reach], dear, ALONE).rate == 1.0
    assert choose([reach], dear) == [0]
    assert choose([reach] * 6, dear) == [0] * 6
    assert choose([reach] * 6, cheap) == [2] * 6
    assert choose([reach], cheap, Load(5)) == [0]


def test_a_sequential_draft_goes_no_deeper_than_all_rows_together_pay_for() -> None:
    """A pass costs 0.4 steps of a row: the second one brings a row 0.5 tokens, which is worth it to two rows."""
    reach, sequential = (0.9, 0.5, 0.1), price(base_s=0.0, row_s=1.0, launch_s=0.4, is_sequential=True)
    assert choose([reach], sequential) == [1]
    assert choose([reach] * 2, sequential) == [2, 2]
    assert choose([reach, (0.9,)], sequential, Load(1, 3, 3, num_passes=3)) == [3, 1]


def test_where_others_draft_anyway_the_launch_is_theirs() -> None:
    reach, dear = (0.5, 0.3), price(base_s=1.0, launch_s=1.2, slot_s=0.01)
    assert choose([reach], dear, Load(5, num_drafted=3, num_verified=3)) == [2]


def test_equals_take_the_shallowest() -> None:
    free = price()
    assert choose([(0.5, 0.0), (0.0, 0.0)], free) == [1, 0]
    assert choose([(1.0, 0.5)], linear_price(1.0)) == [0]


def test_load_fades_speculation_out() -> None:
    """A token costs the same however many rows there are, but the time that it saves is shared by them."""
    reach = (0.9, 0.6, 0.4, 0.25)
    depths = [set(choose([reach] * rows, linear_price(0.12))) for rows in range(1, 13)]
    assert all(len(of_load) == 1 for of_load in depths)
    deepest = [max(of_load) for of_load in depths]
    assert deepest == sorted(deepest, reverse=True)
    assert (deepest[0], deepest[-1]) == (3, 0)


def test_a_dear_target_makes_drafts_cheap() -> None:
    assert choose([(0.5, 0.4)], price(base_s=1.0, launch_s=2.0)) == [0]
    assert choose([(0.5, 0.4)], price(base_s=10.0, launch_s=2.0)) == [2]


def test_the_nodes_that_a_depth_will_add_are_paid_for() -> None:
    """Nothing is verified of most slots at depth 2, and of those at depth 1 many choices."""
    reach, of_tokens = (0.5, 0.45), price(token_s=0.3)
    assert choose_by([reach], of_tokens, ALONE, (1.0, 1.0)).depths.tolist() == [2]
    assert choose_by([reach], of_tokens, ALONE, (3.0, 3.0)).depths.tolist() == [0]
    assert choose_by([reach], of_tokens, ALONE, (1.0, 3.0)).depths.tolist() == [1]


def test_depths_count_the_nodes_that_are_worth_their_seconds() -> None:
    """At depth 1 a node of 0.5 and four of 0.1: the dearer a token, the fewer of them are verified."""
    thresholds = np.array([0.05, 0.3])
    sums, counts = np.array([[[0.9, 0.5]]]), np.array([[[5.0, 1.0]]])
    found = [
        choose_depths(Expected(thresholds, sums, counts), np.array([1]), price(token_s=token_s, slot_s=0.1), ALONE)
        for token_s in (0.01, 0.2)
    ]
    assert [each.depths.tolist() for each in found] == [[1], [1]]
    assert found[0].rate == pytest.approx(1.9 / 1.15)
    assert found[1].rate == pytest.approx(1.5 / 1.3)


# --- nodes ---


def trees_of(offered: Sequence[Sequence[float]]) -> Trees:
    num = np.array(list(map(len, offered)))
    chances = np.zeros((len(num), max(1, int(num.max()))))
    for r, of_row in enumerate(offered):
        chances[r, : num[r]] = of_row
    return Trees(np.zeros_like(num), num, num, chances, np.ones_like(chances, dtype=int))


def taken(offered: Sequence[Sequence[float]], price: StepPrice, drafted: Load) -> list[int]:
    """At the rate of plain decoding."""
    rate = drafted.rows / price.seconds(drafted)
    found: list[int] = choose_nodes(trees_of(offered), price, drafted, rate).tolist()
    return found


@given(
    st.lists(st.lists(chances, max_size=9).map(lambda drawn: sorted(drawn, reverse=True)), min_size=1, max_size=6),
    prices,
    loads,
    st.floats(0, 3),
)
def test_the_best_nodes_of_all_rows_are_taken_as_many_as_gain_the_most(
    offered: list[list[float]], price: StepPrice, beside: Load, rate: float
) -> None:
    """No other number of every row's best nodes gains more; nor by numpy, where there is no C."""
    drafted = beside._replace(rows=beside.rows + len(offered))

    def gain_of(taken: Sequence[int]) -> float:
        tokens = sum(sum(of_row[:n]) for of_row, n in zip(offered, taken, strict=True))
        more_s = price.seconds(drafted._replace(num_verified=drafted.num_verified + sum(taken)))
        return tokens - rate * (more_s - price.seconds(drafted))

    found = choose_nodes(trees_of(offered), price, drafted, rate).tolist()
    by_numpy = _choose_nodes(trees_of(offered), price, drafted, rate).tolist()
    every = product(*(range(len(of_row) + 1) for of_row in offered)) if sum(map(len, offered)) < 12 else [found]
    best = max(map(gain_of, every))
    assert gain_of(found) == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert gain_of(by_numpy) == pytest.approx(best, rel=1e-9, abs=1e-9)
    last = [of_row[n - 1] for of_row, n in zip(offered, found, strict=True) if n]
    left = [of_row[n] for of_row, n in zip(offered, found, strict=True) if n < len(of_row)]
    assert not last or not left or min(last) >= max(left)


def test_a_node_is_worth_more_the_slower_the_step() -> None:
    """A node of 0.1 is not worth 0.2 seconds if 1 second makes a token; if that takes 3 seconds, it is."""
    row = [0.9, 0.5, 0.3, 0.1, 0.05]
    assert taken([row], price(base_s=1.0, token_s=0.2), Load(1)) == [3]
    assert taken([row], price(base_s=3.0, token_s=0.2), Load(1)) == [4]
    assert taken([row, row], price(base_s=1.0, token_s=0.2), Load(2)) == [2, 2]
    assert taken([row, row], price(base_s=0.5, token_s=0.2), Load(2)) == [1, 1]
    assert taken([[], []], price(), Load(2)) == [0, 0]
