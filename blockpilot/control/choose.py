"""Choice of the depth that every row drafts, and of the nodes to verify. Pure functions.

The expected gain of a node is the time that an accepted token saves, times its acceptance probability; its cost is
its share of the step cost. The time that a token saves is the reciprocal of the row's rate in tokens per second. It
differs by the kind of row (`AcceptanceModel.kinds`): if many tokens are accepted per step, one more saves little. So
each kind has the rate of a batch of rows of this kind. Prompt tokens in a step have a fixed cost, but fill tiles.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.control.acceptance import Expected
from blockpilot.control.cost import Load, StepPrice, Tiles
from blockpilot.native.growing import Nodes, select_nodes

Array = NDArray[Any]


class RowPlan(NamedTuple):
    """Tokens per second of a batch of rows of one kind, and seconds that drafting saves a row; [K, ...] for K kinds.

    saved_s [1 + D], by the drafted depth, is net of the cost of drafted positions and verified nodes, but not of the
    draft's launch cost.
    """

    rate: Array
    saved_s: Array


class Trees(NamedTuple):
    """Candidate nodes of R trees; kinds [R] of the rows, and positions [R] that a draft proposed tokens for."""

    kinds: Array
    drafted: Array
    nodes: Nodes


def plan_rows(expected: Expected, num_rows: int, price: StepPrice, other_load: Load) -> RowPlan:
    """Plan, for each kind, of `num_rows` rows together with the load of other rows, which emit one token each.

    Maximises over all depths, all probability thresholds of verified nodes, and numbers of nodes that fill a tile.
    """
    _, sums, counts = expected
    depths = np.arange(sums.shape[-2])[:, None]
    tokens, nodes = num_rows * sums.cumsum(axis=-2), num_rows * counts.cumsum(axis=-2)
    load = other_load._replace(rows=other_load.rows + num_rows)
    if price.tile_s:
        tokens, nodes = _with_full_tiles(tokens, nodes, load.num_tokens, price.tiles)
    plain_s = price.seconds(load)
    tiles = price.tiles.beyond(load.num_tokens + nodes) - price.tiles.beyond(load.num_tokens)
    seconds = plain_s + num_rows * depths * price.slot_s + nodes * price.token_s + tiles * price.tile_s
    seconds += price.more_experts_s(load.num_tokens, nodes)
    rates = (load.rows + tokens) / (seconds + np.reshape(_launch_s(len(depths), price, other_load), (-1, 1)))
    rate = rates.max(axis=(-2, -1)).clip(min=load.rows / plain_s)
    saved_s = (tokens / rate[..., None, None] - seconds).max(axis=-1)
    return RowPlan(rate, (saved_s - saved_s[..., :1].clip(min=-plain_s)) / num_rows)


def _with_full_tiles(tokens: Array, nodes: Array, num: int, tiles: Tiles) -> tuple[Array, Array]:
    """Expected tokens and nodes [..., J + F] at J thresholds, and at F numbers of nodes that fill a tile.

    The step has `num` tokens without nodes. `choose_nodes` fills tiles between two thresholds: with sixteen rows,
    few thresholds fall into a tile. Further tiles of one token are always full.
    """
    free = tiles.first - num if num < tiles.first else -(num - tiles.first) % tiles.further or tiles.further
    fills = np.arange(free, nodes.max() + tiles.further, tiles.further) if tiles.further > 1 else np.array([free])
    # From no nodes to those above the least threshold, [..., 1 + J].
    xs, ys = (np.concatenate([np.zeros_like(v[..., :1]), v[..., ::-1]], axis=-1) for v in (nodes, tokens))
    filled = np.minimum(fills, xs[..., -1:])
    # Interpolate between the highest threshold that gives at least `filled` nodes and the next higher one.
    after = (xs[..., None, :] < filled[..., None]).sum(axis=-1).clip(min=1)
    (x0, x1), (y0, y1) = ([np.take_along_axis(v, at, axis=-1) for at in (after - 1, after)] for v in (xs, ys))
    share = np.divide(filled - x0, x1 - x0, out=np.zeros_like(x0), where=x1 > x0)
    return np.concatenate([tokens, y0 + share * (y1 - y0)], axis=-1), np.concatenate([nodes, filled], axis=-1)


def _launch_s(num: int, price: StepPrice, other_load: Load) -> list[float]:
    """Launch cost in seconds of the draft passes for depths 0 to num - 1 [num], beyond the passes of other rows."""
    launched = other_load.num_passes if other_load.num_drafted else 0
    num_passes = range(num) if price.is_sequential else [0, *[1] * (num - 1)]
    return [price.launch_s * max(0, num_launches - launched) for num_launches in num_passes]


class Drafting(NamedTuple):
    """Depths [R], at least one positive if any row may draft, and the seconds of a step that they save (or cost)."""

    depths: Array
    saved_s: float


def best_drafting(plans: RowPlan, kinds: Array, most: Array, price: StepPrice, other_load: Load) -> Drafting:
    """Depths of rows of these kinds [R], at most most[r] for row r, that save the most seconds.

    If no draft saves any, the cheapest one, for exploration. plans: one for every kind. other_load: load of the other
    rows.
    """
    saved_s, depths = plans.saved_s, np.arange(plans.saved_s.shape[-1])
    launch_s = np.array(_launch_s(len(depths), price, other_load))
    # 1. For each depth limit [1 + D]: the most seconds that each kind saves, and the depth that saves them.
    most_saved_s = np.maximum.accumulate(saved_s, axis=1)
    is_better = np.diff(most_saved_s, axis=1, prepend=saved_s[:, :1]) > 0
    best = np.maximum.accumulate(is_better * depths, axis=1)
    # 2. The limit for all rows at which the step saves most.
    limits = np.minimum(most[:, None], depths)
    net_s = most_saved_s[kinds[:, None], limits].sum(axis=0) - launch_s
    limit = 1 + int(net_s[1:].argmax()) if len(depths) > 1 else 0
    chosen: Array = best[kinds, limits[:, limit]]
    if chosen.any() or not most.any():
        return Drafting(chosen, float(net_s[limit]))
    # 3. Drafting saves nothing: the row and depth with the least cost.
    options = np.where((depths > 0) & (depths <= most[:, None]), saved_s[kinds], -np.inf)
    row, depth = divmod(int(options.argmax()), len(depths))
    chosen[row] = depth
    return Drafting(chosen, float(options[row, depth] - launch_s[depth]))


def least_cost_s(plans: RowPlan, num_rows: int, price: StepPrice, other_load: Load) -> float:
    """Lower bound of the seconds that drafting adds to a step of `num_rows` rows of any kinds; saves if negative."""
    saved_s = plans.saved_s[:, 1:]
    if not saved_s.size:
        return np.inf
    most_saved_s = saved_s.max()
    launch_s = _launch_s(2, price, other_load)[1]
    return float(launch_s - max(most_saved_s, num_rows * most_saved_s))


def choose_nodes(trees: Trees, price: StepPrice, drafted: Load, rates: Array) -> Array:
    """Number of nodes to verify of every tree [R]: the best nodes of all rows, as many as save the most seconds.

    rates [R]: long-run tokens per second of each row's kind, so that one step with poor candidates does not lower the
    threshold. drafted: the step's load without these nodes.
    """
    saved_s = trees.nodes.chances / rates[:, None]
    costs = price.token_s, price.tile_s, price.tiles, price.experts_s, price.expert_share
    selected = select_nodes(saved_s, trees.nodes.num, drafted.num_tokens, *costs)
    return _choose_nodes(saved_s, trees.nodes, price, drafted) if selected is None else selected


def _choose_nodes(saved_s: Array, nodes: Nodes, price: StepPrice, drafted: Load) -> Array:
    """Python version of `select_nodes` (native/growing.c)."""
    rows, columns = nodes.grown.nonzero()
    node_saved_s = saved_s[rows, columns]
    best_first = (-node_saved_s).argsort(kind="stable")
    gains = np.zeros(len(node_saved_s) + 1)
    gains[1:] = node_saved_s[best_first].cumsum()
    num = int((gains - seconds_of_more(price, drafted, len(node_saved_s))).argmax())
    selected: Array = np.bincount(rows[best_first[:num]], minlength=len(nodes.num))
    return selected


def seconds_of_more(price: StepPrice, load: Load, most: int) -> Array:
    """Cost in seconds of a step that verifies 0 to `most` more tokens than `load`, [most + 1]."""
    more = np.arange(most + 1)
    seconds: Array = price.seconds(load) + more * price.token_s + price.more_experts_s(load.num_tokens, more)
    if price.tile_s:
        num, tiles = load.num_tokens, price.tiles
        seconds += (tiles.beyond(num + more) - tiles.beyond(num)) * price.tile_s
    return seconds
