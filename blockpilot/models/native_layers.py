"""Decoder layers in one call in C, on a CPU (native/layers.c); batch invariant.

A token's result has the same bits alone, in a batch, and in a verified tree, also in bfloat16. Widths are padded with
zeros to multiples of C's vectors. Without a compiler or an x86-64 CPU with AVX2, torch runs the layers (layers.py).
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from ctypes import POINTER, Structure, addressof, byref, c_float, c_int, c_long, c_void_p, pointer
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from blockpilot.models.cache import SlotView, layer_config, num_kv_heads
from blockpilot.models.kernels import Product
from blockpilot.models.layers import ContextProjection, DecoderLayers, LayerWeights, Mask, half_heads
from blockpilot.models.native_experts import BuffersStruct, ExpertBuffers, ExpertsStruct, NativeExperts
from blockpilot.models.rotary import Rotary
from blockpilot.native.library import fields, library_for
from blockpilot.native.products import Linear, Padding

QUERIES = 16  # as in layers.c


def layers_of(modules: Iterable[Any], norm: Tensor, config: PretrainedConfig) -> DecoderLayers:
    """Layers of a model and the norm after them: in C if possible, else by torch."""
    layers = [LayerWeights(module, layer_config(config, i)) for i, module in enumerate(modules)]
    library = library_for(norm.dtype, norm.device)
    if library is None or not all(_is_packed(layer) for layer in layers):
        return DecoderLayers(layers, norm, config)
    return NativeLayers(library, layers, norm, config)


def _is_packed(layer: LayerWeights) -> bool:
    if layer.mixture is not None and layer.mixture.prepared is None:
        return False
    products = layer.qkv, layer.out, layer.gate_up, layer.down
    return all(product.packed is not None for product in products if product is not None)


class _ExpertNormsStruct(Structure):
    _fields_ = fields(c_void_p, "experts_in", "router_in", "experts_out", "mlp_out")


class _LayerInputStruct(Structure):
    _fields_ = (*fields(Linear, "gate", "projection"), ("norm", c_void_p))


class _ConvolutionStruct(Structure):
    _fields_ = (("projection", Linear), ("fixed", c_void_p), *fields(c_long, "taps", "group"))


class _LayerStruct(Structure):
    _fields_ = (
        *fields(Linear, "qkv", "out", "gate_up", "down"),
        ("experts", POINTER(ExpertsStruct)),
        ("expert_norms", POINTER(_ExpertNormsStruct)),
        ("inputs", POINTER(_LayerInputStruct)),
        ("convolutions", POINTER(_ConvolutionStruct)),
        *fields(c_void_p, "attention_in", "mlp_in", "heads", "attention_out", "mlp_out", "sinks"),
        ("scalar", c_float),
    )


class _ShapeStruct(Structure):
    _fields_ = (
        *fields(c_long, "hidden", "queries", "kv", "made", "dim", "inner", "unpadded_hidden", "unpadded_dim"),
        *fields(c_float, "eps", "scale", "offset"),
        *fields(c_int, "gelu", "in_float", "norms_values"),
    )


class _RotaryStruct(Structure):
    _fields_ = fields(c_void_p, "cosines", "sines")


class _TokensStruct(Structure):
    _fields_ = (
        ("num", c_long),
        ("caches", c_void_p),
        *fields(c_long, "slots", "length"),
        *fields(c_void_p, "token_slots", "token_columns"),
    )


class _PartStruct(Structure):
    _fields_ = (
        *fields(c_long, "rows", "width", "length"),
        *fields(c_void_p, "sizes", "firsts", "slots", "visible", "positions"),
    )


class NativeLayers(DecoderLayers):
    """Layers by layers.c. Calls raise IndexError for tokens whose slot or column is outside the cache."""

    def __init__(self, library: ctypes.CDLL, layers: Sequence[LayerWeights], norm: Tensor, config: Any) -> None:
        super().__init__(layers, norm, config)
        self._run, self._project = _declared(library)
        self._widths = Padding.to_multiple(config.hidden_size)
        self._norm = self._widths.pad(self._norm)
        # C reads weights by address: these attributes keep the tensors alive that structs point to.
        self._experts, self._weights = list[NativeExperts | None](), list[list[Tensor | None]]()
        self._pointers = list[Any]()
        self._structs, self._shapes = (_LayerStruct * len(layers))(), (_ShapeStruct * len(layers))()
        for i, layer in enumerate(layers):
            experts = None if layer.mixture is None else layer.mixture.prepared
            self._experts.append(None if experts is None else NativeExperts(experts))
            self._weights.append(self._norms_of(layer))
            self._structs[i] = self._struct(layer, self._weights[i], self._experts[i])
            heads = layer.num_queries, layer.num_kv, layer.num_made
            sizes = *heads, 2 * layer.halves.padded, self._structs[i].down.inputs
            dims = self._widths.size, layer.dim
            self._shapes[i] = _ShapeStruct(self._widths.padded, *sizes, *dims, *self._form, layer.norms_values)
        # One buffer serves all layers: as wide as the widest layer, or expert.
        all_heads = max((shape.queries + shape.made) * shape.dim for shape in self._shapes)
        attended = max(shape.queries * shape.dim for shape in self._shapes)
        self._inputs = Padding.to_multiple(max(layer.num_inputs for layer in layers))
        inner = max(self._inputs.padded, *(shape.inner for shape in self._shapes))
        routed = self._widths.padded * any(layer.expert_norms is not None for layer in layers)
        projections = [of.kernel_projection for layer in layers for of in filter(None, layer.convolutions)]
        convolved = max((of.out_features for of in projections), default=0), self._widths.padded * bool(projections)
        self._halves = [layer.halves for layer in layers]
        self._buffers = all_heads, attended, self._widths.padded, 2 * inner, inner, routed, *convolved

    @property
    def halves(self) -> list[Padding]:
        return self._halves

    def _norms_of(self, layer: LayerWeights) -> list[Tensor | None]:
        """Padded norm weights of a layer, its sinks, and the norms of its per-layer input and parallel experts."""
        attention_in, mlp_in, attention_out, mlp_out = (
            None if norm is None else self._widths.pad(norm)
            for norm in (layer.attention_in, layer.mlp_in, layer.attention_out, layer.mlp_out)
        )
        head_norms = None if layer.head_norms is None else layer.halves.pad(layer.head_norms)
        expert_norms = [] if layer.expert_norms is None else map(self._widths.pad, layer.expert_norms)
        layer_input = None if layer.inputs is None else self._widths.pad(layer.inputs.norm)
        return [attention_in, mlp_in, head_norms, attention_out, mlp_out, layer.sinks, layer_input, *expert_norms]

    def _struct(
        self, layer: LayerWeights, norms: Sequence[Tensor | None], experts: "NativeExperts | None"
    ) -> _LayerStruct:
        products = map(_packed, (layer.qkv, layer.out, layer.gate_up, layer.down))
        experts_pointer = None if experts is None else pointer(experts.struct)
        addresses = list(map(_address, norms))
        norm_addresses, input_address, expert_addresses = addresses[:6], addresses[6], addresses[7:]
        expert_norms = None
        if layer.expert_norms is not None:
            expert_norms = pointer(_ExpertNormsStruct(*expert_addresses))
        inputs = None
        if layer.inputs is not None:
            input_products = map(_packed, (layer.inputs.gate, layer.inputs.projection))
            inputs = pointer(_LayerInputStruct(*input_products, input_address))
        convolutions = self._convolutions_of(layer) if all(layer.convolutions) else None
        self._pointers += [expert_norms, inputs, convolutions]
        return _LayerStruct(
            *products, experts_pointer, expert_norms, inputs, convolutions, *norm_addresses, layer.scalar
        )

    def _convolutions_of(self, layer: LayerWeights) -> Any:
        structs = (_ConvolutionStruct * 2)()
        for i, module in enumerate(layer.convolutions):
            fixed = self._widths.pad(module.base_kernel.detach()).contiguous()
            self._pointers.append(fixed)
            projection = _packed(module.kernel_projection.product)
            structs[i] = _ConvolutionStruct(projection, fixed.data_ptr(), fixed.shape[1], module.group_size)
        return structs

    def __call__(
        self,
        hidden: Tensor,
        rotaries: Sequence[Rotary],
        cache: SlotView,
        masks: Sequence[Sequence[Mask]],
        feature_layers: Sequence[int],
        first_input: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        # 1. Inputs, padded to multiples of C's vectors.
        if first_input is not None:
            first_input = Padding.to_multiple(first_input.shape[1]).pad(first_input).contiguous()
        inputs = None if inputs is None else self._inputs.pad(inputs).contiguous()
        padded = self._widths.pad(hidden)
        assert padded.is_contiguous()
        num, threads = len(hidden), torch.get_num_threads()
        # 2. Indices in the cache, and masks: layers with the same masks share their structs.
        structs = _PassStructs(cache)
        tokens, parts = structs.tokens(num), list(map(structs.parts, masks))
        rotary_structs = (_RotaryStruct * len(parts))(*map(structs.rotary, rotaries, self.halves))
        # 3. Buffers: queries, keys, values; attention; sublayer output; gate and up; their product; router's input.
        normed, widths = padded.new_empty(num, self._widths.padded), self._buffers
        buffers = padded.new_empty(num * sum(widths))
        addresses = [buffers.data_ptr() + buffers.itemsize * num * sum(widths[:i]) for i in range(len(widths))]
        room = 1 + max(mask.packing.length for mask in masks[0])  # columns that a query attends to, and one more
        scores = torch.empty(threads * 2 * QUERIES * room)
        experts = list(filter(None, self._experts))
        expert_buffers = ExpertBuffers(experts, padded, threads) if experts else None
        # 4. The second output: features after the layers in `feature_layers`.
        num_features = len(feature_layers)
        features = padded.new_empty(num, num_features * self._widths.padded)
        layers = (c_long * num_features)(*feature_layers)
        structs.check(
            self._run(
                *(len(parts), self._shapes, self._structs, self._norm.data_ptr(), byref(tokens), rotary_structs),
                *(len(masks[0]), (POINTER(_PartStruct) * len(parts))(*parts)),
                *(*map(_address, (first_input, inputs, padded, normed)), *addresses, scores.data_ptr()),
                *(
                    room,
                    expert_buffers and byref(expert_buffers.struct),
                    num_features,
                    layers,
                    features.data_ptr(),
                    threads,
                ),
            )
        )
        if padded is not hidden:
            hidden.copy_(self._widths.cut(padded))
        return self._widths.cut(normed), self._widths.cut(features)

    def project(self, features: Tensor, fused: ContextProjection, rotary: Rotary, cache: SlotView) -> Tensor:
        # Keys and values only: C skips the rows of the product that compute queries.
        product, norm = fused.product.packed, self._widths.pad(fused.norm)
        assert product is not None
        features = product.padded(features)
        contexts = features.new_empty(len(features), self._widths.padded)
        heads = features.new_empty(len(features), self._buffers[0])
        structs = _PassStructs(cache)
        tokens, rotation = structs.tokens(len(features)), structs.rotary(rotary, self._halves[0])
        structs.check(
            self._project(
                *(len(self._structs), self._shapes, self._structs, byref(tokens), byref(rotation)),
                *(byref(product.linear), *map(_address, (norm, features, contexts, heads))),
                torch.get_num_threads(),
            )
        )
        return self._widths.cut(contexts)


class NativeAttention:
    """Attention of single layers by layers.c, for layers whose other parts differ (native_hybrid.py)."""

    def __init__(self, library: ctypes.CDLL, config: Any) -> None:
        self._attend = library.attend_layer
        structs = POINTER(_ShapeStruct), POINTER(_TokensStruct), POINTER(_RotaryStruct)
        self._attend.argtypes = (
            *(*structs, c_long, c_long, POINTER(_PartStruct)),
            *(c_void_p, c_void_p, c_long, c_void_p, c_int),
        )
        self._attend.restype = c_int
        padded = half_heads(config).padded
        self._halves = Padding(padded, padded)  # the heads are padded already
        heads, kv = config.num_attention_heads, num_kv_heads(config)
        constants = config.head_dim, config.rms_norm_eps, config.head_dim**-0.5
        self._shape = _ShapeStruct(0, heads, kv, 2 * kv, 2 * padded, 0, 0, *constants)

    def begin(self, rotary: Rotary, cache: SlotView, masks: Sequence[Mask]) -> Callable[[int, Tensor], Tensor]:
        """Attention of a pass: layer in the cache, heads [N, queries + 2 * kv, padded] -> [N, queries, padded].

        Heads are normed and, like `rotary`, padded. They are rotated in place; keys and values are stored first.
        """
        structs, shape = _PassStructs(cache), self._shape
        tokens, rotation = structs.tokens(len(rotary.cosines)), structs.rotary(rotary, self._halves)
        parts = structs.parts(masks)
        room = 1 + max(mask.packing.length for mask in masks)
        threads = torch.get_num_threads()
        scores = torch.empty(threads * 2 * QUERIES * room)

        def attend(layer: int, heads: Tensor) -> Tensor:
            attended = heads.new_empty(len(heads), shape.queries, shape.dim)
            pointers = heads.data_ptr(), scores.data_ptr(), room, attended.data_ptr()
            arguments = byref(shape), byref(tokens), byref(rotation), layer
            structs.check(self._attend(*arguments, len(masks), parts, *pointers, threads))
            return attended

        return attend


class _PassStructs:
    """Structs of a pass, and the tensors that they point to."""

    def __init__(self, cache: SlotView) -> None:
        self._cache, self._num_slots, self._length = cache, cache.cache.num_slots, cache.num_columns
        self._pointed: list[Tensor] = []
        self._parts: dict[int, Any] = {}
        self._rotaries: dict[int, _RotaryStruct] = {}
        self._num = 0

    def tokens(self, num: int) -> _TokensStruct:
        layers, (slots, columns) = self._cache.cache.by_layer, self._cache.token_indices
        assert num == len(slots) == len(columns)
        self._num, size = num, (self._num_slots, self._length)
        # Not stored with the cache: a copy of the cache has other addresses.
        self._caches = (c_void_p * len(layers))(*(layer.data_ptr() for layer in layers))
        return _TokensStruct(num, addressof(self._caches), *size, *map(self._pointer, (slots, columns)))

    def rotary(self, rotary: Rotary, halves: Padding) -> _RotaryStruct:
        """Struct of a layer's rotary embeddings, shared by layers with the same embeddings."""
        key = id(rotary)
        if key not in self._rotaries:
            assert len(rotary.cosines) == len(rotary.sines) == self._num
            self._rotaries[key] = _RotaryStruct(*(self._pointer(halves.pad(table)) for table in rotary))
        return self._rotaries[key]

    def parts(self, masks: Sequence[Mask]) -> Any:
        """Structs [parts] of a layer's masks, shared by layers with the same masks."""
        key = id(masks[0])  # layers share the mask objects
        if key not in self._parts:
            # Rows and tokens of the parts are consecutive.
            self._parts[key] = (_PartStruct * len(masks))()
            first_row = first_token = 0
            for i, mask in enumerate(masks):
                num_rows = len(mask.packing.sizes)
                slots = self._cache.row_slots[first_row : first_row + num_rows]
                self._parts[key][i] = self._part(mask, slots, first_token)
                first_row += num_rows
                first_token += mask.packing.num_tokens
        return self._parts[key]

    def check(self, code: int) -> None:
        if code:
            raise IndexError(
                f"cache of {self._num_slots} slots and {self._length} columns: slot or column of a token out of range"
            )

    def _part(self, mask: Mask, slots: Tensor, first: int) -> _PartStruct:
        # C reads rows of `width` queries; `sizes` is the number of tokens in each, `firsts` their index in N.
        packing, (sizes, firsts) = mask.packing, mask.packing.spans
        num_rows, width, length = len(packing.sizes), packing.width, packing.length
        assert mask.visible.shape == (num_rows, 1, width, length)
        assert length <= self._length
        positions = packing.pad(packing.positions)
        pointers = map(self._pointer, (sizes, firsts + first, slots, mask.visible, positions))
        return _PartStruct(num_rows, width, length, *pointers)

    def _pointer(self, numbers: Tensor) -> int:
        self._pointed.append(numbers.contiguous())
        return self._pointed[-1].data_ptr()


def _address(values: Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()


def _packed(product: Product | None) -> Linear:
    if product is None:
        return Linear()
    assert product.packed is not None
    return product.packed.linear


def _declared(library: ctypes.CDLL) -> tuple[Callable[..., int], Callable[..., int]]:
    """Functions run_layers and project_layers, with their types declared."""
    run, project = library.run_layers, library.project_layers
    buffers = (c_void_p,) * 13  # first input, inputs of layers, hidden, and buffers
    structs = c_long, POINTER(_ShapeStruct), POINTER(_LayerStruct)
    run.argtypes = (
        *(*structs, c_void_p, POINTER(_TokensStruct), POINTER(_RotaryStruct)),
        *(c_long, POINTER(POINTER(_PartStruct)), *buffers),
        *(c_long, POINTER(BuffersStruct), c_long, c_void_p, c_void_p, c_int),
    )
    pointers = POINTER(Linear), *(c_void_p,) * 4
    project.argtypes = *structs, POINTER(_TokensStruct), POINTER(_RotaryStruct), *pointers, c_int
    run.restype = project.restype = c_int
    return run, project
