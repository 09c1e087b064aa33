"""Layers of a hybrid decoder in C (delta_net.c), on a CPU; batch invariant.

Attention is that of layers.c, which rotates whole heads and pairs their halves: the rotated first part of a head is
spread over both halves, and the rest is rotated by 0. The elements of queries and keys are permuted in the same way,
so their products do not change.
"""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int, c_long, c_void_p
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from blockpilot.models.cache import SlotView
from blockpilot.models.delta_net import DeltaNetWeights, StatePass
from blockpilot.models.experts import Mixture
from blockpilot.models.hybrid import HybridLayers, HybridPass, HybridWeights
from blockpilot.models.layers import Mask, half_heads
from blockpilot.models.native_experts import NativeMixtures
from blockpilot.models.native_layers import NativeAttention
from blockpilot.models.rotary import Rotary
from blockpilot.models.states import Accept, StateShape
from blockpilot.native.library import fields, library_for
from blockpilot.native.products import Padding

STRIP = 32  # as in delta_net.c


def hybrid_layers_of(modules: Sequence[Any], norm: Any, config: PretrainedConfig) -> HybridLayers:
    """Layers of a hybrid model and the norm after them: in C if possible, else by torch."""
    library = library_for(norm.weight.dtype, norm.weight.device)
    if library is None:
        return HybridLayers(modules, norm, config)
    return NativeHybridLayers(library, modules, norm, config)


class _NetStruct(Structure):
    _fields_ = (
        *fields(c_long, "key_heads", "value_heads", "key_dim", "value_dim", "kernel"),
        *fields(c_void_p, "taps", "rates", "time_bias", "norm"),
        ("eps", c_float),
    )


class _StatesStruct(Structure):
    _fields_ = fields(c_void_p, "windows", "matrices")


class _OrderStruct(Structure):
    _fields_ = (
        *fields(c_long, "num", "rows"),
        *fields(c_void_p, "sources", "parents", "sizes", "firsts", "slots", "is_text", "is_chain"),
    )


class _InputsStruct(Structure):
    _fields_ = (("stride", c_long), *fields(c_void_p, "projected", "mixed", "decays", "betas", "scales"))


class _Inputs(NamedTuple):
    """Inputs of the recurrence for tokens [N] (`struct delta_inputs`); C fills in all but `projected`."""

    projected: Tensor
    mixed: Tensor
    decays: Tensor
    betas: Tensor
    scales: Tensor

    @classmethod
    def of(cls, projected: Tensor, shape: StateShape) -> Self:
        num = len(projected)
        decays, betas = torch.empty(2, num, shape.value_heads)
        scales = torch.empty(num, 2, shape.key_heads)
        return cls(projected, projected.new_empty(num, shape.channels), decays, betas, scales)

    @property
    def struct(self) -> _InputsStruct:
        return _InputsStruct(self.projected.shape[1], *(x.data_ptr() for x in self))

    def first(self, num: int) -> Self:
        """Inputs of the first `num` tokens; a copy if there are others, so that their memory is freed."""
        return self if num == len(self.projected) else type(self)(*(x[:num].clone() for x in self))


class _Order:
    """Struct of a pass's order, and the arrays that it points to."""

    def __init__(self, order: StatePass) -> None:
        slots = order.slots.numpy()
        numbers = order.sources, order.parents, order.sizes, order.firsts, slots
        flags = order.is_text, order.is_chain
        self._arrays = [np.ascontiguousarray(x, dtype=np.int64) for x in numbers]
        self._arrays += [np.ascontiguousarray(x, dtype=np.uint8) for x in flags]
        pointers = (x.ctypes.data for x in self._arrays)
        self.struct = _OrderStruct(len(order.parents), len(order.sizes), *pointers)


class _NativePass(NamedTuple):
    """Inputs of a pass that the layers in C share, in addition to `HybridPass`."""

    order: _Order
    attend: Callable[[int, Tensor], Tensor]
    """Attention: layer in the cache, its heads -> attended heads."""
    padded_index: Tensor
    """[head_dim]: index in a padded head of every element of a head."""
    mix: Callable[[Mixture, Tensor], Tensor]
    """Experts of a layer: mixture, normed states [N, hidden] -> [N, hidden]."""


