"""A step of the engine is one pass of the target, and one of the draft where a row drafts: no other pass is made."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from blockpilot.control.controller import Controller
from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.types import Request, Sampling, Step
from helpers.controllers import Told, Watched
from helpers.engines import NEVER, PROMPT, resize
from helpers.passes import Passes, counting
from helpers.prices import price

PRICE = price(launch_s=0.1, slot_s=0.06, token_s=0.02)
LONG = tuple(range(10, 70))


def request(num: int, block_size: int | None, prompt: Sequence[int] = PROMPT, **options: float) -> Request:
    return Request(tuple(prompt), num, Sampling(**options), block_size, NEVER)  # type: ignore[arg-type]


@pytest.fixture
def passes(tiny_pair: Pair) -> Iterator[Callable[[], Passes]]:
    with counting(tiny_pair) as since_last:
        yield since_last


def engine_of(
    pair: Pair, num_slots: int, controller: Controller | None = None, max_prefill_tokens: int = 8192
) -> Engine:
    return Engine(
        pair,
        num_slots=num_slots,
        max_length=128,
        controller=controller or Watched(3, PRICE),
        max_prefill_tokens=max_prefill_tokens,
    )


def step(engine: Engine, passes: Callable[[], Passes]) -> list[Step]:
    """One step, whose passes are those that its rows need: what was drafted may be worth nothing."""
    was_idle = engine.idle
    assert passes() == (0, 0)
    steps = engine.step()
    assert isinstance(engine.controller, Watched)
    drafted = not was_idle and engine.controller.outcomes[-1].load.num_drafted > 0
    assert drafted >= any(step.block_size > 1 for step in steps)
    assert passes() == (int(not was_idle), int(drafted))
    return steps


def run(engine: Engine, requests: Sequence[Request], passes: Callable[[], Passes]) -> list[list[Step]]:
    for of_one in requests:
        engine.add(of_one)
    steps = []
    while not engine.idle:
        steps.append(step(engine, passes))
    return steps


def sizes(steps: Sequence[Step]) -> list[int]:
    return sorted(step.block_size for step in steps)


def test_plain_rows_take_one_pass_of_the_target_and_none_of_the_draft(
    tiny_pair: Pair, passes: Callable[[], Passes]
) -> None:
    engine = engine_of(tiny_pair, 3)
    steps = run(engine, [request(9 + i, 1, PROMPT[i:]) for i in range(5)], passes)
    assert {size for of_step in steps for size in sizes(of_step)} == {0, 1}


def test_drafting_rows_take_one_pass_of_each_model(tiny_pair: Pair, passes: Callable[[], Passes]) -> None:
    engine = engine_of(tiny_pair, 3)
    steps = run(engine, [request(9 + i, 3 + i, PROMPT[i:], temperature=1.0) for i in range(3)], passes)
    assert sizes(steps[1]) == [3, 4, 5]


def test_mixed_rows_take_one_pass_of_each_model(tiny_pair: Pair, passes: Callable[[], Passes]) -> None:
    """Of different sizes, beside rows that never draft and rows that stopped drafting."""
    engine = engine_of(tiny_pair, 4)
    ids = [engine.add(request(20, size)) for size in (1, 3, 6, 4)]
    step(engine, passes)
    resize(engine, ids[3], 1)
    assert sizes(step(engine, passes)) == [1, 1, 3, 6]
    resize(engine, ids[3], 2)
    assert sizes(step(engine, passes)) == [1, 2, 3, 6]
    run(engine, [], passes)


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_prompt_shares_the_pass_of_rows_that_decode(
    tiny_pair: Pair, passes: Callable[[], Passes], block_size: int
) -> None:
    engine = engine_of(tiny_pair, 3)
    engine.add(request(20, block_size))
    step(engine, passes)
    beside = [block_size]
    for size in (1, 4):
        engine.add(request(20, size, PROMPT[5:]))
        assert sizes(step(engine, passes)) == [0, *sorted(beside)]
        beside.append(size)
    run(engine, [], passes)


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("alone", [True, False])
def test_every_part_of_a_long_prompt_takes_one_pass(
    tiny_pair: Pair, passes: Callable[[], Passes], block_size: int, alone: bool
) -> None:
    engine = engine_of(tiny_pair, 2, max_prefill_tokens=len(PROMPT))
    if not alone:
        engine.add(request(40, block_size))
        step(engine, passes)
    steps = run(engine, [request(5, block_size, LONG)], passes)
    num_parts = -(-len(LONG) // len(PROMPT))
    assert [0 in sizes(of_step) for of_step in steps[:num_parts]] == [False] * (num_parts - 1) + [True]


CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "by cost": lambda: Watched(3, PRICE),
    "told": lambda: Told(3, [(3, 5), (2, 0), (0, 0), (1, 2)]),
    "plain": lambda: Told(3, [(0, 0)]),
}


@pytest.mark.parametrize("kind", CONTROLLERS)
def test_a_controller_adds_no_pass(tiny_pair: Pair, passes: Callable[[], Passes], kind: str) -> None:
    """Rows join and leave, and their prompts come in parts."""
    engine = engine_of(tiny_pair, 3, CONTROLLERS[kind](), max_prefill_tokens=15)
    requests = [request(12 + 3 * i, (None, None, None, 1, 3)[i % 5], LONG[: 9 + 4 * i]) for i in range(7)]
    steps = run(engine, requests, passes)
    free = {i for i, of_one in enumerate(requests) if of_one.block_size is None}
    chosen = {of_one.block_size for of_step in steps for of_one in of_step if of_one.request_id in free}
    assert chosen >= {0, 1}
    assert (max(chosen) > 1) == (kind != "plain")


def test_an_idle_engine_makes_no_pass(tiny_pair: Pair, passes: Callable[[], Passes]) -> None:
    engine = engine_of(tiny_pair, 2)
    assert step(engine, passes) == []
    run(engine, [request(4, 3)], passes)
    assert step(engine, passes) == []
    engine.cancel(engine.add(request(4, 3)))
    assert step(engine, passes) == []
