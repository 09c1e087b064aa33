"""Structs of mixtures of experts for the layers in C (native/experts.c)."""

from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, c_int, c_long, c_void_p

import torch
from torch import Tensor

from blockpilot.models.kernels import PreparedExperts
from blockpilot.native.library import fields
from blockpilot.native.products import Linear


class ExpertsStruct(Structure):
    """`struct experts`."""

    _fields_ = (
        *fields(c_long, "num", "chosen", "inner"),
        ("normed", c_int),
        ("router", Linear),
        *fields(POINTER(Linear), "gate_up", "down"),
    )


class RoomStruct(Structure):
    """`struct room_of_experts`."""

    _fields_ = (
        *fields(c_void_p, "scores", "weights", "ids", "places", "x", "gate_up", "gated", "found"),
        *fields(c_void_p, "up", "down", "shares"),
    )


class BatchStruct(Structure):
    """`struct batch` of products.h."""

    _fields_ = (("linear", c_void_p), ("rows", c_long), ("x", c_void_p), ("out", c_void_p))


class NativeExperts:
    """The struct of a layer's experts."""

    def __init__(self, experts: PreparedExperts) -> None:
        num = len(experts.products)
        gate_up, down = (Linear * num)(), (Linear * num)()
        for i, (gate_up_product, down_product) in enumerate(experts.products):
            gate_up[i], down[i] = gate_up_product.linear, down_product.linear
        sizes = num, experts.num_chosen, down[0].inputs, experts.is_normed
        self.struct = ExpertsStruct(*sizes, experts.router.linear, gate_up, down)


class RoomOfExperts:
    """Buffers for `threads` threads and tokens like `hidden` [N, hidden], for any of a model's experts."""

    def __init__(self, experts: Sequence[NativeExperts], hidden: Tensor, threads: int) -> None:
        # The same buffers for all layers, as large as the largest layer needs.
        num = chosen = inner = 0
        for layer in experts:
            num, chosen = max(num, layer.struct.num), max(chosen, layer.struct.chosen)
            inner = max(inner, layer.struct.inner)
        rows, width = hidden.shape
        pairs = rows * chosen  # of tokens and experts
        x, down_out = hidden.new_empty(2, pairs * width)
        self._buffers = (
            *(hidden.new_empty(rows * num), torch.empty(pairs)),  # scores of all experts, weights of the chosen
            *torch.empty(2, pairs, dtype=torch.int64),  # their ids, and the indices of their rows in x
            *(x, hidden.new_empty(2 * pairs * inner), hidden.new_empty(pairs * inner), down_out),
        )
        self._batches = (BatchStruct * num)(), (BatchStruct * num)()
        self._shares = torch.empty(3 * threads, dtype=torch.int64)
        addresses = [values.data_ptr() for values in (*self._buffers, self._shares)]
        self.struct = RoomStruct(*addresses[:-1], *map(addressof, self._batches), addresses[-1])
