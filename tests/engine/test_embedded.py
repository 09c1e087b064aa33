"""The embedded pair: accepted drafts, and texts of one-token-at-a-time decoding, in float32 and bfloat16."""

from dataclasses import replace

import torch

from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.pairs.loading import Pair
from blockpilot.types import Layout, Request, Sampling
from helpers.engines import NEVER, plain_text, run, text_of

LONG = "Tiles sum over the first columns of a long text, in an order of their own. " * 6  # 115 tokens
BLOCKS: tuple[tuple[int, Layout], ...] = ((2, "chain"), (8, "chain"), (5, "tree"), (16, "tree"))


def encode(pair: Pair, question: str) -> tuple[int, ...]:
    messages = [{"role": "user", "content": question}]
    return tuple(pair.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def test_float32_texts_are_the_stock_models(embedded_pair: Pair) -> None:
    """Chains and trees at temperatures 0 and 1 in one batch; more tokens of a tree are accepted than of a chain."""
    prompt, samplings = encode(embedded_pair, "Why is the sky blue?"), (Sampling(0.0, seed=7), Sampling(1.0, seed=7))
    requests = [
        Request(prompt, 40, sampling, size, NEVER, layout=layout) for sampling in samplings for size, layout in BLOCKS
    ]
    answers = run(Engine(embedded_pair, num_slots=8, max_length=128), requests)
    for sampling, (twos, chains, fives, trees) in zip(samplings, (answers[:4], answers[4:]), strict=True):
        expected = plain_text(embedded_pair, prompt, 40, sampling)
        assert [text_of(steps) for steps in (twos, chains, fives, trees)] == [expected] * 4
        assert len(trees) < len(chains) < 40
        assert any(not step.tree.is_chain for step in trees)


def test_greedy_text_is_that_of_transformers_generate(embedded_pair: Pair) -> None:
    ids = encode(embedded_pair, "Name three fruits.")
    theirs = embedded_pair.target.generate(torch.tensor([ids]), max_new_tokens=30, do_sample=False)
    ours = text_of(list(generate(embedded_pair, ids, block_size=6, max_new_tokens=30)))
    assert ours == tuple(theirs[0, len(ids) :].tolist())


def test_a_bfloat16_text_is_the_same_however_it_is_decoded(bfloat16_pair: Pair) -> None:
    """Exactly the text of a request alone, one token at a time, at temperatures 0 and 1: in a batch, with chains, and
    with trees.
    """
    prompts = [tuple(bfloat16_pair.tokenizer(text).input_ids) for text in ("Name three fruits.", LONG, "def f(n):")]
    plain = [Request(ids, 24, Sampling(hot, seed=i), 1) for hot in (0.0, 1.0) for i, ids in enumerate(prompts)]
    expected = [text_of(steps) for steps in run(Engine(bfloat16_pair, num_slots=1, max_length=192), plain)]
    for size, layout in ((1, "chain"), (8, "chain"), (32, "tree")):
        requests = [replace(request, block_size=size, layout=layout) for request in plain]  # type: ignore[arg-type]
        together = run(Engine(bfloat16_pair, num_slots=6, max_length=192), requests)
        assert [text_of(steps) for steps in together] == expected
