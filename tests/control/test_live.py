"""Costs that follow an engine's own steps: seconds are made up, the engine and its choices are real."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, cycle, islice, repeat

import pytest

from blockpilot.control import pace
from blockpilot.control.baselines import StaticForecast
from blockpilot.control.live import ALIKE, KINDS, MIXED, PLAIN, REFRESH_EVERY, LiveCosts
from blockpilot.control.price import StepCosts
from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.types import CandidateSet, PairId, Request, StepShape

ROWS = 2
SIZES = CandidateSet((1, 4))
World = Callable[[StepShape], float]


def costs_of(drafting: float) -> StepCosts:
    """Plain steps take a second, others `drafting`, however many rows."""
    table = ((1.0,), (drafting,))
    return StepCosts(PairId("t", "1", "d", "2"), "float32", "cpu", (1, 4), (ROWS,), 64, table, table, table)


def in_use(pair: Pair, tau: float, costs: StepCosts | None, second: float | None = None) -> Engine:
    """An engine whose rows expect tau tokens of a block of 4 (every other one `second`), and one token without."""
    taus = cycle((tau, second or tau))
    policy = lambda prefill: StaticForecast(SIZES, [1.0, next(taus)])  # noqa: E731
    return Engine(pair, num_slots=ROWS, max_length=256, policy=policy, costs=costs)


def drafted(live: LiveCosts, world: World, num: int) -> list[bool]:
    """Which of so many steps that only decode drafted."""
    return [max(sizes) > 1 for sizes in sizes_of(live, world, num)]


def sizes_of(live: LiveCosts, world: World, num: int) -> list[tuple[int, ...]]:
    """Block sizes of so many steps that only decode; two requests are always there, none near its end."""
    engine, seen, emitted = live.engine, list[tuple[int, ...]](), Counter[int]()
    while len(seen) < num:
        while engine.num_active < ROWS:
            emitted[engine.add(Request((1, 2, 3), 200))] = 0
            engine.step()
            live.observe(world(engine.last_shape))
        steps = engine.step()
        live.observe(world(engine.last_shape))
        if not engine.last_shape.num_prompt_tokens:
            seen.append(engine.last_shape.sizes)
        for step in steps:
            emitted[step.request_id] += len(step.tokens)
            if emitted[step.request_id] > 150 or step.finish_reason is not None:
                engine.cancel(step.request_id)
    return seen


def takes(plain: float, drafting: float) -> World:
    return lambda shape: plain if max(shape.sizes, default=1) == 1 else drafting


def test_what_steps_really_take_turns_the_choice(tiny_pair: Pair) -> None:
    """Measured alone a drafting step took 1.7 plain ones, which 1.6 tokens do not pay; here it takes 1.45."""
    live = LiveCosts(in_use(tiny_pair, 1.6, costs_of(1.7)))
    seen = drafted(live, takes(plain=1.2, drafting=1.75), 200)
    assert not any(seen[:REFRESH_EVERY])
    assert sum(seen[50:]) > 140
    assert live.factors[ALIKE] == pytest.approx(1.75 / 1.7, rel=0.01)
    assert live.factors[PLAIN] == pytest.approx(1.2, rel=0.1)  # hoped, since it is seldom tried
    assert live.engine.costs is not None
    assert live.engine.costs.of_candidates(SIZES, ROWS)[1] < 1.6


@pytest.mark.parametrize("pays", [False, True])
def test_a_pace_that_changes_turns_no_choice(tiny_pair: Pair, pays: bool) -> None:
    """Drafting pays by a tenth, or costs as much, whatever else the machine does meanwhile."""
    drafting = 1.6 / 1.1 if pays else 1.6 * 1.1
    live = LiveCosts(in_use(tiny_pair, 1.6, costs_of(drafting)))
    paces = (math.exp(0.4 * math.sin(i / 30)) for i in itertools.count())
    seen = drafted(live, lambda shape: next(paces) * (drafting if max(shape.sizes, default=1) > 1 else 1), 300)
    assert seen.count(pays) > 270


def test_rows_that_differ_have_a_factor_of_their_own(tiny_pair: Pair) -> None:
    """One row would draft and the other would not, if mixed steps took no longer than measured."""
    table, mixed = ((1.0,), (2.0,)), ((1.0,), (1.4,))
    costs = dataclasses.replace(costs_of(2.0), seconds=table, one_drafts=mixed, one_plain=table)
    live = LiveCosts(in_use(tiny_pair, 2.2, costs, second=1.1))

    def world(shape: StepShape) -> float:
        sizes = set(shape.sizes)
        return 1.0 if sizes <= {1} else 2.0 if len(sizes) == 1 else 1.4 * 1.3

    seen = [tuple(sorted(set(sizes))) for sizes in sizes_of(live, world, 200)]
    assert set(seen[:REFRESH_EVERY]) == {(1, 4)}
    assert live.factors[MIXED] > 1.1 * live.factors[PLAIN]
    assert seen[-100:].count((1,)) > 90


def test_rows_between_those_measured_say_little_of_others(tiny_pair: Pair) -> None:
    """Drafting takes 1.7 plain steps of two or four rows. Plain steps of three take a third longer than it seems."""
    table = ((1.0, 1.0), (1.7, 1.7))
    two_and_four = {"rows": (2, 4), "seconds": table, "one_drafts": table, "one_plain": table}
    policy = lambda prefill: StaticForecast(SIZES, [1.0, 1.6])  # noqa: E731
    costs = dataclasses.replace(costs_of(1.7), **two_and_four)
    live = LiveCosts(Engine(tiny_pair, num_slots=4, max_length=256, policy=policy, costs=costs))

    def steps_of(num_rows: int, num: int) -> Iterator[bool]:
        while live.engine.num_decoding < num_rows:
            live.engine.add(Request((1, 2, 3), 250))
            live.engine.step()
        for _ in range(num):
            live.engine.step()
            sizes = live.engine.last_shape.sizes
            live.observe(1.7 if max(sizes) > 1 else 1.3 if len(sizes) == 3 else 1.0)
            yield max(sizes) > 1

    assert sum(list(steps_of(2, 60))[20:]) < 10
    assert sum(list(steps_of(3, 60))[20:]) > 30
    assert live.factors[PLAIN] > 1.05 * live.factors[ALIKE]
    assert sum(list(steps_of(4, 60))[20:]) < 10
    assert live.factors[PLAIN] < 1.07 * live.factors[ALIKE]


def test_mixed_steps_do_not_say_what_rows_alike_take(tiny_pair: Pair) -> None:
    """One of the first two rows drafts, which takes far longer than measured. Both of the next would do well to."""
    mixed = ((1.0,), (1.2,))
    costs = dataclasses.replace(costs_of(1.5), one_drafts=mixed)
    taus = chain((3.0, 1.0), repeat(1.8))
    policy = lambda prefill: StaticForecast(SIZES, [1.0, next(taus)])  # noqa: E731
    live = LiveCosts(Engine(tiny_pair, num_slots=ROWS, max_length=256, policy=policy, costs=costs))

    def world(shape: StepShape) -> float:
        sizes = set(shape.sizes)
        return 1.0 if sizes <= {1} else 1.5 if len(sizes) == 1 else 2.0

    seen = [tuple(sorted(set(sizes))) for sizes in sizes_of(live, world, 400)]
    assert set(seen[:100]) == {(1, 4)}
    assert live.factors[MIXED] > 1.05 * live.factors[ALIKE]
    assert seen[-100:].count((4,)) > 90


def test_steps_that_take_what_was_measured_change_nothing(tiny_pair: Pair) -> None:
    live = LiveCosts(in_use(tiny_pair, 3.0, costs_of(1.5)))
    assert set(drafted(live, takes(plain=1.0, drafting=1.5), 200)) == {True}
    # Plain steps were never seen, and even so hoped they do not pay.
    assert 0.7 < live.factors[PLAIN] < 0.8
    assert live.factors[ALIKE] == live.factors[MIXED] == pytest.approx(1)


def test_a_kind_that_was_given_up_is_tried_anew(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting pays by what was measured and not here, until the machine changes."""
    monkeypatch.setattr(pace, "FADING", fading := 200)
    live = LiveCosts(in_use(tiny_pair, 1.6, costs_of(1.5)))
    busy = drafted(live, takes(plain=1.0, drafting=2.0), 2 * fading)
    assert 0 < sum(busy) < fading / 5
    calm = drafted(live, takes(plain=1.0, drafting=1.2), 2 * fading)
    assert sum(calm[-50:]) > 45


