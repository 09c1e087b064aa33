"""Costs that follow an engine's own steps: seconds are made up, the engine and its choices are real."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, cycle, repeat

import pytest

from blockpilot.adaptive.live import ALIKE, KINDS, MIXED, PLAIN, LiveController
from blockpilot.adaptive.pace import Pace
from blockpilot.control.controller import FixedPolicy
from blockpilot.control.price import StepCosts
from blockpilot.engine.engine import Engine
from blockpilot.evaluation.baselines import StaticForecast
from blockpilot.evaluation.step_costs import relative_costs
from blockpilot.pairs.loading import Pair
from blockpilot.types import CandidateSet, PairId, Policy, Request, StepShape
from helpers.controllers import Switch, World

ROWS = 2
SIZES = CandidateSet((1, 4))
Seconds = Callable[[StepShape], float]


def costs_of(drafting: float) -> StepCosts:
    """Plain steps take a second, others `drafting`, however many rows."""
    table = ((1.0,), (drafting,))
    return StepCosts(PairId("t", "1", "d", "2"), "float32", "cpu", (1, 4), (ROWS,), 64, table, table, table)


def expecting(tau: float, second: float | None = None) -> Policy:
    """Expects tau tokens of a block of 4 (every other request `second`), and one token without."""
    taus = cycle((tau, second or tau))
    return lambda prefill: StaticForecast(SIZES, [1.0, next(taus)])


def engine_of(pair: Pair, controller: LiveController, num_slots: int = ROWS) -> Engine:
    return Engine(pair, num_slots=num_slots, max_length=256, controller=controller)


def drafted(pair: Pair, live: World, num: int) -> list[bool]:
    """Which of so many steps that only decode drafted."""
    return [max(sizes) > 1 for sizes in sizes_of(pair, live, num)]


def sizes_of(pair: Pair, live: World, num: int) -> list[tuple[int, ...]]:
    """Block sizes of so many steps that only decode; two requests are always there, none near its end."""
    engine, seen, emitted = engine_of(pair, live), list[tuple[int, ...]](), Counter[int]()
    while len(seen) < num:
        while engine.num_active < ROWS:
            emitted[engine.add(Request((1, 2, 3), 200))] = 0
            engine.step()
        steps = engine.step()
        if not live.shapes[-1].num_prompt_tokens:
            seen.append(live.shapes[-1].sizes)
        for step in steps:
            emitted[step.request_id] += len(step.tokens)
            if emitted[step.request_id] > 150 or step.finish_reason is not None:
                engine.cancel(step.request_id)
    return seen


def takes(plain: float, drafting: float) -> Seconds:
    return lambda shape: plain if max(shape.sizes, default=1) == 1 else drafting


def world(tau: float, costs: StepCosts | None, seconds: Seconds, second: float | None = None) -> World:
    return World(expecting(tau, second), costs, seconds, num_slots=ROWS)


def test_what_steps_really_take_turns_the_choice(tiny_pair: Pair) -> None:
    """Measured alone a drafting step took 1.7 plain ones, which 1.6 tokens do not pay; here it takes 1.45."""
    live = world(1.6, costs_of(1.7), takes(plain=1.2, drafting=1.75))
    seen = drafted(tiny_pair, live, 200)
    assert not any(seen[:2])
    assert sum(seen[50:]) > 140
    assert live.factors[ALIKE] == pytest.approx(1.75 / 1.7, rel=0.01)
    assert live.factors[PLAIN] == pytest.approx(1.2, rel=0.1)  # optimistic, since it is seldom tried
    assert live.costs is not None
    assert relative_costs(live.costs, SIZES, ROWS)[1] < 1.6


@pytest.mark.parametrize("pays", [False, True])
def test_a_pace_that_changes_turns_no_choice(tiny_pair: Pair, pays: bool) -> None:
    """Drafting pays by a tenth, or costs as much, whatever else the machine does meanwhile."""
    drafting = 1.6 / 1.1 if pays else 1.6 * 1.1
    paces = (math.exp(0.4 * math.sin(i / 30)) for i in itertools.count())
    live = world(
        1.6, costs_of(drafting), lambda shape: next(paces) * (drafting if max(shape.sizes, default=1) > 1 else 1)
    )
    assert drafted(tiny_pair, live, 300).count(pays) > 270


def test_rows_that_differ_have_a_factor_of_their_own(tiny_pair: Pair) -> None:
    """One row would draft and the other would not, if mixed steps took no longer than measured."""
    costs = dataclasses.replace(costs_of(2.0), one_drafts=((1.0,), (1.4,)))

    def seconds(shape: StepShape) -> float:
        sizes = set(shape.sizes)
        return 1.0 if sizes <= {1} else 2.0 if len(sizes) == 1 else 1.4 * 1.3

    live = world(2.2, costs, seconds, second=1.1)
    seen = [tuple(sorted(set(sizes))) for sizes in sizes_of(tiny_pair, live, 200)]
    assert set(seen[:2]) == {(1, 4)}
    assert live.factors[MIXED] > 1.1 * live.factors[PLAIN]
    assert seen[-100:].count((1,)) > 90


def test_rows_between_those_measured_say_little_of_others(tiny_pair: Pair) -> None:
    """Drafting takes 1.7 plain steps of two or four rows. Plain steps of three take a third longer than it seems."""
    table = ((1.0, 1.0), (1.7, 1.7))
    costs = dataclasses.replace(costs_of(1.7), rows=(2, 4), seconds=table, one_drafts=table, one_plain=table)

    def seconds(shape: StepShape) -> float:
        return 1.7 if max(shape.sizes, default=1) > 1 else 1.3 if len(shape.sizes) == 3 else 1.0

    live = World(expecting(1.6), costs, seconds, num_slots=4)
    engine = engine_of(tiny_pair, live, num_slots=4)

    def steps_of(num_rows: int, num: int) -> Iterator[bool]:
        while engine.num_decoding < num_rows:
            engine.add(Request((1, 2, 3), 250))
            engine.step()
        for _ in range(num):
            engine.step()
            yield max(live.shapes[-1].sizes) > 1

    assert sum(list(steps_of(2, 60))[20:]) < 10
    assert sum(list(steps_of(3, 60))[20:]) > 30
    assert live.factors[PLAIN] > 1.05 * live.factors[ALIKE]
    assert sum(list(steps_of(4, 60))[20:]) < 10
    assert live.factors[PLAIN] < 1.07 * live.factors[ALIKE]


def test_mixed_steps_do_not_say_what_rows_alike_take(tiny_pair: Pair) -> None:
    """One of the first two rows drafts, which takes far longer than measured. Both of the next would do well to."""
    costs = dataclasses.replace(costs_of(1.5), one_drafts=((1.0,), (1.2,)))
    taus = chain((3.0, 1.0), repeat(1.8))

    def seconds(shape: StepShape) -> float:
        sizes = set(shape.sizes)
        return 1.0 if sizes <= {1} else 1.5 if len(sizes) == 1 else 2.0

    live = World(lambda prefill: StaticForecast(SIZES, [1.0, next(taus)]), costs, seconds, num_slots=ROWS)
    seen = [tuple(sorted(set(sizes))) for sizes in sizes_of(tiny_pair, live, 400)]
    assert set(seen[:100]) == {(1, 4)}
    assert live.factors[MIXED] > 1.05 * live.factors[ALIKE]
    assert seen[-100:].count((4,)) > 90


def test_steps_that_take_what_was_measured_change_nothing(tiny_pair: Pair) -> None:
    live = world(3.0, costs_of(1.5), takes(plain=1.0, drafting=1.5))
    assert set(drafted(tiny_pair, live, 200)) == {True}
    # Plain steps were never seen, and even the optimistic factor does not make them pay.
    assert 0.7 < live.factors[PLAIN] < 0.8
    assert live.factors[ALIKE] == live.factors[MIXED] == pytest.approx(1)


def test_a_kind_that_was_given_up_is_tried_anew(tiny_pair: Pair) -> None:
    """Drafting pays by what was measured and not here, until the machine changes."""
    fading = 200
    live = World(
        expecting(1.6), costs_of(1.5), takes(plain=1.0, drafting=2.0), num_slots=ROWS, pace=Pace(ROWS, fading=fading)
    )
    busy = drafted(tiny_pair, live, 2 * fading)
    assert 0 < sum(busy) < fading / 5
    live.seconds = takes(plain=1.0, drafting=1.2)
    calm = drafted(tiny_pair, live, 2 * fading)
    assert sum(calm[-50:]) > 45


def test_a_kind_out_of_reach_is_never_tried(tiny_pair: Pair) -> None:
    live = world(1.2, costs_of(2.0), takes(plain=3.0, drafting=6.0))
    assert set(drafted(tiny_pair, live, 300)) == {False}


def test_a_stall_is_not_what_steps_take(tiny_pair: Pair) -> None:
    times = iter(100.0 if i % 5 == 0 else 1.5 for i in range(1000))
    live = world(3.0, costs_of(1.5), lambda shape: next(times))
    drafted(tiny_pair, live, 100)
    assert live.factors[ALIKE] == pytest.approx(1, rel=0.15)


def test_steps_with_prompts_are_not_counted(tiny_pair: Pair) -> None:
    live = world(1.6, costs_of(1.7), lambda shape: 1000.0 if shape.num_prompt_tokens else takes(1.1, 1.9)(shape))
    drafted(tiny_pair, live, 200)
    assert live.factors == pytest.approx({PLAIN: 1.1, ALIKE: 1.1, MIXED: 1.1}, rel=0.15)


def test_another_controller_begins_anew(tiny_pair: Pair) -> None:
    live = world(1.6, costs_of(1.7), takes(plain=1.2, drafting=1.75))
    drafted(tiny_pair, live, 100)
    fresh = LiveController(live.policy, costs_of(1.9), num_slots=ROWS)
    assert (fresh.costs, fresh.factors) == (costs_of(1.9), dict.fromkeys(KINDS, 1))
    without = world(1.6, None, takes(plain=1.0, drafting=9.0))
    assert set(drafted(tiny_pair, without, 50)) == {True}  # steps cost alike
    assert without.costs is None


def test_steps_are_timed_and_stay_as_they_are(tiny_pair: Pair) -> None:
    request = Request((5, 6, 7), 60)
    alone, timed = (
        Engine(tiny_pair, num_slots=ROWS, max_length=256, controller=controller)
        for controller in (
            Switch(expecting(3.0), costs_of(1.5)),
            LiveController(expecting(3.0), costs_of(1.5), num_slots=ROWS),
        )
    )
    for engine in (alone, timed):
        engine.add(request)
    steps = [step for _ in range(20) for step in timed.step()]
    assert [step.tokens for step in steps] == [step.tokens for _ in range(20) for step in alone.step()]
    assert isinstance(timed.controller, LiveController)
    assert 0 < timed.controller.factors[ALIKE] < 1  # a second and a half is far more than the tiny pair takes


def test_a_controller_sees_the_shape_of_every_step(tiny_pair: Pair) -> None:
    switch = Switch(FixedPolicy(4))
    engine = Engine(tiny_pair, num_slots=2, max_length=64, max_prefill_tokens=4, controller=switch)
    engine.step()
    assert switch.shapes == []  # nothing to do
    engine.add(Request((1, 2, 3), 20, block_size=3))
    engine.step()
    assert switch.shapes == [StepShape(num_prompt_tokens=3)]
    engine.add(Request((1, 2, 3, 4, 5, 6), 20, block_size=2))
    for _ in range(3):
        engine.step()
    assert [shape.num_prompt_tokens for shape in switch.shapes[1:]] == [4, 2, 0]
    assert [shape.sizes for shape in switch.shapes[1:]] == [(3,), (3,), (3, 2)]


def test_a_policy_and_a_controller_are_one_too_many(tiny_pair: Pair) -> None:
    with pytest.raises(ValueError, match="policy and controller: give one"):
        Engine(tiny_pair, max_length=64, policy=FixedPolicy(2), controller=Switch(FixedPolicy(2)))
