"""Synthetic sweeps on disk, with their step cost, and the training examples made from them."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from blockpilot.sweep.rows import Metadata, SweepRow, write_rows
from helpers.prices import price
from helpers.processes import Job
from helpers.sweeps import CANDIDATES, PAIR, metadata, synthetic_rows, with_choices
from jobs.training.config import TrainConfig
from jobs.training.dataset import Dataset, read_dataset

ROOT = Path(__file__).parents[2]
WITH_PLAIN = (1, *CANDIDATES)
PRICE = price(pair=PAIR, row_s=0.02, launch_s=0.01, slot_s=0.005, token_s=0.015)


def write_sweep(
    folder: Path, rows: Sequence[SweepRow], made_by: Metadata | None = None, part: str = "part-0"
) -> None:
    write_rows(folder / "rows" / f"{part}.parquet", rows, made_by or metadata())


def write_price(folder: Path, **changes: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "price.json").write_text(dataclasses.replace(PRICE, **changes).to_json())  # type: ignore[arg-type]


def rows_with_choices(num_rows: int, seed: int) -> list[SweepRow]:
    return [with_choices(row, 1000 * seed + i) for i, row in enumerate(synthetic_rows(num_rows, seed))]


def dataset(folder: Path, **config: object) -> Dataset:
    return read_dataset(TrainConfig(**config), folder / "examples")  # type: ignore[arg-type]


def run_job(folder: Path, *arguments: object) -> tuple[int, str]:
    """Exit code and output of the job, run as a user does, in a folder without any setup."""
    output = folder.with_suffix(".said")
    job = Job([ROOT / "jobs" / "train.py", *arguments], cwd=folder, env=environment(), output=output)
    return job.wait(100), job.log


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS")}
