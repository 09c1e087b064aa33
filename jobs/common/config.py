"""Base of every job's configuration: a frozen model, its command line, and the choice of a pair.

A default is written once, here or in the Config of the job; the command line is generated from it (tyro).
"""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from blockpilot.pairs.checkpoints import known_revision
from blockpilot.pairs.table import (
    NAMED_PAIRS,
    NO_DRAFT,
    check_pair_names,
    no_draft_message,
    plain_name,
    split_revision,
)
from blockpilot.storage import is_uri, without_secrets
from blockpilot.types import PairId

if TYPE_CHECKING:
    from blockpilot.pairs.loading import Pair

Place = Annotated[str, BeforeValidator(os.fspath)]  # a local path, or a URI such as s3://bucket/sweep
ModelName = Annotated[str, AfterValidator(plain_name)]  # a hub id or local directory


def _local(path: Path) -> Path:
    """The path. Raises ValueError for a URI, of which Path would make a local folder."""
    if re.match(r"[A-Za-z][\w+.-]+:/", str(path)):  # Path has removed the second slash
        raise ValueError(f"{path}: must be a local path; only sweeps, and prices of steps, may be URIs")
    return path


LocalPath = Annotated[Path, AfterValidator(_local)]
DEFAULT_PAIR = "smollm2-135m"
ConfigT = TypeVar("ConfigT", bound="Config")


class ConfigError(Exception):
    """Refused values of a configuration, in one line. Not a ValueError, which tyro would print in a box."""


class Config(BaseModel):
    """Base of every job's configuration: immutable; unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            complaints = [
                f"{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')} (got {e['input']!r})"
                for e in error.errors()
            ]
            raise ConfigError("; ".join(complaints)) from None

    def recorded(self, **options: Any) -> dict[str, Any]:
        """`model_dump` as JSON for files and MLflow, without secrets in addresses."""
        values: dict[str, Any] = json.loads(without_secrets(json.dumps(self.model_dump(mode="json", **options))))
        return values


class PairConfig(Config):
    """Target and draft: a named pair, or a target with an optional draft, by hub id or local directory."""

    name: Annotated[str | None, tyro.conf.arg(name="pair")] = None
    """A named pair (docs/your-own-pair.md); by default the embedded smollm2-135m, unless a target is set."""
    target: ModelName | None = None
    """Target by hub id or local directory."""
    draft: ModelName | None = None
    """DFlash or EAGLE-3 draft of the target, by hub id or local directory. Without one: plain decoding or prompt
    lookup."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of weights and activations. auto: bfloat16 on a GPU, and on a CPU with AVX2 and a C compiler (where
    texts stay exact), otherwise float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the models. auto: cuda if available, otherwise cpu."""

    def names(self) -> tuple[str | None, str | None, str | None]:
        """(name, target, draft) as `load_pair` takes them; raises ValueError if it would refuse them."""
        name = self.name if (self.name or self.target or self.draft) else DEFAULT_PAIR
        check_pair_names(name, self.target, self.draft)
        return name, self.target, self.draft

    @property
    def models(self) -> tuple[str, str]:
        """Names of target and draft, NO_DRAFT without one; raises ValueError as `names` does."""
        name, target, draft = self.names()
        target, draft = NAMED_PAIRS[name] if name is not None else (target, draft)
        return str(target), draft or NO_DRAFT

    @property
    def has_draft(self) -> bool:
        """False for a target without a draft; raises ValueError as `names` does."""
        return self.models[1] != NO_DRAFT

    def need_draft(self, what: str) -> None:
        """Raise ValueError, naming the target and `what`, if there is no draft; also raises as `names` does."""
        if not self.has_draft:
            raise ValueError(no_draft_message(self.models[0], what))

    def known_revisions(self) -> list[str | None]:
        """Revisions of target and draft, None if unknown without a download."""
        target, draft = self.models
        return [known_revision("target", target), known_revision("draft", draft) if self.has_draft else NO_DRAFT]

    def check_made_for(self, what: str, made_for: PairId) -> None:
        """Raise ValueError, naming both pairs, unless `what` was made for this pair."""
        target, draft = (split_revision(name)[0] for name in self.models)
        if (made_for.target, made_for.draft) != (target, draft):
            raise ValueError(
                f"{what}: made for target {made_for.target} with draft {made_for.draft}; "
                f"this pair is target {target} with draft {draft}"
            )

    def load(self) -> "Pair":
        """Load target, draft and tokenizer onto the device."""
        # Imported here, since it takes seconds and only processes that load a pair need it.
        from transformers.utils.logging import disable_progress_bar

        from blockpilot.device import best_device
        from blockpilot.pairs.loading import load_pair

        name, target, draft = self.names()
        disable_progress_bar()  # also in actors: the job shows its own progress
        device = best_device() if self.device == "auto" else self.device
        return load_pair(name, target=target, draft=draft, dtype=self.dtype, device=device)


class Placement(Config):
    """Number of Ray actors, and the type of their GPUs."""

    num_actors: int = Field(default=1, ge=1)
    """Number of Ray actors; each loads a copy of the pair."""
    accelerator_type: str | None = None
    """GPU type of every actor, such as H100; each actor holds one GPU."""


class Resources(Placement):
    """Resources of each Ray actor of a job."""

    num_cpus: float = Field(default=1.0, gt=0)
    """CPU cores of each actor, and its torch threads (at least one)."""


def in_submitted_job() -> bool:
    """True if this process is the driver of a `ray job submit`."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def absolute_in_submitted_job(path: str | Path, name: str) -> None:
    """Raise ValueError for a relative output in a submitted job, whose working directory is a temporary copy."""
    if in_submitted_job() and not (is_uri(path) or Path(path).is_absolute()):
        raise ValueError(f"{name} {path}: must be absolute in a submitted job, whose directory is temporary")


def main(config_type: type[ConfigT], run: Callable[[ConfigT], object]) -> None:
    """Parse the command line into `config_type` and run the job.

    Bad input, and files that cannot be read or written, end in a one-line error and exit status 2.
    """
    try:
        description = sys.modules[run.__module__].__doc__
        config = tyro.cli(config_type, description=description, config=(tyro.conf.OmitArgPrefixes,))
        run(config)
    except (ConfigError, ValueError, OSError) as error:
        if os.environ.get("BLOCKPILOT_TRACEBACK"):
            raise
        print(f"error: {without_secrets(str(error))}", file=sys.stderr)
        sys.exit(2)
