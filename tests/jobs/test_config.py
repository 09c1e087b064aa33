"""What a job's configuration makes of the machine that it runs on."""

from typing import Any

import pytest
import torch

from blockpilot.native import library
from jobs.common.config import pick_dtype


@pytest.mark.parametrize(
    ("wanted", "device", "instructions", "dtype"),
    [
        ("auto", "cuda", {}, "bfloat16"),
        ("auto", "cpu", {"avx512_bf16": True}, "bfloat16"),
        ("auto", "cpu", {"amx_bf16": True, "avx512_bf16": False}, "bfloat16"),
        ("auto", "cpu", {"avx2": True, "avx512_bf16": False}, "float32"),
        ("float32", "cpu", {"amx_bf16": True}, "float32"),
        ("bfloat16", "cpu", {}, "bfloat16"),
        ("float32", "cuda", {}, "float32"),
    ],
)
def test_dtype_is_what_the_device_is_good_at(
    monkeypatch: pytest.MonkeyPatch, wanted: str, device: str, instructions: dict[str, Any], dtype: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    monkeypatch.setattr(library, "reason_without", lambda dtype, device: "")
    assert pick_dtype(wanted, device) == dtype


def test_without_a_compiler_bfloat16_is_not_exact_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    monkeypatch.setattr(library, "reason_without", lambda dtype, device: "no cc")
    dtype = library.fastest_dtype(torch.device("cpu"))
    assert dtype == ("float32", "amx_bf16, but no layers in C: no cc")
