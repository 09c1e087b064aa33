"""The choice: how deep every row drafts, and which drafted tokens are verified, by what they bring and cost.

A position drafted, or a token verified, is worth its chance of being accepted, and costs its share of a step's
seconds. Before the draft runs, depths are chosen by what each is expected to bring. After it, nodes are taken by
falling chance, of all rows together, as many as make the most tokens a second. Prompts that a step takes in do not
matter: their seconds are spent anyway.
"""

import math
from collections.abc import Sequence
from operator import add, itemgetter
from typing import NamedTuple

import numpy as np

from blockpilot.control.cost import TILE, Array, Load, StepPrice, passes

Reaches = Sequence[Sequence[float]]


class Depths(NamedTuple):
    """Positions that every row drafts, and the tokens a second that are expected of it."""

    depths: list[int]
    rate: float


class _Bundle(NamedTuple):
    """Positions of a row that are drafted together: later ones bring more for their seconds than the first alone."""

    cost: float
    """Seconds for a token that is expected of them to be accepted."""
    row: int
    num_slots: int
    gain: float
    """Tokens of them that are expected to be accepted."""
    num_tokens: float
    """Tokens of them that will be verified."""
    seconds: float


def choose_depths(reaches: Reaches, price: StepPrice, beside: Load, tokens_a_slot: Sequence[float]) -> Depths:
    """The depths that are expected to make the most tokens a second of the whole batch.

    reaches[r][d] is the chance that more than d drafted tokens of row r are accepted. `beside` is what other rows
    take in, which emit a token each. A position at depth d costs a slot, and tokens_a_slot[d] verified tokens; tokens
    beyond the first tile are charged their share of theirs.

    The best of all, but where a step may leave a tile: there rows are compared by what positions cost within it.
    """
    load = beside._replace(rows=beside.rows + len(reaches))
    deepest, launched = max(map(len, reaches)), beside.num_passes if beside.num_drafted else 0
    plain_s, share_s = price.seconds(load) - load.terms[-1] * price.tile_s, price.tile_s / TILE
    token_s = price.token_s + (share_s if load.num_tokens >= TILE else 0.0)
    costs = [(num, price.slot_s + num * token_s) for num in tokens_a_slot[:deepest]]
    best = Depths([0] * len(reaches), load.rows / (plain_s + max(0, load.num_tokens - TILE) * share_s))
    for limit in range(1, deepest + 1) if price.is_sequential else (deepest,):
        launch_s = price.launch_s * max(0, passes([limit], price.is_sequential) - launched)
        emitted, seconds, num_tokens = float(load.rows), plain_s + launch_s, float(load.num_tokens)
        bundles, most, num_taken = _bundles([reach[:limit] for reach in reaches], costs), best.rate, 0
        for place, (_, _, num_slots, gain, tokens, _) in enumerate(bundles, 1):
            emitted += gain
            num_tokens += tokens
            seconds += num_slots * price.slot_s + tokens * price.token_s
            beyond = num_tokens - TILE
            rate = emitted / (seconds + beyond * share_s if beyond > 0 else seconds)
            if rate > most:
                most, num_taken = rate, place
        if num_taken:
            depths = [0] * len(reaches)
            for bundle in bundles[:num_taken]:
                depths[bundle.row] += bundle.num_slots
            best = Depths(depths, most)
    return best


def _bundles(reaches: Reaches, costs: Sequence[tuple[float, float]]) -> list[_Bundle]:
    """All positions, the cheapest first; costs[d] are tokens and seconds of one at depth d."""
    found = list[_Bundle]()
    for r, reach in enumerate(reaches):
        of_row = list[_Bundle]()
        for gain, (num_tokens, seconds) in zip(reach, costs, strict=False):
            bundle = _Bundle(seconds / gain if gain else math.inf, r, 1, gain, num_tokens, seconds)
            while of_row and of_row[-1].cost > bundle.cost:
                _, _, num, *sums = of_row.pop()
                gain, num_tokens, seconds = map(add, sums, bundle[3:])
                bundle = _Bundle(seconds / gain, r, num + bundle.num_slots, gain, num_tokens, seconds)
            of_row.append(bundle)
        found += of_row
    found.sort(key=itemgetter(0))  # of one row's alike in cost the first stays the first
    return found


def choose_nodes(chances: Sequence[Sequence[float] | Array], price: StepPrice, drafted: Load) -> list[int]:
    """How many nodes of every row's tree are verified: the N of all rows that make the most tokens a second.

    chances[r] are those of row r's nodes by falling chance. `drafted` is the load before anything of these is
    verified; its rows emit a token each, and the draft's seconds are spent.
    """
    sizes = [len(of_row) for of_row in chances]
    every = np.concatenate([np.asarray(of_row, dtype=float) for of_row in chances]) if chances else np.zeros(0)
    best_first = np.argsort(-every, kind="stable")
    tokens = drafted.rows + np.concatenate([[0.0], every[best_first].cumsum()])
    num = int((tokens / seconds_of_more(price, drafted, len(every))).argmax())
    rows = np.repeat(np.arange(len(sizes)), sizes)[best_first[:num]]
    return np.bincount(rows, minlength=len(sizes)).tolist()


def seconds_of_more(price: StepPrice, load: Load, most: int) -> Array:
    """Seconds of a step that verifies 0 to `most` tokens more than `load`, [most + 1]."""
    more = np.arange(most + 1)
    more_tiles = (load.num_tokens + more - 1) // TILE - (load.num_tokens - 1) // TILE
    found: Array = price.seconds(load) + more * price.token_s + more_tiles * price.tile_s
    return found
