"""Prepared target: embeddings, all layers as one call over packed tokens, and LM head.

Cache indices do not depend on the layer and are computed once per pass; rotary embeddings and masks once per pass and
kind of layer. With sliding-window layers there are two kinds.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockpilot.models.cache import SlotCache, SlotView, key_heads
from blockpilot.models.graphs import Box, BoxTokens
from blockpilot.models.hybrid import HybridLayers
from blockpilot.models.kernels import copy_mapped_weights, prepared, use_huge_pages
from blockpilot.models.layers import DecoderLayers, Mask
from blockpilot.models.native_hybrid import STRIP, NativeHybridLayers, hybrid_layers_of
from blockpilot.models.native_layers import NativeLayers, layers_of
from blockpilot.models.packing import Packing
from blockpilot.models.rotary import Rotary, RotaryTable
from blockpilot.models.states import FULL, LINEAR, StateCache
from blockpilot.native.library import reason_without

HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text")  # the text parts of qwen3_5 and qwen3_5_moe
FAMILIES = (
    *("llama", "mistral", "ministral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", *HYBRIDS),
    *("gemma3", "gemma3_text", "gemma4", "gemma4_text", "gpt_oss"),
)
UNSUPPORTED = {
    "gemma": "norms and embeddings of its first version",
    "gemma2": "attention scores and logits with a soft cap",
    "gemma3n": "embeddings in every layer",
    "qwen3_next": "projections of recurrent layers that interleave their heads",
}
"""Well-known families that are not supported, and the feature that is missing."""
PROPORTIONAL = "proportional"  # only a part of a head is rotated: the frequencies of the rest are 0
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


class LayerKind(NamedTuple):
    """Layer type of transformers, attention window in tokens (None for all), and query heads per KV head."""

    name: str
    window: int | None
    groups: int


class LayerInputs:
    """Per-layer inputs of every token, computed from the token and its embedding (small Gemma 4 models)."""

    def __init__(self, body: Any) -> None:
        self._embed, self._norm = body.embed_tokens_per_layer, body.per_layer_projection_norm
        self._projection = prepared(body, "per_layer_model_projection")
        self._scales = body.per_layer_model_projection_scale, body.per_layer_input_scale

    def __call__(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Tokens [N], embeddings [N, hidden] -> [N, layers * width of an input]."""
        projected = (self._projection(hidden) * self._scales[0]).unflatten(1, (-1, len(self._norm.weight)))
        inputs: Tensor = (self._norm(projected).flatten(1) + self._embed(tokens)) * self._scales[1]
        return inputs


