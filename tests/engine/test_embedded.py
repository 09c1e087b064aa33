"""The real pair: its draft is often right, and its text is one token at a time's, in float32 and bfloat16."""

from dataclasses import replace

import pytest

from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.types import Layout, Request, Sampling
from helpers.engines import NEVER, plain_text, run, text_of

LONG = "Tiles sum over the first columns of a long text, in an order of their own. " * 6  # 115 tokens
BLOCKS: tuple[tuple[int, Layout], ...] = ((2, "chain"), (8, "chain"), (5, "tree"), (16, "tree"))


def encode(pair: Pair, question: str) -> tuple[int, ...]:
    messages = [{"role": "user", "content": question}]
    return tuple(pair.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_float32_texts_are_the_stock_models(embedded_pair: Pair, temperature: float) -> None:
    """By chains and trees in one batch; more of a tree is accepted than of a chain."""
    prompt, sampling = encode(embedded_pair, "Why is the sky blue?"), Sampling(temperature, seed=7)
    expected = plain_text(embedded_pair, prompt, 40, sampling)
    requests = [Request(prompt, 40, sampling, size, NEVER, layout=layout) for size, layout in BLOCKS]
    answers = run(Engine(embedded_pair, num_slots=4, max_length=128), requests)
    assert [text_of(steps) for steps in answers] == [expected] * 4
    num_steps = [len(steps) for steps in answers]
    assert num_steps[3] < num_steps[1] < 40
    assert any(not step.tree.is_chain for step in answers[3])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bfloat16_text_is_the_same_however_it_is_decoded(bfloat16_pair: Pair, temperature: float) -> None:
    """Bit for bit as alone, one token at a time: in a batch, by chains, and by trees of several sizes."""
    prompts = [tuple(bfloat16_pair.tokenizer(text).input_ids) for text in ("Name three fruits.", LONG, "def f(n):")]
    plain = [Request(ids, 24, Sampling(temperature, seed=i), 1) for i, ids in enumerate(prompts)]
    engine = Engine(bfloat16_pair, num_slots=1, max_length=192)
    expected = [text_of(steps) for steps in run(engine, plain)]
    for size, layout in ((1, "chain"), (8, "chain"), (32, "tree")):
        requests = [replace(request, block_size=size, layout=layout) for request in plain]  # type: ignore[arg-type]
        together = run(Engine(bfloat16_pair, num_slots=3, max_length=192), requests)
        assert [text_of(steps) for steps in together] == expected


def test_the_prefix_cache_changes_no_step(bfloat16_pair: Pair) -> None:
    """Drafts and acceptance of a second turn are those without the cache."""
    first, again = (
        encode(bfloat16_pair, "Count from one to ten in words."),
        tuple(bfloat16_pair.tokenizer("\nAnd once more, please.").input_ids),
    )
    seen = []
    for prefix_tokens in (0, 1024):
        engine = Engine(bfloat16_pair, num_slots=1, max_length=256, prefix_tokens=prefix_tokens)
        request = Request(first, 40, block_size=8, layout="tree", stop_token_ids=NEVER)
        [answer] = run(engine, [request])
        [steps] = run(engine, [replace(request, prompt_ids=(*first, *text_of(answer), *again))])
        assert (steps[0].num_reused > len(first)) == bool(prefix_tokens)
        assert sum(step.num_accepted for step in steps) > 10
        seen.append([(step.tokens, step.num_accepted, step.tree) for step in steps])
    assert seen[0] == seen[1]
