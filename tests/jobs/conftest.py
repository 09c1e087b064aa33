"""The MLflow store of a test, and trainings without Ray."""

import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from helpers import one_process
from helpers.processes import Job
from helpers.stores import CREATE, NUM_CREATORS
from jobs.common.config import PairConfig
from jobs.common.registry import Registry

# Ray starts only the processes that jobs ask for.
os.environ.update(RAY_prestart_worker_first_driver="0", RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="0")


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """New sqlite store, created once by concurrent processes for all pytest workers; copying it is cheap."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path, staging = folder / "store" / "mlflow.db", folder / "begun-store"
    with FileLock(folder / "store.lock"):
        if not path.exists():
            staging.mkdir()
            command = ["-c", CREATE, f"sqlite:///{staging}/mlflow.db"]
            logs = [folder / f"store-{i}.log" for i in range(NUM_CREATORS)]
            jobs = [Job(command, cwd=staging, env=os.environ, output=log) for log in logs]
            assert [job.wait(200) for job in jobs] == [0] * NUM_CREATORS, [job.log for job in jobs]
            staging.rename(path.parent)
    return path


@pytest.fixture
def registry(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Registry of a new store, mlflow.db in the working directory, which jobs open by default."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Registry.open()


@pytest.fixture(scope="session")
def pair_config(tiny_pair_dirs: tuple[Path, Path]) -> PairConfig:
    """Configuration of the tiny pair in a job."""
    target, draft = map(str, tiny_pair_dirs)
    return PairConfig(target=target, draft=draft, dtype="float32")


@pytest.fixture
def in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run trainings without Ray: their workers and actors are this process."""
    for attribute in ("train.connect", "train.scaling_config", "answers.connect", "train_draft.scaling_config"):
        monkeypatch.setattr(f"jobs.{attribute}", lambda *_, **__: None)
    for attribute in ("train.train", "train_draft.train"):
        monkeypatch.setattr(f"jobs.{attribute}", one_process.train)
    for attribute in ("answers.pooled", "train_draft.pooled"):
        monkeypatch.setattr(f"jobs.{attribute}", one_process.pooled)
