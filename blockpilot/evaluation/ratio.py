"""Dinkelbach's algorithm (1967): the choice with the largest ratio of sums, sum(a) / sum(b).

A rate is feasible if some choice has sum(a - rate * b) >= 0. The choice that maximises this sum has at least that
rate; the rate of this choice is tried next. A few rounds are enough.
"""

from collections.abc import Callable
from typing import TypeVar

Choice = TypeVar("Choice")


def largest_ratio(maximise: Callable[[float], tuple[Choice, float]], num_rounds: int = 50) -> tuple[Choice, float]:
    """The choice with the largest rate, and that rate.

    `maximise(rate)` returns the choice with the largest sum(a - rate * b), and that choice's sum(a) / sum(b).
    """
    rate = 0.0
    choice, best_rate = maximise(rate)
    for _ in range(num_rounds - 1):
        if best_rate <= rate:
            break
        rate = best_rate
        next_choice, next_rate = maximise(rate)
        if next_rate > rate:
            choice, best_rate = next_choice, next_rate
    return choice, best_rate
