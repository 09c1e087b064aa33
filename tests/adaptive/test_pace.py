"""What steps take beside what was measured: kinds told apart while the pace of all of them changes."""

import math
from collections.abc import Iterator, Sequence
from itertools import cycle, islice

import numpy as np
import pytest

from blockpilot.adaptive.pace import ALIKE, BACKED_OFF, FIRST_LEVEL, LEVEL_STEP, MIXED, NOISE, PLAIN, Pace

Seen = Sequence[tuple[str, int, float]]
KINDS = (PLAIN, ALIKE, MIXED, BACKED_OFF)
FADING = 4096  # the default


def after(seen: Seen, most_rows: int = 16) -> Pace:
    """The filter after steps of these kinds, rows and ratios."""
    found = Pace(most_rows)
    for kind, rows, ratio in seen:
        found.observe(kind, rows, ratio)
    return found


def relative(found: Pace, kind: str = ALIKE, rows: int = 4) -> float:
    """What a kind takes beside plain steps."""
    return found.factor(kind, rows) / found.factor(PLAIN, rows)


def prior(a: tuple[str, int], b: tuple[str, int]) -> float:
    """Covariance of two offsets, by the words of pace.py."""
    shared = (a[0] in (PLAIN, BACKED_OFF)) == (b[0] in (PLAIN, BACKED_OFF))
    own = {PLAIN: 0.03, BACKED_OFF: 0.03, ALIKE: 0.05, MIXED: 0.2}[a[0]] ** 2 * (a[0] == b[0])
    return (0.04 * shared + own) * (1 if a[1] == b[1] else 0.5)


def test_it_is_the_regression_that_sees_all_steps_at_once() -> None:
    """A Gaussian process with the same covariances, solved densely; no ratio is far enough off to be clipped."""
    draws = np.random.default_rng(0)
    places = [
        (str(kind), int(rows))
        for kind, rows in zip(draws.choice(KINDS, 60), draws.choice([1, 4, 16], 60), strict=True)
    ]
    logs = draws.normal(0, 0.05, 60)
    found = after([(*place, math.exp(log)) for place, log in zip(places, logs, strict=True)])

    def covariance(a: tuple[str, int], i: int, b: tuple[str, int], j: int, level: float = 1) -> float:
        """Of the level and offset at two steps, counted from 1."""
        of_level = FIRST_LEVEL**2 + min(i, j) * LEVEL_STEP**2
        return level * of_level + prior(a, b) * math.exp(-abs(i - j) / FADING)

    steps = list(enumerate(places, start=1))
    between = np.array([[covariance(a, i, b, j) for j, b in steps] for i, a in steps]) + NOISE**2 * np.eye(60)
    for kind in (PLAIN, ALIKE, MIXED, BACKED_OFF):
        for rows in (1, 4, 8, 16):
            with_all = np.array([covariance((kind, rows), 60, b, j) for j, b in steps])
            assert math.log(found.factor(kind, rows)) == pytest.approx(
                with_all @ np.linalg.solve(between, logs), abs=1e-6
            )
            apart = np.array(
                [
                    covariance((kind, rows), 60, b, j, 0) - covariance((BACKED_OFF, rows), 60, b, j, 0)
                    for j, b in steps
                ]
            )
            at_first = prior((kind, rows), (kind, rows)) + prior((BACKED_OFF, rows), (BACKED_OFF, rows))
            at_first -= 2 * prior((kind, rows), (BACKED_OFF, rows))
            left = at_first - apart @ np.linalg.solve(between, apart)
            hoped = found.optimistic(kind, rows, beside=BACKED_OFF)
            assert math.log(found.factor(kind, rows) / hoped) == pytest.approx(math.sqrt(left), abs=1e-6)


def test_a_pace_that_changes_for_all_kinds_says_nothing_of_one() -> None:
    """The pace rises in 30 steps before drafting is tried: what medians would take for a difference."""
    rising = [(PLAIN, 4, math.exp(0.3 * i / 30)) for i in range(30)]
    found = after([(PLAIN, 4, 1.0)] * 50 + rising + [(ALIKE, 4, math.exp(0.3))] * 100)
    assert relative(found) == pytest.approx(1, abs=0.05)
    assert found.factor(PLAIN, 4) == pytest.approx(math.exp(0.3), rel=0.05)


def wandering(offset: float, num: int) -> Iterator[tuple[str, int, float]]:
    """Steps in which plain and drafting ones take turns while the pace wanders; the latter take this much longer."""
    draws = np.random.default_rng(1)
    level = np.cumsum(draws.normal(0, 0.03, num))
    for kind, at in islice(zip(cycle([PLAIN, PLAIN, ALIKE]), level, strict=False), num):
        yield kind, 4, math.exp(at + offset * (kind == ALIKE) + draws.normal(0, NOISE))


