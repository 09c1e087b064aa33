"""A price that follows an engine's own steps: seconds are made up, the engine and its choices are real."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from blockpilot.control.controller import FixedPolicy, StepOutcome
from blockpilot.control.live import (
    LEAST,
    LEVEL,
    LEVEL_STEP,
    NOISE,
    PROBE_EVERY,
    SLOPE_STEP,
    SLOPES,
    LiveController,
    PriceTracker,
)
from blockpilot.control.price import Array, Load, StepPrice
from blockpilot.engine.engine import Engine
from blockpilot.evaluation.pricing import StaticForecast
from blockpilot.pairs.loading import Pair
from blockpilot.types import Policy, Request
from helpers.controllers import Switch, World
from helpers.prices import price

# --- the filter ---

MEASURED = price(base_s=0.05, row_s=0.004, launch_s=0.02, slot_s=0.0005, token_s=0.0015, tile_s=0.01)


def mixed_loads(num: int, seed: int = 0) -> Iterator[Load]:
    """One to 16 rows, some of which draft now and then, and verify more or fewer tokens than they drafted."""
    draws = np.random.default_rng(seed)
    for _ in range(num):
        rows = int(draws.integers(1, 17))
        drafting = int(draws.integers(0, rows + 1)) if draws.random() < 0.7 else 0
        yield Load(rows, 7 * drafting, int(draws.integers(0, 16 * drafting + 1)))


def watched(tracker: PriceTracker, true: Array, loads: Sequence[Load], noise: float = 0.05) -> None:
    """Show it steps with these loads, whose seconds vary by a share."""
    draws = np.random.default_rng(1)
    for load in loads:
        tracker.observe(load, float(true @ load.terms) * math.exp(draws.normal(0, noise)))


@pytest.mark.parametrize("factors", [[1.5] * 6, [1 / 1.5] * 6, [1.5, 0.8, 1 / 1.5, 1.3, 0.7, 1.2]], ids=str)
def test_it_finds_the_coefficients_that_steps_have(factors: list[float]) -> None:
    """From others that are up to 1.5 times as large: what every load costs, and most of each coefficient."""
    tracker, true = PriceTracker(MEASURED), MEASURED.coefficients * factors
    watched(tracker, true, list(mixed_loads(1500)))
    for load in mixed_loads(50, seed=2):
        assert tracker.price.seconds(load) == pytest.approx(float(true @ load.terms), rel=0.05)
    error = np.abs(np.log(tracker.price.coefficients / true))
    assert (error < 0.2).all()


def test_a_level_that_changes_for_all_steps_is_followed_within_some_tens_of_steps() -> None:
    """Also by what is not seen meanwhile: plain steps say what drafting ones take at another level."""
    tracker, plain = PriceTracker(MEASURED), [Load(4)] * 40
    watched(tracker, MEASURED.coefficients, list(mixed_loads(300)))
    watched(tracker, 1.6 * MEASURED.coefficients, plain)
    assert tracker.price.seconds(Load(4)) == pytest.approx(1.6 * MEASURED.seconds(Load(4)), rel=0.05)
    drafting = Load(4, 28, 28)
    assert tracker.price.seconds(drafting) == pytest.approx(1.6 * MEASURED.seconds(drafting), rel=0.1)


def test_a_stall_is_not_what_steps_take() -> None:
    tracker = PriceTracker(MEASURED)
    watched(tracker, MEASURED.coefficients, list(mixed_loads(300)))
    before = tracker.price
    tracker.observe(Load(4, 28, 28), 1000 * before.seconds(Load(4, 28, 28)))
    np.testing.assert_allclose(tracker.price.coefficients, before.coefficients, rtol=0.2)
    watched(tracker, MEASURED.coefficients, list(mixed_loads(20)))
    np.testing.assert_allclose(tracker.price.coefficients, before.coefficients, rtol=0.1)


def test_no_coefficient_falls_below_a_tenth_of_what_was_measured() -> None:
    """Whatever the steps say, so that no price is negative and nothing is free for ever."""
    tracker = PriceTracker(MEASURED)
    for load in mixed_loads(500):
        tracker.observe(load, 1e-9)
        assert (tracker.price.coefficients >= LEAST * MEASURED.coefficients).all()
    np.testing.assert_allclose(tracker.price.coefficients, LEAST * MEASURED.coefficients, rtol=0.01)


def test_steps_as_measured_change_nothing() -> None:
    tracker = PriceTracker(MEASURED)
    watched(tracker, MEASURED.coefficients, list(mixed_loads(200)), noise=0.0)
    np.testing.assert_allclose(tracker.price.coefficients, MEASURED.coefficients, rtol=1e-9)


@pytest.mark.parametrize("num_steps", [1, 4])
def test_it_is_the_regression_that_sees_all_steps_at_once(num_steps: int) -> None:
    """A Gaussian process with the same covariances, solved densely; no step is far enough off to be clipped.

    Sums of steps of one kind, whose noises are independent: a probe of one step weighs a quarter of four.
    """
    loads = list(mixed_loads(40))
    draws, measured = np.random.default_rng(3), MEASURED.coefficients
    tracker, seconds, variances = PriceTracker(MEASURED, num_steps), list[float](), list[float]()
    taken = [MEASURED.seconds(load) * math.exp(draws.normal(0, 0.05)) for load in loads]
    runs = [list(run) for _, run in itertools.groupby(range(40), lambda i: loads[i].num_drafted > 0)]
    sums = [run[i : i + num_steps] for run in runs for i in range(0, len(run), num_steps)]
    for steps in sums:
        expected = sum(tracker.price.seconds(loads[i]) for i in steps)
        for i in steps:
            tracker.observe(loads[i], taken[i])
        if tracker._seen:  # taken in as soon as a step of another kind comes
            tracker._update()
        variances.append((NOISE * expected) ** 2 / len(steps))
        seconds.append(sum(taken[i] for i in steps))
    terms = np.array([np.sum([loads[i].terms for i in steps], axis=0) for steps in sums], dtype=float)

    def covariance(after: int) -> Array:
        """Of the coefficients, `after` steps of wandering after the start."""
        level, slopes = LEVEL**2 + after * LEVEL_STEP**2, SLOPES**2 + after * SLOPE_STEP**2
        return level * np.outer(measured, measured) + slopes * np.diag(measured**2)

    ends = np.cumsum([len(steps) for steps in sums])
    between = np.array(
        [
            [terms[i] @ covariance(min(ends[i], ends[j])) @ terms[j] for j in range(len(sums))]
            for i in range(len(sums))
        ]
    )
    now = np.array([covariance(end) @ row for end, row in zip(ends, terms, strict=True)]).T
    surprise = np.array(seconds) - terms @ measured
    expected_now = measured + now @ np.linalg.solve(between + np.diag(variances), surprise)
    np.testing.assert_allclose(tracker.price.coefficients, expected_now, rtol=1e-6)


# --- in an engine ---

ROWS = 2
Seconds = Callable[[StepOutcome], float]


def drafting_takes(seconds: float) -> StepPrice:
    """Plain steps take a second, others so many, however many rows."""
    return price(launch_s=seconds - 1)


def expecting(tokens: float) -> Policy:
    """Expects so many tokens of a step, three drafted ones at most."""
    return lambda prefill: StaticForecast([(tokens - 1) / 3] * 3)


def world(tokens: float, price: StepPrice, seconds: Seconds) -> World:
    return World(expecting(tokens), price, seconds)


def takes(plain: float, drafting: float) -> Seconds:
    return lambda outcome: drafting if outcome.load.num_drafted else plain


def drafted(pair: Pair, live: World, num: int) -> list[bool]:
    """Which of so many steps that only decode drafted; two requests are always there, none near its end."""
    engine, seen, emitted = (
        Engine(pair, num_slots=ROWS, max_length=256, controller=live),
        list[bool](),
        Counter[int](),
    )
    while len(seen) < num:
        while engine.num_active < ROWS:
            emitted[engine.add(Request((1, 2, 3), 200, layout="chain"))] = 0
            engine.step()
        steps = engine.step()
        if not live.outcomes[-1].num_prompt_tokens:
            seen.append(live.outcomes[-1].load.num_drafted > 0)
        for step in steps:
            emitted[step.request_id] += len(step.tokens)
            if emitted[step.request_id] > 150 or step.finish_reason is not None:
                engine.cancel(step.request_id)
    return seen


class NowAndThen(StaticForecast):
    """Expects 0.6 tokens in every other step of all rows, and nothing in between: both kinds of steps are seen."""

    def __init__(self, outcomes: Sequence[StepOutcome]) -> None:
        self.outcomes = outcomes

    @property
    def reach(self) -> Sequence[float]:  # type: ignore[override]
        return () if len(self.outcomes) % 2 else (0.2, 0.2, 0.2)


def test_what_steps_really_take_turns_the_choice(tiny_pair: Pair) -> None:
    """Measured alone a drafting step took 1.4 plain ones, which 1.6 tokens pay; here it takes 1.9."""
    live = World(lambda _: NowAndThen(live.outcomes), drafting_takes(1.4), takes(plain=1.0, drafting=1.9))
    seen = drafted(tiny_pair, live, 200)
    assert sum(seen[:4]) >= 2
    assert sum(seen[100:]) <= 1  # a probe
    assert live.price.seconds(Load(ROWS, 6)) > 1.6 * live.price.seconds(Load(ROWS))


@pytest.mark.parametrize("pays", [False, True])
def test_a_pace_that_changes_turns_no_choice(tiny_pair: Pair, pays: bool) -> None:
    """Drafting pays by a tenth, or costs as much, whatever else the machine does meanwhile."""
    drafting = 1.6 / 1.1 if pays else 1.6 * 1.1
    paces = (math.exp(0.4 * math.sin(i / 30)) for i in itertools.count())
    live = world(1.6, drafting_takes(drafting), lambda outcome: next(paces) * takes(1.0, drafting)(outcome))
    assert drafted(tiny_pair, live, 300).count(pays) > 270


def test_steps_that_take_what_was_measured_change_no_price(tiny_pair: Pair) -> None:
    live = world(3.0, drafting_takes(1.5), takes(plain=1.0, drafting=1.5))
    seen = drafted(tiny_pair, live, 2 * PROBE_EVERY)
    assert [i for i, each in enumerate(seen) if not each] == [PROBE_EVERY]
    assert live.price.coefficients == pytest.approx(drafting_takes(1.5).coefficients, abs=1e-6)


def test_what_is_out_of_reach_is_only_probed(tiny_pair: Pair) -> None:
    live = world(1.2, drafting_takes(2.0), takes(plain=3.0, drafting=6.0))
    assert sum(drafted(tiny_pair, live, 3 * PROBE_EVERY)) == 2


@pytest.mark.parametrize("pays", [False, True])
def test_a_probe_shows_what_steps_of_one_kind_do_not(tiny_pair: Pair, pays: bool) -> None:
    """1.6 tokens are expected of a step that is measured to take 1.4 or 1.9 plain ones, and takes 1.9 or 1.4."""
    measured, true = (1.9, 1.4) if pays else (1.4, 1.9)
    live = world(1.6, drafting_takes(measured), takes(plain=1.0, drafting=true))
    seen = drafted(tiny_pair, live, 8 * PROBE_EVERY)
    assert seen[: PROBE_EVERY - 1].count(pays) == 0
    assert seen[-PROBE_EVERY:].count(pays) > 0.9 * PROBE_EVERY


def test_steps_with_prompts_are_not_counted(tiny_pair: Pair) -> None:
    live = world(
        1.6, drafting_takes(1.7), lambda outcome: 1000.0 if outcome.num_prompt_tokens else takes(1.1, 1.9)(outcome)
    )
    drafted(tiny_pair, live, 200)
    assert live.price.seconds(Load(ROWS)) == pytest.approx(1.1, rel=0.02)


def test_a_step_without_rows_teaches_nothing() -> None:
    live = World(FixedPolicy(2), MEASURED, lambda outcome: 9.0)
    live.finish(StepOutcome(Load(0), 5, 0, 0, 1, next_rows=1))
    live.finish(StepOutcome(Load(0), 0, 0, 0, 0, next_rows=0))
    assert live.price == MEASURED


@pytest.mark.parametrize("has_captured", [True, False])
def test_a_step_that_captures_a_graph_teaches_nothing(*, has_captured: bool) -> None:
    live = World(FixedPolicy(2), MEASURED, lambda outcome: 9.0)
    for _ in range(20):
        live.finish(StepOutcome(Load(1), 0, 0, 0, 1, next_rows=1, has_captured=has_captured))
    assert (live.price == MEASURED) == has_captured


def test_another_controller_begins_anew(tiny_pair: Pair) -> None:
    live = world(1.6, drafting_takes(1.4), takes(plain=1.2, drafting=1.75))
    drafted(tiny_pair, live, 100)
    assert live.price != drafting_takes(1.4)
    fresh = LiveController(live.policy, drafting_takes(1.4))
    assert (fresh.price, fresh.calibration) == (drafting_takes(1.4), 1)


def test_steps_are_timed_and_stay_as_they_are(tiny_pair: Pair) -> None:
    request = Request((5, 6, 7), 60)
    alone, timed = (
        Engine(tiny_pair, num_slots=ROWS, max_length=256, controller=controller)
        for controller in (
            Switch(expecting(3.0), drafting_takes(1.5)),
            LiveController(expecting(3.0), drafting_takes(1.5)),
        )
    )
    texts = []
    for engine in (alone, timed):
        engine.add(request)
        texts.append([token for _ in range(20) for step in engine.step() for token in step.tokens])
    shorter = min(map(len, texts))
    assert texts[0][:shorter] == texts[1][:shorter]
    plain_s = timed.controller.price.seconds(Load(1))
    assert 0 < plain_s < 0.5  # a second is far more than the tiny pair takes


def test_a_controller_is_told_what_came_of_every_step(tiny_pair: Pair) -> None:
    switch = Switch(lambda prefill: StaticForecast((0.9, 0.8)), price())
    engine = Engine(tiny_pair, num_slots=3, max_length=64, max_prefill_tokens=4, controller=switch)
    engine.step()
    assert switch.outcomes == []  # nothing to do
    engine.add(Request((1, 2, 3), 20, block_size=3))
    engine.step()
    assert switch.outcomes == [StepOutcome(Load(0), 3, 0, 0, num_tokens=1, next_rows=1)]
    free = engine.add(Request((1, 2, 3, 4, 5, 6), 20, layout="chain"))
    engine.add(Request((1, 2), 3, block_size=1))
    engine.add(Request((1, 2), 3, block_size=1))
    while not engine.idle:
        rows, before = engine.num_decoding, len(switch.outcomes)
        steps = engine.step()
        [outcome] = switch.outcomes[before:]
        decoded = [step for step in steps if step.block_size]
        chosen = [step for step in decoded if step.request_id == free]
        assert outcome.load.rows == rows == len(decoded)
        assert outcome.load.num_verified == sum(step.block_size - 1 for step in decoded)
        assert outcome.num_chosen == len(chosen)
        assert outcome.num_accepted == sum(step.num_accepted for step in chosen)
        assert outcome.num_tokens == sum(len(step.tokens) for step in steps)
        assert outcome.next_rows == engine.num_decoding
    assert sum(outcome.num_prompt_tokens for outcome in switch.outcomes) == 3 + 6 + 2 + 2
    assert max(outcome.num_prompt_tokens for outcome in switch.outcomes) == 4
    assert {outcome.load.num_drafted for outcome in switch.outcomes[1:]} >= {2, 4}
    assert {outcome.num_chosen for outcome in switch.outcomes} == {0, 1}


def test_a_policy_and_a_controller_are_one_too_many(tiny_pair: Pair) -> None:
    with pytest.raises(ValueError, match="policy and controller: give one"):
        Engine(tiny_pair, max_length=64, policy=FixedPolicy(2), controller=Switch(FixedPolicy(2)))
