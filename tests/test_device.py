"""Dtypes and devices as Python code has them."""

from typing import Any

import pytest
import torch

from blockpilot.device import to_device, to_dtype


@pytest.mark.parametrize("given", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_dtypes(given: Any) -> None:
    assert to_dtype(given) is torch.bfloat16


@pytest.mark.parametrize("given", ["float16", torch.float16, "auto", "bf16", None, 16])
def test_other_dtypes_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"dtype .*: must be one of float32, bfloat16$"):
        to_dtype(given)


@pytest.mark.parametrize("given", ["cpu", "cpu:0", torch.device("cpu")])
def test_devices(given: Any) -> None:
    assert to_device(given).type == "cpu"


@pytest.mark.parametrize("given", ["cuda", 0, "cuda:1", torch.device("cuda", 0), "gpu", "meta", True, None])
def test_devices_that_are_not_here_are_refused(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"device .*: must be one of cpu, which"):
        to_device(given)


def test_gpus_by_number_and_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for given in (1, "cuda:1", torch.device("cuda", 1)):
        assert to_device(given) == torch.device("cuda:1")
    assert to_device("cuda") == torch.device("cuda")
    for given in (2, -1, "cuda:2", True):
        with pytest.raises(ValueError, match=r"device .*: must be one of cpu, cuda, cuda:0, cuda:1, which"):
            to_device(given)
