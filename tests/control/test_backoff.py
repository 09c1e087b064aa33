"""Rests: an engine that drafting hardly helps decodes plainly for a while, and is not ready to draft meanwhile."""

import itertools
from collections.abc import Iterator

import pytest

import blockpilot.control.backoff
from blockpilot.control import live as live_costs
from blockpilot.control.backoff import GAIN, LONGEST, SHORTEST, SHORTEST_WINDOW, WINDOW, Rest
from blockpilot.control.baselines import StaticForecast
from blockpilot.control.live import LiveCosts
from blockpilot.control.price import StepCosts
from blockpilot.drafts.dflash import DraftModel
from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.types import CandidateSet, PairId, Request, Sampling, StepShape

ROWS = 16
PLAIN_S = 0.05
NUM_STEPS = WINDOW // ROWS  # of a window
ALL_CHOSEN = StepShape((2,) * ROWS, 0, ROWS)
AT_REST = StepShape((1,) * ROWS)


def observe(rest: Rest, shape: StepShape, gain: float, num: int) -> None:
    """So many steps that emit 1.5 tokens a row, each `gain` times as fast as plain ones."""
    num_tokens = len(shape.sizes) * 3 // 2
    for _ in range(num):
        rest.observe(shape, num_tokens, num_tokens / len(shape.sizes) * PLAIN_S / gain, PLAIN_S)


def steps_until_rest(rest: Rest, shape: StepShape, gain: float) -> int:
    """How many steps lead to a rest, of a window at most."""
    for num in range(NUM_STEPS):
        if rest.resting(ROWS):
            return num
        observe(rest, shape, gain, 1)
    return NUM_STEPS


def rested(rest: Rest, gain: float) -> int:
    """Steps of the next rest, to which steps lead that show this gain; 0 if a window of them leads to none."""
    steps_until_rest(rest, ALL_CHOSEN, gain)
    num = 0
    while rest.resting(ROWS):
        observe(rest, AT_REST, 1.0, 1)
        num += 1
    return num


@pytest.mark.parametrize(("gain", "num_blocks"), [(0.0199, 2048), (0.01, 1632), (-0.03, 784), (-0.5, 512)])
def test_the_less_is_gained_the_sooner_it_is_certain(gain: float, num_blocks: int) -> None:
    """2% is asked for, and 8% (sqrt(2048 / n) - 1) less of n blocks: n is 2048 / 1.125^2 where 1% is gained."""
    rest = Rest()
    assert steps_until_rest(rest, ALL_CHOSEN, 1 + gain) == num_blocks / ROWS
    assert rest.resting(ROWS)


@pytest.mark.parametrize(("num_drafted", "num_steps"), [(0, 32), (4, 32), (8, 64), (9, 72), (16, 128)])
def test_the_fewer_blocks_are_drafted_the_fewer_are_needed(num_drafted: int, num_steps: int) -> None:
    """With a share p drafted, 2048 p blocks are as telling as 2048 that all draft: n^2 = 2048 p n; at least 512."""
    rest, shape = Rest(), StepShape((2,) * num_drafted + (1,) * (ROWS - num_drafted), 0, ROWS)
    assert steps_until_rest(rest, shape, 1 + GAIN - 1e-4) == num_steps
    assert rest.resting(ROWS)


def test_what_pays_goes_on() -> None:
    rest = Rest()
    observe(rest, ALL_CHOSEN, 1 + 2 * GAIN, 10 * NUM_STEPS)
    assert not rest.resting(ROWS)
    observe(rest, ALL_CHOSEN, 0.9, NUM_STEPS)  # what was before is forgotten
    assert rest.resting(ROWS)


def test_rests_become_longer_until_drafting_pays_once() -> None:
    rest = Rest()
    assert [rested(rest, 1.0) for _ in range(3)] == [SHORTEST, 2 * SHORTEST, 4 * SHORTEST]
    assert [rested(rest, 1.0) for _ in range(4)][-1] == LONGEST
    assert rested(rest, 1.5) == 0
    assert rested(rest, 0.5) == SHORTEST


def test_only_steps_whose_sizes_are_all_chosen_count() -> None:
    rest = Rest()
    observe(rest, ALL_CHOSEN._replace(num_chosen=ROWS - 1), 0.5, 3 * NUM_STEPS)
    observe(rest, AT_REST, 0.5, 3 * NUM_STEPS)
    assert not rest.resting(ROWS)


