"""Train: a sweep's rows -> a policy, through Ray Train, recorded in MLflow and registered as a new version.

The rows are checked and split before Ray starts. Every worker gets the same tensors; rank 0 logs each epoch
to MLflow. A killed worker costs the epochs since the last checkpoint, a killed driver nothing more: the
same command goes on. The result does not depend on either.
"""

import functools
import hashlib
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray.train
import ray.train.torch
import torch
from pydantic import Field
from torch import Tensor

from blockpilot.files import is_file, is_folder
from blockpilot.fit import (
    Examples,
    Fit,
    FitSettings,
    LookupReport,
    examples,
    lookup_report,
    new_network,
    split_rows,
)
from blockpilot.policy import CandidateSet, ClassPolicy, PolicyInfo, save_policy
from blockpilot.records import MIN_PROB, Metadata, read_sweep
from jobs.cluster import connect
from jobs.config import Config, Place, absolute_in_submitted_job, main
from jobs.ray_train import recorded, report, saved_state, scaling_config, train
from jobs.registry import Registry, Version

MIN_PROMPTS = 8
_DEFAULT = FitSettings()


class TrainConfig(Config):
    """What to train on, how, and where the policy goes."""

    sweep: Place = "runs/sweep"
    """Directory (or file) of a sweep."""
    output: Path = Path("runs/policy")
    """Directory of the policy; checkpoints while it trains. Every node must see it."""
    hidden: int = Field(default=_DEFAULT.hidden, ge=1)
    """Width of the network."""
    epochs: int = Field(default=_DEFAULT.epochs, ge=1)
    """Passes over the rows at most."""
    batch_size: int = Field(default=_DEFAULT.batch_size, ge=1)
    """Rows of an optimizer step, over all workers."""
    lr: float = Field(default=_DEFAULT.lr, gt=0)
    """Learning rate of Adam."""
    dropout: float = Field(default=_DEFAULT.dropout, ge=0, lt=1)
    """Share of hidden units dropped in training."""
    patience: int | None = Field(default=_DEFAULT.patience, ge=1)
    """Stop after so many epochs without a lower validation loss; None runs all epochs and keeps the last."""
    validation: float = Field(default=0.2, gt=0, lt=1)
    """Share of the prompts held back to stop early and to report."""
    seed: int = Field(default=_DEFAULT.seed, ge=0)
    """Of the split, the initial weights, the order of rows and dropout."""
    num_workers: int = Field(default=1, ge=1)
    """Data-parallel Ray Train workers."""
    num_cpus: float = Field(default=1.0, gt=0)
    """CPU cores of a worker."""
    accelerator_type: str | None = None
    """Put every worker on a GPU of this type. Otherwise a GPU where there are any."""
    checkpoint_every: int = Field(default=25, ge=1)
    """Epochs between checkpoints."""
    max_failures: int = Field(default=3, ge=0)
    """Lost workers to recover from."""
    register_version: bool = True
    """Register the policy as a new version of its target's model."""


class TrainResult(NamedTuple):
    """A trained policy."""

    policy: Path
    version: Version | None
    report: LookupReport
    num_epochs: int
    run_id: str


class Dataset(NamedTuple):
    """A sweep, ready to train on."""

    id: str
    """Hash of the rows."""
    metadata: Metadata
    train: Examples
    validation: Examples


class Task(NamedTuple):
    """What a worker needs."""

    data: Dataset
    settings: FitSettings
    checkpoint_every: int
    tracking_uri: str
    run_id: str


def run(config: TrainConfig) -> TrainResult:
    """Train, save and register a policy; raises ValueError for bad input before Ray starts."""
    absolute_in_submitted_job(config.output, "output")
    data = read_dataset(config)
    registry = Registry.open()
    connect(include_dashboard=True)
    scaling = scaling_config(config.num_workers, config.accelerator_type, config.num_cpus)
    storage, name = config.output.absolute() / "train", _run_name(config, data)
    with recorded(registry, "train", storage, name) as record:
        record.log_params(config.model_dump(mode="json") | {"sweep_id": data.id})
        task = Task(data, _settings(config), config.checkpoint_every, registry.uri, record.id)
        state, _ = train(functools.partial(_work, task), scaling, storage, name, config.max_failures)
        policy, report = _policy(config, data, state)
        save_policy(policy, config.output)
        record.log_metrics({f"lookup_{key}": value for key, value in report._asdict().items()})
        version = None
        if config.register_version:
            tags = _tags(policy.info, data, report)
            version = registry.register_policy(
                config.output, target=policy.info.pair.target, run_id=record.id, tags=tags
            )
    shutil.rmtree(storage)  # the same command trains anew from here on
    result = TrainResult(config.output, version, report, state["progress"]["epoch"], record.id)
    print(describe(result, data))
    return result


# --- before Ray starts ---


