"""Back-off: an engine that drafting hardly helps decodes plainly for a while, and the draft keeps up with nothing."""

import itertools
from collections.abc import Iterator

import pytest

from blockpilot.control.backoff import Backoff
from blockpilot.control.controller import FixedPolicy, StepOutcome
from blockpilot.control.live import LiveController
from blockpilot.control.cost import Load
from blockpilot.drafts.decoder import DraftDecoder
from blockpilot.engine.engine import Engine
from blockpilot.evaluation.pricing import StaticForecast
from blockpilot.pairs.loading import Pair
from blockpilot.types import Request, Sampling
from helpers.controllers import Switch
from helpers.prices import price

WINDOW, MIN_GAIN, SHORTEST, LONGEST = 1024, 0.02, 256, 4096  # the defaults
ROWS = 16
PLAIN_S = 0.05
NUM_STEPS = WINDOW // ROWS  # of a window


def observe(backoff: Backoff, gain: float, num: int, rows: int = ROWS) -> None:
    """So many steps that emit 1.5 tokens a row, each `gain` times as fast as plain ones."""
    num_tokens = rows * 3 // 2
    for _ in range(num):
        backoff.observe(rows, num_tokens, num_tokens / rows * PLAIN_S / gain, PLAIN_S)


def length_of_backoff(backoff: Backoff, gain: float) -> int:
    """Steps of the next back-off, after a window that shows this gain; 0 if it leads to none."""
    observe(backoff, gain, NUM_STEPS)
    num = 0
    while backoff.active(ROWS):
        observe(backoff, 1.0, 1)
        num += 1
    return num


@pytest.mark.parametrize(("rows", "num_steps"), [(ROWS, 64), (3, 342), (1, 1024)])
def test_it_decides_after_a_window_of_blocks(rows: int, num_steps: int) -> None:
    backoff = Backoff()
    observe(backoff, 0.5, num_steps - 1, rows)
    assert not backoff.active(rows)
    observe(backoff, 0.5, 1, rows)
    assert backoff.active(rows)


def test_less_than_the_least_gain_does_not_pay() -> None:
    less, more = Backoff(), Backoff()
    observe(less, 1 + MIN_GAIN - 1e-4, NUM_STEPS)
    observe(more, 1 + MIN_GAIN + 1e-4, NUM_STEPS)
    assert less.active(ROWS)
    assert not more.active(ROWS)


def test_what_pays_goes_on() -> None:
    backoff = Backoff()
    observe(backoff, 1 + 2 * MIN_GAIN, 10 * NUM_STEPS)
    assert not backoff.active(ROWS)
    observe(backoff, 0.9, NUM_STEPS)  # what was before is forgotten
    assert backoff.active(ROWS)


