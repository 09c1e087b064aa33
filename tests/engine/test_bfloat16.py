"""Exactness in bfloat16, where layers are in C: a token's bits do not depend on what is beside it."""

from dataclasses import replace

import pytest
import torch

from blockpilot.engine.engine import Engine
from blockpilot.native.products import native_product
from blockpilot.pairs.loading import Pair, load_pair
from blockpilot.types import Request, Sampling
from helpers.engines import NEVER, run, text_of

LONG = "Tiles sum over the first columns of a long text, in an order of their own. " * 6  # 115 tokens
PROMPTS = "Name three fruits.", LONG, "def fibonacci(n):"


@pytest.fixture(scope="module")
def pair() -> Pair:
    if native_product(torch.zeros(16, 32, dtype=torch.bfloat16), None) is None:
        pytest.skip("no compiler, or no CPU for it")
    return load_pair("smollm2-135m", dtype="bfloat16")


def texts(pair: Pair, num_slots: int, temperature: float, block_size: int, layout: str) -> list[list[int]]:
    """Answers of 40 tokens to PROMPTS."""
    engine = Engine(pair, num_slots=num_slots, max_length=192)
    found = {}
    for seed, prompt in enumerate(PROMPTS):
        tokens = tuple(pair.tokenizer(prompt).input_ids)
        sampling = Sampling(temperature=temperature, seed=seed)
        request = Request(tokens, 40, sampling=sampling, block_size=block_size, layout=layout)
        found[engine.add(request)] = list[int]()
    while not engine.idle:
        for step in engine.step():
            found[step.request_id] += step.tokens
    return list(found.values())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_is_the_same_however_it_is_decoded(pair: Pair, temperature: float) -> None:
    """As one token at a time, alone: in a batch, by chains, and by trees of several sizes."""
    expected = texts(pair, 1, temperature, 1, "chain")
    for num_slots in (1, 3):
        for block_size, layout in ((1, "chain"), (8, "chain"), (5, "tree"), (32, "tree")):
            assert texts(pair, num_slots, temperature, block_size, layout) == expected, (
                num_slots,
                block_size,
                layout,
            )


def test_a_kept_prefix_changes_no_step(pair: Pair) -> None:
    """Of a second turn: what the draft proposes and how much of it is accepted are those without anything kept."""
    turns = [{"role": "user", "content": "Count from one to ten in words."}]
    first = tuple(pair.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))
    looks = []
    for kept in (0, 1024):
        engine = Engine(pair, num_slots=1, max_length=256, prefix_tokens=kept)
        ask = Request(first, 40, block_size=8, layout="tree", stop_token_ids=NEVER)
        [answer] = run(engine, [ask])
        again = tuple(pair.tokenizer("\nAnd once more, please.").input_ids)
        [steps] = run(engine, [replace(ask, prompt_ids=(*first, *text_of(answer), *again))])
        assert (steps[0].num_reused > len(first)) == bool(kept)
        assert sum(step.num_accepted for step in steps) > 10
        looks.append([(step.tokens, step.num_accepted, step.tree) for step in steps])
    assert looks[0] == looks[1]
