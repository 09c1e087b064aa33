"""Random requests, pairs of any target to decode them with, and what the stock model answers."""

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
from helpers.engines import NEVER, changed_logits
from helpers.tiny import MASK_ID, byte_tokenizer

MAX_NEW_TOKENS = 14


def pair_of(target: Any, dtype: torch.dtype) -> Pair:
    draft = DraftModel(new_draft_config(target.config, mask_token_id=MASK_ID, num_layers=2, block_size=8))
    models = (model.to(dtype).eval().requires_grad_(False) for model in (target, draft))
    return Pair(PairId("t", "1", "d", "2"), *models, byte_tokenizer())  # type: ignore[arg-type]


def any_request(rng: np.random.Generator, num_prompt_tokens: int) -> Request:
    """All sampling fields at random, each off in about half of the requests."""

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
    return Request(
        tuple(rng.integers(0, 256, size=num_prompt_tokens).tolist()),
        num,
        sampling,
        size,
        stops,
        layout=LAYOUTS[int(rng.integers(len(LAYOUTS)))],
        min_new_tokens=int(maybe(rng.integers(0, num + 1), 0)),  # type: ignore[call-overload]
        lookup=(None, None, True, False)[int(rng.integers(4))],
    )


# --- by the stock model, one token at a time ---


@cache
def tables(pair: Pair) -> LLTokenizer:
    return from_tokenizer(pair.tokenizer, pair.vocab_size, sorted(pair.stop_token_ids))


def matcher_of(pair: Pair, request: Request, answer: Sequence[int]) -> LLMatcher | None:
    """One that has read the whole answer anew."""
    if request.constraint is None:
        return None
    assert isinstance(request.constraint, CompiledGrammar)
    matcher = LLMatcher(tables(pair), request.constraint.grammar.compiled_from())
    assert matcher.consume_tokens(list(answer))
    return matcher


def next_scores(pair: Pair, logits: torch.Tensor, request: Request, answer: Sequence[int]) -> torch.Tensor:
    """Logits [V] of the next token, changed by all that the request asks for but temperature, top_k and top_p."""
    barred = request.stop_token_ids if len(answer) < request.min_new_tokens else NEVER
    sampling = request.sampling
    if (matcher := matcher_of(pair, request, answer)) is not None:
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[: pair.vocab_size].astype(bool))
        logits = logits.masked_fill(~allowed, -torch.inf)
        if barred >= set(allowed.nonzero()[:, 0].tolist()):  # the constraint wins, by the target's own logits
            barred, sampling = NEVER, Sampling(sampling.temperature, min_p=sampling.min_p)
    return changed_logits(logits, sampling, request.prompt_ids, answer, barred)


@torch.inference_mode()
def slow_answers(pair: Pair, requests: Sequence[Request]) -> list[tuple[tuple[int, ...], FinishReason]]:
    """Answers to requests without stop strings, whose prompts are equally long, and why they end."""
    texts = [list(request.prompt_ids) for request in requests]
    samplings = [replace(request.sampling, min_p=0.0) for request in requests]
    num_prompt, ended = len(texts[0]), dict[int, tuple[tuple[int, ...], FinishReason]]()
    while len(ended) < len(requests):
        logits = pair.target(torch.tensor(texts)).logits[:, -1]
        scores = [
            of_row if i in ended else next_scores(pair, of_row, requests[i], texts[i][num_prompt:])
            for i, of_row in enumerate(logits)
        ]
        tokens = keyed_sample(torch.stack(scores), [len(text) for text in texts], samplings).tolist()
        for i, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            texts[i].append(token)  # also after its end, so that all are equally long
            if i in ended:
                continue
            answer = tuple(texts[i][num_prompt:])
            matcher = matcher_of(pair, request, answer)
            if token in request.stop_token_ids or (matcher is not None and matcher.is_stopped()):
                ended[i] = answer, "stop"
            elif len(answer) == request.max_new_tokens:
                ended[i] = answer, "length"
    return [ended[i] for i in range(len(requests))]


@torch.inference_mode()
def check_log_probs(pair: Pair, request: Request, steps: Sequence[Step]) -> None:
    """Those of a request's answer and prompt are the stock model's, by one pass over the text."""
    text, num_prompt = (
        (*request.prompt_ids, *(token for step in steps for token in step.tokens)),
        len(request.prompt_ids),
    )
    scores = pair.target(torch.tensor([text])).logits[0].log_softmax(dim=-1)
    of_answer = [of_token for step in steps for of_token in step.logprobs]
    for given, num, start, end in (
        (of_answer, request.num_logprobs, num_prompt, len(text)),
        (steps[0].prompt_logprobs[1:], request.num_prompt_logprobs, 1, num_prompt),
    ):
        if num is None:
            assert not given
            continue
        for position, of_token in zip(range(start, end), given, strict=True):
            assert isinstance(of_token, TokenLogprobs)
            before = scores[position - 1]
            assert of_token.logprob == pytest.approx(float(before[text[position]]), abs=1e-3)
            values = [value for _, value in of_token.likeliest]
            assert values == pytest.approx(before.topk(num).values.tolist(), abs=1e-3)
            assert values == pytest.approx([float(before[token]) for token, _ in of_token.likeliest], abs=1e-3)
