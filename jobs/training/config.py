"""The configuration of jobs/train.py. What only workflows set is not on the command line."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Self

import tyro
from pydantic import AfterValidator, Field, model_validator

from blockpilot.policy.learned import Objective
from blockpilot.policy.training import FitSettings
from jobs.common.config import Config, Place


def shown(settings: type[Any], *names: str) -> type[Any]:
    """The dataclass, with these of its fields on the command line and no others."""
    hidden = [field for field in dataclasses.fields(settings) if field.name not in names]
    suppressed = [(field.name, Annotated[field.type, tyro.conf.Suppress], field.default) for field in hidden]
    return dataclasses.make_dataclass(settings.__name__, suppressed, bases=(settings,), frozen=True)


def _checked(settings: FitSettings) -> FitSettings:
    """Of the class itself, whatever the command line made. Raises ValueError for values that cannot be."""
    return FitSettings(**dataclasses.asdict(settings)).checked()


OnCommandLine = tyro.conf.arg(
    constructor=shown(FitSettings, "kind", "hidden", "epochs", "batch_size", "lr", "dropout", "seed")
)


class TrainConfig(Config):
    """What to train on, how, and where the policy goes."""

    sweep: tuple[Place, ...] = Field(default=("runs/sweep",), min_length=1)
    """Directories (or files) of sweeps: of one pair, dtype and candidate set, whatever their prompts and
    temperatures."""
    output: Path = Path("runs/policy")
    """Directory of the policy; checkpoints while it trains. Every node must see it."""
    objective: Objective = "throughput"
    """Of kind `prompt`. tau: tokens a step. throughput: tokens a second by the price of a step beside the sweep;
    plain decoding is then a candidate. Kind `step` follows any price and load in use."""
    rows: int = Field(default=1, ge=1)
    """Active rows at whose price of a step labels and reports of kind `prompt` are."""
    candidates: tuple[int, ...] | None = None
    """Block sizes for kind `prompt` to choose from, some of the sweep's; all by default."""
    leave_out: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Prompt sets whose rows are not used."""
    fit: Annotated[FitSettings, OnCommandLine, AfterValidator(_checked)] = FitSettings()
    validation: float = Field(default=0.2, gt=0, lt=1)
    """Share of the prompts held back to stop early and to report."""
    num_workers: int = Field(default=1, ge=1)
    """Data-parallel Ray Train workers."""
    num_cpus: float = Field(default=1.0, gt=0)
    """CPU cores of a worker."""
    accelerator_type: str | None = None
    """Put every worker on a GPU of this type. Otherwise a GPU where there are any."""
    checkpoint_every: tyro.conf.Suppress[int] = Field(default=25, ge=1)
    """Epochs between checkpoints."""
    max_failures: tyro.conf.Suppress[int] = Field(default=3, ge=0)
    """Lost workers to recover from."""
    register_version: bool = True
    """Register the policy as a new version of its target's model."""
    relog: bool = False
    """Train nothing: tell MLflow of the finished training in `output`."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.fit.kind == "step" and self.candidates is not None:
            raise ValueError(f"candidates {self.candidates}: kind step has none; train --kind prompt")
        return self