def test_a_kind_out_of_reach_is_never_tried(tiny_pair: Pair) -> None:
    live = LiveCosts(in_use(tiny_pair, 1.2, costs_of(2.0)))
    assert set(drafted(live, takes(plain=3.0, drafting=6.0), 300)) == {False}


def test_a_stall_is_not_what_steps_take(tiny_pair: Pair) -> None:
    live = LiveCosts(in_use(tiny_pair, 3.0, costs_of(1.5)))
    times = iter(100.0 if i % 5 == 0 else 1.5 for i in range(1000))
    drafted(live, lambda shape: next(times), 100)
    assert live.factors[ALIKE] == pytest.approx(1, rel=0.15)


def test_steps_with_prompts_are_not_counted(tiny_pair: Pair) -> None:
    live = LiveCosts(in_use(tiny_pair, 1.6, costs_of(1.7)))
    drafted(live, lambda shape: 1000.0 if shape.num_prompt_tokens else takes(1.1, 1.9)(shape), 200)
    assert live.factors == pytest.approx({PLAIN: 1.1, ALIKE: 1.1, MIXED: 1.1}, rel=0.15)


def test_other_costs_begin_anew(tiny_pair: Pair) -> None:
    live = LiveCosts(in_use(tiny_pair, 1.6, costs_of(1.7)))
    drafted(live, takes(plain=1.2, drafting=1.75), 100)
    live.use(costs_of(1.9))
    assert (live.engine.costs, live.factors) == (costs_of(1.9), dict.fromkeys(KINDS, 1))
    live.use(None)
    assert set(drafted(live, takes(plain=1.0, drafting=9.0), 50)) == {True}  # steps cost alike
    assert live.engine.costs is None