class NativeHybridLayers(HybridLayers):
    """Layers in C: gated DeltaNets by delta_net.c, attention by layers.c."""

    def __init__(self, library: ctypes.CDLL, modules: Sequence[Any], norm: Any, config: Any) -> None:
        super().__init__(modules, norm, config)
        self._c, self._halves = _declared(library), half_heads(config)
        self._attention = NativeAttention(library, config)
        self._nets = [self._net(layer.delta_net) for layer in self._layers if layer.delta_net is not None]
        mixtures = [layer.mixture for layer in self._layers if layer.mixture is not None]
        self._mixtures = NativeMixtures(library, mixtures, config.hidden_size)

    @property
    def halves(self) -> list[Padding]:
        return self._attention_halves(self._halves)

    def _net(self, net: DeltaNetWeights) -> _NetStruct:
        shape = net.shape
        sizes = shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.kernel
        weights = net.taps, net.rates, net.time_bias, net.norm  # attributes of `net`, which lives as long as this
        return _NetStruct(*sizes, *(weight.data_ptr() for weight in weights), self._eps)

    def _begin(self, rotary: Rotary, cache: SlotView, masks: Sequence[Mask]) -> HybridPass:
        in_pass, padded_index = super()._begin(rotary, cache, masks), self._padded_index(rotary.cosines.shape[-1])
        attend = self._attention.begin(self._spread(rotary, padded_index), cache, masks)
        mix = self._mixtures.begin(rotary.cosines)
        return in_pass._replace(native=_NativePass(_Order(in_pass.order), attend, padded_index, mix))

    def _padded_index(self, num: int) -> Tensor:
        """Index [head_dim] in a padded head of every element of a head whose first `num` elements are rotated."""
        # C rotates elements i and half + i of a padded head as a pair: first the rotated pairs, then the rest.
        half, rotated = self._halves.padded, num // 2
        first, second = range(half), range(half, 2 * half)
        rest = [*first[rotated:], *second[rotated:]]
        return torch.tensor([*first[:rotated], *second[:rotated], *rest][: self._dim])

    def _spread(self, rotary: Rotary, padded_index: Tensor) -> Rotary:
        """Rotation of padded heads [N, 1, padded]."""
        padded_index = padded_index[: rotary.cosines.shape[-1]]
        # Cosine 1 and sine 0 leave the other elements unchanged.
        cosines = rotary.cosines.new_ones(len(rotary.cosines), 1, 2 * self._halves.padded)
        sines = torch.zeros_like(cosines)
        cosines[..., padded_index], sines[..., padded_index] = rotary.cosines, rotary.sines
        return Rotary(cosines, sines)

    def _add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        assert hidden.is_contiguous()
        out, given = torch.empty_like(hidden), None if delta is None else delta.contiguous()
        pointer = None if given is None else given.data_ptr()
        pointers = hidden.data_ptr(), pointer, weight.data_ptr()
        self._c.add_norm_rows(*hidden.shape, *pointers, self._eps, out.data_ptr(), torch.get_num_threads())
        return out

    def _mlp(self, layer: HybridWeights, x: Tensor, in_pass: HybridPass) -> Tensor:
        gate_up, threads = layer.gate_up(x).contiguous(), torch.get_num_threads()
        gated = gate_up.new_empty(len(x), gate_up.shape[1] // 2)
        self._c.swiglu_rows(*gated.shape, gate_up.data_ptr(), gated.data_ptr(), threads)
        out = layer.down(gated)
        if layer.mixture is None or layer.shared_gate is None:
            return out
        native: _NativePass = in_pass.native
        mixed, gates, out = native.mix(layer.mixture, x), layer.shared_gate(x), out.contiguous()
        self._c.add_gated_rows(*out.shape, gates.data_ptr(), out.data_ptr(), mixed.data_ptr(), threads)
        return mixed

    def _attend(self, layer: HybridWeights, x: Tensor, in_pass: HybridPass) -> Tensor:
        assert layer.attention is not None
        weights, padded, threads = layer.attention, 2 * self._halves.padded, torch.get_num_threads()
        native: _NativePass = in_pass.native
        # 1. Heads, normed and padded, without the interleaved gates.
        projected = weights.qkv(x).contiguous()
        heads = projected.new_empty(len(x), self._queries + 2 * self._kv, padded)
        sizes = *projected.shape, projected.data_ptr()
        shape = self._queries, self._kv, self._dim, padded
        norms = native.padded_index.data_ptr(), weights.norms.data_ptr(), self._eps
        self._c.split_heads(*sizes, *shape, *norms, heads.data_ptr(), threads)
        # 2. Attention, then the gates, which C reads from `projected`.
        attended = native.attend(layer.index, heads)
        gated = projected.new_empty(len(x), self._queries * self._dim)
        shape = self._queries, self._dim, padded, attended.data_ptr()
        self._c.gate_heads(*sizes, *shape, gated.data_ptr(), threads)
        return weights.out(gated)

    def _recur(self, net: DeltaNetWeights, index: int, x: Tensor, in_pass: HybridPass) -> tuple[Tensor, Accept]:
        shape, order, native = net.shape, in_pass.order, in_pass.native
        inputs = _Inputs.of(net.project(x).contiguous(), shape)
        states, struct, threads = self._states(index, in_pass), self._nets[index], torch.get_num_threads()
        room = torch.empty(threads * order.most_nodes * shape.key_dim * STRIP)
        out = x.new_empty(len(x), shape.value_heads * shape.value_dim)
        structs = byref(struct), byref(states), byref(native.order.struct), byref(inputs.struct)
        self._c.delta_pass(*structs, room.data_ptr(), order.most_nodes, out.data_ptr(), threads)
        kept = inputs.first(order.num_block_tokens)
        return net.out(out), partial(self._accept, kept, index, in_pass)

    def _states(self, index: int, in_pass: HybridPass) -> _StatesStruct:
        return _StatesStruct(in_pass.states.windows[index].data_ptr(), in_pass.states.matrices[index].data_ptr())

    def _accept(self, inputs: _Inputs, index: int, in_pass: HybridPass, paths: Sequence[Sequence[int]]) -> None:
        """Advance a layer's states by the accepted paths [R] without their anchors."""
        # The accepted tokens of all rows, concatenated, without the anchors.
        order, tokens, sizes = in_pass.order, list[int](), list[int]()
        for first, path in zip(order.firsts.tolist(), paths, strict=False):
            tokens += [first + node for node in path[1:]]
            sizes.append(len(path) - 1)
        starts = np.cumsum([0, *sizes[:-1]])
        slots = order.slots.numpy()[: len(sizes)]
        arrays = [np.ascontiguousarray(x, dtype=np.int64) for x in (slots, sizes, starts, tokens)]
        states = self._states(index, in_pass)
        structs = byref(self._nets[index]), byref(states), byref(inputs.struct)
        pointers = (x.ctypes.data for x in arrays)
        self._c.delta_accept(*structs, len(sizes), *pointers, torch.get_num_threads())


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library, with types declared for the functions of delta_net.c."""
    net, states, inputs = POINTER(_NetStruct), POINTER(_StatesStruct), POINTER(_InputsStruct)
    row_types = c_long, c_long, c_void_p
    signatures: dict[str, tuple[Any, ...]] = {
        "add_norm_rows": (c_long, c_long, c_void_p, c_void_p, c_void_p, c_float, c_void_p, c_int),
        "swiglu_rows": (c_long, c_long, c_void_p, c_void_p, c_int),
        "add_gated_rows": (c_long, c_long, c_void_p, c_void_p, c_void_p, c_int),
        "split_heads": (*row_types, *(c_long,) * 4, c_void_p, c_void_p, c_float, c_void_p, c_int),
        "gate_heads": (*row_types, *(c_long,) * 3, c_void_p, c_void_p, c_int),
        "delta_pass": (net, states, POINTER(_OrderStruct), inputs, c_void_p, c_long, c_void_p, c_int),
        "delta_accept": (net, states, inputs, c_long, *(c_void_p,) * 4, c_int),
    }
    for name, types in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library
