"""Running an engine to its end, and the text of one-token-at-a-time decoding."""

from collections.abc import Sequence

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


def plain_text(pair: Pair, prompt: Sequence[int], num: int, sampling: Sampling) -> tuple[int, ...]:
    """One token at a time by the stock model, without any cache of ours; T = 0 by argmax, T > 0 by the key."""
    from blockpilot.engine.sampling import keyed_sample

    tokens = list(prompt)
    for _ in range(num):
        logits = pair.target(torch.tensor([tokens])).logits[0, -1:]
        tokens.append(int(keyed_sample(logits, [len(tokens)], [sampling])[0]))
    return tuple(tokens[len(prompt) :])
