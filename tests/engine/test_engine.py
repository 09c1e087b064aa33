"""The engine's text is the target's own, whatever the block sizes, the batch and the acceptance."""

from collections.abc import Sequence

import pytest
import torch

import blockpilot as bp
from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.pairs.loading import Pair
from blockpilot.types import Request, Sampling
from helpers.engines import NEVER, PROMPT, plain_text, run, text_of
from helpers.scripted import scripted_pair


def oracle_steps(text: Sequence[int], start: int, block_size: int, wrong: frozenset[int]) -> list[int]:
    """num_emitted of each step by a slow walk: `start` is the first anchor's position, `text` ends the answer."""
    emitted, anchor = [], start
    while anchor < len(text) - 1:
        count = 1
        while count < block_size and anchor + count not in wrong:
            count += 1
        emitted.append(min(count, len(text) - 1 - anchor))
        anchor += emitted[-1]
    return emitted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong_every", [1, 2, 3, 7, 1000])
def test_every_block_size_emits_the_plain_text_at_every_acceptance(
    tiny_pair: Pair, temperature: float, wrong_every: int
) -> None:
    sampling, num = Sampling(temperature, seed=14), 40
    expected = plain_text(tiny_pair, PROMPT, num, sampling)
    text = PROMPT + expected
    wrong = frozenset(range(0, len(text), wrong_every))
    pair = scripted_pair(tiny_pair, text, wrong)
    for block_size in range(1, 13):
        steps = list(
            generate(
                pair,
                PROMPT,
                block_size=block_size,
                max_new_tokens=num,
                temperature=temperature,
                seed=14,
                stop_token_ids=NEVER,
            )
        )
        assert text_of(steps) == expected
        emitted = [len(step.tokens) for step in steps[1:]]
        assert emitted == oracle_steps(text, len(PROMPT), block_size, wrong)
        assert [step.num_accepted for step in steps[1:-1]] == [n - 1 for n in emitted[:-1]]


@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_ragged_batches_of_mixed_block_sizes_equal_single_runs(tiny_pair: Pair, num_slots: int) -> None:
    requests = [
        Request(
            PROMPT[: 1 + i % 9],
            5 + 3 * i,
            Sampling([0.0, 1.0, 0.7][i % 3], [1.0, 0.9][i % 2], [0, 20][i % 2], seed=i),
            block_size=1 + i % 12,
            stop_token_ids=NEVER,
        )
        for i in range(16)
    ]
    together = run(Engine(tiny_pair, num_slots=num_slots, max_length=128), requests)
    for request, steps in zip(requests, together, strict=True):
        expected = plain_text(tiny_pair, request.prompt_ids, request.max_new_tokens, request.sampling)
        assert text_of(steps) == expected
        assert steps[-1].finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_embedded_pair_is_exact_at_every_block_size(embedded_pair: Pair, temperature: float) -> None:
    """The real draft, whose acceptance is its own: single runs and one batch of all block sizes, fp32."""
    messages = [{"role": "user", "content": "Count from one to ten in words."}]
    prompt = tuple(
        embedded_pair.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    )
    sampling, num = Sampling(temperature, seed=3), 14
    expected = plain_text(embedded_pair, prompt, num, sampling)
    requests = [Request(prompt, num, sampling, block_size=b, stop_token_ids=NEVER) for b in range(1, 13)]
    together = run(Engine(embedded_pair, num_slots=12, max_length=128), requests)
    assert [text_of(steps) for steps in together] == [expected] * 12
    for block_size in (3, 8):
        alone = generate(
            embedded_pair,
            prompt,
            block_size=block_size,
            max_new_tokens=num,
            temperature=temperature,
            seed=3,
            stop_token_ids=NEVER,
        )
        assert text_of(list(alone)) == expected


def test_greedy_text_is_that_of_transformers_generate(embedded_pair: Pair) -> None:
    messages = [{"role": "user", "content": "Name three fruits."}]
    ids = embedded_pair.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    theirs = embedded_pair.target.generate(torch.tensor([ids]), max_new_tokens=30, do_sample=False)
    ours = text_of(list(generate(embedded_pair, ids, block_size=6, max_new_tokens=30)))
    assert ours == tuple(theirs[0, len(ids) :].tolist())


# --- ends of a request ---


def test_a_stop_token_ends_mid_block_and_nothing_follows(tiny_pair: Pair) -> None:
    expected = plain_text(tiny_pair, PROMPT, 30, Sampling())
    pair = scripted_pair(tiny_pair, PROMPT + expected, NEVER)  # everything is accepted
    stop = expected[10]
    first = expected.index(stop)
    steps = list(generate(pair, PROMPT, block_size=12, max_new_tokens=30, stop_token_ids=frozenset({stop})))
    assert text_of(steps) == expected[: first + 1]
    assert steps[-1].finish_reason == "stop"
    assert sum(len(s.tokens) for s in steps) == first + 1