def test_its_steps_are_timed_and_are_the_engines(tiny_pair: Pair) -> None:
    request = Request((5, 6, 7), 60)
    alone, timed = in_use(tiny_pair, 3.0, costs_of(1.5)), LiveCosts(in_use(tiny_pair, 3.0, costs_of(1.5)))
    for engine in (alone, timed.engine):
        engine.add(request)
    steps = [step for _ in range(20) for step in timed.step()[0]]
    assert [step.tokens for step in steps] == [step.tokens for _ in range(20) for step in alone.step()]
    assert 0 < timed.factors[ALIKE] < 1  # a second and a half is far more than the tiny pair takes


def test_the_shape_of_a_step(tiny_pair: Pair) -> None:
    engine = Engine(tiny_pair, num_slots=2, max_length=64, max_prefill_tokens=4)
    assert engine.last_shape == StepShape()
    engine.add(Request((1, 2, 3), 20, block_size=3))
    engine.step()
    assert engine.last_shape == StepShape(num_prompt_tokens=3)
    engine.add(Request((1, 2, 3, 4, 5, 6), 20, block_size=2))
    shapes = [engine.last_shape for _ in islice(iter(engine.step, None), 3)]
    assert [shape.num_prompt_tokens for shape in shapes] == [4, 2, 0]
    assert [shape.sizes for shape in shapes] == [(3,), (3,), (3, 2)]
    engine.cancel(0)
    engine.cancel(1)
    engine.step()
    assert engine.last_shape == StepShape()