class Decoder:
    """Layers, embeddings and LM head of a model. Raises ValueError for an unsupported family or option.

    The model's linear layers are prepared in place, once; the model can still be called as usual.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel) -> None:
        check_network(model.config)
        body, config = cast(Any, model.model), model.config
        self._layers: DecoderLayers | HybridLayers = (
            hybrid_layers_of(body.layers, body.norm, config)
            if config.model_type in HYBRIDS
            else layers_of(body.layers, body.norm.weight, config)
        )
        self._kinds, self.embed = layer_kinds(config), body.embed_tokens
        self._inputs = LayerInputs(body) if getattr(config, "hidden_size_per_layer_input", None) else None
        self._rotaries = {kind.name: RotaryTable(body.rotary_emb, kind.name) for kind in self._kinds}
        self._soft_cap = soft_cap(config)
        is_new = type(model.lm_head) is nn.Linear
        self.head = prepared(model, "lm_head")
        self._kind = model.dtype, model.device
        if self.head.packed is not None and is_new:
            copy_mapped_weights(model)
            use_huge_pages()

    @property
    def exactness(self) -> str:
        """Exactness of texts on this machine, "bit for bit" or "up to rounding", and the reason."""
        if isinstance(self._layers, NativeLayers | NativeHybridLayers) and self.head.packed is not None:
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

    def logits(self, hidden: Tensor) -> Tensor:
        """LM head: [N, hidden] -> [N, vocab]."""
        return capped(self.head(hidden), self._soft_cap)

    def __call__(
        self, tokens: Tensor, packing: Packing, cache: SlotView, feature_layers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Normed hidden states [N, hidden] of packed tokens [N], and features [N, F * hidden] after F layers."""
        hidden = self.embed(tokens)  # [N, hidden]; the layers change it in place
        inputs = None if self._inputs is None else self._inputs(tokens, hidden)
        tables = {name: rotary.table(cache, hidden) for name, rotary in self._rotaries.items()}
        # On a GPU, passes of few tokens run as a CUDA graph; prompts are too wide.
        most = self._layers.most_captured
        if most and len(packing.parts) == 1:
            in_box = partial(self._in_box, tables, tuple(feature_layers))
            both = hidden if inputs is None else torch.cat([hidden, inputs], dim=-1)
            outputs = cache.by_graph(in_box, ("target", *feature_layers), both, packing.parts[0], most)
            if outputs is not None:
                normed, features = outputs
                return normed, features

        def masks_of(window: int | None, groups: int) -> list[Mask]:
            return [Mask(part, part.visible_in(window), groups, hidden.dtype) for part in packing.parts]

        return self._run(hidden, inputs, tables, packing.positions, cache, masks_of, feature_layers)

    def _in_box(
        self,
        tables: Mapping[str, Rotary],
        feature_layers: Sequence[int],
        both: Tensor,
        box: Box,
        box_tokens: BoxTokens,
        packing: Packing,
        cache: SlotView,
    ) -> tuple[Tensor, Tensor]:
        def masks_of(window: int | None, groups: int) -> list[Mask]:
            return [Mask(packing, box.visible(box_tokens, window), groups, both.dtype)]

        hidden, inputs = both, None
        if self._inputs is not None:
            width = self.embed.embedding_dim
            hidden, inputs = both[:, :width].contiguous(), both[:, width:]
        return self._run(hidden, inputs, tables, box_tokens.positions, cache, masks_of, feature_layers)

    def _run(
        self,
        hidden: Tensor,
        inputs: Tensor | None,
        tables: Mapping[str, Rotary],
        positions: Tensor,
        cache: SlotView,
        masks_of: Callable[[int | None, int], list[Mask]],
        feature_layers: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Run the layers; layers of one kind share rotary embeddings and masks."""
        rotary = {name: table.at(positions) for name, table in tables.items()}
        masks = {kind: masks_of(*kind) for kind in {(kind.window, kind.groups) for kind in self._kinds}}
        rotaries, all_masks = (
            [rotary[kind.name] for kind in self._kinds],
            [masks[kind.window, kind.groups] for kind in self._kinds],
        )
        if isinstance(self._layers, HybridLayers):
            return self._layers(hidden, rotaries, cache, all_masks, feature_layers)
        return self._layers(hidden, rotaries, cache, all_masks, feature_layers, inputs=inputs)


def check_family(model_type: object) -> None:
    """Raise ValueError for an unsupported family."""
    if model_type in FAMILIES:
        return
    reason = f" ({UNSUPPORTED[model_type]})" if isinstance(model_type, str) and model_type in UNSUPPORTED else ""
    raise ValueError(f"target family {model_type!r}{reason}: supported are {', '.join(FAMILIES)}")


def layer_kinds(config: Any) -> list[LayerKind]:
    """The kind of every layer."""
    window = getattr(config, "sliding_window", None)
    # Mistral and Qwen3-MoE have no layer types: their window applies to all layers. Llama has neither.
    is_windowed = config.model_type in ("mistral", "qwen3_moe") and window is not None
    default = "sliding_attention" if is_windowed else "full_attention"
    names = getattr(config, "layer_types", None) or [default] * config.num_hidden_layers
    groups = [config.num_attention_heads // heads.num for heads in key_heads(config)]
    windows = [window if name == "sliding_attention" else None for name in names]
    return list(map(LayerKind, names, windows, groups))


def full_rope(config: Any) -> dict[str, Any]:
    """Rotary parameters of the full-attention layers, for a draft: type "proportional" becomes "default"."""
    rope = config.rope_parameters or {}
    rope = dict(rope.get("full_attention", rope))
    if rope.get("rope_type") == PROPORTIONAL:
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return rope


def check_network(config: Any) -> None:
    """Raise ValueError, with the reason, for a model that this engine cannot run exactly."""
    check_family(config.model_type)
    if config.model_type in HYBRIDS:
        _check_hybrid(config)
    _check_experts(config)
    if any(kind[:2] == ("sliding_attention", None) for kind in layer_kinds(config)):
        raise ValueError("target with layer_types sliding_attention: sliding_window must be given, and in use")
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        if (method, config.model_type) != ("mxfp4", "gpt_oss"):
            raise ValueError(f"target with quantization_config {method}: only gpt-oss's mxfp4 is supported")
    gemma_options = (
        ("hidden_activation", ("gelu_pytorch_tanh",)),
        *((name, (None,)) for name in ("attn_logit_softcapping", "final_logit_softcapping")),
        ("use_bidirectional_attention", (False, None)),
    )
    gemma4_options = ("hidden_activation", ("gelu_pytorch_tanh",)), ("use_bidirectional_attention", ("vision", None))
    names = {"gemma3_text": gemma_options, "gemma4_text": gemma4_options}.get(
        config.model_type, (("hidden_act", ("silu",)),)
    )
    options: list[tuple[str, Any, Sequence[Any]]] = [
        (name, getattr(config, name), allowed) for name, allowed in names
    ]
    options.append(("is_causal", getattr(config, "is_causal", True), (True,)))
    rope = config.rope_parameters or {}
    for parameters in [rope[kind.name] for kind in layer_kinds(config) if kind.name in rope] or [rope]:
        is_proportional = config.model_type == "gemma4_text" and parameters.get("rope_type") == PROPORTIONAL
        options.append(("rope_type", parameters.get("rope_type"), (*ROPE_TYPES, *[PROPORTIONAL] * is_proportional)))
        if config.model_type not in HYBRIDS and not is_proportional:
            options.append(("partial_rotary_factor", parameters.get("partial_rotary_factor", 1.0), (1.0,)))
    for name, value, supported in options:
        if value not in supported:
            raise ValueError(f"target option {name} = {value}: supported: {', '.join(map(str, supported))}")


def _check_experts(config: Any) -> None:
    """Raise ValueError if a token is for more experts than there are."""
    name = "top_k_experts" if config.model_type == "gemma4_text" else "num_experts_per_tok"
    num_experts = getattr(config, "num_experts", None) if getattr(config, "enable_moe_block", True) else None
    if num_experts and not 1 <= getattr(config, name) <= num_experts:
        raise ValueError(f"target option {name} = {getattr(config, name)}: must be 1 to {num_experts}")


def _check_hybrid(config: Any) -> None:
    """Raise ValueError for a hybrid network with unsupported shapes of states or types of layers."""
    for name in ("linear_key_head_dim", "linear_value_head_dim"):
        if getattr(config, name) % STRIP:
            raise ValueError(f"target option {name} = {getattr(config, name)}: must be a multiple of {STRIP}")
    if config.linear_num_value_heads % config.linear_num_key_heads:
        heads = config.linear_num_value_heads, config.linear_num_key_heads
        raise ValueError(f"target with {heads[0]} value heads: must be a multiple of its {heads[1]} key heads")
    if unknown := set(config.layer_types) - {LINEAR, FULL}:
        raise ValueError(f"target with layers of type {', '.join(sorted(unknown))}: supported are {LINEAR}, {FULL}")


def soft_cap(config: Any) -> float | None:
    """Bound of a target's logits (Gemma 4's have one), for `capped`."""
    cap: float | None = getattr(config, "final_logit_softcapping", None)
    return cap


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Logits with a soft cap: cap * tanh(logits / cap). Changes `logits`; also for gradients."""
    if cap is None:
        return logits
    bounded = logits.div_(cap).tanh_()
    return bounded * cap if bounded.requires_grad else bounded.mul_(cap)


def context_length(config: Any) -> int:
    """Maximum tokens of a text: with "dynamic" scaling the configuration's times the factor; with YaRN the original
    length times the factor, if that is more.
    """
    rope, longest = full_rope(config), int(config.max_position_embeddings)
    if rope.get("rope_type") == "dynamic":
        return int(longest * rope["factor"])
    if rope.get("rope_type") != "yarn":
        return longest
    return max(longest, int(rope["original_max_position_embeddings"] * rope["factor"]))
