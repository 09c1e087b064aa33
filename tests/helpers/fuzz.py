"""Random requests, pairs of any target, and checks of answers against the stock model."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from blockpilot.constraints.automaton import CompiledGrammar
from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.dflash_checkpoint import new_draft_config
from blockpilot.engine.sampling import keyed_sample
from blockpilot.pairs.loading import Pair
from blockpilot.types import LAYOUTS, FinishReason, PairId, Request, Sampling, Step, TokenLogprobs
from helpers.engines import NEVER, changed_logits, text_of
from helpers.tiny import MASK_ID, byte_tokenizer

MAX_NEW_TOKENS = 14


def pair_of(target: Any, dtype: torch.dtype) -> Pair:
    draft = DraftModel(new_draft_config(target.config, mask_token_id=MASK_ID, num_layers=2, block_size=8))
    models = (model.to(dtype).eval().requires_grad_(False) for model in (target, draft))
    return Pair(PairId("t", "1", "d", "2"), *models, byte_tokenizer())  # type: ignore[arg-type]


def any_request(rng: np.random.Generator, num_prompt_tokens: int) -> Request:
    """A request with random sampling fields, each off in about half of the requests."""

    def maybe(value: object, off: object) -> object:
        return value if rng.random() < 0.5 else off

    few = rng.choice(256, size=12, replace=False).tolist()
    sampling = Sampling(
        temperature=float(rng.choice([0.0, 0.0, 0.7, 1.0, 6.0])),
        top_p=float(rng.choice([1.0, 1.0, 0.9, 0.5])),
        top_k=int(rng.choice([0, 0, 40, 3])),
        seed=int(rng.integers(2**40)),
        min_p=float(rng.choice([0.0, 0.0, 0.02, 0.3])),
        presence_penalty=float(maybe(rng.uniform(-2, 2), 0.0)),  # type: ignore[arg-type]
        frequency_penalty=float(maybe(rng.uniform(-2, 2), 0.0)),  # type: ignore[arg-type]
        repetition_penalty=float(maybe(rng.uniform(0.7, 1.8), 1.0)),  # type: ignore[arg-type]
        logit_bias=tuple((t, float(rng.uniform(-8, 8))) for t in few[: int(rng.choice([0, 0, 1, 12]))]),
    )
    num = int(rng.integers(1, MAX_NEW_TOKENS + 1))
    size = None if rng.random() < 0.3 else int(rng.integers(1, 10))
    stops = frozenset(rng.choice(256, size=40, replace=False).tolist()) if rng.random() < 0.5 else NEVER
    prompt, layout = rng.integers(0, 256, size=num_prompt_tokens).tolist(), LAYOUTS[int(rng.integers(len(LAYOUTS)))]
    least = int(maybe(rng.integers(0, num + 1), 0))  # type: ignore[call-overload]
    lookup = (None, None, True, False)[int(rng.integers(4))]
    return Request(prompt, num, sampling, size, stops, layout=layout, min_new_tokens=least, lookup=lookup)


# --- by the stock model ---


@cache
def tables(pair: Pair) -> LLTokenizer:
    return from_tokenizer(pair.tokenizer, pair.vocab_size, sorted(pair.stop_token_ids))


def matcher_of(pair: Pair, request: Request, answer: Sequence[int]) -> LLMatcher | None:
    """A new matcher that has read the answer; None without a constraint."""
    if request.constraint is None:
        return None
    assert isinstance(request.constraint, CompiledGrammar)
    matcher = LLMatcher(tables(pair), request.constraint.grammar.compiled_from())
    assert matcher.consume_tokens(list(answer))
    return matcher


def next_scores(
    pair: Pair, logits: torch.Tensor, request: Request, answer: Sequence[int], matcher: LLMatcher | None
) -> torch.Tensor:
    """Logits [V] of the next token, after all parameters and masks but temperature, top_k and top_p."""
    barred = request.stop_token_ids if len(answer) < request.min_new_tokens else NEVER
    sampling = request.sampling
    if matcher is not None:
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[: pair.vocab_size].astype(bool))
        logits = logits.masked_fill(~allowed, -torch.inf)
        if barred >= set(allowed.nonzero()[:, 0].tolist()):  # the constraint wins, without bias and penalties
            barred, sampling = NEVER, Sampling(sampling.temperature, min_p=sampling.min_p)
    return changed_logits(logits, sampling, request.prompt_ids, answer, barred)


@torch.inference_mode()
def check_answers(pair: Pair, requests: Sequence[Request], answers: Sequence[Sequence[Step]]) -> None:
    """Assert that tokens, ends and log probabilities are those of the stock model, by one pass over all texts.

    Each token is the choice after those before it; requests must not have stop strings.
    """
    texts = [[*request.prompt_ids, *text_of(steps)] for request, steps in zip(requests, answers, strict=True)]
    longest = max(map(len, texts))
    logits = pair.target(torch.tensor([text + [0] * (longest - len(text)) for text in texts])).logits
    for request, steps, text, text_logits in zip(requests, answers, texts, logits, strict=True):
        num_prompt = len(request.prompt_ids)
        beginnings = [tuple(text[num_prompt:end]) for end in range(num_prompt, len(text) + 1)]
        matchers = [matcher_of(pair, request, answer) for answer in beginnings]
        reasons = [why_it_ends(request, *after) for after in zip(beginnings[1:], matchers[1:], strict=True)]
        before = zip(text_logits[num_prompt - 1 :], beginnings[:-1], matchers[:-1], strict=False)
        scores = [next_scores(pair, row, request, answer, matcher) for row, answer, matcher in before]
        assert reasons == [None] * (len(scores) - 1) + [steps[-1].finish_reason], request
        samplings = [replace(request.sampling, min_p=0.0)] * len(scores)
        positions = list(range(num_prompt, len(text)))
        assert keyed_sample(torch.stack(scores), positions, samplings).tolist() == text[num_prompt:], request
        check_log_probs(text_logits[: len(text)], text, request, steps)


def why_it_ends(request: Request, answer: Sequence[int], matcher: LLMatcher | None) -> FinishReason | None:
    """Finish reason after this answer; None if it continues."""
    if answer[-1] in request.stop_token_ids or (matcher is not None and matcher.is_stopped()):
        return "stop"
    return "length" if len(answer) == request.max_new_tokens else None


def check_log_probs(logits: torch.Tensor, text: Sequence[int], request: Request, steps: Sequence[Step]) -> None:
    """Assert that log probabilities of answer and prompt are those of the stock model's logits [len(text), V]."""
    scores, num_prompt = logits.log_softmax(dim=-1), len(request.prompt_ids)
    answer_logprobs = [token_logprobs for step in steps for token_logprobs in step.logprobs]
    for given, num, start, end in (
        (answer_logprobs, request.num_logprobs, num_prompt, len(text)),
        (steps[0].prompt_logprobs[1:], request.num_prompt_logprobs, 1, num_prompt),
    ):
        if num is None:
            assert not given
            continue
        for position, token_logprobs in zip(range(start, end), given, strict=True):
            assert isinstance(token_logprobs, TokenLogprobs)
            before = scores[position - 1]
            assert token_logprobs.logprob == pytest.approx(float(before[text[position]]), abs=1e-3)
            values = [value for _, value in token_logprobs.likeliest]
            assert values == pytest.approx(before.topk(num).values.tolist(), abs=1e-3)
            assert values == pytest.approx([float(before[token]) for token, _ in token_logprobs.likeliest], abs=1e-3)
