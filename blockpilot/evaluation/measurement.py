"""Timing of requests that flow through an engine: what each got, and its share of the time.

The engine itself has no timers. Tokens have reached the host when a step returns, so the clock needs no device. A
step's seconds are shared equally among the requests that it advanced: shares add up to the time that passed, and what
a request costs can be told although it never runs alone.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count, cycle

from blockpilot.engine.engine import Engine
from blockpilot.evaluation.statistics import Totals
from blockpilot.types import Request, Step


@dataclass
class RequestTiming:
    """One request: its output, and its shares of the engine's steps. "Later" are those that took in no prompt."""

    output: list[int] = field(default_factory=list)
    block_sizes: list[int] = field(default_factory=list)
    """Of its verify steps."""
    total_s: float = 0.0
    num_later_tokens: int = 0
    num_later_steps: float = 0.0
    later_s: float = 0.0

    def at_pace(self, pace: float) -> "RequestTiming":
        """What it would have been had the machine taken `pace` times as long."""
        return replace(self, total_s=self.total_s * pace, later_s=self.later_s * pace)

    def totals(self, reference: Sequence[int]) -> Totals:
        """Sums; `reference` is the output that this one is compared with."""
        return Totals(
            num_requests=1,
            num_tokens=len(self.output),
            total_s=self.total_s,
            num_later_tokens=self.num_later_tokens,
            num_later_steps=self.num_later_steps,
            later_s=self.later_s,
            num_verified=len(self.block_sizes),
            num_emitted=len(self.output) - 1,
            sum_block_sizes=sum(self.block_sizes),
            num_equal=self.output == list(reference),
        )


class Flow:
    """Requests that queue for the slots of an idle engine; the next one begins when one ends.

    Until the last of them has ended they begin again and again, so that every one of them is decoded in a batch as
    full as the slots allow: what comes twice takes its share of the time, and is not counted.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self._engine = engine
        self._measured = {self._engine.add(request): RequestTiming() for request in requests}
        self._again, self._fillers = cycle(requests), list[int]()
        self._num_open = len(requests)
        self.num_tokens = 0
        """Emitted so far, by what is counted and what is not."""
        self._untold_s = 0.0  # passed, and of no request yet

    @property
    def done(self) -> bool:
        return self._num_open == 0

    @property
    def results(self) -> list[RequestTiming]:
        """In the order of the requests."""
        return list(self._measured.values())

    def step(self) -> None:
        """One step of the engine."""
        while self._engine.num_waiting < self._engine.num_slots:
            self._fillers.append(self._engine.add(next(self._again)))
        started = time.perf_counter()
        steps = self._engine.step()
        self._share(steps, time.perf_counter() - started)
        self.num_tokens += sum(len(step.tokens) for step in steps)
        if self.done:
            for request_id in self._fillers:
                self._engine.cancel(request_id)

    def _share(self, steps: Sequence[Step], seconds: float) -> None:
        self._untold_s += seconds
        advanced = {step.request_id for step in steps}
        if not advanced:  # a part of a prompt was taken in
            return
        share_s, self._untold_s = self._untold_s / len(advanced), 0.0
        later = all(step.prefill is None for step in steps)
        for measured in (self._measured[request_id] for request_id in advanced & self._measured.keys()):
            measured.total_s += share_s
            measured.later_s += share_s * later
            measured.num_later_steps += later / len(advanced)
        for step in steps:
            if step.request_id in self._measured:
                measured = self._measured[step.request_id]
                measured.output += step.tokens
                measured.num_later_tokens += len(step.tokens) * later
                if step.block_size:
                    measured.block_sizes.append(step.block_size)
                self._num_open -= step.finish_reason is not None


def in_turns(flows: Sequence[Flow], num_tokens: int) -> None:
    """Run all flows to their ends, so many tokens of each at a time: they end together, whatever a step of them
    emits, and a slow moment of the machine falls on all.
    """
    for goal in count(num_tokens, num_tokens):
        running = [flow for flow in flows if not flow.done]
        if not running:
            return
        for flow in running:
            while flow.num_tokens < goal and not flow.done:
                flow.step()
