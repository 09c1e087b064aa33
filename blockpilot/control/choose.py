"""The choice: how deep every row drafts, and which drafted tokens are verified, by what they bring and cost.

A position drafted, or a token verified, is worth its chance of being accepted, and costs its share of a step's
seconds. Before the draft runs, positions are bought by the reach that is expected of them; the best rate of tokens a
second that this promises is the price of time. After it, tokens are bought while their chance is worth that price.
Prompts that a step takes in do not matter: their seconds are spent anyway.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice, takewhile
from typing import NamedTuple, Protocol, TypeVar

from blockpilot.control.price import TILE, Load, StepPrice, passes
from blockpilot.control.ratio import largest_ratio


class Priced(Protocol):
    """A drafted token that may be verified."""

    @property
    def chance(self) -> float:
        """That the target chooses it, and all before it."""

    @property
    def depth(self) -> int:
        """Its place after the anchor, from 1 on."""


Offered = TypeVar("Offered", bound=Priced)
Reaches = Sequence[Sequence[float]]


class Depths(NamedTuple):
    """Positions that every row drafts, and the tokens a second that are expected of it."""

    depths: list[int]
    rate: float


def choose_depths(reaches: Reaches, price: StepPrice, beside: Load, tokens_a_slot: Sequence[float]) -> Depths:
    """The depths that are expected to make the most tokens a second of the whole batch.

    reaches[r][d] is the chance that more than d drafted tokens of row r are accepted. `beside` is what other rows
    take in, which emit a token each. A position at depth d costs a slot, and tokens_a_slot[d] verified tokens.

    Tokens beyond the first tile are charged their share of theirs. The best at the price before it is the best of all
    if it stays there, and so is that at the price beyond; about the knee the best of a few prices is taken.
    """
    load, share_s = beside._replace(rows=beside.rows + len(reaches)), price.tile_s / TILE
    plain_s = price.seconds(load) - load.terms[-1] * price.tile_s

    def at(share: float) -> tuple[Depths, float]:
        """Depths with this part of `share_s` in the price of all tokens, their true rate, tokens beyond a tile."""
        num_beyond = load.num_tokens - TILE
        base_s = plain_s + share * num_beyond * share_s
        if base_s <= 0:
            return Depths([0] * len(reaches), load.rows / (plain_s + max(0, num_beyond) * share_s)), num_beyond
        token_s = price.token_s + share * share_s
        depths, rate = _at_one_price(reaches, price, beside, tokens_a_slot, base_s, token_s)
        emitted = load.rows + sum(sum(reach[:depth]) for reach, depth in zip(reaches, depths, strict=True))
        expected = num_beyond + sum(sum(tokens_a_slot[:depth]) for depth in depths)
        more_s = (max(0, expected) - share * expected) * share_s
        return Depths(depths, emitted / (emitted / rate + more_s)), expected

    before, num_beyond = at(0)
    if not share_s or num_beyond <= 0:
        return before
    beyond, num_beyond = at(1)
    return beyond if num_beyond >= 0 else max(before, at(0.5)[0], beyond, key=lambda found: found.rate)


def _at_one_price(
    reaches: Reaches, price: StepPrice, beside: Load, tokens_a_slot: Sequence[float], plain_s: float, token_s: float
) -> Depths:
    """`choose_depths` where every token costs `token_s`, and a step that drafts nothing `plain_s`."""
    # Lists, not arrays: there are few rows, and a step waits for this.
    rows, deepest = len(reaches) + beside.rows, max(map(len, reaches))
    gains = [list(accumulate(of_row, initial=0.0)) for of_row in reaches]
    costs = list(accumulate((price.slot_s + num * token_s for num in tokens_a_slot[:deepest]), initial=0.0))
    launched = beside.num_passes if beside.num_drafted else 0  # those passes are made anyway
    more = (max(0, passes([depth], price.is_sequential) - launched) for depth in range(1, deepest + 1))
    launches = [0.0, *(price.launch_s * num for num in more)]
    limits = range(deepest + 1) if price.is_sequential else (0, deepest)

    def maximise(rate: float) -> tuple[list[int], float]:
        """At a rate rows choose apart, none deeper than passes are worth to all of them together."""
        worth = [[gain - rate * cost for gain, cost in zip(of_row, costs, strict=False)] for of_row in gains]
        best = [list(accumulate(of_row, max)) for of_row in worth]  # by the limit
        together = [sum(of_row[min(n, len(of_row) - 1)] for of_row in best) - rate * launches[n] for n in limits]
        limit = limits[together.index(max(together))]
        depths = [of_row.index(most[min(limit, len(most) - 1)]) for of_row, most in zip(worth, best, strict=True)]
        tokens = rows + sum(of_row[depth] for of_row, depth in zip(gains, depths, strict=True))
        return depths, tokens / (plain_s + launches[max(depths)] + sum(costs[depth] for depth in depths))

    return Depths(*largest_ratio(maximise, rows / plain_s))


def buy(
    offered: Sequence[Iterable[Offered]], worth: float, worth_tile: float, num_free: int, most: int
) -> list[list[Offered]]:
    """Tokens of every row, so many a row at most, of those offered by falling chance.

    One is worth it if its chance is at least `worth`, and a tile more if its tokens bring `worth_tile` beyond that;
    `num_free` fit into the tile that is begun.
    """
    bought = [list(takewhile(lambda token: token.chance >= worth, islice(of_row, most))) for of_row in offered]
    best_first = sorted((-token.chance, r) for r, of_row in enumerate(bought) for token in of_row)
    if len(best_first) <= num_free:
        return bought
    gains = list(accumulate((-negative - worth for negative, _ in best_first), initial=0.0))
    ends = [*range(num_free, len(best_first), TILE), len(best_first)]
    best = max(reversed(range(len(ends))), key=lambda num_tiles: gains[ends[num_tiles]] - num_tiles * worth_tile)
    taken = Counter(r for _, r in best_first[: ends[best]])
    return [of_row[: taken[r]] for r, of_row in enumerate(bought)]
