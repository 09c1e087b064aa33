"""Products in C against those of torch: equal up to rounding; torch if C is not available."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from blockpilot.native import library
from blockpilot.native.library import library_for, reason_without
from blockpilot.native.products import NativeProduct, Padding, native_product

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
WARNING = "decoder layers by torch, which is slower, and exact up to rounding: "
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def close(output: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCE[output.dtype]
    return output.dtype == expected.dtype and torch.allclose(output, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
@pytest.mark.skipif(not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="no such CPU")
def test_a_machine_with_a_compiler_has_them() -> None:
    assert all(library_for(dtype, CPU) is not None for dtype in DTYPES)
    assert all(reason_without(dtype, CPU) == "" for dtype in DTYPES)
    assert library_for(torch.float16, CPU) is None
    assert reason_without(torch.float16, CPU) == "float16"
    assert reason_without(torch.float32, torch.device("meta")) == "device meta"
    assert library_for(torch.float32, torch.device("meta")) is None


def product_of(weight: Tensor, bias: Tensor | None = None, *paddings: Padding) -> NativeProduct:
    product = native_product(weight, bias, *paddings)
    if product is None:
        pytest.skip("no compiler, or no CPU for it")
    return product


@given(
    rows=st.integers(0, 70),
    inputs=st.integers(1, 290),
    outputs=st.integers(1, 150),
    bias=st.booleans(),
    data=st.data(),
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products(dtype: torch.dtype, rows: int, inputs: int, outputs: int, bias: bool, data: st.DataObject) -> None:
    """Products of any shape equal torch's; a row has the same bits next to any others, NaN or not."""
    torch.manual_seed(rows)
    weight, x = torch.randn(outputs, inputs).div(inputs).to(dtype), torch.randn(rows, inputs).to(dtype)
    added = torch.randn(outputs).to(dtype) if bias else None
    product = product_of(weight, added)
    output = product(x)
    assert close(output, functional.linear(x, weight, added))
    assert product.unpacked().equal(weight)
    if rows:
        first = data.draw(st.integers(0, rows - 1))
        last = data.draw(st.integers(first + 1, rows))
        assert product(x[first:last]).equal(output[first:last])
        x[:first], x[last:] = torch.nan, torch.inf
        assert product(x)[first:last].equal(output[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [20, 1300])  # of more than 512 rows, inputs are converted in parts
def test_products_have_the_same_bits_by_any_number_of_threads(dtype: torch.dtype, rows: int) -> None:
    product, x = product_of(torch.randn(16 * 7, 64).to(dtype)), torch.randn(rows, 64).to(dtype)
    before, outputs = torch.get_num_threads(), []
    try:
        for num in (1, 2, 3, 9):
            torch.set_num_threads(num)
            outputs.append(product(x))
    finally:
        torch.set_num_threads(before)
    assert all(output.equal(outputs[0]) for output in outputs)
    assert product(x[-7:]).equal(outputs[0][-7:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("runs", [1, 3])
def test_padded_products(dtype: torch.dtype, runs: int) -> None:
    """Runs of inputs and outputs are padded with zeros in the packed weight; results are without padding."""
    inputs, outputs = Padding(10, 32), Padding(6, 16)
    weight, bias = torch.randn(6 * runs, 10 * runs).to(dtype), torch.randn(6 * runs).to(dtype)
    product = product_of(weight, bias, inputs, outputs)
    x = torch.randn(5, 10 * runs).to(dtype)
    assert (product.linear.inputs, product.linear.outputs) == (32 * runs, 16 * runs)
    assert close(product(x), functional.linear(x, weight, bias))
    assert product.unpacked().equal(weight)
    assert inputs.cut(inputs.pad(x)).equal(x)


def test_torch_where_c_has_no_such_numbers() -> None:
    assert native_product(torch.zeros(16, 32, dtype=torch.float64), None) is None
    assert native_product(torch.zeros(16, 32, device="meta"), None) is None


@pytest.fixture
def fresh_library() -> Iterator[None]:
    """Load the library again in the test, and once more after it."""
    library._library.cache_clear()
    yield
    library._library.cache_clear()


@pytest.mark.usefixtures("fresh_library")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FileNotFoundError(2, "No such file", "cc"), "no C compiler"),
        (FileNotFoundError(2, "No usable temporary directory"), "[Errno 2] No usable temporary directory"),
        (subprocess.TimeoutExpired("cc", 60), "Command 'cc' timed out after 60 seconds"),
    ],
)
def test_torch_where_there_is_no_compiler(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", failing)
    for _ in range(3):
        assert library_for(torch.float32, CPU) is None
        assert reason_without(torch.float32, CPU) == reason
    assert caplog.messages == [WARNING + reason]  # once


@pytest.mark.usefixtures("fresh_library")
@pytest.mark.skipif(not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="no such CPU")
@pytest.mark.parametrize(
    ("script", "said"),
    [("printf '\\377\\376 no' >&2; exit 1", "cc: \ufffd\ufffd no"), ("exit 3", "cc: ended with status 3")],
)
def test_torch_where_the_compiler_fails(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Warning with the compiler's message in any encoding, or with its exit status."""
    (tmp_path / "cc").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert library_for(torch.float32, CPU) is None
    assert caplog.messages == [WARNING + said]


@pytest.mark.usefixtures("fresh_library")
@pytest.mark.skipif(not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="no such CPU")
def test_a_compiled_library_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process compiles only if the library is missing, damaged, or of other sources or flags."""
    monkeypatch.setattr(library, "CACHE", tmp_path / "cache")
    commands, run = list[list[str]](), library._run
    monkeypatch.setattr(library, "_run", lambda folder, *command: commands.append(command) or run(folder, *command))

    def num_compiled() -> int:
        """Number of sources that a new process compiles."""
        library._library.cache_clear()
        commands.clear()
        assert library_for(torch.float32, CPU) is not None
        return sum("-c" in command for command in commands)

    # Loaded from where it is kept, since the folder of temporary files may not be executable.
    file = tmp_path / "cache" / f"native-{library._identity(('cc', *library.FLAGS, '-c'))}.so"
    file.parent.mkdir()
    file.write_bytes(b"\x7fELF and no more")
    assert num_compiled() == len(library.SOURCES)
    mapped = Path("/proc/self/maps").read_text()
    assert str(file) in mapped
    assert "/native.so" not in mapped
    assert num_compiled() == 0
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-DANOTHER"))
    assert num_compiled() == len(library.SOURCES)
