"""What a choice can give: against all choices there are, and on published figures worked by hand."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from blockpilot.evaluation.oracle import Table, gain, oracle, potential

Array = NDArray[np.float64]

# Tokens of a step of 32 prompts of GSM8K with Qwen3-4B and its DFlash draft, greedy: figures that BlockPilot (arXiv
# 2606.31315) has released, a line for each prompt and a column for each block size.
PUBLISHED_SIZES = (14, 15, 16, 17, 18)
PUBLISHED = """
    7.325 7.864865 7.621622 7.487179 8.111111
    7.0 7.212121 7.4375 7.677419 7.0
    7.55 8.089286 8.236364 8.358491 7.77193
    7.809524 8.631579 8.2 8.837838 8.384615
    7.741935 8.0 7.5 7.741935 7.058824
    4.247312 4.340659 4.521739 4.674419 4.466667
    5.809524 5.674419 5.545455 5.545455 5.304348
    5.972973 6.138889 5.675 6.5 5.972973
    6.142857 6.37037 6.509434 7.020408 6.615385
    6.067797 6.62963 6.392857 6.280702 5.68254
    4.394737 4.513514 4.638889 4.638889 4.771429
    8.042553 8.217391 8.590909 8.590909 7.411765
    6.448276 6.925926 6.925926 7.192308 7.333333
    5.703125 5.809524 5.903226 5.661538 5.75
    5.866667 5.866667 5.966102 6.175439 5.866667
    5.960784 6.08 5.735849 5.627119 5.269841
    5.811321 5.923077 6.039216 5.826087 6.090909
    4.864865 5.142857 5.294118 5.294118 5.0
    5.5 5.28 6.0 5.076923 5.076923
    4.958333 5.173913 5.173913 5.173913 5.409091
    6.12069 6.574074 7.0 7.0 6.236364
    6.928571 6.928571 7.0 6.689655 5.878788
    5.833333 5.697674 5.880952 5.348837 4.791667
    7.7 8.178571 8.25 8.25 7.7
    6.283019 6.283019 6.529412 6.66 6.403846
    6.62963 6.62963 6.509091 6.62963 6.280702
    5.066667 5.066667 5.428571 5.090909 5.6
    6.809524 7.333333 7.944444 7.944444 7.526316
    4.272727 4.360825 5.154762 4.648352 4.548387
    7.513514 7.513514 7.4 7.722222 8.424242
    5.831325 5.761905 6.303371 6.1 6.177215
    6.571429 6.764706 6.969697 7.419355 6.969697
"""


def table_of(taus: Array) -> Table:
    """Rates are mean taus: one second for each."""
    return Table(taus, np.ones_like(taus))


def published() -> Table:
    return table_of(np.array(PUBLISHED.split(), float).reshape(32, len(PUBLISHED_SIZES)))


def brute_force(table: Table) -> float:
    """The largest ratio of sums of all ways to choose a column from every line."""
    num_choices, num_candidates = table.tokens.shape
    rates = []
    for columns in product(range(num_candidates), repeat=num_choices):
        tokens = sum(table.tokens[i, c] for i, c in enumerate(columns))
        rates.append(tokens / sum(table.seconds[i, c] for i, c in enumerate(columns)))
    return max(rates)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 4)))
    values = [
        draw(st.lists(st.floats(low, 20), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
        for low in (0.0, 0.01)
    ]
    return Table(*(np.array(of).reshape(shape) for of in values))


@settings(deadline=None)
@given(tables())
def test_the_oracle_is_the_best_of_all_choices(table: Table) -> None:
    best = brute_force(table)
    assert table.rate(oracle(table)) == pytest.approx(best, rel=1e-12)
    found = potential(table, range(table.tokens.shape[1]))
    assert found.oracle == pytest.approx(best, rel=1e-12)
    for c, rate in found.fixed.items():
        assert rate == pytest.approx(sum(table.tokens[:, c]) / sum(table.seconds[:, c]), rel=1e-12)
        assert rate <= found.oracle * (1 + 1e-12)
    assert found.best_fixed_rate == max(found.fixed.values())


def test_the_oracle_of_a_rate_is_not_the_best_of_each_line() -> None:
    """Alone, the second line's best is 3 tokens in 1 s; with the first, 8 in 3 s make more of both."""
    table = Table(np.array([[10.0, 0.0], [3.0, 8.0]]), np.array([[10.0, 10.0], [1.0, 3.0]]))
    assert (table.tokens / table.seconds).argmax(axis=1).tolist() == [0, 0]
    assert oracle(table).tolist() == [0, 1]
    assert potential(table, [2, 4]).oracle == 18 / 13 > 13 / 11


