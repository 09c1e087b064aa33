"""Bias, penalties, min_p and the least length: a speculated text is the one of one token at a time.

The oracle reads the whole text anew for every token, by the stock model, and changes its logits token by token
(helpers/engines.py).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from blockpilot.control.controller import FixedPolicy
from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.engine.penalties import LogitsProcessor
from blockpilot.engine.sampling import keyed_sample
from blockpilot.pairs.loading import Pair
from blockpilot.types import FinishReason, Request, Sampling
from helpers.engines import NEVER, PROMPT, changed_logits, plain_text, run, text_of
from helpers.fuzz import any_request

PLAIN = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": ()}


# --- one token at a time ---


def next_scores(logits: torch.Tensor, request: Request, text: Sequence[int]) -> torch.Tensor:
    prompt, answer = text[: len(request.prompt_ids)], text[len(request.prompt_ids) :]
    is_early = len(answer) < request.min_new_tokens
    return changed_logits(logits, request.sampling, prompt, answer, request.stop_token_ids if is_early else ())


def expected(pair: Pair, requests: Sequence[Request]) -> list[tuple[tuple[int, ...], FinishReason]]:
    """Texts of requests whose prompts are equally long, and why they end."""
    texts = [list(request.prompt_ids) for request in requests]
    reasons: list[FinishReason | None] = [None] * len(requests)
    ends, samplings = [0] * len(requests), [replace(request.sampling, min_p=0.0) for request in requests]
    while None in reasons:
        logits = pair.target(torch.tensor(texts)).logits[:, -1]
        scores = torch.stack([next_scores(*each) for each in zip(logits, requests, texts, strict=True)])
        next_tokens = keyed_sample(scores, [len(text) for text in texts], samplings).tolist()
        for i, (request, next_token) in enumerate(zip(requests, next_tokens, strict=True)):
            texts[i].append(next_token)  # also after its end, so that all are equally long
            if reasons[i] is None and next_token in request.stop_token_ids:
                reasons[i], ends[i] = "stop", len(texts[i])
            elif reasons[i] is None and len(texts[i]) == len(request.prompt_ids) + request.max_new_tokens:
                reasons[i], ends[i] = "length", len(texts[i])
    found = []
    for request, text, end, reason in zip(requests, texts, ends, reasons, strict=True):
        assert reason is not None
        found.append((tuple(text[len(request.prompt_ids) : end]), reason))
    return found


# --- random requests ---


def compare(pair: Pair, num_requests: int, seed: int) -> tuple[int, int]:
    """Decode so many random requests, 16 at a time; gives the number of texts changed and of tokens accepted."""
    rng, num_changed, num_accepted = np.random.default_rng(seed), 0, 0
    for start in range(0, num_requests, 16):
        length = int(rng.integers(3, 20))
        requests = [any_request(rng, length) for _ in range(min(16, num_requests - start))]
        policy = None if rng.random() < 0.5 else FixedPolicy(4)
        engine = Engine(
            pair,
            num_slots=int(rng.integers(1, 5)),
            max_length=64,
            policy=policy,
            max_prefill_tokens=int(rng.choice([5, 100])),
        )
        with torch.inference_mode():
            wanted = expected(pair, requests)
            plain = [replace(request, sampling=replace(request.sampling, **PLAIN)) for request in requests]
            without = expected(pair, plain) if start < 48 else wanted
        for steps, (text, reason), request in zip(run(engine, requests), wanted, requests, strict=True):
            assert (text_of(steps), steps[-1].finish_reason) == (text, reason), request
            num_accepted += sum(step.num_accepted for step in steps)
        num_changed += sum(a != b for a, b in zip(wanted, without, strict=True))
    return num_changed, num_accepted


@pytest.mark.parametrize("name", ["tiny_pair", "markov_pair", "dflash2_pair", "eagle_pair"])
def test_texts_of_96_random_requests_are_those_of_one_token_at_a_time(
    request: pytest.FixtureRequest, name: str
) -> None:
    num_changed, num_accepted = compare(request.getfixturevalue(name), 96, seed=1)
    assert num_changed > 24
    assert num_accepted > 10


@pytest.mark.soak
@pytest.mark.parametrize("name", ["tiny_pair", "markov_pair", "dflash2_pair", "eagle_pair"])
def test_texts_of_4000_random_requests_are_those_of_one_token_at_a_time(
    request: pytest.FixtureRequest, name: str
) -> None:
    compare(request.getfixturevalue(name), 4000, seed=2)


# --- what each field does ---


def decode(pair: Pair, num: int = 20, **more: object) -> tuple[int, ...]:
    sampling = Sampling(1.0, seed=5, **more)  # type: ignore[arg-type]
    return text_of(run(Engine(pair, max_length=128), [Request(PROMPT, num, sampling, 4)])[0])


def test_a_banned_token_never_comes_and_a_wanted_one_always(tiny_pair: Pair) -> None:
    plain = decode(tiny_pair)
    assert plain[0] not in decode(tiny_pair, logit_bias={plain[0]: -100.0})
    assert set(decode(tiny_pair, logit_bias={7: 100.0})) == {7}


def test_a_high_penalty_of_presence_lets_no_token_come_twice(tiny_pair: Pair) -> None:
    assert len(set(decode(tiny_pair, logit_bias=dict.fromkeys(range(9), 60.0)))) < 10
    text = decode(tiny_pair, presence_penalty=1000.0)
    assert len(set(text)) == len(text) == 20


def test_a_high_penalty_of_repetition_bars_the_prompts_tokens_as_well(tiny_pair: Pair) -> None:
    """All logits above 0 by a bias, so that the penalty lowers those of known tokens to nearly 0."""
    text = decode(tiny_pair, 60, logit_bias=dict.fromkeys(range(260), 1000.0), repetition_penalty=1e6)
    assert len(set(text) | set(PROMPT)) == len(text) + len(PROMPT)


def test_min_p_of_one_is_greedy(tiny_pair: Pair) -> None:
    with torch.inference_mode():
        assert decode(tiny_pair, min_p=1.0) == plain_text(tiny_pair, PROMPT, 20, Sampling())


def test_no_stop_token_comes_before_the_least_length(tiny_pair: Pair) -> None:
    every = frozenset(range(0, 260, 2))  # every second token ends a text
    for least in (0, 1, 7, 20):
        request = Request(PROMPT, 20, Sampling(1.0, seed=2), 5, every, min_new_tokens=least)
        (steps,) = run(Engine(tiny_pair, max_length=128), [request])
        text = text_of(steps)
        assert not every & set(text[:least])
        assert len(text) >= least
        if len(text) < 20:
            assert text[-1] in every
            assert steps[-1].finish_reason == "stop"


def test_stop_strings_are_looked_for_after_the_least_length(tiny_pair: Pair) -> None:
    """A text of one letter, which is the stop string."""
    sampling = Sampling(logit_bias={65: 1000.0})
    letter = tiny_pair.tokenizer.decode([65])
    for least in (0, 3, 12):
        request = Request(PROMPT, 12, sampling, 4, NEVER, (letter * 2,), min_new_tokens=least)
        (steps,) = run(Engine(tiny_pair, max_length=128), [request])
        assert "".join(text for step in steps for text in step.texts) == letter * least
        assert len(text_of(steps)) == min(12, least + 2)
        assert steps[-1].finish_reason == ("stop" if least < 12 else "length")


def test_generate_takes_all_of_them(tiny_pair: Pair) -> None:
    """Each by its own name: the text is that of a request with the same sampling."""
    fields = {"min_p": 0.01, "presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    found = generate(
        tiny_pair, PROMPT, max_new_tokens=20, temperature=1.0, seed=5, logit_bias={9: 2.0}, min_new_tokens=4, **fields
    )
    assert text_of(list(found)) == decode(tiny_pair, logit_bias={9: 2.0}, **fields)


def test_changed_logits_keep_what_bfloat16_would_lose() -> None:
    request = Request(PROMPT, 4, Sampling(logit_bias=((3, 0.01),)))
    processor = LogitsProcessor.of(request)
    assert processor is not None
    logits = torch.full((1, 260), 30.0, dtype=torch.bfloat16)
    found = processor(logits, PROMPT, [len(PROMPT)])
    assert found.dtype == torch.float32
    assert int(found.argmax()) == 3
    assert logits.eq(30.0).all()  # the target's own are not touched


def test_requests_that_change_nothing_have_no_processor() -> None:
    assert LogitsProcessor.of(Request(PROMPT, 4, Sampling(1.0, top_p=0.5, min_p=0.1), stop_token_ids={1})) is None  # type: ignore[arg-type]
    assert LogitsProcessor.of(Request(PROMPT, 4, min_new_tokens=3)) is None  # nothing stops it


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", 1.5),
        ("min_p", math.nan),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {"1": 1.0}),
    ],
)
def test_sampling_refuses_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        Sampling(**{field: value})  # type: ignore[arg-type]


def test_the_engine_refuses_tokens_that_are_not_there_and_lengths_that_cannot_be(tiny_pair: Pair) -> None:
    engine = Engine(tiny_pair, max_length=64)
    with pytest.raises(ValueError, match="logit_bias: token 260: must be 0 to 259"):
        engine.add(Request(PROMPT, 4, Sampling(logit_bias=((260, 1.0),))))
    with pytest.raises(ValueError, match="min_new_tokens 5: must be 0 to 4"):
        engine.add(Request(PROMPT, 4, min_new_tokens=5))


# --- log probabilities of the prompt ---


@pytest.mark.parametrize("max_prefill_tokens", [100, 4])
def test_log_probabilities_of_the_prompt_are_the_stock_models(tiny_pair: Pair, max_prefill_tokens: int) -> None:
    engine = Engine(tiny_pair, num_slots=3, max_length=64, max_prefill_tokens=max_prefill_tokens, prefix_tokens=256)
    asked = Request(PROMPT, 3, Sampling(), 4, num_prompt_logprobs=2)
    beside = Request(PROMPT[:7], 3, Sampling(), 1)
    for _ in range(2):  # the second time the prompt is in the prefix cache
        first = run(engine, [beside, asked])[1][0]
        with torch.inference_mode():
            scores = tiny_pair.target(torch.tensor([PROMPT])).logits[0].log_softmax(dim=-1)
        assert first.prompt_logprobs[0] is None
        assert len(first.prompt_logprobs) == len(PROMPT)
        for position, found in enumerate(first.prompt_logprobs[1:], 1):
            assert found is not None
            assert found.logprob == pytest.approx(float(scores[position - 1, PROMPT[position]]), abs=1e-4)
            top = scores[position - 1].topk(2)
            assert [token for token, _ in found.likeliest] == top.indices.tolist()
    assert not run(engine, [beside])[0][0].prompt_logprobs