def test_a_window_counts_by_its_seconds() -> None:
    """Half of its steps gain a half; by their seconds the others lose more."""
    backoff = Backoff()
    observe(backoff, 1.5, NUM_STEPS // 2)
    observe(backoff, 0.7, NUM_STEPS // 2)
    assert backoff.active(ROWS)


def test_back_offs_double_until_drafting_pays_once() -> None:
    backoff = Backoff()
    assert [length_of_backoff(backoff, 1.0) for _ in range(3)] == [SHORTEST, 2 * SHORTEST, 4 * SHORTEST]
    assert [length_of_backoff(backoff, 1.0) for _ in range(4)][-1] == LONGEST
    assert length_of_backoff(backoff, 1.5) == 0
    assert length_of_backoff(backoff, 0.5) == SHORTEST


def test_every_load_backs_off_by_itself() -> None:
    backoff = Backoff()
    observe(backoff, 1.0, NUM_STEPS)
    assert [rows for rows in range(1, 33) if backoff.active(rows)] == list(range(12, 23))
    observe(backoff, 0.9, WINDOW // 4, rows=4)
    assert backoff.active(ROWS)
    assert backoff.active(4)
    assert not backoff.active(1)
    assert not backoff.active(0)


# --- in a controller ---


def live(window: int = WINDOW) -> LiveController:
    return LiveController(FixedPolicy(2), price(base_s=1.0), backoff=Backoff(window=window))


def learn(controller: LiveController, num: int, *, chosen: int = ROWS, prompts: int = 0) -> None:
    """So many steps of ROWS rows, which emit a token each and take as long as two plain ones."""
    for _ in range(num):
        controller.begin()
        controller.learn(StepOutcome(Load(ROWS), prompts, chosen, 0, ROWS, next_rows=ROWS), 2.0)


def test_only_steps_without_prompts_whose_rows_are_all_chosen_for_count() -> None:
    """The price of a plain step is at last the two seconds that all of these take: they gain nothing."""
    controller = live()
    learn(controller, 3 * NUM_STEPS, chosen=ROWS - 1)
    learn(controller, 3 * NUM_STEPS, prompts=9)
    assert controller.speculates
    learn(controller, NUM_STEPS)
    assert not controller.speculates


def test_a_back_off_ends_by_steps_of_rows_that_nobody_chose_for() -> None:
    """Those with prompts are none."""
    controller = live()
    learn(controller, NUM_STEPS)
    learn(controller, SHORTEST - 1, chosen=0)
    learn(controller, 9, chosen=0, prompts=5)
    assert not controller.speculates
    learn(controller, 1, chosen=0)
    assert controller.speculates


def test_the_rows_of_the_next_step_say_whether_it_speculates() -> None:
    controller = live()
    learn(controller, NUM_STEPS)
    for next_rows in (0, 1, 4, ROWS):
        controller.learn(StepOutcome(Load(ROWS), 1, 0, 0, ROWS, next_rows), 2.0)
        assert controller.speculates == (next_rows != ROWS)


# --- in an engine ---


def switched(pair: Pair, num_slots: int = 4, max_prefill_tokens: int = 8192) -> tuple[Engine, Switch]:
    """An engine whose policy drafts three positions in every step, and verifies all that is worth anything."""
    switch = Switch(lambda prefill: StaticForecast((0.99, 0.98, 0.97)), price())
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

    def step() -> tuple[list[int], int, int]:
        """Who drafts; positions drafted; rows that the controller chose for."""
        drafting = [step.request_id for step in engine.step() if step.block_size > 1]
        return drafting, switch.outcomes[-1].load.num_drafted, switch.outcomes[-1].num_chosen

    first, fixed = engine.add(Request((5, 6, 7), 60)), engine.add(Request((5, 6, 7), 60, block_size=3))
    engine.step()
    assert step() == ([first, fixed], 5, 1)
    switch.backs_off = True
    second = engine.add(Request((5, 6, 8), 60))
    assert step() == ([fixed], 2, 0)
    switch.backs_off = False
    third = engine.add(Request((5, 6, 9), 60))
    engine.step()
    assert step() == ([fixed, third], 5, 1)
    for request_id in (first, second):
        with pytest.raises(ValueError, match=f"request {request_id}: decodes plainly and cannot draft any more"):
            engine.set_block_size(request_id, 2)
    engine.set_block_size(fixed, 5)


def test_during_a_back_off_the_draft_does_not_run(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("extend", "propose"):
        monkeypatch.setattr(DraftDecoder, name, lambda *args, name=name: pytest.fail(name))
    texts(tiny_pair, itertools.repeat(True), 6)


def test_a_long_prompt_that_began_in_a_back_off_never_drafts(tiny_pair: Pair) -> None:
    engine, switch = switched(tiny_pair, max_prefill_tokens=4)
    engine.add(Request((5, 6, 7, 8, 9, 10), 20))
    switch.backs_off = True
    engine.step()
    switch.backs_off = False
    while not engine.idle:
        engine.step()
        assert switch.outcomes[-1].load.num_drafted == 0


def test_seconds_of_an_engines_own_steps_make_it_back_off(tiny_pair: Pair) -> None:
    """Drafting pays by what was expected. The clock says that it does not, however long a step really takes."""
    ticks, window = itertools.count(), 64
    controller = LiveController(
        lambda prefill: StaticForecast((0.99, 0.98, 0.97)),
        price(),
        backoff=Backoff(window=window, min_gain=0.5),
        clock=lambda: float(next(ticks)),
    )
    engine = Engine(tiny_pair, num_slots=1, max_length=256, controller=controller)
    seen = list[int]()
    while len(seen) < 2 * window + SHORTEST + 20:
        if engine.idle:
            engine.add(Request((1, 2, 3), 200, layout="chain"))
        seen += [step.block_size for step in engine.step() if step.block_size]
    # Random weights: hardly a draft is accepted, so a step of a second emits little more than a token.
    first = seen.index(1)
    assert first == window
    assert set(seen[first : first + SHORTEST]) == {1}
    assert max(seen[first + SHORTEST :]) == 4
