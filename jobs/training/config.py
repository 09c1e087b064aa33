"""Configuration of jobs/train.py. Settings that only workflows use are not on the command line."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Self

import tyro
from pydantic import AfterValidator, Field, model_validator

from blockpilot.policy.learned import Objective
from blockpilot.policy.training import FitSettings
from jobs.common.config import Config, LocalPath, Place


def shown(settings: type[Any], *names: str) -> type[Any]:
    """The dataclass with only these fields on the command line."""
    hidden = [field for field in dataclasses.fields(settings) if field.name not in names]
    suppressed = [(field.name, Annotated[field.type, tyro.conf.Suppress], field.default) for field in hidden]
    return dataclasses.make_dataclass(settings.__name__, suppressed, bases=(settings,), frozen=True)


def _checked(settings: FitSettings) -> FitSettings:
    """The settings as a plain FitSettings. Raises ValueError for invalid values."""
    return FitSettings(**dataclasses.asdict(settings)).checked()


OnCommandLine = tyro.conf.arg(
    constructor=shown(FitSettings, "kind", "hidden", "epochs", "batch_size", "lr", "dropout", "seed")
)


class TrainConfig(Config):
    """Sweeps to train on, training settings, and output of the policy."""

    sweep: tuple[Place, ...] = Field(default=("runs/sweep",), min_length=1)
    """Directories (or files) of sweeps, all of one pair, dtype and candidate set; prompts and temperatures may
    differ."""
    output: LocalPath = Path("runs/policy")
    """Output directory of the policy, and of checkpoints during training; must be visible to every node."""
    objective: Objective = "throughput"
    """Objective of kind `prompt`. tau: tokens per step. throughput: tokens per second by the sweep's step cost, with
    plain decoding as a candidate. Kind `step` has none: it adapts to step cost and load while it decodes."""
    rows: int = Field(default=1, ge=1)
    """Batch size of the step cost in the labels and reports of kind `prompt`."""
    candidates: tuple[int, ...] | None = None
    """Candidate block sizes of kind `prompt`, a subset of the sweep's; by default all."""
    leave_out: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Prompt sets whose rows are excluded."""
    fit: Annotated[FitSettings, OnCommandLine, AfterValidator(_checked)] = FitSettings()
    validation: float = Field(default=0.2, gt=0, lt=1)
    """Share of the prompts in the validation split, for early stopping and the report."""
    num_workers: int = Field(default=1, ge=1)
    """Number of data-parallel Ray Train workers."""
    num_cpus: float = Field(default=1.0, gt=0)
    """CPU cores of each worker."""
    accelerator_type: str | None = None
    """GPU type of every worker; by default any GPU, or the CPU if there is none."""
    checkpoint_every: tyro.conf.Suppress[int] = Field(default=25, ge=1)
    """Epochs between checkpoints."""
    max_failures: tyro.conf.Suppress[int] = Field(default=3, ge=0)
    """Number of lost workers to recover from."""
    register_version: bool = True
    """Register the policy as a new version of its target's model."""
    relog: bool = False
    """Train nothing; log the finished training in `output` to MLflow."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.fit.kind == "step" and self.candidates is not None:
            raise ValueError(f"candidates {self.candidates}: kind step has none; train --kind prompt")
        return self