def test_every_load_rests_by_itself() -> None:
    rest = Rest()
    observe(rest, ALL_CHOSEN, 1.0, NUM_STEPS)
    assert [rows for rows in range(1, 33) if rest.resting(rows)] == list(range(12, 23))
    observe(rest, StepShape((2,) * 4, 0, 4), 0.9, SHORTEST_WINDOW // 4 - 1)
    assert not rest.resting(4)  # fewer rows need more steps
    observe(rest, StepShape((2,) * 4, 0, 4), 0.9, 1)
    assert rest.resting(ROWS)
    assert rest.resting(4)
    assert not rest.resting(1)
    assert not rest.resting(0)


# in an engine


def forecasting(pair: Pair, num_slots: int = 4) -> Engine:
    """An engine whose policy wants blocks of 4 in every step."""
    forecast = StaticForecast(CandidateSet((1, 4)), [1.0, 3.9])
    return Engine(pair, num_slots=num_slots, max_length=256, policy=lambda prefill: forecast)


def requests(num: int) -> Iterator[Request]:
    return (Request((5, 6, i), 40, Sampling(i % 2, seed=i)) for i in range(num))


def texts(engine: Engine, resting: Iterator[bool], num: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {engine.add(request): [] for request in requests(num)}
    while not engine.idle:
        engine.resting = next(resting)
        for step in engine.step():
            found[step.request_id] += step.tokens
    return found


def test_rests_do_not_change_what_is_said(tiny_pair: Pair) -> None:
    """Requests meet their rests in prompts, in the middle, and never."""
    awake = texts(forecasting(tiny_pair), itertools.repeat(False), 12)
    for length in (1, 3, 7):
        naps = itertools.cycle([False] * 5 + [True] * length)
        assert texts(forecasting(tiny_pair), naps, 12) == awake


def test_a_rest_is_for_good_for_those_who_meet_it(tiny_pair: Pair) -> None:
    engine = forecasting(tiny_pair)
    first, fixed = engine.add(Request((5, 6, 7), 60)), engine.add(Request((5, 6, 7), 60, block_size=3))
    engine.step()
    engine.step()
    assert (engine.last_shape.sizes, engine.last_shape.num_chosen) == ((4, 3), 1)
    engine.resting = True
    engine.add(Request((5, 6, 8), 60))
    engine.step()
    assert (engine.last_shape.sizes, engine.last_shape.num_chosen) == ((1, 3), 0)
    engine.resting = False
    engine.add(Request((5, 6, 9), 60))
    engine.step()
    engine.step()
    assert (engine.last_shape.sizes, engine.last_shape.num_chosen) == ((1, 3, 1, 4), 1)
    with pytest.raises(ValueError, match=f"request {first}: decodes plainly and cannot draft any more"):
        engine.set_block_size(first, 2)
    engine.set_block_size(fixed, 5)


def test_at_rest_the_draft_has_nothing_to_do(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fuse", "extend", "propose"):
        monkeypatch.setattr(DraftModel, name, lambda *args, name=name: pytest.fail(name))
    texts(forecasting(tiny_pair), itertools.repeat(True), 6)


def test_a_long_prompt_that_began_in_a_rest_never_drafts(tiny_pair: Pair) -> None:
    engine = forecasting(tiny_pair)
    engine.max_prefill_tokens = 4
    engine.add(Request((5, 6, 7, 8, 9, 10), 20))
    engine.resting = True
    engine.step()
    engine.resting = False
    while not engine.idle:
        engine.step()
        assert set(engine.last_shape.sizes) <= {1}


def test_seconds_of_an_engines_own_steps_send_it_to_rest(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting pays by what was measured. The clock says that it does not, however long a step really takes."""
    clock, window = itertools.count(), 64
    monkeypatch.setattr(live_costs.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(blockpilot.control.backoff, "WINDOW", window)
    monkeypatch.setattr(blockpilot.control.backoff, "SHORTEST_WINDOW", window // 4)
    table = ((1.0,), (1.0,))
    costs = StepCosts(PairId("t", "1", "d", "2"), "float32", "cpu", (1, 4), (1,), 64, table, table, table)
    engine = forecasting(tiny_pair, num_slots=1)
    engine.costs = costs
    live, seen = LiveCosts(engine), list[int]()
    while len(seen) < 2 * window + SHORTEST + 20:
        if engine.idle:
            engine.add(Request((1, 2, 3), 200))
        live.step()
        seen += engine.last_shape.sizes
    # Random weights: hardly a draft is accepted, so a step of a second emits little more than a token.
    first = seen.index(1)
    assert window // 4 <= first < window + 5
    assert set(seen[first : first + SHORTEST]) == {1}
    assert 4 in seen[first + SHORTEST :]
