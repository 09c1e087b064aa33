"""Back-off: an engine that drafting hardly helps decodes plainly for a while, and the draft keeps up with nothing."""

import itertools
from collections.abc import Iterator

import pytest

from blockpilot.adaptive.backoff import Backoff
from blockpilot.adaptive.live import LiveController
from blockpilot.control.price import StepCosts
from blockpilot.drafts.dflash import DraftModel
from blockpilot.engine.engine import Engine
from blockpilot.evaluation.baselines import StaticForecast
from blockpilot.pairs.loading import Pair
from blockpilot.types import CandidateSet, PairId, Request, Sampling, StepShape
from helpers.controllers import Switch

WINDOW, MIN_BLOCKS, MIN_GAIN, SHORTEST, LONGEST = 2048, 512, 0.02, 256, 4096  # the defaults
ROWS = 16
PLAIN_S = 0.05
NUM_STEPS = WINDOW // ROWS  # of a window
ALL_CHOSEN = StepShape((2,) * ROWS, num_chosen=ROWS)
BACKED_OFF = StepShape((1,) * ROWS)


def observe(backoff: Backoff, shape: StepShape, gain: float, num: int) -> None:
    """So many steps that emit 1.5 tokens a row, each `gain` times as fast as plain ones."""
    num_tokens = len(shape.sizes) * 3 // 2
    for _ in range(num):
        backoff.observe(shape, num_tokens, num_tokens / len(shape.sizes) * PLAIN_S / gain, PLAIN_S)


def steps_until_backoff(backoff: Backoff, shape: StepShape, gain: float) -> int:
    """How many steps lead to a back-off, of a window at most."""
    for num in range(NUM_STEPS):
        if backoff.active(ROWS):
            return num
        observe(backoff, shape, gain, 1)
    return NUM_STEPS


def length_of_backoff(backoff: Backoff, gain: float) -> int:
    """Steps of the next back-off, after steps that show this gain; 0 if a window of them leads to none."""
    steps_until_backoff(backoff, ALL_CHOSEN, gain)
    num = 0
    while backoff.active(ROWS):
        observe(backoff, BACKED_OFF, 1.0, 1)
        num += 1
    return num


@pytest.mark.parametrize(("gain", "num_blocks"), [(0.0199, 2048), (0.01, 1632), (-0.03, 784), (-0.5, 512)])
def test_the_less_is_gained_the_sooner_it_is_certain(gain: float, num_blocks: int) -> None:
    """2% is asked for, and 8% (sqrt(2048 / n) - 1) less of n blocks: n is 2048 / 1.125^2 where 1% is gained."""
    backoff = Backoff()
    assert steps_until_backoff(backoff, ALL_CHOSEN, 1 + gain) == num_blocks / ROWS
    assert backoff.active(ROWS)


@pytest.mark.parametrize(("num_drafted", "num_steps"), [(0, 32), (4, 32), (8, 64), (9, 72), (16, 128)])
def test_the_fewer_blocks_are_drafted_the_fewer_are_needed(num_drafted: int, num_steps: int) -> None:
    """With a share p drafted, 2048 p blocks are as telling as 2048 that all draft: n^2 = 2048 p n; at least 512."""
    backoff, shape = Backoff(), StepShape((2,) * num_drafted + (1,) * (ROWS - num_drafted), num_chosen=ROWS)
    assert steps_until_backoff(backoff, shape, 1 + MIN_GAIN - 1e-4) == num_steps
    assert backoff.active(ROWS)


def test_what_pays_goes_on() -> None:
    backoff = Backoff()
    observe(backoff, ALL_CHOSEN, 1 + 2 * MIN_GAIN, 10 * NUM_STEPS)
    assert not backoff.active(ROWS)
    observe(backoff, ALL_CHOSEN, 0.9, NUM_STEPS)  # what was before is forgotten
    assert backoff.active(ROWS)


def test_back_offs_double_until_drafting_pays_once() -> None:
    backoff = Backoff()
    assert [length_of_backoff(backoff, 1.0) for _ in range(3)] == [SHORTEST, 2 * SHORTEST, 4 * SHORTEST]
    assert [length_of_backoff(backoff, 1.0) for _ in range(4)][-1] == LONGEST
    assert length_of_backoff(backoff, 1.5) == 0
    assert length_of_backoff(backoff, 0.5) == SHORTEST


def test_only_steps_whose_sizes_are_all_chosen_count() -> None:
    backoff = Backoff()
    observe(backoff, ALL_CHOSEN._replace(num_chosen=ROWS - 1), 0.5, 3 * NUM_STEPS)
    observe(backoff, BACKED_OFF, 0.5, 3 * NUM_STEPS)
    assert not backoff.active(ROWS)


