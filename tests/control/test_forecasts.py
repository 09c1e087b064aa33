"""Running means of acceptance: what they believe at first, what they learn, and what they choose by it."""

import math
import random
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import pytest
import torch

from blockpilot.control.choose import choose_depths
from blockpilot.control.forecasts import RunningForecast, RunningMeans
from blockpilot.control.cost import Load, StepPrice
from blockpilot.evaluation.pricing import StaticForecast
from blockpilot.types import Prefill
from helpers.prices import linear_price

PREFILL = Prefill(torch.zeros(4), None, 3)
DEEPEST = 7


def accepted(hazards: Sequence[float], depth: int, draw: random.Random) -> int:
    """Drafted tokens accepted in a step if a position's is with its chance once it is reached."""
    num = 0
    while num < depth and draw.random() < hazards[num]:
        num += 1
    return num


def reach_of(hazards: Sequence[float]) -> list[float]:
    return list(accumulate(hazards, mul))


def ratios(policy: RunningMeans) -> list[float]:
    return [record.ratio for record in policy.records]


def test_before_anything_was_seen_it_guesses() -> None:
    policy = RunningMeans(DEEPEST)
    forecast = policy(PREFILL)
    assert ratios(policy) == [0.75] * DEEPEST
    assert forecast.reach == pytest.approx(reach_of([0.75] * DEEPEST))
    assert forecast.reader is None


def test_what_a_step_teaches() -> None:
    """A step that drafted 3 positions with one token accepted has reached the first two; a full one all three."""
    policy = RunningMeans(DEEPEST)
    forecast = policy(PREFILL)
    forecast.observe(3, 3, 1)
    assert ratios(policy)[:4] == pytest.approx([4 / 5, 3 / 5, 3 / 4, 3 / 4], rel=0.002)
    forecast.observe(3, 3, 3)
    assert ratios(policy)[:4] == pytest.approx([5 / 6, 4 / 6, 4 / 5, 3 / 4], rel=0.002)
    forecast.observe(0, 0, 0)
    assert ratios(policy)[:4] == pytest.approx([5 / 6, 4 / 6, 4 / 5, 3 / 4], rel=0.002)
    # The request's own two steps against four of all requests.
    mine = [(2 + 4 * 5 / 6) / 6, (1 + 4 * 4 / 6) / 6, (1 + 4 * 4 / 5) / 5]
    assert list(forecast.reach)[:3] == pytest.approx(reach_of(mine), rel=0.005)
    assert policy(PREFILL).reach[0] == pytest.approx(5 / 6, rel=0.002)  # a new one knows what all have shown


def test_rates_converge_to_what_is_accepted() -> None:
    hazards, draw = [0.9, 0.7, 0.5, 0.8, 0.2, 0.6, 0.4], random.Random(0)
    policy = RunningMeans(DEEPEST)
    for _ in range(200):
        forecast = policy(PREFILL)
        for _ in range(100):
            forecast.observe(DEEPEST, DEEPEST, accepted(hazards, DEEPEST, draw))
    for place, (hazard, found) in enumerate(zip(hazards, ratios(policy), strict=True)):
        # Four standard errors of what is remembered, and the first guess that is never forgotten.
        reached = RunningMeans.MEMORY * math.prod(hazards[:place])
        margin = 4 * math.sqrt(hazard * (1 - hazard) / reached) + RunningMeans.DOUBT / reached
        assert found == pytest.approx(hazard, abs=margin)


def test_requests_differ_by_what_they_have_shown() -> None:
    policy = RunningMeans(2)
    easy, hard = policy(PREFILL), policy(PREFILL)
    for _ in range(60):
        easy.observe(2, 2, 2)
        hard.observe(2, 2, 0)
    new = policy(PREFILL).reach
    assert easy.reach[0] > 0.95
    assert hard.reach[0] < 0.1
    assert new[0] == pytest.approx(0.5, abs=0.03)


def test_what_is_not_drafted_fades_back_to_the_first_guess() -> None:
    """Deeper positions, and all of them after steps without drafts."""
    policy = RunningMeans(3)
    forecast = policy(PREFILL)
    for _ in range(200):
        forecast.observe(3, 3, 0)
    assert ratios(policy) == pytest.approx([0.015, 0.75, 0.75], abs=0.005)
    assert isinstance(forecast, RunningForecast)
    seen = [forecast.reach[0]]
    for _ in range(4):
        for _ in range(2 * int(RunningMeans.MEMORY)):
            forecast.observe(0, 0, 0)
        seen.append(forecast.reach[0])
    assert seen == sorted(seen)
    assert seen[0] < 0.02
    assert seen[-1] == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize(
    ("hazards", "per_token", "best"),
    [
        ([0.95] * 7, 0.02, 7),
        ([0.9, 0.9, 0.9, 0.1, 0.1, 0.1, 0.1], 0.1, 3),
        ([0.8, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], 0.2, 1),
        ([0.1] * 7, 0.3, 0),
    ],
)
def test_it_finds_the_best_depth(hazards: list[float], per_token: float, best: int) -> None:
    """A request of 200 steps after 20 others, each step chosen by what was seen before it."""
    price = linear_price(per_token)
    rates = [(1 + sum(reach_of(hazards)[:depth])) / (1 + per_token * depth) for depth in range(DEEPEST + 1)]
    assert rates.index(max(rates)) == best
    draw, policy = random.Random(1), RunningMeans(DEEPEST)
    chosen: list[int] = []
    for _ in range(21):
        chosen = steps_of(policy, price, hazards, draw)
    assert chosen.count(best) > 0.9 * len(chosen)


def steps_of(policy: RunningMeans, price: StepPrice, hazards: Sequence[float], draw: random.Random) -> list[int]:
    """Depths of a request of 200 steps, alone in its batch."""
    forecast, chosen = policy(PREFILL), list[int]()
    for _ in range(200):
        [depth] = choose_depths([forecast.reach], price, Load(0), [1.0] * DEEPEST).depths
        forecast.observe(depth, depth, accepted(hazards, depth, draw))
        chosen.append(depth)
    return chosen


def test_what_was_given_up_is_tried_anew() -> None:
    """By one token in a while, as long as it fails; what a machine or a text allows may change."""
    draw, policy, price = random.Random(2), RunningMeans(DEEPEST), linear_price(0.3)
    failing = [depth for _ in range(40) for depth in steps_of(policy, price, [0.05] * DEEPEST, draw)]
    assert 0 < sum(depth > 0 for depth in failing[2000:]) < 0.05 * len(failing)
    later = [depth for _ in range(40) for depth in steps_of(policy, price, [0.95] * DEEPEST, draw)]
    assert sum(depth >= DEEPEST - 2 for depth in later[-200:]) > 150


def test_at_least_one_position_is_drafted() -> None:
    with pytest.raises(ValueError, match="deepest 0: must be at least 1"):
        RunningMeans(0)


def test_a_static_forecast_learns_nothing() -> None:
    forecast = StaticForecast([0.5, 0.2])
    forecast.observe(2, 2, 0)
    assert (forecast.reach, forecast.reader) == ((0.5, 0.2), None)
