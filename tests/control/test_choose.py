"""Depths before the draft and nodes after it, against brute force over all choices."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpilot.control.acceptance import Array, Expected
from blockpilot.control.choose import (
    RowPlan,
    _choose_nodes,
    best_drafting,
    choose_nodes,
    least_cost_s,
    plan_rows,
    seconds_of_more,
)
from blockpilot.control.cost import TILES, VECTORS, Load, StepPrice, passes
from helpers.prices import linear_price, price
from helpers.trees import trees_to_select

ALONE = Load(0)

chances = st.floats(0, 1)
falling = st.lists(chances, max_size=9).map(lambda drawn: sorted(drawn, reverse=True))
seconds = st.just(0.0) | st.floats(1e-3, 2.0)
costs = dict.fromkeys(("row_s", "launch_s", "slot_s", "token_s", "tile_s", "experts_s"), seconds)
shares = st.sampled_from([0.0, 1 / 16, 1 / 2])
tilings = st.sampled_from([*TILES, *VECTORS]).map(lambda tiles: {"tile": tiles.first, "next_tile": tiles.further})
prices = st.builds(
    lambda tiling, **fields: price(**tiling, **fields),
    tilings,
    base_s=st.floats(0.1, 5),
    is_sequential=st.booleans(),
    expert_share=shares,
    **costs,
)
few = st.integers(0, 9)
loads = st.builds(Load, st.integers(0, 3), few, few, st.integers(1, 5), st.just(0)).filter(
    lambda load: load.rows or load == ALONE
)


# --- plans of kinds of rows ---


class SlowStep(NamedTuple):
    tokens: float
    seconds: float
    """Without the launch cost of passes that no other row runs."""
    launch_s: float


def slow_step(depth: int, tokens: float, nodes: float, num_rows: int, price: StepPrice, other_load: Load) -> SlowStep:
    """Step of rows that draft to this depth, which adds these tokens and nodes."""
    rows, verified = other_load.rows + num_rows, other_load.num_verified + nodes
    launched = other_load.num_passes if other_load.num_drafted else 0
    num_passes = depth if price.is_sequential else int(depth > 0)
    seconds = price.base_s + rows * price.row_s + launched * price.launch_s + verified * price.token_s
    seconds += (other_load.num_drafted + num_rows * depth) * price.slot_s
    beyond = max(0, rows + verified - price.tile) / price.next_tile
    seconds += (beyond if price.next_tile == 1 else math.ceil(beyond)) * price.tile_s
    seconds += (1 - (1 - price.expert_share) ** (rows + verified)) * price.experts_s
    return SlowStep(tokens, seconds, price.launch_s * max(0, num_passes - launched))


nodes_of = st.lists(st.tuples(chances, st.floats(0, 9)), min_size=2, max_size=5)


@settings(deadline=None, max_examples=300)
@given(st.lists(nodes_of, min_size=1, max_size=2), st.integers(1, 3), prices, loads)
def test_a_plan_has_the_highest_rate_and_what_each_depth_saves_by_it(
    by_threshold: list[list[tuple[float, float]]], num_rows: int, price: StepPrice, other_load: Load
) -> None:
    """Brute force over depths, thresholds of nodes, and numbers of nodes that fill a tile; depth 0 needs no draft.

    Each threshold has some more nodes than the one above it, which are accepted with some probability.
    """
    size = min(map(len, by_threshold))
    more = np.array([depth_nodes[:size] for depth_nodes in by_threshold]).transpose(2, 1, 0)
    more[0] *= more[1]
    values = more[..., ::-1].cumsum(axis=-1)[..., ::-1]
    plan = plan_rows(Expected(np.zeros(len(by_threshold)), *values), num_rows, price, other_load)
    steps = list[list[SlowStep]]()
    for depth in range(size):
        tokens, nodes = num_rows * values[:, : depth + 1].sum(axis=1)
        before = other_load.num_tokens + num_rows
        ends = np.arange(price.tile, before + nodes[0] + 1, price.next_tile) if price.tile_s else np.zeros(0)
        fills = ends[(ends > before) & (ends < before + nodes[0])] - before
        filled = np.interp(fills, [0, *nodes[::-1]], [0, *tokens[::-1]])
        points = [*zip(tokens.tolist(), nodes.tolist(), strict=True), *zip(filled, fills.tolist(), strict=True)]
        steps.append([slow_step(depth, *point, num_rows, price, other_load) for point in points])
    rows, plain_s = other_load.rows + num_rows, slow_step(0, 0, 0, num_rows, price, other_load).seconds
    rates = [(rows + step.tokens) / (step.seconds + step.launch_s) for depth_steps in steps for step in depth_steps]
    rate = max(rows / plain_s, *rates)
    assert plan.rate == pytest.approx(rate, rel=1e-9)
    saved = [max(step.tokens / rate - step.seconds for step in depth_steps) for depth_steps in steps]
    undrafted = max(saved[0], -plain_s)
    assert plan.saved_s.tolist() == pytest.approx([(s - undrafted) / num_rows for s in saved], rel=1e-6, abs=1e-9)


@given(
    st.lists(st.tuples(st.lists(chances, min_size=4, max_size=4), st.integers(0, 4)), min_size=1, max_size=3),
    prices,
    loads,
)
def test_the_depths_save_the_most_seconds(
    rows: list[tuple[list[float], int]], price: StepPrice, other_load: Load
) -> None:
    """Brute force over the depths that rows may draft; if no draft saves any seconds, one row may still try one."""
    saved_s, most = np.array([[0.2, *row_saved_s] for row_saved_s, _ in rows]) - 0.2, [deepest for _, deepest in rows]
    launched = other_load.num_passes if other_load.num_drafted else 0

    def saved(depths: Sequence[int]) -> float:
        num_passes = passes(depths, price.is_sequential) if any(depths) else 0
        launch_s = price.launch_s * max(0, num_passes - launched)
        return sum(float(row_saved_s[depth]) for row_saved_s, depth in zip(saved_s, depths, strict=True)) - launch_s

    plans = RowPlan(np.ones(len(rows)), saved_s)
    drafting = best_drafting(plans, np.arange(len(rows)), np.array(most), price, other_load)
    every = [depths for depths in product(*(range(m + 1) for m in most)) if any(depths)]
    assert drafting.depths.any() == bool(every)
    if every:
        best = max(map(saved, every))
        assert max(drafting.saved_s, 0.0) == pytest.approx(max(best, 0.0), abs=1e-9)
        assert drafting.saved_s == pytest.approx(saved(drafting.depths.tolist()), abs=1e-9)
        assert drafting.saved_s <= -least_cost_s(plans, len(rows), price, other_load) + 1e-9
    assert (drafting.depths <= most).all()


@given(prices, loads)
def test_the_mean_cost_of_a_token_is_that_in_whole_tiles(price: StepPrice, load: Load) -> None:
    price = replace(price, experts_s=0.0)
    num = 3 * price.tiles.further
    seconds = seconds_of_more(price, load, num)
    if load.num_tokens >= price.tiles.first or load.num_tokens + num <= price.tiles.first:
        assert seconds[-1] - seconds[0] == pytest.approx(num * price.mean_token_s(load))


def choose(reaches: Sequence[Sequence[float]], price: StepPrice, other_load: Load = ALONE) -> list[int]:
    """Depths of rows, each of a separate kind, which add one node of probability `reaches` at each depth."""
    sums = np.array([[0.0, *reach] for reach in reaches])[..., None]
    plans = plan_rows(Expected(np.zeros(1), sums, (sums > 0).astype(float)), len(reaches), price, other_load)
    most = np.full(len(reaches), sums.shape[1] - 1)
    drafting = best_drafting(plans, np.arange(len(reaches)), most, price, other_load)
    depths: list[int] = drafting.depths.tolist()
    return depths if drafting.saved_s > 0 else [0] * len(reaches)


def test_rows_choose_apart() -> None:
    """Depths of rows are independent: the long draft of one row costs the others nothing."""
    easy, hard = (0.95, 0.93, 0.9, 0.85), (0.1, 0.05, 0.0, 0.0)
    assert choose([hard, easy, hard, easy], linear_price(0.1)) == [0, 4, 0, 4]


def test_nobody_drafts_where_launch_is_too_dear_for_all_together() -> None:
    """All of six rows draft or none: together they expect 4.8 more tokens; a pass for one row gains 0.8."""
    reach, dear, cheap = (0.5, 0.3), *(price(base_s=1.0, launch_s=launch, slot_s=0.01) for launch in (1.2, 0.5))
    assert choose([reach] * 6, dear) == [0] * 6
    assert choose([reach] * 6, cheap) == [2] * 6
    assert choose([reach], cheap, Load(5)) == [0]
    assert choose([reach], dear, Load(5, num_drafted=3, num_verified=3)) == [2]  # the others pay the launch cost


def test_a_sequential_draft_goes_no_deeper_than_all_rows_together_pay_for() -> None:
    """A pass costs 0.4 steps of a row: the second one gains 0.5 tokens per row, which pays for two rows."""
    reach, sequential = (0.9, 0.5, 0.1), price(base_s=0.0, row_s=1.0, launch_s=0.4, is_sequential=True)
    assert choose([reach], sequential) == [1]
    assert choose([reach] * 2, sequential) == [2, 2]


def test_load_fades_speculation_out() -> None:
    """Depth falls with the number of rows: a token costs the same, but they share the time that it saves."""
    depths = [set(choose([(0.9, 0.6, 0.4, 0.25)] * rows, linear_price(0.12))) for rows in range(1, 13)]
    assert all(len(row_depths) == 1 for row_depths in depths)
    deepest = [max(row_depths) for row_depths in depths]
    assert deepest == sorted(deepest, reverse=True)
    assert (deepest[0], deepest[-1]) == (3, 0)


def test_equals_take_the_shallowest() -> None:
    assert choose([(0.5, 0.0), (0.0, 0.0)], price()) == [1, 0]
    assert choose([(1.0, 0.5)], linear_price(1.0)) == [0]


# --- nodes ---


@given(st.lists(st.tuples(falling, st.floats(0.1, 3)), min_size=1, max_size=6), prices, loads)
def test_the_best_nodes_of_all_rows_are_taken_as_many_as_save_the_most(
    rows: list[tuple[list[float], float]], price: StepPrice, other_load: Load
) -> None:
    """No other numbers of the rows' best nodes save more seconds, in C or by numpy."""
    drafted = other_load._replace(rows=other_load.rows + len(rows))
    chains, rates = [chain for chain, _ in rows], np.array([rate for _, rate in rows])

    def saved(sizes: Sequence[int]) -> float:
        tokens = sum(sum(chain[:n]) / rate for (chain, rate), n in zip(rows, sizes, strict=True))
        more_s = price.seconds(drafted._replace(num_verified=drafted.num_verified + sum(sizes)))
        return tokens - (more_s - price.seconds(drafted))

    trees = trees_to_select(chains)
    taken = choose_nodes(trees, price, drafted, rates).tolist()
    by_numpy: Array = _choose_nodes(trees.nodes.chances / rates[:, None], trees.nodes, price, drafted)
    every = product(*(range(len(chain) + 1) for chain in chains)) if sum(map(len, chains)) < 12 else [taken]
    best = max(map(saved, every))
    assert saved(taken) == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert saved(by_numpy.tolist()) == pytest.approx(best, rel=1e-9, abs=1e-9)
    last = [chain[n - 1] / rate for (chain, rate), n in zip(rows, taken, strict=True) if n]
    left = [chain[n] / rate for (chain, rate), n in zip(rows, taken, strict=True) if n < len(chain)]
    assert not last or not left or min(last) >= max(left)


def test_prompt_tokens_fill_tiles() -> None:
    """Cost of a tile for its first token: with 14 prompt tokens in the step, the second node of a row."""
    cost, rates = price(token_s=0.01, tile_s=0.5), np.array([1.0])
    trees = trees_to_select([[0.6, 0.4, 0.3]])
    assert choose_nodes(trees, cost, Load(1, 3), rates).tolist() == [3]
    assert choose_nodes(trees, cost, Load(1, 3, num_prompt_tokens=14), rates).tolist() == [3]
    assert choose_nodes(trees, replace(cost, tile_s=0.8), Load(1, 3, num_prompt_tokens=14), rates).tolist() == [1]
