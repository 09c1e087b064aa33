"""Timing of requests in a full engine: each request's tokens and its share of the time.

The engine has no timers. A step returns when its tokens have reached the host, so host time is enough. A step's
seconds are shared equally among the requests that it advanced. The shares add up to the elapsed time, and are
the cost of a request in a shared batch.
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
    """One request: its output, and its shares of the engine's steps. "Later" steps are those without a prefill."""

    output: list[int] = field(default_factory=list)
    block_sizes: list[int] = field(default_factory=list)
    """Block size of each of its verify steps."""
    total_s: float = 0.0
    num_later_tokens: int = 0
    num_later_steps: float = 0.0
    later_s: float = 0.0

    def at_pace(self, pace: float) -> "RequestTiming":
        """The timing with all seconds multiplied by `pace`."""
        return replace(self, total_s=self.total_s * pace, later_s=self.later_s * pace)

    def totals(self, reference: Sequence[int]) -> Totals:
        """Totals of this request; `reference` is the output that its tokens are compared with."""
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

    Repetitions of the requests (fillers) keep all slots busy from the first measured request to the end of the last,
    so every request begins and decodes in a full batch, as in a server under constant load. The first fillers end one
    after the other: if all slots began together, the measured requests would pay for one more batch of prefills.
    Fillers take their share of the time and are not measured.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self._engine, num = engine, engine.num_slots
        self._again, self._fillers = cycle(requests), list[int]()
        for i in range(1, num):
            request = next(self._again)
            limit = max(1, request.max_new_tokens * i // num)
            self._fillers.append(engine.add(replace(request, max_new_tokens=limit)))
        self._measured = {engine.add(request): RequestTiming() for request in requests}
        self._num_open = len(requests)
        self.num_tokens = 0
        """Tokens emitted so far, those of fillers included."""
        self._unshared_s = 0.0  # seconds of steps that advanced no request

    @property
    def done(self) -> bool:
        return self._num_open == 0

    @property
    def results(self) -> list[RequestTiming]:
        """Timings in the order of the requests."""
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
        self._unshared_s += seconds
        advanced = {step.request_id for step in steps}
        if not advanced:  # prefill of a part of a prompt
            return
        share_s, self._unshared_s = self._unshared_s / len(advanced), 0.0
        later = all(step.prefill is None for step in steps)
        for timing in (self._measured[request_id] for request_id in advanced & self._measured.keys()):
            timing.total_s += share_s
            timing.later_s += share_s * later
            timing.num_later_steps += later / len(advanced)
        for step in steps:
            if step.request_id in self._measured:
                timing = self._measured[step.request_id]
                timing.output += step.tokens
                timing.num_later_tokens += len(step.tokens) * later
                if step.block_size:
                    timing.block_sizes.append(step.block_size)
                self._num_open -= step.finish_reason is not None


def in_turns(flows: Sequence[Flow], num_tokens: int) -> None:
    """Run all flows to their ends, interleaved: `num_tokens` tokens of each flow per round.

    Flows end together, regardless of their tokens per step, and slow moments of the machine affect all of them.
    """
    for goal in count(num_tokens, num_tokens):
        running = [flow for flow in flows if not flow.done]
        if not running:
            return
        for flow in running:
            while flow.num_tokens < goal and not flow.done:
                flow.step()