def test_every_load_backs_off_by_itself() -> None:
    backoff = Backoff()
    observe(backoff, ALL_CHOSEN, 1.0, NUM_STEPS)
    assert [rows for rows in range(1, 33) if backoff.active(rows)] == list(range(12, 23))
    observe(backoff, StepShape((2,) * 4, num_chosen=4), 0.9, MIN_BLOCKS // 4 - 1)
    assert not backoff.active(4)  # fewer rows need more steps
    observe(backoff, StepShape((2,) * 4, num_chosen=4), 0.9, 1)
    assert backoff.active(ROWS)
    assert backoff.active(4)
    assert not backoff.active(1)
    assert not backoff.active(0)


# in an engine


def switched(pair: Pair, num_slots: int = 4, max_prefill_tokens: int = 8192) -> tuple[Engine, Switch]:
    """An engine whose policy wants blocks of 4 in every step."""
    switch = Switch(lambda prefill: StaticForecast(CandidateSet((1, 4)), [1.0, 3.9]))
    engine = Engine(
        pair, num_slots=num_slots, max_length=256, max_prefill_tokens=max_prefill_tokens, controller=switch
    )
    return engine, switch


def requests(num: int) -> Iterator[Request]:
    return (Request((5, 6, i), 40, Sampling(i % 2, seed=i)) for i in range(num))


def texts(pair: Pair, backs_off: Iterator[bool], num: int) -> dict[int, list[int]]:
    engine, switch = switched(pair)
    found: dict[int, list[int]] = {engine.add(request): [] for request in requests(num)}
    while not engine.idle:
        switch.backs_off = next(backs_off)
        for step in engine.step():
            found[step.request_id] += step.tokens
    return found


def test_back_offs_do_not_change_the_text(tiny_pair: Pair) -> None:
    """Requests meet their back-offs in prompts, in the middle, and never."""
    without = texts(tiny_pair, itertools.repeat(False), 12)
    for length in (1, 3, 7):
        now_and_then = itertools.cycle([False] * 5 + [True] * length)
        assert texts(tiny_pair, now_and_then, 12) == without


def test_rows_that_meet_a_back_off_never_draft_again(tiny_pair: Pair) -> None:
    engine, switch = switched(tiny_pair)

    def shape() -> tuple[tuple[int, ...], int]:
        return switch.shapes[-1].sizes, switch.shapes[-1].num_chosen

    first, fixed = engine.add(Request((5, 6, 7), 60)), engine.add(Request((5, 6, 7), 60, block_size=3))
    engine.step()
    engine.step()
    assert shape() == ((4, 3), 1)
    switch.backs_off = True
    engine.add(Request((5, 6, 8), 60))
    engine.step()
    assert shape() == ((1, 3), 0)
    switch.backs_off = False
    engine.add(Request((5, 6, 9), 60))
    engine.step()
    engine.step()
    assert shape() == ((1, 3, 1, 4), 1)
    with pytest.raises(ValueError, match=f"request {first}: decodes plainly and cannot draft any more"):
        engine.set_block_size(first, 2)
    engine.set_block_size(fixed, 5)


def test_during_a_back_off_the_draft_does_not_run(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fuse", "extend", "propose"):
        monkeypatch.setattr(DraftModel, name, lambda *args, name=name: pytest.fail(name))
    texts(tiny_pair, itertools.repeat(True), 6)


def test_a_long_prompt_that_began_in_a_back_off_never_drafts(tiny_pair: Pair) -> None:
    engine, switch = switched(tiny_pair, max_prefill_tokens=4)
    engine.add(Request((5, 6, 7, 8, 9, 10), 20))
    switch.backs_off = True
    engine.step()
    switch.backs_off = False
    while not engine.idle:
        engine.step()
        assert set(switch.shapes[-1].sizes) <= {1}


def test_seconds_of_an_engines_own_steps_make_it_back_off(tiny_pair: Pair) -> None:
    """Drafting pays by what was measured. The clock says that it does not, however long a step really takes."""
    ticks, window = itertools.count(), 64
    table = ((1.0,), (1.0,))
    costs = StepCosts(PairId("t", "1", "d", "2"), "float32", "cpu", (1, 4), (1,), 64, table, table, table)
    live = LiveController(
        lambda prefill: StaticForecast(CandidateSet((1, 4)), [1.0, 3.9]),
        costs,
        num_slots=1,
        backoff=Backoff(window=window, min_blocks=window // 4),
        clock=lambda: float(next(ticks)),
    )
    engine = Engine(tiny_pair, num_slots=1, max_length=256, controller=live)
    seen = list[int]()
    while len(seen) < 2 * window + SHORTEST + 20:
        if engine.idle:
            engine.add(Request((1, 2, 3), 200))
        seen += [step.block_size for step in engine.step() if step.block_size]
    # Random weights: hardly a draft is accepted, so a step of a second emits little more than a token.
    first = seen.index(1)
    assert window // 4 <= first < window + 5
    assert set(seen[first : first + SHORTEST]) == {1}
    assert 4 in seen[first + SHORTEST :]
