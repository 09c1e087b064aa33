"""Runs of an engine to its end, and reference texts by one-token-at-a-time decoding."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch

from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.types import Request, Sampling, Step

PROMPT = tuple(range(40, 59))
NEVER: frozenset[int] = frozenset()


def text_of(steps: Sequence[Step]) -> tuple[int, ...]:
    return tuple(token for step in steps for token in step.tokens)


def run(engine: Engine, requests: Sequence[Request]) -> list[list[Step]]:
    ids = [engine.add(request) for request in requests]
    steps: dict[int, list[Step]] = {i: [] for i in ids}
    while not engine.idle:
        for step in engine.step():
            steps[step.request_id].append(step)
    return [steps[i] for i in ids]


def changed_logits(
    logits: torch.Tensor,
    sampling: Sampling,
    prompt: Sequence[int],
    answer: Sequence[int],
    barred: Collection[int] = (),
) -> torch.Tensor:
    """Logits [V] of the next token after bias, `barred`, penalties and min_p, by a slow loop in float32."""
    scores = logits.numpy().astype(np.float32)
    for token, bias in sampling.logit_bias:
        scores[token] += np.float32(bias)
    scores[list(barred)] = -np.inf
    for token in set(answer) | (set(prompt) if sampling.repetition_penalty != 1 else set()):
        penalty = np.float32(sampling.repetition_penalty)
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        count = np.float32(list(answer).count(token))
        scores[token] -= np.float32(sampling.frequency_penalty) * count
        scores[token] -= np.float32(sampling.presence_penalty) * np.float32(count > 0)
    if sampling.min_p and not sampling.is_greedy:
        probs = torch.from_numpy(scores).double().div(sampling.temperature).softmax(dim=0)
        scores[(probs < sampling.min_p * probs.max()).numpy()] = -np.inf
    return torch.from_numpy(scores)


def plain_text(pair: Pair, prompt: Sequence[int], num: int, sampling: Sampling) -> tuple[int, ...]:
    """Text of the stock model, one token at a time without our caches: argmax at T = 0, keyed sampling at T > 0.

    Cached. One pass of the stock model verifies the engine's text first, which saves a pass for each token.
    """
    return _plain_text(pair, tuple(prompt), num, sampling)


@cache
def _plain_text(pair: Pair, prompt: tuple[int, ...], num: int, sampling: Sampling) -> tuple[int, ...]:
    engine = Engine(pair, num_slots=1, max_length=len(prompt) + num)
    [steps] = run(engine, [Request(prompt, num, sampling, 1, NEVER)])
    if is_own_text(pair, prompt, text_of(steps), sampling):
        return text_of(steps)
    text: tuple[int, ...] = ()
    for _ in range(num):
        text += (next_tokens(pair, prompt, text, 1, sampling)[0],)
    return text


def is_own_text(pair: Pair, prompt: Sequence[int], text: Sequence[int], sampling: Sampling) -> bool:
    """True if each token is the target's choice after those before it, by one pass of the stock model."""
    return next_tokens(pair, prompt, text[:-1], len(text), sampling) == list(text)


@torch.inference_mode()
def next_tokens(pair: Pair, prompt: Sequence[int], text: Sequence[int], num: int, sampling: Sampling) -> list[int]:
    """The stock model's choices after each of the last `num` prefixes of a text, by one pass over it."""
    from blockpilot.engine.sampling import keyed_sample

    logits = pair.target(torch.tensor([[*prompt, *text]]), logits_to_keep=num).logits[0]
    ends = range(len(text) + 1 - num, len(text) + 1)
    scores = [changed_logits(row, sampling, prompt, text[:end]) for row, end in zip(logits, ends, strict=True)]
    positions = [len(prompt) + end for end in ends]
    return keyed_sample(torch.stack(scores), positions, [replace(sampling, min_p=0.0)] * num).tolist()


def resize(engine: Engine, request_id: int, block_size: int) -> None:
    """Change the fixed block size of a row from its next step on."""
    [row] = [row for row in engine._rows if row.request_id == request_id]
    assert row.block_size
    assert row.can_draft or block_size == 1
    row.block_size = block_size
