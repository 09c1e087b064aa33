"""Timing of requests that flow through an engine: what each got, and its share of the time.

The engine itself has no timers. Tokens have reached the host when a step returns, so the clock needs no device. A
step's seconds are shared equally among the requests that it advanced: shares add up to the time that passed, and what
a request costs can be told although it never runs alone.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from blockpilot.engine import Engine, Request, Step
from blockpilot.report import Totals


@dataclass
class Measured:
    """One request: its output, and its shares of the engine's steps. "Later" are those that took in no prompt."""

    output: list[int] = field(default_factory=list)
    block_sizes: list[int] = field(default_factory=list)
    """Of its verify steps."""
    total_s: float = 0.0
    num_later_tokens: int = 0
    num_later_steps: float = 0.0
    later_s: float = 0.0

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
    """Requests that queue for the slots of an idle engine; the next one begins when one ends."""

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self._engine = engine
        self.measured = {engine.add(request): Measured() for request in requests}
        self._untold_s = 0.0  # passed, and of no request yet

    @property
    def done(self) -> bool:
        return self._engine.idle

    @property
    def results(self) -> list[Measured]:
        """In the order of the requests."""
        return list(self.measured.values())

    def step(self) -> None:
        """One step of the engine."""
        started = time.perf_counter()
        steps = self._engine.step()
        seconds = time.perf_counter() - started + self._untold_s
        advanced = {step.request_id for step in steps}
        if not advanced:  # a part of a prompt was taken in
            self._untold_s = seconds
            return
        self._untold_s = 0.0
        later = all(step.prefill is None for step in steps)
        for request_id in advanced:
            measured = self.measured[request_id]
            measured.total_s += seconds / len(advanced)
            measured.later_s += seconds / len(advanced) * later
            measured.num_later_steps += later / len(advanced)
        for step in steps:
            self._count(self.measured[step.request_id], step, later)

    def _count(self, measured: Measured, step: Step, later: bool) -> None:
        measured.output += step.tokens
        measured.num_later_tokens += len(step.tokens) * later
        if step.block_size:
            measured.block_sizes.append(step.block_size)


def in_turns(flows: Sequence[Flow], num_steps: int) -> None:
    """Run all flows to their ends, so many steps of each at a time: a slow moment of the machine falls on all."""
    while running := [flow for flow in flows if not flow.done]:
        for flow in running:
            for _ in range(num_steps):
                if not flow.done:
                    flow.step()
