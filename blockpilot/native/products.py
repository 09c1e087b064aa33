"""Linear products in C (products.c): a row's results do not depend on the rows beside it."""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from blockpilot.native.library import library_for

PANEL, INPUTS = 16, 32  # of which products.c takes multiples


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
        self._product, self._bias = _declared(library), bias
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


@cache
def _declared(library: ctypes.CDLL) -> Callable[..., None]:
    """`product` of products.h."""
    found, pointer = library.product, ctypes.c_void_p
    found.argtypes = ctypes.POINTER(Linear), ctypes.c_long, pointer, pointer, ctypes.c_int
    found.restype = None
    return found


def native_product(weight: Tensor, bias: Tensor | None) -> NativeProduct | None:
    """For a weight [outputs, inputs] on a CPU; None where there is none."""
    num_outputs, num_inputs = weight.shape
    fits = num_outputs % PANEL == 0 and num_inputs % INPUTS == 0
    library = library_for(weight.dtype, weight.device) if fits else None
    return None if library is None else NativeProduct(library, weight, bias)
