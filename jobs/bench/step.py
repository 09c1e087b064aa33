"""Step costs relative to a plain step, and the share of the memory bandwidth that plain decoding reaches.

A plain step reads every weight once, so it is bound by memory; more tokens in it should cost almost nothing. An
engine's steps are timed at `context` tokens, all kinds interleaved; the fastest of each kind counts. The cost of the
draft's pass comes from a step cost fitted to the same steps.

    python jobs/bench/step.py --threads 1 2
"""

import time
from collections.abc import Sequence
from typing import cast

import torch
from pydantic import Field

from blockpilot.control.cost import COEFFICIENTS, fit
from blockpilot.device import device_name, dtype_name
from blockpilot.evaluation.pricing import Drafted, TimedStep, time_steps
from blockpilot.evaluation.tables import markdown
from blockpilot.pairs.loading import Pair
from jobs.common.config import Config, PairConfig, main

READ_BYTES = 1 << 30  # much more than the CPU caches hold
READS = 8


class StepConfig(Config):
    """Pair, and kinds of steps."""

    pair: PairConfig = PairConfig()
    threads: tuple[int, ...] = (1,)
    """Numbers of torch threads; a table for each."""
    rows: tuple[int, ...] = (1, 4, 16)
    """Batch sizes: requests that decode together."""
    tokens: tuple[int, ...] = (2, 4, 8, 16, 32)
    """Tokens per row in a verify step (anchor and drafted tokens), in addition to plain decoding."""
    context: int = Field(default=192, ge=1)
    """Tokens of context of every row at the start."""
    num_steps: int = Field(default=12, ge=1)
    """Timed steps of each kind; the fastest counts."""


def read_speed(device: torch.device) -> float:
    """Memory bandwidth in bytes per second, by a sum over an uncached array: the best of READS."""
    numbers = torch.ones(READ_BYTES // 4, device=device)
    numbers.sum().item()
    seconds = []
    for _ in range(READS):
        started = time.perf_counter()
        numbers.sum().item()
        seconds.append(time.perf_counter() - started)
    return READ_BYTES / min(seconds)


def bytes_read(pair: Pair) -> int:
    """Bytes of weights that a plain step of a dense model reads: the target's without the embeddings."""
    total: int = sum(weight.nbytes for weight in pair.target.state_dict().values())  # with an LM head, tied or not
    embeddings = cast(torch.Tensor, pair.target.get_input_embeddings().weight)
    return total - embeddings.nbytes


def step_costs(timed: Sequence[TimedStep], num_rows: int) -> dict[str, float]:
    """Milliseconds of a plain step, and costs of larger steps and of the draft's pass relative to it."""
    by_tokens = {1 + step.load.num_verified // num_rows: step for step in timed}
    plain = by_tokens[1].seconds
    price = dict(zip(COEFFICIENTS, fit([s.load for s in timed], [s.seconds for s in timed]).tolist(), strict=True))
    slots = max(step.load.num_drafted for step in timed)
    costs = {str(tokens): step.seconds / plain for tokens, step in sorted(by_tokens.items())[1:]}
    return {"plain, ms": 1e3 * plain} | costs | {"draft": (price["launch_s"] + slots * price["slot_s"]) / plain}


def run(config: StepConfig) -> None:
    """Measure, and print a table for every number of threads."""
    pair = config.pair.load()
    device = pair.target.device
    size = bytes_read(pair)
    print(f"{pair.id.target}, {dtype_name(pair.target.dtype)} on {device_name(device)}: {size / 1e6:.0f} MB a step")
    for threads in config.threads:
        torch.set_num_threads(threads)
        speed = read_speed(device)
        rows = []
        for num in config.rows:
            mixtures = [[Drafted.from_size(n, pair.block_size - 1)] * num for n in (1, *config.tokens)]
            costs = step_costs(time_steps(pair, mixtures, config.context, num_steps=config.num_steps), num)
            share = size / (costs["plain, ms"] / 1e3) / speed
            cells = {name: f"{value:.1f}" if name == "plain, ms" else f"{value:.2f}" for name, value in costs.items()}
            rows.append({"rows": str(num)} | cells | {"share of memory bandwidth": f"{share:.2f}"})
        bandwidth = f"memory read at {speed / 1e9:.1f} GB/s"
        print(f"\nthreads {threads}, {bandwidth}; steps by tokens per row, relative to a plain step:\n")
        print(markdown(rows), flush=True)


if __name__ == "__main__":
    main(StepConfig, run)
