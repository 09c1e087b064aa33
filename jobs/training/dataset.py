"""Sweeps, read and checked part by part, and written as examples to train on (`blockpilot/policy/dataset.py`)."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from blockpilot.control.cost import PRICE_FILE, StepPrice, read_price
from blockpilot.policy.dataset import Index, write_examples, write_steps
from blockpilot.policy.network import NetworkShape
from blockpilot.policy.training import FitTask
from blockpilot.storage import is_file, is_folder, join
from blockpilot.sweep.rows import Metadata, SweepRow, mismatch, read_parts
from blockpilot.sweep.summary import Summary
from blockpilot.types import CandidateSet
from jobs.training.config import TrainConfig

MIN_PROMPTS = 8


class Dataset(NamedTuple):
    """Sweeps, written as examples."""

    id: str
    """Hash of the rows."""
    metadata: Metadata
    price: StepPrice | None
    task: FitTask | None
    """Of kind `prompt`."""
    folder: Path
    """Of the examples."""
    rows: Index
    taus: dict[float, dict[int, float]]
    """Over all rows, by temperature and block size."""


def check_sweeps(config: TrainConfig) -> None:
    """Raise ValueError for a sweep that is not there."""
    for place in config.sweep:
        if not (is_file(place) or is_folder(place)):
            raise ValueError(f"sweep {place}: no such file or directory")


def read_dataset(config: TrainConfig, folder: Path) -> Dataset:
    """Read and check sweeps part by part and write their examples. Raises ValueError where nothing can be learned."""
    metadata = next(read_parts(config.sweep[0])).metadata
    digests, totals = list[bytes](), defaultdict[float, Summary](Summary)
    parts = _parts(config, metadata, digests, totals)
    price, task = _find_price(config, metadata), None
    if config.fit.kind == "step":
        index = write_steps(folder, parts)
    else:
        task = _task(config, metadata, price)
        NetworkShape(metadata.vocab_size, len(task.candidates), config.fit.hidden)  # refuses what cannot be
        index = write_examples(folder, parts, task.candidates)
    if (num_prompts := len(set(index.prompts))) < MIN_PROMPTS:
        raise ValueError(f"sweep {config.sweep[0]}: {num_prompts} different prompts; needed: {MIN_PROMPTS}")
    digest = hashlib.sha256(metadata.to_json().encode() + b"".join(sorted(digests))).hexdigest()[:16]
    taus = {temperature: of_rows.tau_curve for temperature, of_rows in totals.items()}
    return Dataset(digest, metadata, price, task, folder, index, taus)


def _task(config: TrainConfig, metadata: Metadata, price: StepPrice | None) -> FitTask:
    if len(metadata.candidates) < 2:
        raise ValueError(f"sweep {config.sweep[0]}: one candidate {metadata.candidates}; at least 2 are needed")
    candidates = tuple(_candidates(config, metadata))
    step_costs = price.relative(candidates, config.rows) if price else [1.0] * len(candidates)
    return FitTask(config.objective, candidates, torch.tensor(step_costs))


def _parts(
    config: TrainConfig, metadata: Metadata, digests: list[bytes], totals: Mapping[float, Summary]
) -> Iterator[list[SweepRow]]:
    """The rows to train on, part by part; `digests` gets one of each, `totals` are by temperature."""
    seen: set[str] = set()
    for place in config.sweep:
        for part in read_parts(place):
            if found := mismatch(metadata, part.metadata, ignored=("config",)):
                raise ValueError(f"{config.sweep[0]} and {place}: made for different pairs or candidates ({found})")
            rows = [row for row in part.rows if row.prompt_set not in config.leave_out]
            if twice := next((row.prompt_id for row in rows if row.prompt_id in seen), None):
                raise ValueError(f"sweep {place}: prompt {twice} is in another of the sweeps, too")
            seen.update(row.prompt_id for row in rows)
            digests += map(_digest, rows)
            for row in rows:
                totals[row.temperature].add([row])
            yield rows
    if not seen:
        raise ValueError(f"sweep {config.sweep[0]}: no rows are left without the sets {', '.join(config.leave_out)}")


def _digest(row: SweepRow) -> bytes:
    """A hash of all that examples are made of."""
    prefill = row.prompt_id, row.taus, row.probs_ids, row.probs, row.temperature
    digest = hashlib.sha256(repr((prefill, row.step_places)).encode())
    for offers in (row.step_ranks, row.step_scores, row.step_log_probs):
        digest.update(offers)
    return digest.digest()


def _candidates(config: TrainConfig, metadata: Metadata) -> CandidateSet:
    """Those asked for, or the sweep's; with plain decoding where costs count."""
    there = metadata.candidates
    wanted = config.candidates or tuple(there)
    CandidateSet(wanted)
    if unknown := sorted(set(wanted) - {1, *there}):
        raise ValueError(f"candidates {wanted}: {unknown[0]} is none of the sweep's {there}")
    if config.objective == "throughput":
        wanted = tuple(sorted({1, *wanted}))
    if len(wanted) < 2:
        raise ValueError(f"candidates {wanted}: at least 2 are needed")
    return CandidateSet(wanted)


def _find_price(config: TrainConfig, metadata: Metadata) -> StepPrice | None:
    """The one beside the first sweep: kind `prompt` needs it for throughput, kind `step` keeps it if it is there."""
    is_step, place = config.fit.kind == "step", join(config.sweep[0], PRICE_FILE)
    if not is_step and config.objective == "tau":
        return None
    if not is_file(place):
        if is_step:
            return None
        raise ValueError(
            f"sweep {config.sweep[0]}: no {PRICE_FILE} for objective 'throughput'; "
            "sweep with --price-rows, or train with --objective tau"
        )
    price = read_price(place)
    if price.pair != metadata.pair or price.dtype != metadata.dtype:
        raise ValueError(
            f"{place}: price of {price.pair}, {price.dtype}; the rows are of {metadata.pair}, {metadata.dtype}"
        )
    return price
