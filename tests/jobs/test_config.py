"""Configuration of a job on its machine: dtype by device, and the output of submitted jobs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blockpilot.native import library
from blockpilot.types import PairId
from jobs import answers, evaluate, sweep, train, train_draft
from jobs.answers import AnswersConfig
from jobs.common.config import Config, ConfigError, PairConfig
from jobs.evaluation.inputs import EvaluateConfig
from jobs.export import ExportConfig
from jobs.sweep import SweepConfig
from jobs.training.config import TrainConfig
from jobs.training.draft import TrainDraftConfig

OUTPUT = Path("runs/x")


@pytest.mark.parametrize(
    ("wanted", "device", "reason", "dtype"),
    [
        ("auto", "cuda", "", "bfloat16"),
        ("auto", "cpu", "", "bfloat16"),
        ("auto", "cpu", "no cc", "float32"),
        ("float32", "cpu", "", "float32"),
        ("bfloat16", "cpu", "no cc", "bfloat16"),
        ("float32", "cuda", "", "float32"),
    ],
)
def test_dtype_is_what_the_device_is_good_at(
    monkeypatch: pytest.MonkeyPatch, wanted: str, device: str, reason: str, dtype: str
) -> None:
    monkeypatch.setattr(library, "reason_without", lambda dtype, device: reason)
    assert library.pick_dtype(wanted, device) == dtype


def test_without_a_compiler_bfloat16_is_not_exact_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "reason_without", lambda dtype, device: "no cc")
    assert library.fastest_dtype(torch.device("cpu")) == ("float32", "no layers in C: no cc")


def test_a_directory_has_one_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A policy made for models/m is for models/m/ too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "m").mkdir(parents=True)
    config = PairConfig(target="./models/m/", draft="models/./m")
    assert config.models == ("models/m", "models/m")
    config.check_made_for("policy", PairId("models/m", "0", "models/m", "0"))
    assert PairConfig(target="Qwen/Qwen3-4B@main", draft="/other/machine/draft/").models == (
        "Qwen/Qwen3-4B@main",
        "/other/machine/draft",
    )


@pytest.mark.parametrize(
    ("run", "config"),
    [
        (sweep.run, SweepConfig(output=str(OUTPUT))),
        (train.run, TrainConfig(output=OUTPUT)),
        (evaluate.run, EvaluateConfig(prompts=("demo",), output=OUTPUT)),
        (answers.run, AnswersConfig(answers=OUTPUT)),
        (train_draft.run, TrainDraftConfig(output=OUTPUT)),
    ],
)
def test_a_submitted_job_needs_an_absolute_output(
    run: Callable[[Any], object], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(ValueError, match="runs/x: must be absolute in a submitted job"):
        run(config)


@pytest.mark.parametrize("uri", ["s3://bucket/x", Path("s3://bucket/x"), "file:///tmp/x"])
@pytest.mark.parametrize(
    ("config", "values"),
    [
        (TrainConfig, {}),
        (EvaluateConfig, {"prompts": ("demo",)}),
        (ExportConfig, {}),
        (TrainDraftConfig, {}),
    ],
)
def test_outputs_that_must_be_local_are_no_uris(
    config: type[Config], values: dict[str, object], uri: str | Path
) -> None:
    """The command line gives a Path, which has one slash fewer."""
    with pytest.raises(ConfigError, match=r"output: (s3:/|file:/).* must be a local path; only sweeps"):
        config(**values, output=uri)
    with pytest.raises(ConfigError, match="answers: s3:/bucket: must be a local path"):
        AnswersConfig(answers=Path("s3://bucket"))
