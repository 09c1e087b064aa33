"""The choice: how deep every row drafts, and which drafted tokens are verified. Pure functions.

A node of a tree is worth the probability that it is accepted, and costs its share of a step's seconds. Before the
draft runs, depths are chosen by the nodes that each is expected to add. After it, nodes are taken by falling
probability, of all rows together, as many as make the most tokens a second. Prompts that a step takes in do not
matter: their seconds are spent anyway.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.control.acceptance import Expected
from blockpilot.control.cost import TILE, Load, StepPrice, passes
from blockpilot.native.growing import select_nodes

Array = NDArray[Any]

MAX_ROUNDS = 20  # of Dinkelbach's method, which takes two or three


class Depths(NamedTuple):
    """Positions that every row drafts [R], and the tokens a second that are expected of it."""

    depths: Array
    rate: float


class Trees(NamedTuple):
    """Nodes of R trees that may be verified, by falling probability, of each `num` [R].

    drawn [R] 0 or 1: of rows that draw tokens. drafted [R]: positions that a draft proposed tokens for. chances and
    depths [R, M].
    """

    drawn: Array
    drafted: Array
    num: Array
    chances: Array
    depths: Array

    @property
    def taken(self) -> Array:
        """Mask of the nodes [R, M]."""
        found: Array = np.arange(self.chances.shape[1]) < self.num[:, None]
        return found


def choose_depths(expected: Expected, most: Array, price: StepPrice, beside: Load) -> Depths:
    """The depths, at most most[r] of row r, that are expected to make the most tokens a second of the whole batch.

    `beside` is what other rows take in, which emit a token each. Of a depth count the nodes that will be verified:
    those whose probability is worth their seconds. Tokens beyond the first tile are charged their share of theirs.

    Dinkelbach's method (1967): where every row takes the depth with the largest tokens - rate * seconds, the rate
    grows until it is the largest there is. Where a step may leave a tile, the rate is that of the better side of it.
    """
    thresholds, sums, counts = expected
    num_rows, deepest = sums.shape[:2]
    allowed = np.arange(deepest) < most[:, None]
    load = beside._replace(rows=beside.rows + num_rows)
    launched = beside.num_passes if beside.num_drafted else 0
    share_s = price.tile_s / TILE
    plain_s = price.seconds(load) - load.terms[-1] * price.tile_s
    tokens_s = [price.token_s] if load.num_tokens < TILE else []
    tokens_s += [price.token_s + share_s] if share_s or not tokens_s else []

    def seconds(num_passes: int, num_slots: float, num_tokens: float) -> float:
        beyond_s = max(0.0, load.num_tokens + num_tokens - TILE) * share_s
        launch_s = price.launch_s * max(0, num_passes - launched)
        return plain_s + launch_s + num_slots * price.slot_s + num_tokens * price.token_s + beyond_s

    best = Depths(np.zeros(num_rows, dtype=int), load.rows / seconds(launched, 0, 0))
    places = np.arange(num_rows)
    for limit in range(1, deepest + 1) if price.is_sequential else (deepest,):
        num_passes = passes([limit], price.is_sequential)
        for _ in range(MAX_ROUNDS):
            before = best.rate
            for token_s in tokens_s:
                j = min(int(np.searchsorted(thresholds, before * token_s)), len(thresholds) - 1)
                tokens, nodes = sums[:, :limit, j], counts[:, :limit, j]
                worth = np.where(allowed[:, :limit], tokens - before * (price.slot_s + nodes * token_s), -np.inf)
                total = worth.cumsum(axis=1)
                deep = total.argmax(axis=1)
                drafts = total[places, deep] > 0
                depths = np.where(drafts, deep + 1, 0)
                inside = np.arange(limit) < depths[:, None]
                emitted = load.rows + float(tokens[inside].sum())
                rate = emitted / seconds(num_passes, int(depths.sum()), float(nodes[inside].sum()))
                if rate > best.rate and drafts.any():
                    best = Depths(depths, rate)
            if best.rate <= before * (1 + 1e-9):
                break
    return best


def choose_nodes(trees: Trees, price: StepPrice, drafted: Load, rate: float) -> Array:
    """Number of nodes to verify of every tree [R]: the N best of all rows with the most tokens - rate * seconds.

    With the tokens a second that are made in the long run as its rate, this makes the most of them: a step with poor
    candidates is no reason to verify worse ones. `drafted` is the load before anything of these is verified.
    """
    now = drafted.num_tokens, rate * price.token_s, rate * price.tile_s, TILE
    found = select_nodes(trees.chances, trees.num, *now)
    return _choose_nodes(trees, price, drafted, rate) if found is None else found


def _choose_nodes(trees: Trees, price: StepPrice, drafted: Load, rate: float) -> Array:
    """As growing.c does it."""
    rows, places = trees.taken.nonzero()
    chances = trees.chances[rows, places]
    best_first = (-chances).argsort(kind="stable")
    gains = np.zeros(len(chances) + 1)
    gains[1:] = chances[best_first].cumsum()
    num = int((gains - rate * seconds_of_more(price, drafted, len(chances))).argmax())
    taken: Array = np.bincount(rows[best_first[:num]], minlength=len(trees.num))
    return taken


def seconds_of_more(price: StepPrice, load: Load, most: int) -> Array:
    """Seconds of a step that verifies 0 to `most` tokens more than `load`, [most + 1]."""
    more = np.arange(most + 1)
    found: Array = price.seconds(load) + more * price.token_s
    if price.tile_s:
        found += ((load.num_tokens + more - 1) // TILE - (load.num_tokens - 1) // TILE) * price.tile_s
    return found
