"""Benchmark of the controller: its overhead per step.

Overheads are microseconds of planning, selection and learning in a step, in a tight loop, and with CACHE_BYTES read
in between, as a step reads its weights.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from blockpilot.control.acceptance import AcceptanceModel
from blockpilot.control.controller import Controller, Planned, StepOutcome
from blockpilot.control.cost import Load
from blockpilot.engine.growing import grow_all, merge_paths, score_candidates, verified
from blockpilot.engine.lookup import Lookup
from blockpilot.engine.rows import Row
from blockpilot.evaluation.tables import markdown
from blockpilot.sweep.rows import NUM_CHOICES
from blockpilot.types import MAX_BLOCK_SIZE, Candidates, Request, Sampling, Step
from jobs.common.config import Config, main

Array = NDArray[Any]

CACHE_BYTES = 256 * 2**20
NUM_SLOTS, NUM_WARM_UP = 7, 20
CONTEXTS = 1_000, 8_000  # tokens


class ChoiceConfig(Config):
    """Batch sizes and steps."""

    rows: tuple[int, ...] = Field(default=(1, 4, 16), min_length=1)
    """Batch sizes: rows that decode together."""
    num_steps: int = Field(default=200, ge=1)
    """Number of timed steps."""


def run(config: ChoiceConfig) -> str:
    """Print and return a table."""
    torch.set_num_threads(1)
    table = markdown([_cost(num, config.num_steps) for num in config.rows])
    print(report := f"Microseconds of the choice in a step:\n{table}")
    return report


def _cost(num_rows: int, num_steps: int) -> dict[str, str]:
    memory, cells = np.zeros(CACHE_BYTES // 8), {"rows": str(num_rows)}
    for context in (0, *CONTEXTS):
        for name, reads in (("in a loop", False), ("between steps", True)):
            steps = _steps(num_rows, num_steps, context)
            seconds = [step(lambda: memory[::8].sum()) if reads else step(lambda: None) for step in steps]
            suffix = f", lookup in {context:,} tokens" if context else ""
            cells[name + suffix] = f"{1e6 * float(np.mean(sorted(seconds)[: -max(1, num_steps // 10)])):.0f}"
    return cells


def _steps(num_rows: int, num_steps: int, context: int) -> Iterator[Callable[[Callable[[], object]], float]]:
    """Steps whose rows accept their first candidate; each calls its argument between its parts, returns its seconds.

    With a context, rows use prompt lookup in texts of that many repeating tokens, so every row has a match.
    """
    draws = np.random.default_rng(0)
    controller, rows = Controller(AcceptanceModel(NUM_SLOTS)), [_row(i) for i in range(num_rows)]
    log_probs = -np.sort(draws.exponential(2, (NUM_SLOTS * num_rows, NUM_CHOICES))).astype(np.float32)
    sampled, max_depths = np.ones(num_rows, dtype=int), np.full(num_rows, NUM_SLOTS)
    lookup = Lookup(num_rows, context + 2 * (num_steps + NUM_WARM_UP) + 2)
    for row in rows:
        row.tokens = (draws.integers(0, 49_152, 300).tolist() * (1 + context // 300))[: max(1, context)]

    def step(between: Callable[[], object]) -> float:
        started = time.perf_counter()
        paths = lookup.paths(rows, sampled, MAX_BLOCK_SIZE - 1, controller.cut_paths) if context else None
        kinds = controller.kinds(sampled, paths)
        plan = controller.plan(Planned(kinds, max_depths), Load(0))
        depths = plan.depths.tolist()
        seconds = time.perf_counter() - started
        between()  # the draft's pass
        depths = [max(1, depth) for depth in depths]
        candidates = _candidates(log_probs[: sum(depths)])
        started = time.perf_counter()
        offered = score_candidates(candidates, [True] * num_rows, depths, controller)
        if paths is not None:
            offered = merge_paths(offered, paths, controller.model.paths.weights)
        select = partial(controller.select, rates=plan.rates, drafted=Load(num_rows, sum(depths)))
        grown = grow_all(rows, offered, kinds, select, MAX_BLOCK_SIZE - 1)
        assert grown is not None
        seconds += time.perf_counter() - started
        between()  # the target's
        started = time.perf_counter()
        first = [tree.tokens[:1] for tree in grown.trees]
        emitted, accepted = [(*tokens, 0) for tokens in first], [list(range(1 + len(tokens))) for tokens in first]
        steps = [Step(row.request_id, tokens, 1, 0, None) for row, tokens in zip(rows, emitted, strict=True)]
        outcome = partial(verified, rows, grown, accepted, steps, offered)
        load = Load(num_rows, sum(depths), int(grown.sizes.sum()))
        controller.learn(StepOutcome(load, proposal=offered.proposal, verified=outcome), 0.02)
        for row, tokens in zip(rows, emitted, strict=True):
            row.tokens += tokens
        return seconds + time.perf_counter() - started

    for _ in range(NUM_WARM_UP):
        step(lambda: None)
    yield from (step for _ in range(num_steps))


def _row(request_id: int) -> Row:
    return Row(request_id, Request((0,), 1, Sampling(temperature=1.0)), 1 << 30, [0], None)


def _candidates(log_probs: Array) -> Candidates:
    """Sampled candidates whose tokens are their ranks, and whose scores are their log probabilities."""
    tokens, values = torch.arange(log_probs.shape[1]).expand(log_probs.shape), torch.from_numpy(log_probs)
    return Candidates(tokens, values, values, torch.ones(len(log_probs), dtype=torch.bool))


if __name__ == "__main__":
    main(ChoiceConfig, run)