def test_a_worked_table() -> None:
    table = Table(np.array([[2.0, 4.0], [3.0, 2.0]]), np.array([[1.0, 2.0], [1.0, 4.0]]))
    assert table.rate(np.array([1, 0])) == 7 / 3
    found = potential(table, [2, 8])
    assert found.fixed == {2: 5 / 2, 8: 6 / 6}
    assert (found.best_fixed, found.best_fixed_rate, found.random, found.oracle) == (2, 2.5, 11 / 8, 2.5)
    assert found.headroom == 0


def test_the_smallest_of_equals_is_the_best_fixed() -> None:
    assert potential(table_of(np.array([[2.0, 3.0, 3.0], [4.0, 3.0, 3.0]])), [4, 6, 8]).best_fixed == 4


# --- published figures ---


def test_published_means() -> None:
    """GSM8K by block size: 17 is best here, though the paper's draft was trained with 16."""
    found = potential(published(), PUBLISHED_SIZES)
    assert {b: round(rate, 2) for b, rate in found.fixed.items()} == {
        14: 6.21,
        15: 6.41,
        16: 6.51,
        17: 6.53,
        18: 6.28,
    }
    assert found.best_fixed == 17
    assert [round(rate * 32, 3) for rate in found.fixed.values()] == [198.778, 204.977, 208.278, 208.884, 200.886]
    assert found.random == pytest.approx(1021.803 / 160, abs=1e-5)


def test_published_headroom_over_the_trained_block_size() -> None:
    """All that knowing the best size of each prompt beforehand would give: 3.5%, luck included."""
    found = potential(published(), PUBLISHED_SIZES)
    assert found.fixed[16] == pytest.approx(6.5087, abs=1e-4)
    assert found.oracle == pytest.approx(6.7354, abs=1e-4)
    assert round(found.oracle / found.fixed[16] - 1, 3) == 0.035
    assert found.headroom == pytest.approx(6.7354 / 6.5276 - 1, abs=1e-4)


# --- the interval of a gain ---


def noisy(num: int, better: float, seed: int) -> Table:
    """Two columns: taus that vary a lot from line to line, the second one's larger by a share and some noise."""
    draw = np.random.default_rng(seed)
    first = draw.gamma(2.0, 2.0, num) + 1
    second = first * (1 + better + draw.normal(0, 0.3, num))
    return Table(np.stack([first, second], axis=1), draw.uniform(0.5, 1.5, (num, 2)))


def columns(num: int, column: int) -> NDArray[np.int64]:
    return np.full(num, column, np.int64)


def test_gain_is_near_that_of_a_bootstrap() -> None:
    table, num = noisy(80, 0.1, 0), 80
    found = gain(table, columns(num, 1), columns(num, 0))
    assert found.value == pytest.approx(table.rate(columns(num, 1)) / table.rate(columns(num, 0)) - 1)
    draw = np.random.default_rng(99)
    gains = []
    for _ in range(4000):
        lines = draw.integers(0, num, num)
        rates = [table.tokens[lines, c].sum() / table.seconds[lines, c].sum() for c in (0, 1)]
        gains.append(rates[1] / rates[0] - 1)
    # Of 80 lines a bootstrap's quantiles are near the ends of a t-interval of the logarithm.
    low, high = np.quantile(gains, [0.025, 0.975])
    assert found.low == pytest.approx(low, abs=0.1 * (high - low))
    assert found.high == pytest.approx(high, abs=0.1 * (high - low))


def test_gain_over_itself_is_nothing() -> None:
    assert gain(noisy(20, 0.1, 0), columns(20, 1), columns(20, 1)) == (0, 0, 0)


def test_intervals_cover_the_truth() -> None:
    """Both columns' seconds are alike on average, so the second one's true gain is 10%. 95% of 200, less 4 errors."""
    covers = 0
    for seed in range(200):
        found = gain(noisy(100, 0.1, seed), columns(100, 1), columns(100, 0))
        covers += found.low <= 0.1 <= found.high
    assert 200 * 0.95 - 4 * math.sqrt(200 * 0.95 * 0.05) <= covers < 200
