"""Timing of requests that share an engine: what was emitted, step by step, and how long each step took.

The engine itself has no timers. Tokens have reached the host when a step returns, so the clock needs no device.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from blockpilot.engine import Engine, Request
from blockpilot.report import Totals


class Measured(NamedTuple):
    """Requests that arrived together: what each got, and every engine step until the last one ended."""

    outputs: list[tuple[int, ...]]
    block_sizes: list[list[int]]  # of each request's verify steps
    step_s: list[float]  # the first one prefills and calls the policy, too
    num_step_tokens: list[int]

    def totals(self, reference: Sequence[tuple[int, ...]]) -> Totals:
        """Sums; `reference` holds the outputs that these are compared with."""
        num_tokens = sum(map(len, self.outputs))
        return Totals(
            num_requests=len(self.outputs),
            num_tokens=num_tokens,
            total_s=sum(self.step_s),
            num_later_tokens=sum(self.num_step_tokens[1:]),
            num_later_steps=len(self.step_s) - 1,
            later_s=sum(self.step_s[1:]),
            num_verified=sum(map(len, self.block_sizes)),
            num_emitted=num_tokens - len(self.outputs),
            sum_block_sizes=sum(map(sum, self.block_sizes)),
            num_equal=sum(mine == its for mine, its in zip(self.outputs, reference, strict=True)),
        )


def decode_group(engine: Engine, requests: Sequence[Request]) -> Measured:
    """Decode requests that arrive together, in an idle engine with a slot for each."""
    tokens: list[list[int]] = [[] for _ in requests]
    block_sizes: list[list[int]] = [[] for _ in requests]
    step_s: list[float] = []
    num_step_tokens: list[int] = []
    started = time.perf_counter()
    place = {engine.add(request): i for i, request in enumerate(requests)}
    while not engine.idle:
        steps = engine.step()
        now = time.perf_counter()
        step_s.append(now - started)
        num_step_tokens.append(sum(len(step.tokens) for step in steps))
        for step in steps:
            tokens[place[step.request_id]] += step.tokens
            if step.block_size:
                block_sizes[place[step.request_id]].append(step.block_size)
        started = now
    return Measured([tuple(output) for output in tokens], block_sizes, step_s, num_step_tokens)
