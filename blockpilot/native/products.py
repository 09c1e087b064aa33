"""Linear products in C (products.c), batch invariant: a row's result does not depend on the other rows."""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from blockpilot.native.library import fields, library_for

PANEL, INPUTS = 16, 32  # outputs of a panel; products.c needs a multiple of INPUTS inputs


class Padding(NamedTuple):
    """Padding of runs of `size` numbers with zeros to runs of `padded`."""

    size: int
    padded: int

    @classmethod
    def to_multiple(cls, size: int, of: int = INPUTS) -> Self:
        """The least padding of runs to a multiple."""
        return cls(size, -(-size // of) * of)

    def pad(self, x: Tensor) -> Tensor:
        """[..., runs * size] -> [..., runs * padded], a copy only if the sizes differ."""
        if self.size == self.padded:
            return x
        padded: Tensor = functional.pad(x.unflatten(-1, (-1, self.size)), (0, self.padded - self.size)).flatten(-2)
        return padded

    def cut(self, x: Tensor) -> Tensor:
        """[..., runs * padded] -> [..., runs * size]"""
        if self.size == self.padded:
            return x
        cut: Tensor = x.unflatten(-1, (-1, self.padded))[..., : self.size].flatten(-2)
        return cut


class Linear(ctypes.Structure):
    """`struct linear` of products.h."""

    _fields_ = (
        *fields(ctypes.c_long, "inputs", "outputs"),
        *fields(ctypes.c_void_p, "weights", "bias"),
    )


class NativeProduct:
    """x [..., inputs] -> x @ weight.T + bias, with the weight [outputs, inputs] packed for products.c.

    linear: struct of the packed weight, whose inputs and outputs are padded.
    """

    def __init__(
        self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None, inputs: Padding, outputs: Padding
    ) -> None:
        # Panels of 16 outputs follow each other; a panel has units of 4 bytes of inputs for each output, so the
        # operands of one vector instruction are contiguous.
        self._inputs, self._outputs = inputs, outputs
        weight = outputs.pad(inputs.pad(weight).T).T
        num_outputs, num_inputs = weight.shape
        panel_padding, per_unit = Padding.to_multiple(num_outputs, PANEL), 4 // weight.element_size()
        panels = panel_padding.pad(weight.T).T.reshape(-1, PANEL, num_inputs // per_unit, per_unit)
        self._packed = panels.transpose(1, 2).contiguous()  # [panels, units, PANEL, inputs of a unit]
        # A copy: C keeps its address, and a model's own weights may move (kernels.copy_mapped_weights).
        self._bias = None if bias is None else panel_padding.pad(outputs.pad(bias.detach())).clone()
        self._product = _declared(library)
        pointers = self._packed.data_ptr(), None if self._bias is None else self._bias.data_ptr()
        self.linear = Linear(num_inputs, num_outputs, *pointers)

    def __call__(self, x: Tensor) -> Tensor:
        x, linear = self.padded(x), self.linear
        out = x.new_empty(*x.shape[:-1], linear.outputs)
        # Leading dimensions do not matter to C: all are rows.
        rows, threads = x.numel() // linear.inputs, torch.get_num_threads()
        self._product(ctypes.byref(linear), rows, x.data_ptr(), out.data_ptr(), threads)
        return self._outputs.cut(out)

    def padded(self, x: Tensor) -> Tensor:
        """x [..., inputs] as C reads it."""
        x = self._inputs.pad(x).contiguous()
        assert (x.dtype, x.shape[-1]) == (self._packed.dtype, self.linear.inputs)
        return x

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # immutable

    @property
    def bias(self) -> Tensor | None:
        """The bias without padding."""
        return None if self._bias is None else self._outputs.cut(self._bias[: self.linear.outputs])

    def unpacked(self) -> Tensor:
        """The weight, a copy."""
        # Cut off the padded rows of the last panel, then the padding of outputs and inputs.
        inputs, outputs = self.linear.inputs, self.linear.outputs
        weight = self._packed.transpose(1, 2).reshape(-1, inputs)[:outputs]
        return self._inputs.cut(self._outputs.cut(weight.T).T).contiguous()


@cache
def _declared(library: ctypes.CDLL) -> Callable[..., None]:
    """`product` of products.h."""
    product, pointer = library.product, ctypes.c_void_p
    product.argtypes = ctypes.POINTER(Linear), ctypes.c_long, pointer, pointer, ctypes.c_int
    product.restype = None
    return product


def native_product(
    weight: Tensor, bias: Tensor | None, inputs: Padding | None = None, outputs: Padding | None = None
) -> NativeProduct | None:
    """Product of a weight [outputs, inputs], with inputs padded for C by default; None without C."""
    library = library_for(weight.dtype, weight.device)
    if library is None:
        return None
    num_outputs, num_inputs = weight.shape
    inputs, outputs = inputs or Padding.to_multiple(num_inputs), outputs or Padding(num_outputs, num_outputs)
    return NativeProduct(library, weight, bias, inputs, outputs)
