"""Prompts are taken in bit by bit: no text depends on it, and nobody waits for a neighbour's long prompt."""

import pytest
import torch

from blockpilot.control.cost import Load
from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.types import Prefill, Request, Sampling
from helpers.controllers import Told
from helpers.engines import NEVER, PROMPT, plain_text, run, text_of

LONG = tuple(range(10, 70))


@pytest.mark.parametrize("num_slots", [1, 3, 8])
@pytest.mark.parametrize("max_prefill_tokens", [1, 5, 8, 40])
def test_texts_are_those_of_whole_prompts(tiny_pair: Pair, num_slots: int, max_prefill_tokens: int) -> None:
    """Requests join and leave between any two parts of a prompt."""
    requests = [
        Request(LONG[: 3 + 7 * (i % 5)], 4 + 3 * (i % 4), Sampling([0.0, 1.0][i % 2], seed=i), 1 + i % 5, NEVER)
        for i in range(10)
    ]
    engine = Engine(tiny_pair, num_slots=num_slots, max_length=128, max_prefill_tokens=max_prefill_tokens)
    for request, steps in zip(requests, run(engine, requests), strict=True):
        expected = plain_text(tiny_pair, request.prompt_ids, request.max_new_tokens, request.sampling)
        assert text_of(steps) == expected
        assert [step.block_size for step in steps].count(0) == 1


def test_policies_see_the_same_whatever_the_parts(tiny_pair: Pair) -> None:
    seen: list[list[Prefill]] = []

    def policy(prefill: Prefill) -> int:
        seen[-1].append(prefill)
        return 2

    for size in (4, 1000):
        seen.append([])
        engine = Engine(tiny_pair, num_slots=2, max_length=128, policy=policy, max_prefill_tokens=size)
        run(engine, [Request(LONG, 3), Request(PROMPT, 3)])
    for part, whole in zip(*seen, strict=True):
        assert torch.allclose(part.logits, whole.logits, atol=1e-4)
        assert part.context is not None
        assert whole.context is not None
        assert torch.allclose(part.context, whole.context, atol=1e-4)


def test_a_long_prompt_stalls_nobody(tiny_pair: Pair) -> None:
    """While ten steps take it in, its neighbour emits tokens in each of them."""
    engine = Engine(tiny_pair, num_slots=2, max_length=128, max_prefill_tokens=6)
    neighbour = engine.add(Request(PROMPT[:6], 30, block_size=1, stop_token_ids=NEVER))
    engine.step()
    long = engine.add(Request(LONG, 5, block_size=2, stop_token_ids=NEVER))
    for taken in range(1, 10):
        assert [(step.request_id, len(step.tokens)) for step in engine.step()] == [(neighbour, 1)]
        assert (engine.num_active, engine.num_waiting) == (2, 0), taken
    assert [step.request_id for step in engine.step()] == [neighbour, long]


def test_short_prompts_share_a_step(tiny_pair: Pair) -> None:
    engine = Engine(tiny_pair, num_slots=8, max_length=128, max_prefill_tokens=20)
    ids = [engine.add(Request(LONG[:8], 40, block_size=1, stop_token_ids=NEVER)) for _ in range(5)]
    begun = [[step.request_id for step in engine.step() if step.prefill] for _ in range(2)]
    assert begun == [ids[:2], ids[2:]]  # of the third, the first step took half


@pytest.mark.parametrize("when", [0, 1, 3])
def test_a_request_cancelled_in_its_prompt_leaves_no_trace(tiny_pair: Pair, when: int) -> None:
    engine = Engine(tiny_pair, num_slots=3, max_length=128, max_prefill_tokens=7)
    steady = engine.add(Request(PROMPT[:7], 25, block_size=3, stop_token_ids=NEVER))
    texts: dict[int, list[int]] = {steady: []}

    def advance() -> None:
        for step in engine.step():
            texts[step.request_id] += step.tokens

    advance()
    gone = engine.add(Request(LONG, 10, stop_token_ids=NEVER))
    for _ in range(when):
        advance()
    engine.cancel(gone)
    assert (engine.num_active, engine.num_waiting) == (1, 0)
    after = engine.add(Request(LONG[5:30], 10, block_size=4, stop_token_ids=NEVER))
    texts[after] = []
    while not engine.idle:
        advance()
    for request_id, prompt, num in ((steady, PROMPT[:7], 25), (after, LONG[5:30], 10)):
        assert tuple(texts[request_id]) == plain_text(tiny_pair, prompt, num, Sampling())


def test_a_prompt_in_parts_follows_when_neighbours_leave(tiny_pair: Pair) -> None:
    """Its slot is after those that decode, which are fewer with every one that ends."""
    engine = Engine(tiny_pair, num_slots=4, max_length=128, max_prefill_tokens=5)
    short = [Request(LONG[i : i + 5], 3 + 2 * i, block_size=1 + i, stop_token_ids=NEVER) for i in range(3)]
    requests = [*short, Request(LONG, 12, block_size=4, stop_token_ids=NEVER)]
    for request, steps in zip(requests, run(engine, requests), strict=True):
        assert text_of(steps) == plain_text(tiny_pair, request.prompt_ids, request.max_new_tokens, Sampling())


def test_a_limit_below_one_is_refused(tiny_pair: Pair) -> None:
    with pytest.raises(ValueError, match="max_prefill_tokens 0: must be at least 1"):
        Engine(tiny_pair, max_prefill_tokens=0)


def test_nothing_is_planned_for_a_request_before_its_whole_prompt_is_through(tiny_pair: Pair) -> None:
    controller = Told(3, [(2, 2)])
    engine = Engine(tiny_pair, num_slots=2, max_length=128, controller=controller, max_prefill_tokens=10)
    requests = [
        Request(PROMPT[:8], 20, stop_token_ids=NEVER, layout="chain"),
        Request(LONG, 8, stop_token_ids=NEVER, layout="chain"),
    ]
    for request, steps in zip(requests, run(engine, requests), strict=True):
        assert text_of(steps) == plain_text(tiny_pair, request.prompt_ids, request.max_new_tokens, Sampling())
        assert {step.block_size for step in steps[1:-2]} == {3}  # the limit cuts the last ones short
    alone = [outcome.load for outcome in controller.outcomes if outcome.num_prompt_tokens and outcome.load.rows]
    assert len(alone) > 4
    assert set(alone) == {Load(1, 2, 2)}


def test_a_policy_sees_the_prefill(tiny_pair: Pair) -> None:
    """The target's distribution after the prompt, and the temperature."""
    seen: list[Prefill] = []

    def policy(prefill: Prefill) -> int:
        seen.append(prefill)
        return 2

    engine = Engine(tiny_pair, num_slots=1, max_length=64, policy=policy)
    engine.add(Request(PROMPT, 8, Sampling(temperature=0.7, seed=3)))
    engine.step()
    assert (seen[0].temperature, seen[0].num_prompt_tokens) == (0.7, len(PROMPT))
    with torch.inference_mode():
        logits = tiny_pair.target(torch.tensor([PROMPT])).logits[0, -1]
    assert torch.allclose(seen[0].logits, logits, atol=1e-4)
