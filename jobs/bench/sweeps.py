"""Compare: what a sweep costs by replay, densely, by decoding every candidate, and by a loop of single decodings.

All do the same prompts in one process, shard by shard and in turns. The loop is the way of the paper's release:
prompt by prompt, candidate by candidate, batch 1.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from pydantic import Field, field_validator
from rich.console import Console
from rich.table import Table

from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Prompt, load_prompts
from blockpilot.sweep.rows import SweepRow
from blockpilot.sweep.sweep import candidates_around, check_candidates, decode, replay
from jobs.common.config import Config, PairConfig, main

Sweep = Callable[[Sequence[Prompt]], list[SweepRow]]


class SweepsConfig(Config):
    """What all of them sweep."""

    pair: PairConfig = PairConfig()
    prompts: str = "demo"
    """A prompt set by name, or a file."""
    num_prompts: int = Field(default=64, ge=1)
    candidates: tuple[int, ...] | None = None
    """Block sizes, ascending. Default: the draft's trained one and two to each side."""
    methods: tuple[str, ...] = ("replay", "dense", "decode", "loop")
    """Of these; the first one is what the others are compared with."""
    temperature: float = Field(default=0.0, ge=0)
    max_new_tokens: int = Field(default=128, ge=2)
    prompts_per_shard: int = Field(default=16, ge=1)
    slots: int = Field(default=16, ge=1)
    """Sequences in the engine's batch; the loop has one."""
    num_threads: int = Field(default=1, ge=1)
    """Torch threads of the process."""

    @field_validator("methods")
    @classmethod
    def _check_methods(cls, methods: tuple[str, ...]) -> tuple[str, ...]:
        known = ("replay", "dense", "decode", "loop")
        unknown = [name for name in methods if name not in known]
        if unknown or not methods:
            raise ValueError(f"methods {unknown[:1]}: must be of {', '.join(known)}")
        return methods


class MethodCost(NamedTuple):
    """Of one method over all prompts."""

    seconds: float
    num_equal: int  # rows that count what the first method counts
    num_rows: int


def run(config: SweepsConfig) -> dict[str, MethodCost]:
    """Print and return seconds by method."""
    prompts = load_prompts(config.prompts, config.num_prompts)
    torch.set_num_threads(config.num_threads)
    pair = config.pair.load()
    candidates = config.candidates or tuple(candidates_around(pair.block_size))
    check_candidates(candidates)
    sweeps = {name: _sweep(config, pair, candidates, name) for name in config.methods}
    seconds = dict.fromkeys(sweeps, 0.0)
    rows: dict[str, list[SweepRow]] = {name: [] for name in sweeps}
    order = list(sweeps)
    for start in range(0, len(prompts), config.prompts_per_shard):
        for name in order:
            started = time.perf_counter()
            rows[name] += sweeps[name](prompts[start : start + config.prompts_per_shard])
            seconds[name] += time.perf_counter() - started
        order = order[1:] + order[:1]
        print(f"{min(start + config.prompts_per_shard, len(prompts))}/{len(prompts)} prompts", flush=True)
    first = rows[config.methods[0]]
    costs = {name: MethodCost(seconds[name], _num_equal(first, rows[name]), len(rows[name])) for name in sweeps}
    _print(config, pair, candidates, costs)
    return costs


def _sweep(config: SweepsConfig, pair: Pair, candidates: Sequence[int], name: str) -> Sweep:
    settings: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "temperature": config.temperature}
    if name == "loop":
        return partial(_loop, pair, candidates, settings)
    method = decode if name == "decode" else partial(replay, dense=name == "dense")
    return lambda prompts: method(pair, prompts, candidates, num_slots=config.slots, **settings).rows


def _loop(
    pair: Pair, candidates: Sequence[int], settings: dict[str, Any], prompts: Sequence[Prompt]
) -> list[SweepRow]:
    rows = []
    for prompt in prompts:
        for size in candidates:
            rows += decode(pair, [prompt], [size], num_slots=1, **settings).rows
    return rows


def _num_equal(first: Sequence[SweepRow], other: Sequence[SweepRow]) -> int:
    """Pairs of prompt and candidate whose steps emitted the same."""
    return len(_counts(first) & _counts(other))


def _counts(rows: Sequence[SweepRow]) -> set[tuple[str, int, tuple[int, ...]]]:
    return {
        (row.prompt_id, size, tuple(histogram))
        for row in rows
        for size, histogram in zip(row.candidates, row.emitted_histograms, strict=True)
    }


def _print(config: SweepsConfig, pair: Pair, candidates: Sequence[int], costs: dict[str, MethodCost]) -> None:
    first = next(iter(costs.values()))
    title = f"{pair.id.draft}, {pair.target.dtype}, T={config.temperature:g}, block sizes {candidates}"
    table = Table("method", "seconds", f"times {config.methods[0]}", "equal counts", title=title)
    num_counts = len(candidates) * first.num_rows
    for name, cost in costs.items():
        ratio = f"{cost.seconds / first.seconds:.2f}"
        table.add_row(name, f"{cost.seconds:.1f}", ratio, f"{cost.num_equal}/{num_counts}")
    Console().print(table)


if __name__ == "__main__":
    main(SweepsConfig, run)
