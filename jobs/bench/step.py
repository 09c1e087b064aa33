"""Cost of steps in plain ones, and the share of the memory's speed that plain decoding reaches.

A plain step reads every weight once, so memory bounds it; more tokens in it should cost next to nothing. Steps are an
engine's own, at `context` tokens: the fastest of each kind, all kinds in turns. The cost of the draft's pass is that
of a step price fitted to the same steps.

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

READ_BYTES = 1 << 30  # many times what the caches hold
READS = 8


class StepConfig(Config):
    """Which pair, and which steps."""

    pair: PairConfig = PairConfig()
    threads: tuple[int, ...] = (1,)
    """Torch threads; a table for each number."""
    rows: tuple[int, ...] = (1, 4, 16)
    """Requests that decode together."""
    tokens: tuple[int, ...] = (2, 4, 8, 16, 32)
    """A row verifies, beside plain decoding: anchor and drafted ones."""
    context: int = Field(default=192, ge=1)
    """Tokens of every row at first."""
    num_steps: int = Field(default=12, ge=1)
    """Steps of each kind; the fastest counts."""


def read_speed(device: torch.device) -> float:
    """Bytes a second at which a sum over numbers that no cache holds reads them: the best of READS."""
    numbers = torch.ones(READ_BYTES // 4, device=device)
    numbers.sum().item()
    seconds = []
    for _ in range(READS):
        started = time.perf_counter()
        numbers.sum().item()
        seconds.append(time.perf_counter() - started)
    return READ_BYTES / min(seconds)


def bytes_read(pair: Pair) -> int:
    """Weights that a plain step of a dense model reads: all of the target's but the embeddings, which it looks up."""
    total: int = sum(weight.nbytes for weight in pair.target.state_dict().values())  # with an LM head, tied or not
    embeddings = cast(torch.Tensor, pair.target.get_input_embeddings().weight)
    return total - embeddings.nbytes


def step_costs(timed: Sequence[TimedStep], num_rows: int) -> dict[str, float]:
    """Milliseconds of a plain step, and steps of several tokens and the draft's pass in plain ones."""
    by_tokens = {1 + step.load.num_verified // num_rows: step for step in timed}
    plain = by_tokens[1].seconds
    price = dict(zip(COEFFICIENTS, fit([s.load for s in timed], [s.seconds for s in timed]).tolist(), strict=True))
    slots = max(step.load.num_drafted for step in timed)
    costs = {str(tokens): step.seconds / plain for tokens, step in sorted(by_tokens.items())[1:]}
    return {"plain, ms": 1e3 * plain} | costs | {"draft": (price["launch_s"] + slots * price["slot_s"]) / plain}


def run(config: StepConfig) -> None:
    """Measure and print a table for every number of threads."""
    pair = config.pair.load()
    device = pair.target.device
    size = bytes_read(pair)
    print(f"{pair.id.target}, {dtype_name(pair.target.dtype)} on {device_name(device)}: {size / 1e6:.0f} MB a step")
    for threads in config.threads:
        torch.set_num_threads(threads)
        speed = read_speed(device)
        rows = []
        for num in config.rows:
            mixtures = [[Drafted.of_size(n, pair.block_size - 1)] * num for n in (1, *config.tokens)]
            costs = step_costs(time_steps(pair, mixtures, config.context, num_steps=config.num_steps), num)
            share = size / (costs["plain, ms"] / 1e3) / speed
            cells = {name: f"{value:.1f}" if name == "plain, ms" else f"{value:.2f}" for name, value in costs.items()}
            rows.append({"rows": str(num)} | cells | {"of the memory's speed": f"{share:.2f}"})
        print(
            f"\nthreads {threads}, memory read at {speed / 1e9:.1f} GB/s; steps by tokens of a row, in plain ones:\n"
        )
        print(markdown(rows), flush=True)


if __name__ == "__main__":
    main(StepConfig, run)
