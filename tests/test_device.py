"""Dtypes and devices, by name or as torch objects."""

from pathlib import Path
from typing import Any

import pytest
import torch

from blockpilot.device import free_bytes, to_device, to_dtype


def test_dtypes_and_the_cpu_by_name_or_as_torch_has_them() -> None:
    assert {to_dtype(dtype) for dtype in ("bfloat16", "torch.bfloat16", torch.bfloat16)} == {torch.bfloat16}
    assert {to_device(device).type for device in ("cpu", "cpu:0", torch.device("cpu"))} == {"cpu"}


@pytest.mark.parametrize("dtype", ["float16", torch.float16, "auto", "bf16", None, 16])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"dtype .*: must be one of float32, bfloat16$"):
        to_dtype(dtype)


@pytest.mark.parametrize("device", ["cuda", 0, "cuda:1", torch.device("cuda", 0), "gpu", "meta", True, None])
def test_devices_that_are_not_here_are_refused(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"device .*: must be one of cpu, which"):
        to_device(device)


def test_gpus_by_number_and_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in (1, "cuda:1", torch.device("cuda", 1)):
        assert to_device(device) == torch.device("cuda:1")
    assert to_device("cuda") == torch.device("cuda")
    for wrong in (2, -1, "cuda:2", True):
        with pytest.raises(ValueError, match=r"device .*: must be one of cpu, cuda, cuda:0, cuda:1, which"):
            to_device(wrong)


@pytest.mark.parametrize(("limit", "free"), [("1000000", 650_000), ("300000", 0), ("max", None)])
def test_memory_that_a_container_leaves(
    limit: str, free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 400,000 bytes in use 60,000 are file cache, 10,000 of these shared memory, which does not yield."""
    cpu = torch.device("cpu")
    of_machine = free_bytes(cpu)
    monkeypatch.setattr("blockpilot.device.CONTAINER", tmp_path)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 340000\nfile 60000\nshmem 10000\n")
    if free is None:
        assert free_bytes(cpu) == pytest.approx(of_machine, rel=0.2)
    else:
        assert free_bytes(cpu) == free
