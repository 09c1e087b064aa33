"""Depths before the draft and nodes after it, against all choices there are."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blockpilot.control.acceptance import Array, Expected
from blockpilot.control.choose import RowPlan, Trees, _choose_nodes, best_drafting, choose_nodes, plan_rows
from blockpilot.control.cost import TILE, Load, StepPrice, passes
from helpers.prices import linear_price, price

ALONE = Load(0)
ONE_EACH = (1.0,) * 8


def choose_depths(plans: Sequence[RowPlan], most: Array, of: StepPrice, beside: Load) -> Array:
    """The best depths of rows, none where drafting saves nothing."""
    together = RowPlan(*(np.stack(each) for each in zip(*plans, strict=True)))
    found = best_drafting(together, np.arange(len(plans)), most, of, beside)
    return found.depths if found.saved_s > 0 else np.zeros_like(found.depths)


def rate(
    depths: Sequence[int],
    reaches: Sequence[Sequence[float]],
    price: StepPrice,
    beside: Load,
    nodes: Sequence[float] = ONE_EACH,
    drafted: int | None = None,
) -> float:
    """Tokens a second of a step; rows beside emit one each. Each row drafts `drafted` positions, or its depth."""
    rows = len(depths) + beside.rows
    tokens = rows + sum(sum(reach[:depth]) for reach, depth in zip(reaches, depths, strict=True))
    of_rows = list(depths) if drafted is None else [drafted] * len(depths)
    launched = beside.num_passes if beside.num_drafted else 0
    num_passes = max(launched, passes(of_rows, price.is_sequential) if any(of_rows) else 0)
    load = Load(rows, beside.num_drafted + sum(of_rows), beside.num_verified, num_passes)
    return tokens / (price.seconds(load) + of_tokens(load, price, expected_nodes(depths, nodes)))


def expected_nodes(depths: Sequence[int], nodes: Sequence[float]) -> float:
    """Nodes that will be verified."""
    return sum(sum(nodes[:depth]) for depth in depths)


def of_tokens(load: Load, price: StepPrice, num: float) -> float:
    """Seconds of so many tokens beside a load, whose own tiles are taken back: tokens have shares of them."""
    beyond = max(0, load.num_tokens + num - TILE)
    return num * price.token_s + beyond * price.tile_s / TILE - load.terms[-1] * price.tile_s


def expected_of(reach: Sequence[float], nodes: Sequence[float] = ONE_EACH, path: float = 0.0) -> Expected:
    """Positions that add as much as `reach` says, in so many nodes, all of them likely enough; a node of a path."""
    sums = np.array([path, *reach])[:, None]
    return Expected(np.zeros(1), sums, np.array([float(path > 0), *nodes[: len(reach)]])[:, None])


def plans_of(
    reaches: Sequence[Sequence[float]], price: StepPrice, beside: Load, nodes: Sequence[float] = ONE_EACH
) -> list[RowPlan]:
    """Plans of rows each of a kind of its own."""
    deepest = max(1, *map(len, reaches))
    padded = [[*reach, *[0.0] * (deepest - len(reach))] for reach in reaches]
    return [plan_rows(expected_of(reach, nodes), len(reaches), price, beside) for reach in padded]


def choose(
    reaches: Sequence[Sequence[float]], price: StepPrice, beside: Load = ALONE, nodes: Sequence[float] = ONE_EACH
) -> list[int]:
    """Depths of rows, no deeper than their reaches are long."""
    most = np.array(list(map(len, reaches)))
    found: list[int] = choose_depths(plans_of(reaches, price, beside, nodes), most, price, beside).tolist()
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
    reach=[1.0, 1.0, 1.0], path=0.0, num_rows=1, price=price(token_s=1.0), beside=ALONE, nodes=[1.0, 1.0, 0.0, 0.0]
)
@given(
    reach=falling.filter(len),
    path=st.just(0.0) | chances,
    num_rows=st.integers(1, 3),
    price=prices,
    beside=loads,
    nodes=st.lists(st.floats(0, 4), min_size=4, max_size=8),
)
def test_a_plan_has_the_highest_rate(
    reach: list[float], path: float, num_rows: int, price: StepPrice, beside: Load, nodes: list[float]
) -> None:
    """That of some depth, with or without nodes of the path. Rates are sums in another order."""

    def rate_of(depth: int, *, follows: bool) -> float:
        """Of rows that draft so deep, and verify the path's node."""
        of_path, reaches = float(follows and path > 0), [[path * follows + sum(reach[:depth])]] * num_rows
        return rate([1] * num_rows, reaches, price, beside, [of_path + sum(nodes[:depth])], depth)

    rates = [rate_of(depth, follows=follows) for depth in range(len(reach) + 1) for follows in (False, True)]
    found = plan_rows(expected_of(reach, nodes, path), num_rows, price, beside)
    assert found.rate == pytest.approx(max(rates[0], *rates[1::2]), rel=1e-9)


