"""Ray Train workers that fit something and survive kills: what the training jobs share.

A worker's function asks `saved_state()` where to go on, and calls `report` with a new state now and then; rank 0's is
kept. A lost worker restarts the group from the last state, and the same command after a lost driver does, too: the
name of a run holds all that its result depends on.
"""

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train.v2._internal.constants import ENV_VARS_TO_PROPAGATE

from blockpilot.storage import without_secrets
from jobs.common.cluster import actor_options
from jobs.common.registry import Registry, RunRecord

STATE_FILE = "state.pt"
STATE_API = "RAY_API_SERVER_ADDRESS"  # takes the cluster's address, too; RAY_ADDRESS means more to jobs (cluster.py)
log = logging.getLogger(__name__)
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
    with _cluster_is_named():
        result = trainer.fit()
    assert result.checkpoint is not None, "the last state is always reported"
    return _load(result.checkpoint), result.metrics or {}


@contextmanager
def _cluster_is_named() -> Iterator[None]:
    """Say in the environment of Ray Train's own actors which cluster they are in.

    Otherwise those that ask whether the controller lives look for any cluster on the machine. Where there are two,
    they die, or ask the other one, which knows no such controller, and take the resources of a training that runs.
    """
    ENV_VARS_TO_PROPAGATE.add(STATE_API)
    before = os.environ.get(STATE_API)
    os.environ[STATE_API] = ray.get_runtime_context().gcs_address
    try:
        yield
    finally:
        if before is None:
            del os.environ[STATE_API]
        else:
            os.environ[STATE_API] = before


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


class MetricLog:
    """Metrics by step on their way to an MLflow run: while the store is away they wait, and training goes on.

    What waits belongs to the state of a checkpoint, so that a worker that takes over logs it; a step is logged once.
    """

    def __init__(self, store: str, run_id: str, waiting: Sequence[tuple[int, dict[str, float]]] = ()) -> None:
        self.waiting = list(waiting)
        self._store, self._run_id = store, run_id
        self._last_step: int | None = None  # that the run has; None until the store has said it

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Let the metrics of a step wait; `flush` logs them."""
        self.waiting.append((step, metrics))

    def flush(self) -> None:
        """Log what waits, in order, as far as the store takes it."""
        try:
            record = Registry.open(self._store).run(self._run_id)
            while self.waiting:
                step, metrics = self.waiting[0]
                if self._last_step is None:
                    self._last_step = record.last_step(min(metrics))
                if step > self._last_step:
                    record.log_metrics(metrics, step=step)
                    self._last_step = step
                del self.waiting[0]
        except Exception as error:  # MLflow's, its database's, its server's: none is worth a checkpoint
            log.warning("metrics of %d steps are logged later: %s", len(self.waiting), without_secrets(str(error)))


def _load(checkpoint: ray.train.Checkpoint) -> State:
    with checkpoint.as_directory() as directory:
        state: State = torch.load(Path(directory) / STATE_FILE, map_location="cpu", weights_only=True)
    return state
