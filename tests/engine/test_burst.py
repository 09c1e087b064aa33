"""A burst of requests comes and goes: a long answer drafts before it and after it, and nobody does in it."""

import pytest
import torch

from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.types import Request, Sampling
from helpers.controllers import Watched
from helpers.engines import NEVER, PROMPT, plain_text
from helpers.prices import linear_price
from helpers.scripted import OTHER_PROMPT, scripted_pair

NUM_LONG, NUM_SHORT, NUM_BURST = 150, 20, 8


@pytest.mark.parametrize(("prompt", "sampling"), [(PROMPT[1:], Sampling()), (PROMPT, Sampling(0.9, seed=6))])
@torch.inference_mode()
def test_a_long_answer_speculates_again_after_a_burst(
    tiny_pair: Pair, prompt: tuple[int, ...], sampling: Sampling
) -> None:
    """A drafted token costs 0.3 plain steps: too much where a step makes eight tokens, little where it makes one."""
    long = Request(prompt, NUM_LONG, sampling, stop_token_ids=NEVER)
    burst = [Request(OTHER_PROMPT[i:], NUM_SHORT, sampling, stop_token_ids=NEVER) for i in range(NUM_BURST)]
    expected = plain_text(tiny_pair, prompt, NUM_LONG, sampling)
    controller = Watched(tiny_pair.block_size - 1, linear_price(0.3), follows=False)
    engine = Engine(
        scripted_pair(tiny_pair, prompt + expected, NEVER),
        num_slots=1 + NUM_BURST,
        max_length=256,
        controller=controller,
    )
    texts: dict[int, tuple[int, ...]] = {engine.add(long): ()}

    def advance(num_steps: int) -> list[int]:
        """Positions that each of some steps drafted; fewer where nothing is left to do."""
        drafted = list[int]()
        while len(drafted) < num_steps and not engine.idle:
            for step in engine.step():
                texts[step.request_id] += step.tokens
            drafted.append(controller.outcomes[-1].load.num_drafted)
        return drafted

    assert all(advance(12)[1:])
    for request in burst:
        texts[engine.add(request)] = ()
    advance(1)  # takes their prompts in
    assert engine.num_decoding == 1 + NUM_BURST
    assert advance(NUM_SHORT - 1) == [0] * (NUM_SHORT - 1)
    assert engine.num_decoding == 1
    after = advance(NUM_LONG)
    assert len(after) > 9
    assert all(after[:-1])
    assert list(texts.values()) == [
        expected, *(plain_text(tiny_pair, each.prompt_ids, NUM_SHORT, sampling) for each in burst)
    ]  # fmt: skip
