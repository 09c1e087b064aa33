"""The largest ratio of sums: against all choices there are."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpilot.evaluation.ratio import largest_ratio

PAIRS = st.tuples(st.floats(0, 10), st.floats(0.1, 10))


@given(st.lists(st.lists(PAIRS, min_size=1, max_size=3), min_size=1, max_size=4), st.floats(0, 1))
def test_the_largest_ratio_is_the_best_of_all_choices(options: list[list[tuple[float, float]]], share: float) -> None:
    """From any start that is not above it."""

    def rate_of(choice: tuple[tuple[float, float], ...]) -> float:
        return sum(a for a, _ in choice) / sum(b for _, b in choice)

    def maximise(rate: float) -> tuple[tuple[tuple[float, float], ...], float]:
        choice = tuple(max(of_one, key=lambda pair: pair[0] - rate * pair[1]) for of_one in options)
        return choice, rate_of(choice)

    best = max(map(rate_of, product(*options)))
    choice, found = largest_ratio(maximise, rate=share * best)
    assert found == rate_of(choice) == pytest.approx(best, rel=1e-9)
