"""Exactness in bfloat16, where layers are in C: a token's bits do not depend on what is beside it."""

import pytest
import torch

from blockpilot.engine.engine import Engine
from blockpilot.native.products import native_product
from blockpilot.pairs.loading import Pair, load_pair
from blockpilot.types import Request, Sampling

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
