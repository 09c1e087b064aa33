"""Mixtures of experts as the layers in C read them (native/experts.c)."""

from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, c_int, c_long, c_void_p

import torch
from torch import Tensor

from blockpilot.models.kernels import PreparedExperts
from blockpilot.native.products import Linear


class ExpertsStruct(Structure):
    """`struct experts`."""

    _fields_ = (
        *((name, c_long) for name in ("num", "chosen", "inner")),
        ("normed", c_int),
        ("router", Linear),
        *((name, POINTER(Linear)) for name in ("gate_up", "down")),
    )


class RoomStruct(Structure):
    """`struct room_of_experts`."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in (
            *("scores", "weights", "ids", "places", "x", "gate_up", "gated", "found"),
            *("up", "down", "shares"),
        )
    )


class BatchStruct(Structure):
    """`struct batch` of products.h."""

    _fields_ = (("linear", c_void_p), ("rows", c_long), ("x", c_void_p), ("out", c_void_p))


class NativeExperts:
    """The struct of a layer's experts."""

    def __init__(self, experts: PreparedExperts) -> None:
        num = len(experts.products)
        gate_up, down = (
            (Linear * num)(*(products[place].linear for products in experts.products)) for place in range(2)
        )
        sizes = num, experts.num_chosen, down[0].inputs, experts.is_normed
        self.struct = ExpertsStruct(*sizes, experts.router.linear, gate_up, down)


class RoomOfExperts:
    """Room for a pass of tokens like `hidden` [N, hidden] through any of a model's experts, by `threads` threads."""

    def __init__(self, experts: Sequence[NativeExperts], hidden: Tensor, threads: int) -> None:
        num, chosen, inner = (
            max((getattr(each.struct, name) for each in experts), default=0) for name in ("num", "chosen", "inner")
        )
        rows, width = hidden.shape
        pairs = rows * chosen
        stored = [hidden.new_empty(size) for size in (rows * num, pairs * width, pairs * 2 * inner, pairs * inner)]
        scores, x, gate_up, gated = stored
        weights, found = torch.empty(pairs), torch.empty_like(x)
        ids, places, shares = (torch.empty(size, dtype=torch.int64) for size in (pairs, pairs, 3 * threads))
        self._kept = scores, weights, ids, places, x, gate_up, gated, found
        self._batches = (BatchStruct * num)(), (BatchStruct * num)()
        self._shares = shares
        self.struct = RoomStruct(
            *(each.data_ptr() for each in self._kept), *map(addressof, self._batches), shares.data_ptr()
        )
