"""A pair in addition to those of tests/conftest.py."""

import pytest
import torch

from blockpilot.native.library import library_for
from blockpilot.pairs.loading import Pair, load_pair


@pytest.fixture(scope="session")
def bfloat16_pair() -> Pair:
    """SmolLM2-135M-Instruct with its draft, bfloat16, with layers in C."""
    if library_for(torch.bfloat16, torch.device("cpu")) is None:
        pytest.skip("no compiler, or no CPU for it")
    return load_pair("smollm2-135m", dtype="bfloat16")
