"""Fixtures of the tests of the plug-in."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.common.registry import Registry


@pytest.fixture(scope="module")
def registry(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """Of the tests of a file, and without a champion."""
    file = tmp_path_factory.mktemp("registry") / "mlflow.db"
    shutil.copy(empty_store, file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{file}")
        yield Registry.open()
