"""C for a CPU, compiled by the machine's own compiler when a model is prepared, in a second; and its products.

products.c multiplies with the weights: a row's results do not depend on the rows beside it. layers.c runs all layers
(native_layers.py). Where there is no compiler, no x86-64 CPU with AVX2 or no fitting shape, torch does all of it.
"""

import ctypes
import logging
import platform
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SOURCES = tuple(Path(__file__).with_name(name) for name in ("products.c", "layers.c"))
FLAGS = ("-O3", "-march=native", "-fPIC", "-fopenmp", "-Wno-psabi")
PANEL, INPUTS = 16, 32  # of which products.c takes multiples
_DEFINES = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}

_logger = logging.getLogger(__name__)


class Linear(ctypes.Structure):
    """`struct linear` of products.h."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("inputs", "outputs")),
        *((name, ctypes.c_void_p) for name in ("weights", "bias")),
    )


class NativeProduct:
    """x [..., inputs] -> x @ weight.T + bias, with the weight [outputs, inputs] packed as products.c reads it."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> None:
        num_outputs, num_inputs = weight.shape
        per_unit = 4 // weight.element_size()
        panels = weight.view(-1, PANEL, num_inputs // per_unit, per_unit)
        self._packed = panels.transpose(1, 2).contiguous()  # [panels, units, PANEL, inputs of a unit]
        self._product, self._bias = library.product, bias
        pointers = self._packed.data_ptr(), None if bias is None else bias.data_ptr()
        self.linear = Linear(num_inputs, num_outputs, *pointers)

    def __call__(self, x: Tensor) -> Tensor:
        x, linear = x.contiguous(), self.linear
        assert (x.dtype, x.shape[-1]) == (self._packed.dtype, linear.inputs)
        out = x.new_empty(*x.shape[:-1], linear.outputs)
        rows, threads = x.numel() // linear.inputs, torch.get_num_threads()
        self._product(ctypes.byref(linear), rows, x.data_ptr(), out.data_ptr(), threads)
        return out

    def unpacked(self) -> Tensor:
        """The weight, a copy."""
        return self._packed.transpose(1, 2).reshape(self.linear.outputs, self.linear.inputs)


def native_product(weight: Tensor, bias: Tensor | None) -> NativeProduct | None:
    """For a weight [outputs, inputs] on a CPU; None where there is none."""
    num_outputs, num_inputs = weight.shape
    fits = num_outputs % PANEL == 0 and num_inputs % INPUTS == 0
    library = library_for(weight.dtype, weight.device) if fits else None
    return None if library is None else NativeProduct(library, weight, bias)


def library_for(dtype: torch.dtype, device: torch.device) -> ctypes.CDLL | None:
    """The functions in C for a dtype, or None."""
    return _library(dtype) if device.type == "cpu" and dtype in _DEFINES else None


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The functions in C for a dtype; None, with a line in the log, where it cannot be."""
    try:
        _check_machine()
        with tempfile.TemporaryDirectory() as folder:
            _run(folder, "cc", *FLAGS, *_DEFINES[dtype], "-c", *map(str, SOURCES))
            # No OpenMP of its own: its calls find the one that torch brought, whose threads they share.
            _run(folder, "cc", "-shared", *(f"{source.stem}.o" for source in SOURCES), "-o", "native.so", "-lm")
            return _declared(ctypes.CDLL(str(Path(folder, "native.so"))))
    except (OSError, subprocess.SubprocessError, NotImplementedError) as error:
        _logger.warning("decoder layers by torch, which is slower: %s", error)
        return None


def _check_machine() -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine() != "x86_64" or not capability.startswith("AVX"):
        raise NotImplementedError(f"{platform.machine()} {capability}: an x86-64 CPU with AVX2 is needed")


def _run(folder: str, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command[:1])}: {done.stderr.strip()[-400:]}")


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer = ctypes.c_void_p
    library.product.argtypes = ctypes.POINTER(Linear), ctypes.c_long, pointer, pointer, ctypes.c_int
    library.product.restype = None
    return library
