"""A step cost that is updated from the seconds of an engine's steps."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from blockpilot.control.cost import (
    LEAST,
    LEVEL,
    LEVEL_STEP,
    NOISE,
    NOMINAL,
    SLOPE_STEP,
    SLOPES,
    Array,
    LiveCost,
    Load,
    StepPrice,
)
from helpers.prices import price

SHARE = 1 / 16
MEASURED = price(base_s=0.05, row_s=0.004, launch_s=0.02, slot_s=0.0005, token_s=0.0015, tile_s=0.01)
MIXTURE = replace(MEASURED, tile_s=0.0, experts_s=0.2, expert_share=SHARE)


def mixed_loads(num: int, seed: int = 0) -> Iterator[Load]:
    """Loads of 1 to 16 rows, some of which sometimes draft, and verify more or fewer tokens than they drafted."""
    draws = np.random.default_rng(seed)
    for _ in range(num):
        rows = int(draws.integers(1, 17))
        drafting = int(draws.integers(0, rows + 1)) if draws.random() < 0.7 else 0
        yield Load(rows, 7 * drafting, int(draws.integers(0, 16 * drafting + 1)))


def watched(tracker: LiveCost, true: Array, loads: Sequence[Load], noise: float = 0.05) -> None:
    """Let the tracker observe steps with these loads, whose seconds have relative noise."""
    draws = np.random.default_rng(1)
    for load in loads:
        tracker.observe(load, float(true @ load.terms(tracker.price.expert_share)) * math.exp(draws.normal(0, noise)))


@pytest.mark.parametrize("measured", [MEASURED, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("factors", [[1.0] * 7, [1 / 1.5] * 7, [1.5, 0.8, 1 / 1.5, 1.3, 0.7, 1.2, 1.2]], ids=str)
def test_it_finds_the_coefficients_that_steps_have(factors: list[float], measured: StepPrice) -> None:
    """Costs of all loads, from coefficients that are wrong by up to a factor of 1.5; for a dense target also each
    coefficient, approximately. In a mixture, rows and experts grow alike.
    """
    tracker, true = LiveCost(measured), measured.coefficients * factors
    watched(tracker, true, list(mixed_loads(1500)))
    for load in mixed_loads(50, seed=2):
        assert tracker.price.seconds(load) == pytest.approx(float(true @ load.terms(measured.expert_share)), rel=0.05)
    error = np.abs(np.log(tracker.price.coefficients[:-1] / true[:-1])) if measured is MEASURED else np.zeros(1)
    assert (error < 0.2).all()


def test_a_level_that_changes_for_all_steps_is_followed_within_some_tens_of_steps() -> None:
    """Costs of other steps follow, too: plain steps tell what drafting ones take at the new level."""
    tracker, plain = LiveCost(MEASURED), [Load(4)] * 40
    watched(tracker, MEASURED.coefficients, list(mixed_loads(300)))
    watched(tracker, 1.6 * MEASURED.coefficients, plain)
    assert tracker.price.seconds(Load(4)) == pytest.approx(1.6 * MEASURED.seconds(Load(4)), rel=0.05)
    drafting = Load(4, 28, 28)
    assert tracker.price.seconds(drafting) == pytest.approx(1.6 * MEASURED.seconds(drafting), rel=0.1)


@pytest.mark.parametrize("unit", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("factors", [[1.0] * 7, [1.0, 5.0, 2.5, 1.8, 3.0, 1.0, 1.0]], ids=str)
def test_a_nominal_cost_becomes_that_of_the_steps(unit: float, factors: list[float]) -> None:
    """In the steps' unit, although the nominal cost has none and its ratios are wrong by up to a factor of 5."""
    tracker, true = LiveCost(NOMINAL), unit * NOMINAL.coefficients * factors
    watched(tracker, true, list(mixed_loads(600)))
    assert not tracker.price.is_measured
    for load in mixed_loads(50, seed=2):
        assert tracker.price.seconds(load) == pytest.approx(float(true @ load.terms()), rel=0.07)


def test_a_stall_is_not_what_steps_take() -> None:
    tracker = LiveCost(MEASURED)
    watched(tracker, MEASURED.coefficients, list(mixed_loads(300)))
    before = tracker.price
    tracker.observe(Load(4, 28, 28), 1000 * before.seconds(Load(4, 28, 28)))
    np.testing.assert_allclose(tracker.price.coefficients, before.coefficients, rtol=0.2)
    watched(tracker, MEASURED.coefficients, list(mixed_loads(20)))
    np.testing.assert_allclose(tracker.price.coefficients, before.coefficients, rtol=0.1)


def test_no_coefficient_falls_below_a_tenth_of_what_was_measured() -> None:
    """Lower bound for any observed seconds, so that no cost is negative and nothing stays free."""
    tracker = LiveCost(MEASURED)
    for load in mixed_loads(500):
        tracker.observe(load, 1e-9)
        assert (tracker.price.coefficients >= LEAST * MEASURED.coefficients).all()
    np.testing.assert_allclose(tracker.price.coefficients, LEAST * MEASURED.coefficients, rtol=0.01)


@pytest.mark.parametrize("num_steps", [1, 8])
def test_it_is_the_regression_that_sees_all_steps_at_once(num_steps: int) -> None:
    """Same coefficients as a dense Gaussian process with the same covariances; no step is clipped as an outlier."""
    loads, measured = list(mixed_loads(40)), MEASURED.coefficients
    draws, noises, terms = np.random.default_rng(3), list[float](), np.array([load.terms() for load in loads])
    seconds = [MEASURED.seconds(load) * math.exp(draws.normal(0, 0.05)) for load in loads]
    tracker, ends = LiveCost(MEASURED, num_steps), [i + num_steps - i % num_steps for i in range(len(loads))]
    for first in range(0, len(loads), num_steps):
        noises += [NOISE * tracker.price.seconds(load) for load in loads[first : first + num_steps]]
        for i in range(first, first + num_steps):
            tracker.observe(loads[i], seconds[i])

    def covariance(after: int) -> Array:
        """Covariance of the coefficients after this number of steps."""
        level, slopes = LEVEL**2 + after * LEVEL_STEP**2, SLOPES**2 + after * SLOPE_STEP**2
        return level * np.outer(measured, measured) + slopes * np.diag(measured**2)

    between = np.array(
        [[x @ covariance(min(ends[i], ends[j])) @ y for j, y in enumerate(terms)] for i, x in enumerate(terms)]
    )
    now = np.array([covariance(end) @ row for end, row in zip(ends, terms, strict=True)]).T
    surprise = np.array(seconds) - terms @ measured
    expected_now = measured + now @ np.linalg.solve(between + np.diag(np.square(noises)), surprise)
    np.testing.assert_allclose(tracker.price.coefficients, expected_now, rtol=1e-6)
