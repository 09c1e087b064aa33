"""Ray Train with checkpoints that survive kills, shared by the training jobs.

A worker's function restores `saved_state()` and periodically calls `report` with a new state; rank 0's state is the
checkpoint. After a lost worker the group restarts from the last checkpoint, and so does the same command after a lost
driver: the name of a run is a hash of everything that its result depends on.
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
STATE_API = "RAY_API_SERVER_ADDRESS"  # accepts the cluster's address; jobs use RAY_ADDRESS otherwise (cluster.py)
log = logging.getLogger(__name__)
State = dict[str, Any]


def scaling_config(num_workers: int, accelerator_type: str | None, num_cpus: float) -> ray.train.ScalingConfig:
    """Scaling of workers, each with the resources of `actor_options`.

    Raises ValueError if a cluster of fixed size cannot place them, since Ray would wait forever.
    """
    options = actor_options(accelerator_type, num_cpus)
    need = {"CPU": num_cpus} | ({"GPU": 1.0} if "num_gpus" in options else {})
    for kind, num_needed in need.items():
        num_available = ray.cluster_resources().get(kind, 0)
        if num_workers * num_needed > num_available and not os.environ.get("RAY_ADDRESS"):  # a cluster may grow
            raise ValueError(f"num_workers {num_workers} of {num_needed:g} {kind} each: there are {num_available:g}")
    return ray.train.ScalingConfig(
        num_workers=num_workers,
        use_gpu="GPU" in need,
        resources_per_worker=need,
        accelerator_type=accelerator_type,
    )


@contextmanager
def recorded(registry: Registry, kind: str, storage: Path, name: str) -> Iterator[RunRecord]:
    """The MLflow run of a training: the run of an interrupted driver if the store has it, otherwise a new one."""
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
    """Run the workers, or continue an interrupted run; returns the last reported state and its metrics."""
    # Also bounds the latency of a report, by default 2 s.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
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
    with _cluster_address_in_environment():
        result = trainer.fit()
    assert result.checkpoint is not None, "the last state is always reported"
    return _load(result.checkpoint), result.metrics or {}


@contextmanager
def _cluster_address_in_environment() -> Iterator[None]:
    """Set the cluster's address in the environment of Ray Train's internal actors.

    Otherwise the actors that check the controller look for any cluster on the machine. With two clusters they fail,
    or query the wrong one, which does not have the controller, and then release the resources of a running training.
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
    """Last checkpoint of the worker group; None at the start. Call it before anything else in a worker."""
    logging.getLogger().setLevel(logging.WARNING)  # otherwise Ray Train logs a line for each report
    checkpoint = ray.train.get_checkpoint()
    return None if checkpoint is None else _load(checkpoint)


def report(metrics: dict[str, float], state: State | None) -> None:
    """Report metrics, called by all ranks; a state is stored as the checkpoint."""
    if state is None:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as directory:
        torch.save(state, Path(directory) / STATE_FILE)
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(directory))


class MetricLog:
    """Buffer of metrics by step for an MLflow run: training continues while the store is unreachable.

    Checkpoints include the buffered metrics, so a restarted worker logs them. Each step is logged once.
    """

    def __init__(self, store: str, run_id: str, waiting: Sequence[tuple[int, dict[str, float]]] = ()) -> None:
        self.waiting = list(waiting)
        self._store, self._run_id = store, run_id
        self._last_step: int | None = None  # logged in the run; None before the first query

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Add the metrics of a step to the buffer; `flush` logs them."""
        self.waiting.append((step, metrics))

    def flush(self) -> None:
        """Log the buffered metrics in order; those that the store refuses stay in the buffer."""
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
        except Exception as error:  # of MLflow, its database or its server; must not lose a checkpoint
            log.warning("metrics of %d steps are logged later: %s", len(self.waiting), without_secrets(str(error)))


def _load(checkpoint: ray.train.Checkpoint) -> State:
    with checkpoint.as_directory() as directory:
        state: State = torch.load(Path(directory) / STATE_FILE, map_location="cpu", weights_only=True)
    return state
