"""Running an engine to its end, and the text of one-token-at-a-time decoding."""

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
    """Logits [V] of the token after a text as penalties, bias and min_p leave them, by a slow loop in float32."""
    found = logits.numpy().astype(np.float32)
    for token, bias in sampling.logit_bias:
        found[token] += np.float32(bias)
    found[list(barred)] = -np.inf
    for token in set(answer) | (set(prompt) if sampling.repetition_penalty != 1 else set()):
        penalty = np.float32(sampling.repetition_penalty)
        found[token] = found[token] / penalty if found[token] > 0 else found[token] * penalty
        count = np.float32(list(answer).count(token))
        found[token] -= np.float32(sampling.frequency_penalty) * count
        found[token] -= np.float32(sampling.presence_penalty) * np.float32(count > 0)
    if sampling.min_p and not sampling.is_greedy:
        probs = torch.from_numpy(found).double().div(sampling.temperature).softmax(dim=0)
        found[(probs < sampling.min_p * probs.max()).numpy()] = -np.inf
    return torch.from_numpy(found)


def plain_text(pair: Pair, prompt: Sequence[int], num: int, sampling: Sampling) -> tuple[int, ...]:
    """One token at a time by the stock model, without any cache of ours; T = 0 by argmax, T > 0 by the key.

    A text of the engine that is the stock model's by one pass saves a pass for each token; each text is made once.
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
    """The stock model's choice after each of the last `num` beginnings of a text, by one pass over it."""
    from blockpilot.engine.sampling import keyed_sample

    logits = pair.target(torch.tensor([[*prompt, *text]]), logits_to_keep=num).logits[0]
    ends = range(len(text) + 1 - num, len(text) + 1)
    scores = [changed_logits(row, sampling, prompt, text[:end]) for row, end in zip(logits, ends, strict=True)]
    positions = [len(prompt) + end for end in ends]
    return keyed_sample(torch.stack(scores), positions, [replace(sampling, min_p=0.0)] * num).tolist()


def resize(engine: Engine, request_id: int, block_size: int) -> None:
    """Let a row of a fixed block size draft more or less from the next step on, as a controller does with others."""
    [row] = [row for row in engine._rows if row.request_id == request_id]
    assert row.block_size
    assert row.can_draft or block_size == 1
    row.block_size = block_size
