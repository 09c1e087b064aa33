"""The choice: how deep every row drafts, and which drafted tokens are verified, by what they bring and cost.

A position drafted, or a token verified, is worth its chance of being accepted, and costs its share of a step's
seconds. Before the draft runs, positions are bought by the reach that is expected of them; the best rate of tokens a
second that this promises is the price of time. After it, tokens are bought while their chance is worth that price.
Prompts that a step takes in do not matter: their seconds are spent anyway.
"""

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

    The cost of tokens has a knee at TILE. The best at their price before it is the best of all if it stays there, and
    so is that at the price beyond; about the knee the best of a few prices is taken.
    """
    load = beside._replace(rows=beside.rows + len(reaches))
    plain_s = price.seconds(load) - max(0, load.num_tokens - TILE) * price.beyond_s

    def at(share: float) -> tuple[Depths, float]:
        """Depths with this share of `beyond_s` in the price of all tokens, their true rate, and tokens beyond."""
        base_s = plain_s + share * (load.num_tokens - TILE) * price.beyond_s
        if base_s <= 0:
            return Depths([0] * len(reaches), load.rows / price.seconds(load)), load.num_tokens - TILE
        token_s = price.token_s + share * price.beyond_s
        depths, rate = _at_one_price(reaches, price, beside, tokens_a_slot, base_s, token_s)
        emitted = load.rows + sum(sum(reach[:depth]) for reach, depth in zip(reaches, depths, strict=True))
        num_beyond = load.num_tokens - TILE + sum(sum(tokens_a_slot[:depth]) for depth in depths)
        more_s = (max(0, num_beyond) - share * num_beyond) * price.beyond_s
        return Depths(depths, emitted / (emitted / rate + more_s)), num_beyond

    before, num_beyond = at(0)
    if not price.beyond_s or num_beyond <= 0:
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
    offered: Sequence[Iterable[Offered]], worth: float, worth_beyond: float, num_cheap: int, most: int
) -> list[list[Offered]]:
    """Tokens of every row, so many a row at most, of those offered by falling chance.

    The `num_cheap` best of all rows are bought if their chance is at least `worth`, the others if it is at least
    `worth_beyond`, which is no less.
    """
    bought = [_at_least(islice(of_row, most), worth) for of_row in offered]
    chances = sorted((token.chance for of_row in bought for token in of_row), reverse=True)
    if len(chances) <= num_cheap:
        return bought
    least = min(worth_beyond, chances[num_cheap - 1]) if num_cheap else worth_beyond
    return [_at_least(of_row, least) for of_row in bought]


def _at_least(falling: Iterable[Offered], worth: float) -> list[Offered]:
    return list(takewhile(lambda token: token.chance >= worth, falling))
