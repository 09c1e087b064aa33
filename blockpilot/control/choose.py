"""The choice: how deep every row drafts, and which drafted tokens are verified, by what they bring and cost.

A position drafted, or a token verified, is worth its chance of being accepted, and costs its share of a step's
seconds. Before the draft runs, positions are bought by the reach that is expected of them; the best rate of tokens a
second that this promises is the price of time. After it, tokens are bought while their chance is worth that price.
Prompts that a step takes in do not matter: their seconds are spent anyway.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, islice, takewhile
from typing import NamedTuple, Protocol, TypeVar

from blockpilot.control.price import Load, StepPrice, passes
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


class Depths(NamedTuple):
    """Positions that every row drafts, and the tokens a second that are expected of it."""

    depths: list[int]
    rate: float


def choose_depths(
    reaches: Sequence[Sequence[float]], price: StepPrice, beside: Load, tokens_a_slot: Sequence[float]
) -> Depths:
    """The depths that are expected to make the most tokens a second of the whole batch.

    reaches[r][d] is the chance that more than d drafted tokens of row r are accepted. `beside` is what other rows
    take in, which emit a token each. A position at depth d costs a slot, and tokens_a_slot[d] verified tokens.
    """
    # Lists, not arrays: there are few rows, and a step waits for this.
    rows, deepest = len(reaches) + beside.rows, max(map(len, reaches))
    gains = [list(accumulate(of_row, initial=0.0)) for of_row in reaches]
    of_slots = (price.slot_s + tokens * price.token_s for tokens in tokens_a_slot[:deepest])
    costs = list(accumulate(of_slots, initial=0.0))
    plain_s = price.seconds(beside._replace(rows=rows))
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


def buy(offered: Iterable[Offered], worth: float, most: int) -> list[Offered]:
    """Tokens whose chance is at least `worth`, so many at most, of those offered by falling chance."""
    return list(islice(takewhile(lambda token: token.chance >= worth, offered), most))