@given(
    st.lists(st.tuples(falling.filter(len), st.integers(0, 4)), min_size=1, max_size=3),
    prices,
    loads,
    st.floats(0.1, 3),
)
def test_the_depths_save_the_most_seconds(
    rows: list[tuple[list[float], int]], price: StepPrice, beside: Load, rate: float
) -> None:
    """Of all depths that the rows may draft."""
    plans = [RowPlan(np.array(rate), np.array([0.0, *(reach + [0.0] * 4)[:4]]) - 0.2) for reach, _ in rows]
    plans = [plan._replace(saved_s=np.concatenate([[0.0], plan.saved_s[1:]])) for plan in plans]
    launched = beside.num_passes if beside.num_drafted else 0

    def saved(depths: Sequence[int]) -> float:
        num_passes = passes(depths, price.is_sequential) if any(depths) else 0
        launch_s = price.launch_s * max(0, num_passes - launched)
        return sum(float(plan.saved_s[d]) for plan, d in zip(plans, depths, strict=True)) - launch_s

    most = [deepest for _, deepest in rows]
    found = choose_depths(plans, np.array(most), price, beside).tolist()
    assert saved(found) == pytest.approx(max(map(saved, product(*(range(m + 1) for m in most)))), abs=1e-9)
    assert all(depth <= deepest for depth, deepest in zip(found, most, strict=True))


def test_beyond_a_tile_tokens_are_dearer() -> None:
    """Alone a row drafts all 8, which fit into a tile; five rows draft less."""
    reach, knee = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2), price(token_s=0.01, tile_s=8.0)
    assert choose([reach], knee) == [8]
    [depth] = set(choose([reach] * 5, knee))
    assert depth < 8
    assert rate([depth] * 5, [reach] * 5, knee, ALONE) > rate([8] * 5, [reach] * 5, knee, ALONE)


def test_what_a_path_adds_makes_time_dear() -> None:
    """A row that its text carries on drafts less: what it might add costs as much time as another."""
    of, reach = price(token_s=0.02, slot_s=0.05, launch_s=0.4), (0.5, 0.3)
    without, beside_path = (plan_rows(expected_of(reach, path=path), 1, of, ALONE) for path in (0.0, 0.99))
    assert beside_path.rate > without.rate
    assert choose_depths([without], np.array([2]), of, ALONE).tolist() == [2]
    assert choose_depths([beside_path], np.array([2]), of, ALONE).tolist() == [0]


def test_rows_choose_apart() -> None:
    """One row's long draft costs its neighbours nothing."""
    easy, hard = (0.95, 0.93, 0.9, 0.85), (0.1, 0.05, 0.0, 0.0)
    assert choose([easy, hard], linear_price(0.1)) == [4, 0]
    assert choose([hard, easy, hard, easy], linear_price(0.1)) == [0, 4, 0, 4]
    assert choose([hard, ()], linear_price(0.1), Load(1, 7, 7)) == [0, 0]


def test_nobody_drafts_where_launch_is_too_dear_for_all_together() -> None:
    """Of six rows all draft or none: together they expect 4.8 tokens more, and a pass for one brings 0.8."""
    reach, dear, cheap = (0.5, 0.3), *(price(base_s=1.0, launch_s=launch, slot_s=0.01) for launch in (1.2, 0.5))
    assert plans_of([reach], dear, ALONE)[0].rate == 1.0
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
    assert choose([reach], of_tokens, ALONE, (1.0, 1.0)) == [2]
    assert choose([reach], of_tokens, ALONE, (3.0, 3.0)) == [0]
    assert choose([reach], of_tokens, ALONE, (1.0, 3.0)) == [1]


