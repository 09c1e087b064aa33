"""What a step costs whose rows have different block sizes, measured and as StepCosts predicts it.

A mixture is the block sizes of a batch, such as `4,1,1,1` or `8x2,1x14` (two of 8 and fourteen plain). All are
compared with plain steps of as many rows, in turns. The prediction is what the engine chooses block sizes by.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import Field, field_validator

from blockpilot.control.price import StepCosts
from blockpilot.evaluation.step_costs import measure_costs, time_steps
from blockpilot.evaluation.tables import markdown
from blockpilot.storage import write_text
from blockpilot.types import MAX_BLOCK_SIZE
from jobs.common.config import Config, PairConfig, main


class StepsConfig(Config):
    """Which steps of which pair."""

    pair: PairConfig = PairConfig()
    mixtures: tuple[str, ...] = Field(default=("4,1,1,1", "8,4,2,1", "4,4,4,4", "4x1,1x15", "8x2,2x8,1x6", "2x16"))
    """Block sizes of the rows: numbers with commas, NxM for M rows of size N."""
    context: int = Field(default=128, ge=1)
    """Tokens of every row at the start."""
    num_steps: int = Field(default=9, ge=1)
    """Steps of each mixture; the fastest counts."""
    num_threads: int = Field(default=1, ge=1)
    """Torch threads."""
    output: Path = Path("runs/compare_steps.json")

    @field_validator("mixtures")
    @classmethod
    def _check_mixtures(cls, mixtures: tuple[str, ...]) -> tuple[str, ...]:
        for mixture in mixtures:
            parse(mixture)
        return mixtures


class MixedStep(NamedTuple):
    """Of one mixture: its step over a plain one of as many rows."""

    mixture: str
    measured: float
    predicted: float


def parse(mixture: str) -> list[int]:
    """Block sizes of the rows, the largest first. Raises ValueError that names what is wrong."""
    sizes: list[int] = []
    for part in mixture.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:x(\d+))?\s*", part)
        if found is None or not 1 <= int(found[1]) <= MAX_BLOCK_SIZE or found[2] == "0":
            raise ValueError(f"{mixture!r}: {part.strip()!r} must be a block size of 1 to {MAX_BLOCK_SIZE}, or NxM")
        sizes += [int(found[1])] * int(found[2] or 1)
    return sorted(sizes, reverse=True)


def run(config: StepsConfig) -> list[MixedStep]:
    """Measure, print and write."""
    torch.set_num_threads(config.num_threads)
    pair = config.pair.load()
    by_rows: dict[int, list[str]] = {}
    for mixture in config.mixtures:
        by_rows.setdefault(len(parse(mixture)), []).append(mixture)
    found = []
    for num_rows, mixtures in sorted(by_rows.items()):
        sizes = [parse(mixture) for mixture in mixtures]
        known = sorted({1, *(size for of_one in sizes for size in of_one)})
        costs = measure_costs(pair, known, [num_rows], config.context, num_steps=config.num_steps)
        plain, *seconds = time_steps(pair, [[1] * num_rows, *sizes], config.context, num_steps=config.num_steps)
        for mixture, of_one, each in zip(mixtures, sizes, seconds, strict=True):
            found.append(MixedStep(mixture, each / plain, predicted(costs, of_one)))
    print(markdown([_cells(step) for step in found]))
    write_text(config.output, json.dumps([step._asdict() for step in found]) + "\n")
    return found


def predicted(costs: StepCosts, sizes: list[int]) -> float:
    """A step of these block sizes over a plain one."""
    return costs.mixed_s(sizes) / costs.step_s(1, len(sizes))


def _cells(step: MixedStep) -> dict[str, str]:
    return {
        "block sizes": step.mixture,
        "over a plain step": f"{step.measured:.2f}",
        "predicted": f"{step.predicted:.2f}",
    }


if __name__ == "__main__":
    main(StepsConfig, run)
