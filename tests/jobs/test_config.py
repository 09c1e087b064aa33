"""What a job's configuration makes of the machine that it runs on."""

from typing import Any

import pytest
import torch

from jobs.common.config import pick_dtype


@pytest.mark.parametrize(
    ("wanted", "device", "instructions", "dtype"),
    [
        ("auto", "cuda", {}, "bfloat16"),
        ("fast", "cuda", {}, "bfloat16"),
        ("auto", "cpu", {"avx512_bf16": True}, "float32"),
        ("fast", "cpu", {"avx512_bf16": True}, "bfloat16"),
        ("fast", "cpu", {"amx_bf16": True, "avx512_bf16": False}, "bfloat16"),
        ("fast", "cpu", {"avx2": True, "avx512_bf16": False}, "float32"),
        ("bfloat16", "cpu", {}, "bfloat16"),
        ("float32", "cuda", {}, "float32"),
    ],
)
def test_dtype_is_what_the_device_is_good_at(
    monkeypatch: pytest.MonkeyPatch, wanted: str, device: str, instructions: dict[str, Any], dtype: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    assert pick_dtype(wanted, device) == dtype
