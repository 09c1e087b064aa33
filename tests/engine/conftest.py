"""The tiny target without a draft, beside the pairs of tests/conftest.py."""

from pathlib import Path

import pytest

from blockpilot.pairs.loading import Pair, load_pair


@pytest.fixture(scope="session")
def alone(tiny_pair_dirs: tuple[Path, Path]) -> Pair:
    """The tiny target without a draft."""
    return load_pair(target=tiny_pair_dirs[0], dtype="float32")
