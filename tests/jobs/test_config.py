"""What a job's configuration makes of the machine that it runs on."""

import pytest
import torch

from blockpilot.native import library
from jobs.common.config import pick_dtype


@pytest.mark.parametrize(
    ("wanted", "device", "reason", "dtype"),
    [
        ("auto", "cuda", "", "bfloat16"),
        ("auto", "cpu", "", "bfloat16"),
        ("auto", "cpu", "no cc", "float32"),
        ("float32", "cpu", "", "float32"),
        ("bfloat16", "cpu", "no cc", "bfloat16"),
        ("float32", "cuda", "", "float32"),
    ],
)
def test_dtype_is_what_the_device_is_good_at(
    monkeypatch: pytest.MonkeyPatch, wanted: str, device: str, reason: str, dtype: str
) -> None:
    monkeypatch.setattr(library, "reason_without", lambda dtype, device: reason)
    assert pick_dtype(wanted, device) == dtype


def test_without_a_compiler_bfloat16_is_not_exact_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "reason_without", lambda dtype, device: "no cc")
    assert library.fastest_dtype(torch.device("cpu")) == ("float32", "no layers in C: no cc")
