"""The prepared form of a target: its embeddings, its layers as one call over packed tokens, and its LM head.

Rotary tables, masks and cache indices do not depend on the layer and are computed once a pass.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockpilot.models.cache import SlotCache, SlotView, num_kv_heads
from blockpilot.models.graphs import Box, BoxPlaces
from blockpilot.models.hybrid import HybridLayers
from blockpilot.models.kernels import leave_file, prepared, use_huge_pages
from blockpilot.models.layers import DecoderLayers, Mask, Rotary, RotaryTable
from blockpilot.models.native_hybrid import STRIP, NativeHybridLayers, hybrid_layers_of
from blockpilot.models.native_layers import NativeLayers, layers_of
from blockpilot.models.packing import Packing
from blockpilot.models.states import FULL, LINEAR, StateCache
from blockpilot.native.library import reason_without

FAMILIES = ("llama", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_text")
HYBRID = "qwen3_5_text"  # of the text part of qwen3_5
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


class Decoder:
    """The layers of a model, its embeddings and its LM head. Raises ValueError for an unsupported family.

    The model's linear layers are prepared in place, once; the model can still be called as usual.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel) -> None:
        check_network(model.config)
        body, config = cast(Any, model.model), model.config
        self._layers: DecoderLayers | HybridLayers = (
            hybrid_layers_of(body.layers, body.norm, config)
            if config.model_type == HYBRID
            else layers_of(body.layers, body.norm.weight, config)
        )
        self._rotary, self.embed = RotaryTable(body.rotary_emb), body.embed_tokens
        self._groups = config.num_attention_heads // num_kv_heads(config)
        is_new = type(model.lm_head) is nn.Linear
        self.head = prepared(model, "lm_head")
        self._kind = model.dtype, model.device
        if self.head.is_packed and is_new:
            leave_file(model)
            use_huge_pages()

    @property
    def exactness(self) -> str:
        """Exactness of texts on this machine, "bit for bit" or "up to rounding", and the reason."""
        if isinstance(self._layers, NativeLayers | NativeHybridLayers) and self.head.is_packed:
            return "bit for bit: layers in C"
        return f"up to rounding: layers by torch ({reason_without(*self._kind)})"

    @property
    def has_states(self) -> bool:
        """True if some layers are recurrent."""
        return isinstance(self._layers, HybridLayers)

    def new_cache(self, config: Any, num_slots: int, length: int, num_spare: int) -> SlotCache:
        """Cache of the layers, with states if some of them are recurrent."""
        kind = StateCache if self.has_states else SlotCache
        return kind(config, num_slots, length, *self._kind, num_spare, self._layers.halves)

    def __call__(
        self, tokens: Tensor, packing: Packing, cache: SlotView, feature_layers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [N, hidden] of packed tokens [N], normed; and features [N, F * hidden] after F layers."""
        hidden = self.embed(tokens)  # [N, hidden]; the layers change it in place
        table = self._rotary.table(cache, hidden)
        # On a GPU few tokens run by a CUDA graph. Mixtures route tokens on the host; prompts are too wide.
        if self._layers.is_dense and len(packing.parts) == 1:
            in_box = partial(self._in_box, table, tuple(feature_layers))
            outputs = cache.by_graph(in_box, ("target", *feature_layers), hidden, packing.parts[0])
            if outputs is not None:
                normed, features = outputs
                return normed, features
        masks = [Mask(part, part.visible, self._groups, hidden.dtype) for part in packing.parts]
        return self._layers(hidden, table.at(packing.positions), cache, [masks] * len(self._layers), feature_layers)

    def _in_box(
        self,
        table: Rotary,
        feature_layers: Sequence[int],
        hidden: Tensor,
        box: Box,
        places: BoxPlaces,
        packing: Packing,
        cache: SlotView,
    ) -> tuple[Tensor, Tensor]:
        masks = [Mask(packing, box.visible(places), self._groups, hidden.dtype)]
        return self._layers(hidden, table.at(places.positions), cache, [masks] * len(self._layers), feature_layers)


def check_family(model_type: object) -> None:
    """Raise ValueError for an unsupported family."""
    if model_type not in FAMILIES:
        raise ValueError(f"target family {model_type!r}: supported are {', '.join(FAMILIES)}")


def check_network(config: Any) -> None:
    """Raise ValueError, with the reason, for a model that this engine cannot run exactly."""
    check_family(config.model_type)
    if config.model_type == HYBRID:
        _check_hybrid(config)
    # Qwen3-MoE has no layer types: its window applies to all layers.
    slides = config.model_type == "qwen3_moe" and config.sliding_window is not None
    if slides or "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ValueError("target with sliding-window layers: only full attention is supported")
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise ValueError(f"target with quantization_config {method}: only weights of floats are supported")
    rope = config.rope_parameters or {}
    factor = rope.get("partial_rotary_factor", 1.0)
    for name, value, supported in (
        ("hidden_act", config.hidden_act, ("silu",)),
        ("rope_type", rope.get("rope_type"), ROPE_TYPES),
        ("partial_rotary_factor", 1.0 if config.model_type == HYBRID else factor, (1.0,)),
    ):
        if value not in supported:
            raise ValueError(f"target option {name} = {value}: supported is {', '.join(map(str, supported))}")


def _check_hybrid(config: Any) -> None:
    """Raise ValueError for a hybrid network whose states have a shape that is not built."""
    for name in ("linear_key_head_dim", "linear_value_head_dim"):
        if getattr(config, name) % STRIP:
            raise ValueError(f"target option {name} = {getattr(config, name)}: must be a multiple of {STRIP}")
    if config.linear_num_value_heads % config.linear_num_key_heads:
        heads = config.linear_num_value_heads, config.linear_num_key_heads
        raise ValueError(f"target with {heads[0]} value heads: must be a multiple of its {heads[1]} key heads")
    if unknown := set(config.layer_types) - {LINEAR, FULL}:
        raise ValueError(f"target with layers of type {', '.join(sorted(unknown))}: supported are {LINEAR}, {FULL}")


def context_length(config: Any) -> int:
    """Maximum tokens of a text; with YaRN the original length times the factor, if that is more."""
    rope, longest = config.rope_parameters or {}, int(config.max_position_embeddings)
    if rope.get("rope_type") != "yarn":
        return longest
    return max(longest, int(rope["original_max_position_embeddings"] * rope["factor"]))
