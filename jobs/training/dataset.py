"""Training data of a policy: sweeps read and checked part by part (`blockpilot/policy/dataset.py`)."""

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
    """Training examples of sweeps, in files."""

    id: str
    """Hash of the rows."""
    metadata: Metadata
    price: StepPrice | None
    task: FitTask | None
    """Candidates and step costs of kind `prompt`; None for kind `step`."""
    folder: Path
    """Folder of the example files."""
    rows: Index
    taus: dict[float, dict[int, float]]
    """tau over all rows, by temperature and block size."""


def check_sweeps(config: TrainConfig) -> None:
    """Raise ValueError for a sweep that does not exist."""
    for sweep in config.sweep:
        if not (is_file(sweep) or is_folder(sweep)):
            raise ValueError(f"sweep {sweep}: no such file or directory")


def read_dataset(config: TrainConfig, folder: Path) -> Dataset:
    """Read and check sweeps part by part, and write their examples. Raises ValueError for unusable sweeps."""
    metadata = next(read_parts(config.sweep[0])).metadata
    digests, totals = list[bytes](), defaultdict[float, Summary](Summary)
    parts = _parts(config, metadata, digests, totals)
    price, task = _find_price(config, metadata), None
    if config.fit.kind == "step":
        index = write_steps(folder, parts)
    else:
        task = _task(config, metadata, price)
        NetworkShape(metadata.vocab_size, len(task.candidates), config.fit.hidden)  # raises for impossible shapes
        index = write_examples(folder, parts, task.candidates)
    if (num_prompts := len(set(index.prompts))) < MIN_PROMPTS:
        raise ValueError(f"sweep {config.sweep[0]}: {num_prompts} different prompts; needed: {MIN_PROMPTS}")
    digest = hashlib.sha256(metadata.to_json().encode() + b"".join(sorted(digests))).hexdigest()[:16]
    taus = {temperature: summary.tau_curve for temperature, summary in totals.items()}
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
    """The training rows, part by part; adds a hash per row to `digests`, and the row to `totals` by temperature."""
    seen: set[str] = set()
    for sweep in config.sweep:
        for part in read_parts(sweep):
            if mismatched := mismatch(metadata, part.metadata, ignored=("config",)):
                raise ValueError(
                    f"{config.sweep[0]} and {sweep}: made for different pairs or candidates ({mismatched})"
                )
            rows = [row for row in part.rows if row.prompt_set not in config.leave_out]
            if repeated_id := next((row.prompt_id for row in rows if row.prompt_id in seen), None):
                raise ValueError(f"sweep {sweep}: prompt {repeated_id} is in another of the sweeps, too")
            seen.update(row.prompt_id for row in rows)
            digests += map(_digest, rows)
            for row in rows:
                totals[row.temperature].add([row])
            yield rows
    if not seen:
        raise ValueError(f"sweep {config.sweep[0]}: no rows are left without the sets {', '.join(config.leave_out)}")


def _digest(row: SweepRow) -> bytes:
    """Hash of everything that the examples of a row contain."""
    prefill = row.prompt_id, row.taus, row.probs_ids, row.probs, row.temperature
    digest = hashlib.sha256(repr((prefill, row.step_places)).encode())
    for values in (row.step_ranks, row.step_scores, row.step_log_probs):
        digest.update(values)
    return digest.digest()


def _candidates(config: TrainConfig, metadata: Metadata) -> CandidateSet:
    """The configured candidates, otherwise the sweep's; with 1 (plain decoding) for objective throughput."""
    swept = metadata.candidates
    candidates = config.candidates or tuple(swept)
    CandidateSet(candidates)
    if unknown := sorted(set(candidates) - {1, *swept}):
        raise ValueError(f"candidates {candidates}: {unknown[0]} is not a candidate of the sweep {swept}")
    if config.objective == "throughput":
        candidates = tuple(sorted({1, *candidates}))
    if len(candidates) < 2:
        raise ValueError(f"candidates {candidates}: at least 2 are needed")
    return CandidateSet(candidates)


def _find_price(config: TrainConfig, metadata: Metadata) -> StepPrice | None:
    """Step cost of the first sweep: required by kind `prompt` for throughput, optional for kind `step`."""
    is_step, file = config.fit.kind == "step", join(config.sweep[0], PRICE_FILE)
    if not is_step and config.objective == "tau":
        return None
    if not is_file(file):
        if is_step:
            return None
        raise ValueError(
            f"sweep {config.sweep[0]}: no {PRICE_FILE} for objective 'throughput'; "
            "sweep with --price-rows, or train with --objective tau"
        )
    price = read_price(file)
    if price.pair != metadata.pair or price.dtype != metadata.dtype:
        raise ValueError(
            f"{file}: price of {price.pair}, {price.dtype}; the rows are of {metadata.pair}, {metadata.dtype}"
        )
    return price
