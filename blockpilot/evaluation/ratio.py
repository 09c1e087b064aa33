"""Dinkelbach's search: the choice with the largest sum of a over sum of b.

A rate is reached by some choice if the largest sum of a - rate * b of all choices is not negative. The choice with
that sum has at least that rate, which is the next one to try; a few rounds find the largest (Dinkelbach 1967).
"""

from collections.abc import Callable
from typing import TypeVar

Choice = TypeVar("Choice")


def largest_ratio(
    maximise: Callable[[float], tuple[Choice, float]], rate: float = 0.0, num_rounds: int = 50
) -> tuple[Choice, float]:
    """(choice, its rate) with the largest rate.

    `maximise(rate)` gives the choice with the largest sum of a - rate * b, and that choice's sum of a over sum of b.
    The first choice is taken whatever its rate; `rate` is where the search begins.
    """
    choice, found = maximise(rate)
    for _ in range(num_rounds - 1):
        if found <= rate:
            break
        rate = found
        following, reached = maximise(rate)
        if reached > rate:
            choice, found = following, reached
    return choice, found