@pytest.mark.parametrize("offset", [-0.2, 0.0, 0.1])
def test_kinds_that_take_turns_are_told_apart_whatever_the_pace(offset: float) -> None:
    assert math.log(relative(after(list(wandering(offset, 600))))) == pytest.approx(offset, abs=0.03)


def test_a_change_of_the_pace_is_followed_within_a_few_steps() -> None:
    """As by longer texts, which no measured cost knows of."""
    found = after([(BACKED_OFF, 16, 1.0)] * 100 + [(BACKED_OFF, 16, 1.4)] * 12)
    assert found.factor(BACKED_OFF, 16) == pytest.approx(1.4, rel=0.03)


def test_a_stall_is_not_what_steps_take() -> None:
    steady = [(PLAIN, 4, 1.0), (ALIKE, 4, 1.0)] * 50
    for kind in (PLAIN, ALIKE):
        found = after([*steady, (kind, 4, 1000.0), *steady[:10]])
        assert relative(found) == pytest.approx(1, abs=0.03)
        assert found.factor(PLAIN, 4) == pytest.approx(1, abs=0.05)


def regret(seed: int, num: int = 600) -> float:
    """Share of the speed that choices by it lose, where drafting pays or does not by what has to be found out.

    The pace wanders and jumps, and one step in 20 is three times as noisy.
    """
    draws, found, kind, lost = np.random.default_rng(seed), Pace(1), PLAIN, 0.0
    offset, advantage = draws.normal(0, 0.1, 2)
    level = np.cumsum(draws.normal(0, 0.02, num) + draws.binomial(1, 1 / 40, num) * draws.normal(0, 0.2, num))
    noise = draws.normal(0, 0.09, num) * draws.choice([1, 3], num, p=[0.95, 0.05])
    for at in level + noise:
        found.observe(kind, 1, math.exp(at + offset * (kind == ALIKE)))
        plain_s, drafting_s = (found.optimistic(each, 1, beside=kind) for each in (PLAIN, ALIKE))
        kind = ALIKE if math.log(drafting_s / plain_s) < advantage else PLAIN
        lost += abs(advantage - offset) * ((kind == ALIKE) != (advantage > offset))
    return lost / num


def test_choices_by_it_lose_little() -> None:
    """At random they would lose 6%, and always drafting, or never, as much."""
    assert np.mean([regret(seed) for seed in range(40)]) < 0.01


def test_hope_is_for_what_is_not_known() -> None:
    fresh = Pace(16)
    both = after([(PLAIN, 4, 1.0), (ALIKE, 4, 1.0)] * 50)
    later = after([(PLAIN, 4, 1.0), (ALIKE, 4, 1.0)] * 50 + [(PLAIN, 4, 1.0)] * 500)
    much_later = after([(PLAIN, 4, 1.0), (ALIKE, 4, 1.0)] * 50 + [(PLAIN, 4, 1.0)] * 10 * FADING)

    def hope(found: Pace) -> float:
        return found.optimistic(ALIKE, 4, beside=PLAIN) / found.factor(ALIKE, 4)

    assert hope(fresh) == pytest.approx(math.exp(-math.sqrt(0.08 + 0.03**2 + 0.05**2)))
    assert hope(fresh) < hope(later) < hope(both) < 1
    assert hope(fresh) == pytest.approx(hope(much_later), abs=0.03)
    assert fresh.optimistic(ALIKE, 4, beside=ALIKE) == fresh.factor(ALIKE, 4)


def test_what_was_found_of_a_kind_fades() -> None:
    found = [(PLAIN, 4, 1.0), (ALIKE, 4, 1.3)] * 100
    assert relative(after(found)) == pytest.approx(1.3, rel=0.03)
    assert relative(after([*found, *[(PLAIN, 4, 1.0)] * 5 * FADING])) == pytest.approx(1, abs=0.03)


def test_other_numbers_of_rows_are_believed_to_be_half_like_those_seen() -> None:
    found = after([(PLAIN, 4, 1.0), (ALIKE, 4, 1.2)] * 300)
    here = math.log(relative(found))
    assert here == pytest.approx(math.log(1.2), abs=0.02)
    for rows in (1, 3, 8, 16):
        assert math.log(relative(found, rows=rows)) == pytest.approx(here / 2, rel=0.15)


@pytest.mark.parametrize(("rows", "like"), [(7, 8), (5, 6), (15, 16), (20, 23)])
def test_numbers_of_rows_that_count_as_one(rows: int, like: int) -> None:
    found = after([(PLAIN, rows, 1.0), (ALIKE, rows, 1.2)] * 20, most_rows=64)
    assert relative(found, rows=rows) == relative(found, rows=like)


def test_a_step_of_the_filter_is_symmetric_and_keeps_variances_positive() -> None:
    found = after(list(wandering(0.1, 2000)))
    assert np.allclose(found._covariance, found._covariance.T)
    assert np.linalg.eigvalsh(found._covariance).min() > -1e-12