def read_dataset(config: TrainConfig) -> Dataset:
    """Read, check and split a sweep. Raises ValueError for one that nothing can be learned from."""
    if not (is_file(config.sweep) or is_folder(config.sweep)):
        raise ValueError(f"sweep {config.sweep}: no such file or directory")
    rows, metadata = read_sweep(config.sweep)
    if len(metadata.candidates) < 2:
        raise ValueError(f"sweep {config.sweep}: one candidate {metadata.candidates}; at least 2 are needed")
    num_prompts = len({row.prompt for row in rows})
    if num_prompts < MIN_PROMPTS:
        raise ValueError(f"sweep {config.sweep}: {num_prompts} different prompts; needed: {MIN_PROMPTS}")
    digest = hashlib.sha256(metadata.to_json().encode())
    for row in sorted(rows, key=lambda row: row.prompt_id):
        digest.update(repr((row.prompt_id, row.taus, row.probs_ids, row.probs)).encode())
    train, validation = split_rows(rows, config.validation, config.seed)
    return Dataset(digest.hexdigest()[:16], metadata, examples(train), examples(validation))


def _settings(config: TrainConfig) -> FitSettings:
    return FitSettings(**{name: getattr(config, name) for name in FitSettings.__dataclass_fields__})


def _run_name(config: TrainConfig, data: Dataset) -> str:
    """Ray Train goes on with a run of the same name, so the name holds all that the result depends on."""
    key = repr((_settings(config), config.validation, config.num_workers, data.id))
    return f"policy-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


# --- training ---


def _work(task: Task) -> None:
    """What every Ray Train worker does."""
    saved = saved_state()
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    data, settings = task.data, task.settings
    network = new_network(data.train, data.metadata.vocab_size, settings)
    wrapped = ray.train.torch.prepare_model(network)
    reduce = _all_reduce if world_size > 1 else _same
    fit = Fit(wrapped, data.train, data.validation, settings, rank=rank, world_size=world_size, reduce=reduce)
    if saved is not None:
        fit.load_state_dict(saved)
    record = Registry.open(task.tracking_uri).run(task.run_id) if rank == 0 else None
    last_logged = record.last_step("train_loss") if record else 0
    while not fit.done:
        result = fit.run_epoch()
        metrics = {
            "train_loss": result.train.mean_loss,
            "train_accuracy": result.train.accuracy,
            "validation_loss": result.validation.mean_loss,
            "validation_accuracy": result.validation.accuracy,
        }
        if record and fit.epoch > last_logged:
            record.log_metrics(metrics, step=fit.epoch)
        if fit.done or fit.epoch % task.checkpoint_every == 0:
            report(metrics | {"epoch": fit.epoch}, fit.state_dict() if rank == 0 else None)


def _all_reduce(sums: Tensor) -> Tensor:
    torch.distributed.all_reduce(sums)
    return sums


def _same(sums: Tensor) -> Tensor:
    return sums


# --- after it ---


def _policy(config: TrainConfig, data: Dataset, state: dict[str, Any]) -> tuple[ClassPolicy, LookupReport]:
    """The policy of the best epoch, and what the validation rows say of it."""
    network = new_network(data.train, data.metadata.vocab_size, _settings(config))
    network.load_state_dict(state["best"])
    candidates = CandidateSet(tuple(data.metadata.candidates))
    report = lookup_report(network, candidates, data.train, data.validation)
    training = {
        "sweep_id": data.id,
        "num_train_rows": len(data.train),
        "num_validation_rows": len(data.validation),
        "best_epoch": state["progress"]["best_epoch"],
        "best_fixed_block_size": report.best_fixed,
        "dtype": data.metadata.dtype,
        "git_commit": data.metadata.git_commit,
        **config.model_dump(include={"hidden", "epochs", "batch_size", "lr", "dropout", "patience", "seed"}),
    }
    info = PolicyInfo(data.metadata.pair, data.metadata.vocab_size, candidates, MIN_PROB, training)
    return ClassPolicy(info, network), report


def _tags(info: PolicyInfo, data: Dataset, report: LookupReport) -> dict[str, object]:
    lookup = {f"lookup.{name}": value for name, value in report._asdict().items()}
    candidates = ",".join(map(str, info.candidates))
    kind = {"objective": "tau", "head": "class", "input": "probs", "candidates": candidates}
    return {**info.pair._asdict(), **kind, "sweep_id": data.id, **lookup}


def describe(result: TrainResult, data: Dataset) -> str:
    """The short report on screen."""
    report, version = result.report, result.version
    where = f", registered as {version.name} version {version.number}" if version else ""
    verdict = "a gain" if report.claims_gain else "no gain that the rows can show"
    return (
        f"train: {len(data.train)} rows, {report.num_rows} held back; {result.num_epochs} epochs; "
        f"policy in {result.policy}{where}\n"
        f"train: held-back rows, looked up (a diagnostic, not a result): accuracy {report.accuracy:.2f} "
        f"(best fixed B={report.best_fixed}: {report.accuracy_best_fixed:.2f}); tau {report.tau_policy:.3f} "
        f"(best fixed {report.tau_best_fixed:.3f}, oracle {report.tau_oracle:.3f}); "
        f"gain {report.gain_low:+.3f} to {report.gain_high:+.3f}: {verdict}"
    )


if __name__ == "__main__":
    main(TrainConfig, run)