def test_a_stop_string_ends_at_the_token_that_completes_it(tiny_pair: Pair) -> None:
    expected = plain_text(tiny_pair, PROMPT, 30, Sampling(1.0, seed=4))
    pair = scripted_pair(tiny_pair, PROMPT + expected, NEVER)
    whole = tiny_pair.tokenizer.decode(expected)
    stop = next(char for char in whole[8:] if char.isascii() and char.isprintable() and char not in whole[:8])
    steps = list(
        generate(
            pair,
            PROMPT,
            block_size=9,
            max_new_tokens=30,
            temperature=1.0,
            seed=4,
            stop_token_ids=NEVER,
            stop_strings=(stop,),
        )
    )
    text = tiny_pair.tokenizer.decode(text_of(steps))
    assert steps[-1].finish_reason == "stop"
    assert stop in text
    assert stop not in tiny_pair.tokenizer.decode(text_of(steps)[:-1])


def test_the_context_ends_a_request(tiny_pair: Pair) -> None:
    [steps] = run(Engine(tiny_pair, num_slots=1, max_length=32), [Request(PROMPT, 500, block_size=8)])
    assert len(PROMPT) + len(text_of(steps)) == 32
    assert steps[-1].finish_reason == "length"
    assert text_of(steps) == plain_text(tiny_pair, PROMPT, 32 - len(PROMPT), Sampling())


def test_one_token_needs_no_step(tiny_pair: Pair) -> None:
    steps = list(generate(tiny_pair, PROMPT, max_new_tokens=1, stop_token_ids=NEVER))
    assert [(len(s.tokens), s.block_size, s.finish_reason) for s in steps] == [(1, 0, "length")]


# --- batch life ---


def test_requests_join_and_leave_a_running_batch(tiny_pair: Pair) -> None:
    engine = Engine(tiny_pair, num_slots=3, max_length=128)
    requests = [Request(PROMPT[: 3 + i], 6 + 5 * (i % 4), block_size=1 + i, stop_token_ids=NEVER) for i in range(9)]
    texts: dict[int, list[int]] = {}
    pending = list(requests)
    while pending or not engine.idle:
        if pending:  # one more arrives before every step
            texts[engine.add(pending.pop(0))] = []
        for step in engine.step():
            texts[step.request_id] += step.tokens
    for request, text in zip(requests, texts.values(), strict=True):
        assert tuple(text) == plain_text(tiny_pair, request.prompt_ids, request.max_new_tokens, Sampling())


def test_cancel_frees_the_slot_and_disturbs_nobody(tiny_pair: Pair) -> None:
    engine = Engine(tiny_pair, num_slots=3, max_length=128)
    requests = [Request(PROMPT[: 5 + i], 25, block_size=3 + i, stop_token_ids=NEVER) for i in range(4)]
    ids = [engine.add(request) for request in requests]
    texts: dict[int, list[int]] = {i: [] for i in ids}
    for step in engine.step() + engine.step():
        texts[step.request_id] += step.tokens
    engine.cancel(ids[0])
    assert (engine.num_active, engine.num_waiting) == (2, 1)
    engine.cancel(999)
    while not engine.idle:
        for step in engine.step():
            assert step.request_id != ids[0]
            texts[step.request_id] += step.tokens
    for i, request in zip(ids[1:], requests[1:], strict=True):
        assert tuple(texts[i]) == plain_text(tiny_pair, request.prompt_ids, 25, Sampling())


def test_cancel_of_a_waiting_request(tiny_pair: Pair) -> None:
    engine = Engine(tiny_pair, num_slots=1, max_length=64)
    first, second = (engine.add(Request(PROMPT, 4, stop_token_ids=NEVER)) for _ in range(2))
    engine.cancel(second)
    seen = set()
    while not engine.idle:
        seen |= {step.request_id for step in engine.step()}
    assert seen == {first}


# --- bad input ---


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), 5), "prompt is empty"),
        (
            Request(tuple(range(64)), 5),
            r"64 tokens: at most 63 .* \(max_length is 64, the model's limit is 1024 tokens\)",
        ),
        (Request((5, 260), 5), "prompt token 260: must be 0 to 259"),
        (Request((5, -1), 5), "prompt token -1"),
        (Request(PROMPT, 0), "max_new_tokens 0: must be at least 1"),
        (Request(PROMPT, 5, block_size=0), "block_size 0: must be 1 to 32"),
        (Request(PROMPT, 5, block_size=33), "block_size 33: must be 1 to 32"),
    ],
)
def test_bad_requests_are_refused_before_they_queue(tiny_pair: Pair, request_: Request, message: str) -> None:
    engine = Engine(tiny_pair, num_slots=1, max_length=64)
    with pytest.raises(ValueError, match=message):
        engine.add(request_)
    assert engine.idle


@pytest.mark.parametrize(("num_slots", "max_length"), [(0, 64), (1, 1), (1, 5000)])
def test_bad_engines_are_refused(tiny_pair: Pair, num_slots: int, max_length: int) -> None:
    with pytest.raises(ValueError, match=r"num_slots 0|max_length"):
        Engine(tiny_pair, num_slots=num_slots, max_length=max_length)


def test_public_names() -> None:
    assert all(hasattr(bp, name) for name in bp.__all__)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_emits_the_text_of_one_token_at_a_time(tiny_pair_dirs: tuple[str, str]) -> None:
    pair = bp.load_pair(target=str(tiny_pair_dirs[0]), draft=str(tiny_pair_dirs[1]), device="cuda", dtype="float32")
    texts = {
        text_of(list(generate(pair, PROMPT, block_size=b, max_new_tokens=40, temperature=1.0, stop_token_ids=NEVER)))
        for b in (1, 2, 4, 8)
    }
    assert len(texts) == 1
