"""The choice: how deep every row drafts, and which tokens are verified. Pure functions.

A node of a tree is worth the seconds that it saves if it is accepted, times the probability of that, and costs its
share of a step's seconds. How much a token saves differs by the kind of row (`AcceptanceModel.kinds`): a text has to
be gone through, and where many tokens are accepted a step, one more saves little. So each kind has the tokens a
second that a batch of its own would make. Prompts that a step takes in do not matter: their seconds are spent anyway.
"""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.control.acceptance import Expected
from blockpilot.control.cost import TILE, Load, StepPrice
from blockpilot.native.growing import select_nodes

Array = NDArray[Any]


class RowPlan(NamedTuple):
    """Tokens a second of a batch of one kind of row, and the seconds that drafting saves one of its rows; of K kinds
    [K, ...].

    saved_s [1 + D] by the positions that the row drafts, less their own and those of what is verified of them; the
    launch of the draft is left out.
    """

    rate: Array
    saved_s: Array


class Trees(NamedTuple):
    """Nodes of R trees that may be verified, by falling probability, of each `num` [R].

    kinds [R] of the rows. drafted [R]: positions that a draft proposed tokens for. chances and depths [R, M]; depth 0
    is that of nodes that need no draft, below it of those that nothing is learned from.
    """

    kinds: Array
    drafted: Array
    num: Array
    chances: Array
    depths: Array

    @property
    def taken(self) -> Array:
        """Mask of the nodes [R, M]."""
        found: Array = np.arange(self.chances.shape[1]) < self.num[:, None]
        return found


def plan_rows(expected: Expected, num_rows: int, price: StepPrice, beside: Load) -> RowPlan:
    """The plan of so many rows of each kind, beside what other rows take in, which emit a token each.

    All depths, and all thresholds of the nodes that are verified, are tried. Tokens beyond the first tile are charged
    their share of theirs.
    """
    _, sums, counts = expected
    depths = np.arange(sums.shape[-2])[:, None]
    tokens, nodes = num_rows * sums.cumsum(axis=-2), num_rows * counts.cumsum(axis=-2)
    load = beside._replace(rows=beside.rows + num_rows)
    plain_s = price.seconds(load) - load.terms[-1] * price.tile_s
    share_s = price.tile_s / TILE
    beyond = (load.num_tokens + nodes - TILE).clip(min=0)
    seconds = plain_s + num_rows * depths * price.slot_s + nodes * price.token_s + beyond * share_s
    plain_s += max(0, load.num_tokens - TILE) * share_s
    rates = (load.rows + tokens) / (seconds + np.reshape(_launch_s(len(depths), price, beside), (-1, 1)))
    rate = rates.max(axis=(-2, -1)).clip(min=load.rows / plain_s)
    saved_s = (tokens / rate[..., None, None] - seconds).max(axis=-1)
    return RowPlan(rate, (saved_s - saved_s[..., :1].clip(min=-plain_s)) / num_rows)


def _launch_s(num: int, price: StepPrice, beside: Load) -> list[float]:
    """Seconds that a draft's passes take for depths 0, 1 and so on [num]: where others draft, they are theirs."""
    launched = beside.num_passes if beside.num_drafted else 0
    num_passes = range(num) if price.is_sequential else [0, *[1] * (num - 1)]
    return [price.launch_s * max(0, each - launched) for each in num_passes]


class Drafting(NamedTuple):
    """Depths [R] of rows of which at least one drafts, where any may, and the seconds of a step that this saves."""

    depths: Array
    saved_s: float


def best_drafting(plans: RowPlan, kinds: Array, most: Array, price: StepPrice, beside: Load) -> Drafting:
    """The depths, at most most[r] of row r, that save the most seconds, or cost the least.

    Of rows of these kinds [R], with a plan for each kind, beside what other rows take in.
    """
    rows = list(zip(kinds.tolist(), most.tolist(), strict=True))
    saved_s, launch_s = plans.saved_s.tolist(), _launch_s(plans.saved_s.shape[-1], price, beside)
    net_s, best = [-seconds for seconds in launch_s], dict[tuple[int, int], list[int]]()
    for (kind, deepest), num in Counter(rows).items():
        found, depth = best.setdefault((kind, deepest), []), 0
        for limit, seconds in enumerate(saved_s[kind]):
            if limit <= deepest and seconds > saved_s[kind][depth]:
                depth = limit
            found.append(depth)
            net_s[limit] += num * saved_s[kind][depth]
    limit = max(range(1, len(net_s)), key=net_s.__getitem__, default=0)
    depths = np.array([best[row][limit] for row in rows])
    if depths.any() or not most.any():
        return Drafting(depths, net_s[limit])
    # No row is worth its positions.
    places = [
        (r, depth) for r, (_, deepest) in enumerate(rows) for depth in range(1, 1 + min(deepest, len(net_s) - 1))
    ]
    row, depth = max(places, key=lambda place: saved_s[rows[place[0]][0]][place[1]])
    depths[row] = depth
    return Drafting(depths, saved_s[rows[row][0]][depth] - launch_s[depth])


def choose_nodes(trees: Trees, price: StepPrice, drafted: Load, rates: Array) -> Array:
    """Number of nodes to verify of every tree [R]: the N best of all rows that save the most seconds.

    rates [R]: tokens a second that are made in the long run of each row's kind. So a step with poor candidates is no
    reason to verify worse ones. `drafted` is the load before anything of these is verified.
    """
    saved_s = trees.chances / rates[:, None]
    now = drafted.num_tokens, price.token_s, price.tile_s, TILE
    found = select_nodes(saved_s, trees.num, *now)
    return _choose_nodes(saved_s, trees, price, drafted) if found is None else found


def _choose_nodes(saved_s: Array, trees: Trees, price: StepPrice, drafted: Load) -> Array:
    """As growing.c does it."""
    rows, places = trees.taken.nonzero()
    of_nodes = saved_s[rows, places]
    best_first = (-of_nodes).argsort(kind="stable")
    gains = np.zeros(len(of_nodes) + 1)
    gains[1:] = of_nodes[best_first].cumsum()
    num = int((gains - seconds_of_more(price, drafted, len(of_nodes))).argmax())
    taken: Array = np.bincount(rows[best_first[:num]], minlength=len(trees.num))
    return taken


def seconds_of_more(price: StepPrice, load: Load, most: int) -> Array:
    """Seconds of a step that verifies 0 to `most` tokens more than `load`, [most + 1]."""
    more = np.arange(most + 1)
    found: Array = price.seconds(load) + more * price.token_s
    if price.tile_s:
        found += ((load.num_tokens + more - 1) // TILE - (load.num_tokens - 1) // TILE) * price.tile_s
    return found
