"""Training in the test's process: Ray Train's worker functions without a cluster, and actors as plain objects."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from ray.train import Checkpoint
from ray.train.v2._internal.execution.train_fn_utils import LocalTrainFnUtils, set_train_fn_utils

from jobs.common.ray_train import STATE_FILE, State

Report = tuple[dict[str, Any], State | None]


class LocalWorker(LocalTrainFnUtils):
    """Ray Train's local mode, which loses checkpoints in temporary folders: their state is read immediately."""

    def __init__(self, rank: int, num_workers: int) -> None:
        super().__init__("training", world_size=num_workers, world_rank=rank)
        self.reports = list[Report]()

    def report(self, metrics: dict[str, Any], checkpoint: Checkpoint | None = None, **options: Any) -> None:
        state = None
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                state = torch.load(Path(folder) / STATE_FILE, weights_only=True)
        self.reports.append((metrics, state))


def reports_of(work: Callable[[], None], rank: int = 0, num_workers: int = 1) -> list[Report]:
    """All reports of a worker; ranks do not communicate."""
    worker = LocalWorker(rank, num_workers)
    set_train_fn_utils(worker)
    try:
        work()
    finally:
        set_train_fn_utils(None)
    return worker.reports


def train(work: Callable[[], None], *_: object) -> tuple[State, dict[str, Any]]:
    """Replacement of `jobs.common.ray_train.train` with one worker."""
    metrics, state = reports_of(work)[-1]
    assert state is not None
    return state, metrics


def pooled(
    worker: Callable[[Any], Any], argument: Any, tasks: Sequence[Any], method: str, *_: object
) -> Iterator[Any]:
    """Replacement of `jobs.common.cluster.pooled` with one actor."""
    if tasks:
        yield from map(getattr(worker(argument), method), tasks)
