"""The MLflow store of a test."""

import shutil
from pathlib import Path

import pytest

from jobs.common.registry import Registry


@pytest.fixture
def registry(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """An empty store, which jobs find in the working directory."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Registry.open()
