"""Structs of mixtures of experts for the layers in C (native/experts.c)."""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, addressof, byref, c_float, c_int, c_long, c_void_p

import torch
from torch import Tensor

from blockpilot.models.experts import Mixture
from blockpilot.models.kernels import PreparedExperts
from blockpilot.native.library import fields
from blockpilot.native.products import Linear, Padding


class ExpertsStruct(Structure):
    """`struct experts`."""

    _fields_ = (
        *fields(c_long, "num", "chosen", "inner"),
        *fields(c_int, "normed", "gelu"),
        *fields(c_float, "limit", "alpha"),
        ("router", Linear),
        ("scales", c_void_p),
        *fields(POINTER(Linear), "gate_up", "down"),
    )


class BuffersStruct(Structure):
    """`struct expert_buffers`."""

    _fields_ = (
        *fields(c_void_p, "scores", "weights", "ids", "indices", "x", "gate_up", "gated", "outputs"),
        *fields(c_void_p, "up", "down", "shares"),
    )


class BatchStruct(Structure):
    """`struct batch` of products.h."""

    _fields_ = (("linear", c_void_p), ("rows", c_long), ("x", c_void_p), ("out", c_void_p))


class NativeExperts:
    """`struct experts` of a layer."""

    def __init__(self, experts: PreparedExperts) -> None:
        num = len(experts.products)
        gate_up, down = (Linear * num)(), (Linear * num)()
        for i, (gate_up_product, down_product) in enumerate(experts.products):
            gate_up[i], down[i] = gate_up_product.linear, down_product.linear
        form, self._router = experts.form, experts.router
        sizes = num, self._router.num_chosen, down[0].inputs, self._router.is_normed, form.gelu
        scales = None if self._router.scales is None else self._router.scales.data_ptr()
        self.struct = ExpertsStruct(*sizes, form.limit, form.alpha, experts.scores.linear, scales, gate_up, down)


class ExpertBuffers:
    """Buffers for `threads` threads and tokens like `hidden` [N, hidden], shared by all layers of a model."""

    def __init__(self, experts: Sequence[NativeExperts], hidden: Tensor, threads: int) -> None:
        # As large as the largest layer needs.
        num = chosen = inner = 0
        for layer in experts:
            num, chosen = max(num, layer.struct.num), max(chosen, layer.struct.chosen)
            inner = max(inner, layer.struct.inner)
        # The rows of an expert are contiguous, so a token has one row for each of its experts.
        rows, width = hidden.shape
        pairs = rows * chosen  # (token, selected expert)
        x, down_out = hidden.new_empty(2, pairs * width)
        self._buffers = (
            *(hidden.new_empty(rows * num), torch.empty(pairs)),  # scores of all experts, weights of the selected
            *torch.empty(2, pairs, dtype=torch.int64),  # their ids, and the indices of their rows in x
            *(x, hidden.new_empty(2 * pairs * inner), hidden.new_empty(pairs * inner), down_out),
        )
        self._batches = (BatchStruct * num)(), (BatchStruct * num)()
        self._shares = torch.empty(3 * threads, dtype=torch.int64)
        addresses = [values.data_ptr() for values in (*self._buffers, self._shares)]
        self.struct = BuffersStruct(*addresses[:-1], *map(addressof, self._batches), addresses[-1])


class NativeMixtures:
    """Mixtures of experts in C, for layers that are called one by one (native_hybrid.py)."""

    def __init__(self, library: ctypes.CDLL, mixtures: Sequence[Mixture], hidden: int) -> None:
        self._mix, self._width = library.mix_rows, Padding.to_multiple(hidden)
        rows = c_long, c_long, c_void_p
        self._mix.argtypes = POINTER(ExpertsStruct), *rows, POINTER(BuffersStruct), c_void_p, c_int
        self._mix.restype = None
        self._experts = dict[Mixture, NativeExperts]()
        for mixture in mixtures:
            assert mixture.prepared is not None
            self._experts[mixture] = NativeExperts(mixture.prepared)

    def begin(self, tokens: Tensor) -> Callable[[Mixture, Tensor], Tensor]:
        """Function for a pass of `tokens` [N, ...]: mixture, normed states [N, hidden] -> outputs [N, hidden]."""
        padded, threads = tokens.new_empty(len(tokens), self._width.padded), torch.get_num_threads()
        buffers = ExpertBuffers(list(self._experts.values()), padded, threads)

        def mix(mixture: Mixture, x: Tensor) -> Tensor:
            x, struct = self._width.pad(x).contiguous(), self._experts[mixture].struct
            out = torch.empty_like(x)
            self._mix(byref(struct), *x.shape, x.data_ptr(), byref(buffers.struct), out.data_ptr(), threads)
            return self._width.cut(out).contiguous()

        return mix
