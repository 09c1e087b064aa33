"""Ray Train workers that fit something and survive kills: what the training jobs share.

A worker's function asks `saved_state()` where to go on, and calls `report` with a new state now and then; rank 0's is
kept. A lost worker restarts the group from the last state, and the same command after a lost driver does, too: the
name of a run holds all that its result depends on.
"""

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch

from jobs.common.cluster import actor_options
from jobs.common.registry import Registry, RunRecord

STATE_FILE = "state.pt"
State = dict[str, Any]


def scaling_config(num_workers: int, accelerator_type: str | None, num_cpus: float) -> ray.train.ScalingConfig:
    """Workers that each hold what `actor_options` gives an actor.

    Raises ValueError where a cluster of fixed size can never place them: Ray would wait for ever.
    """
    options = actor_options(accelerator_type, num_cpus)
    need = {"CPU": num_cpus} | ({"GPU": 1.0} if "num_gpus" in options else {})
    for kind, each in need.items():
        there = ray.cluster_resources().get(kind, 0)
        if num_workers * each > there and not os.environ.get("RAY_ADDRESS"):  # a cluster may grow
            raise ValueError(f"num_workers {num_workers} of {each:g} {kind} each: there are {there:g}")
    return ray.train.ScalingConfig(
        num_workers=num_workers,
        use_gpu="GPU" in need,
        resources_per_worker=need,
        accelerator_type=accelerator_type,
    )


@contextmanager
def recorded(registry: Registry, kind: str, storage: Path, name: str) -> Iterator[RunRecord]:
    """The MLflow run of a training; the one that an interrupted driver left, if the store still has it."""
    file = storage / f"{name}.run"
    with registry.log_run(kind, run_id=_unfinished_run(registry, file)) as record:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(record.id, encoding="utf-8")
        yield record


def _unfinished_run(registry: Registry, file: Path) -> str | None:
    try:
        return registry.run(file.read_text(encoding="utf-8")).id
    except (FileNotFoundError, ValueError):
        return None


def train(
    work: Callable[[], None], scaling: ray.train.ScalingConfig, storage: Path, name: str, max_failures: int
) -> tuple[State, dict[str, Any]]:
    """Run the workers, or go on with them; returns the last reported state and its metrics."""
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")  # also how long a report may wait: 2 s
    trainer = ray.train.torch.TorchTrainer(
        work,
        scaling_config=scaling,
        run_config=ray.train.RunConfig(  # type: ignore[call-arg]  # typed as that of Ray Train V1
            name=name,
            storage_path=str(storage),
            failure_config=ray.train.FailureConfig(max_failures=max_failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            logging_config=ray.train.LoggingConfig(log_level="WARNING"),
        ),
    )
    result = trainer.fit()
    assert result.checkpoint is not None, "the last state is always reported"
    return _load(result.checkpoint), result.metrics or {}


# --- in a worker ---


def saved_state() -> State | None:
    """Where the worker's group goes on; None at the start. Call it first."""
    logging.getLogger().setLevel(logging.WARNING)  # Ray Train logs a line for each report otherwise
    checkpoint = ray.train.get_checkpoint()
    return None if checkpoint is None else _load(checkpoint)


def report(metrics: dict[str, float], state: State | None) -> None:
    """All ranks report; the one with a state adds it as a checkpoint."""
    if state is None:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as directory:
        torch.save(state, Path(directory) / STATE_FILE)
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(directory))


def _load(checkpoint: ray.train.Checkpoint) -> State:
    with checkpoint.as_directory() as directory:
        state: State = torch.load(Path(directory) / STATE_FILE, map_location="cpu", weights_only=True)
    return state