def test_depths_count_the_nodes_that_are_worth_their_seconds() -> None:
    """At depth 1 a node of 0.5 and four of 0.1: the dearer a token, the fewer of them are verified."""
    thresholds = np.array([0.05, 0.3])
    sums, counts = np.array([[0.0, 0.0], [0.9, 0.5]]), np.array([[0.0, 0.0], [5.0, 1.0]])
    found = [
        plan_rows(Expected(thresholds, sums, counts), 1, price(token_s=token_s, slot_s=0.1), ALONE)
        for token_s in (0.01, 0.2)
    ]
    assert all(each.saved_s[1] > 0 for each in found)
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
    rates = np.full(len(offered), drafted.rows / price.seconds(drafted))
    found: list[int] = choose_nodes(trees_of(offered), price, drafted, rates).tolist()
    return found


@given(
    st.lists(
        st.tuples(st.lists(chances, max_size=9).map(lambda drawn: sorted(drawn, reverse=True)), st.floats(0.1, 3)),
        min_size=1,
        max_size=6,
    ),
    prices,
    loads,
)
def test_the_best_nodes_of_all_rows_are_taken_as_many_as_save_the_most(
    rows: list[tuple[list[float], float]], price: StepPrice, beside: Load
) -> None:
    """No other number of every row's best nodes saves more seconds; nor by numpy, where there is no C."""
    drafted = beside._replace(rows=beside.rows + len(rows))
    offered, rates = [of_row for of_row, _ in rows], np.array([rate for _, rate in rows])

    def saved(taken: Sequence[int]) -> float:
        tokens = sum(sum(of_row[:n]) / rate for (of_row, rate), n in zip(rows, taken, strict=True))
        more_s = price.seconds(drafted._replace(num_verified=drafted.num_verified + sum(taken)))
        return tokens - (more_s - price.seconds(drafted))

    found = choose_nodes(trees_of(offered), price, drafted, rates).tolist()
    trees = trees_of(offered)
    by_numpy = _choose_nodes(trees.chances / rates[:, None], trees, price, drafted).tolist()
    every = product(*(range(len(of_row) + 1) for of_row in offered)) if sum(map(len, offered)) < 12 else [found]
    best = max(map(saved, every))
    assert saved(found) == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert saved(by_numpy) == pytest.approx(best, rel=1e-9, abs=1e-9)
    last = [of_row[n - 1] / rate for (of_row, rate), n in zip(rows, found, strict=True) if n]
    left = [of_row[n] / rate for (of_row, rate), n in zip(rows, found, strict=True) if n < len(of_row)]
    assert not last or not left or min(last) >= max(left)


def test_a_node_is_worth_more_the_slower_the_step() -> None:
    """A node of 0.1 is not worth 0.2 seconds if 1 second makes a token; if that takes 3 seconds, it is."""
    row = [0.9, 0.5, 0.3, 0.1, 0.05]
    assert taken([row], price(base_s=1.0, token_s=0.2), Load(1)) == [3]
    assert taken([row], price(base_s=3.0, token_s=0.2), Load(1)) == [4]
    assert taken([row, row], price(base_s=1.0, token_s=0.2), Load(2)) == [2, 2]
    assert taken([row, row], price(base_s=0.5, token_s=0.2), Load(2)) == [1, 1]
    assert taken([[], []], price(), Load(2)) == [0, 0]


def test_where_no_row_is_worth_its_positions_one_could_still_draft() -> None:
    """The one that costs the least, so that it can be tried; none where none may."""
    plans, kinds = RowPlan(np.ones(2), np.array([[0.0, -0.3, -0.2], [0.0, -0.1, -0.4]])), np.arange(2)
    found = best_drafting(plans, kinds, np.array([2, 2]), price(launch_s=0.5), ALONE)
    assert found.depths.tolist() == [0, 1]
    assert found.saved_s == pytest.approx(-0.6)
    assert best_drafting(plans, kinds, np.array([2, 0]), price(launch_s=0.5), ALONE).depths.tolist() == [2, 0]
    assert not best_drafting(plans, kinds, np.array([0, 0]), price(launch_s=0.5), ALONE).depths.any()
