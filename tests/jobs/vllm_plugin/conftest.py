"""Fixtures of the tests of the plug-in."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.common.registry import Registry


@pytest.fixture(scope="module")
def registry(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """Registry of a file's tests, without a champion."""
    file = tmp_path_factory.mktemp("registry") / "mlflow.db"
    shutil.copy(empty_store, file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{file}")
        yield Registry.open()
