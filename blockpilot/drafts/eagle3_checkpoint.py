"""EAGLE-3 checkpoint formats (arXiv 2503.01840): config.json and safetensors.

Read and written: the format of the paper's code and of SGLang, a llama configuration with `draft_vocab_size`. Also
read: the format of vLLM's speculators, whose `transformer_layer_config` is the llama configuration, and DeepSpec's
(`eagle3_qwen3_*`), a Qwen3 configuration with five target layers and the whole vocabulary. The number of a target
layer means its output in `eagle_config` (as in SGLang) and `target_layer_ids`, and its input at the top level (as in
vLLM).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from blockpilot.drafts.dflash_checkpoint import (
    OF_TARGET,
    check_weights,
    draft_rope,
    named_errors,
    read_config,
    read_weights,
    write_checkpoint,
)
from blockpilot.drafts.eagle3 import NUM_FEATURES, Eagle3Model, Eagle3Options, eagle3_layer_ids
from blockpilot.drafts.options import check_neutral
from blockpilot.models.cache import head_dim, layer_config, num_kv_heads

EAGLE3_ARCHITECTURE = "LlamaForCausalLMEagle3"
QWEN3_ARCHITECTURE = "Qwen3Eagle3Model"  # DeepSpec's
EAGLE3_ARCHITECTURES = (
    *(EAGLE3_ARCHITECTURE, "Eagle3LlamaForCausalLM", "LlamaForCausalLM"),  # the last, the paper's, is Llama's, too
    *("Eagle3Speculator", "Eagle3DraftModel"),  # of speculators
    QWEN3_ARCHITECTURE,
)
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Options with the values that leave the network as implemented here.
_NEUTRAL: dict[str, Any] = {
    **{"num_hidden_layers": 1, "hidden_act": "silu", "logit_scale": 1.0, "is_causal": True},
    **{"speculators_model_type": "eagle3"},
    **dict.fromkeys(("attention_bias", "mlp_bias", "norm_before_fc", "parallel_drafting"), False),
    **dict.fromkeys(("fc_norm", "norm_output"), False),
    **{"use_sliding_window": False, "sliding_window": None, "quantization_config": None},
}
_NEUTRAL_EAGLE = {"use_aux_hidden_state": True, "return_hidden_post_norm": False}
_EMBEDDINGS = "embed_tokens.weight"
_SHARED_WITH_TARGET = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id"),
)


def load_eagle3(directory: Path) -> Eagle3Model:
    """Read an EAGLE-3 checkpoint directory into fp32 weights; raises ValueError, saying what is wrong with it.

    Only config.json and safetensors are read; no code of the checkpoint runs.
    """
    model = _new_model(directory / "config.json")
    weights = {_name(name): value for name, value in read_weights(directory).items()}
    weights = {name: value for name, value in weights.items() if name not in OF_TARGET}
    shape = (model.config.vocab_size, model.config.hidden_size)
    if _EMBEDDINGS in weights and weights[_EMBEDDINGS].shape == shape:
        model.carry_embeddings(weights[_EMBEDDINGS].float())
    if len(model.d2t) == len(model.t2d):  # whole vocabulary: the checkpoint may omit the maps
        weights = {name: getattr(model, name) for name in ("d2t", "t2d")} | weights
    d2t = weights.get("d2t")
    if d2t is not None and d2t.shape == model.d2t.shape and "t2d" not in weights:  # NVIDIA's Model-Optimizer omits it
        ids = (torch.arange(len(d2t)) + d2t.long()).clamp(0, len(model.t2d) - 1)
        weights["t2d"] = torch.zeros_like(model.t2d).index_fill_(0, ids, True)
    check_weights(model, weights, directory)
    model.load_state_dict(weights)
    _check_vocabulary(model, directory)
    return model


def _name(stored: str) -> str:
    name = stored.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _check_vocabulary(model: Eagle3Model, directory: Path) -> None:
    ids, vocab_size = model.vocabulary, len(model.t2d)
    if wrong := ids[(ids < 0) | (ids >= vocab_size)].tolist():
        raise ValueError(f"draft {directory}: d2t leads to token {wrong[0]}, must be 0 to {vocab_size - 1}")
    if len(ids.unique()) != len(ids):
        raise ValueError(f"draft {directory}: d2t leads to the same token twice")
    if not torch.equal(model.t2d.nonzero()[:, 0], ids.sort().values):
        raise ValueError(f"draft {directory}: t2d holds other tokens than d2t")


def _new_model(path: Path) -> Eagle3Model:
    """Network of a config.json, with random weights; raises ValueError for an invalid configuration."""
    stored = read_config(path)
    with named_errors(path):
        config, options = parse_eagle3(stored)
        return Eagle3Model(config, options)


def parse_eagle3(stored: dict[str, Any]) -> tuple[LlamaConfig, Eagle3Options]:
    """Configuration and options of a config.json in any format; raises ValueError, naming the option at fault."""
    network: dict[str, Any] = stored.get("transformer_layer_config", stored)
    eagle: dict[str, Any] = stored.get("eagle_config") or {}
    architectures = stored.get("architectures") or []
    if not set(architectures) & set(EAGLE3_ARCHITECTURES):
        raise ValueError(f"draft architecture {architectures}: supported: {', '.join(EAGLE3_ARCHITECTURES)}")
    is_qwen3 = QWEN3_ARCHITECTURE in architectures or network.get("model_type") == "qwen3"
    if "draft_vocab_size" not in stored and QWEN3_ARCHITECTURE not in architectures:
        raise ValueError("draft config.json lacks draft_vocab_size")
    neutral = _NEUTRAL | {"target_hidden_size": network.get("hidden_size")}
    family_name = network.get("model_type")
    # Qwen2's layer is Llama's with biases, which `check_weights` would find.
    neutral |= {"model_type": family_name if family_name in ("qwen2", "qwen3") else "llama"}
    options_written = stored | network
    if options_written.get("use_sliding_window") is False:
        del neutral["sliding_window"]  # SpecForge's configurations copy the target's
    check_neutral(options_written, neutral)
    check_neutral(eagle, _NEUTRAL_EAGLE)
    options = Eagle3Options(
        draft_vocab_size=int(stored.get("draft_vocab_size") or network["vocab_size"]),
        block_size=_block_size(stored),
        target_layer_ids=_layer_ids(stored, eagle),
        norm_before_residual=bool(stored.get("norm_before_residual", False)),
        head_norms=is_qwen3,
    )
    draft_options = {
        "draft_vocab_size",
        "block_size",
        "eagle_config",
        _LAYER_IDS,
        "norm_before_residual",
        "architectures",
    }
    draft_options |= {"model_type", "layer_types", "target_layer_ids"}
    family = Qwen3Config if network.get("model_type") == "qwen3" else LlamaConfig  # fills in missing options
    filled = family.from_dict({name: value for name, value in network.items() if name not in draft_options}).to_dict()
    config = LlamaConfig.from_dict({name: value for name, value in filled.items() if name not in draft_options})
    rope = dict(config.rope_parameters or {})
    if rope.get("rope_type") != "default":  # which ignores it
        check_neutral(rope, {"partial_rotary_factor": 1.0})
    return config, options


def _block_size(stored: dict[str, Any]) -> int:
    """The stored block size, or one more than the tokens that speculators proposes or DeepSpec trained for."""
    methods = (stored.get("speculators_config") or {}).get("proposal_methods") or [{}]
    drafted = methods[0].get("speculative_tokens", stored.get("ttt_length", Eagle3Options.block_size - 1))
    default = drafted + 1
    block_size = int(stored.get("block_size", default))
    if block_size < 2:
        raise ValueError(f"draft option block_size = {block_size}: must be at least 2")
    return block_size


def _layer_ids(stored: dict[str, Any], eagle: dict[str, Any]) -> tuple[int, ...] | None:
    """Layers whose output is read; None if the configuration does not name them."""
    outputs, inputs = eagle.get(_LAYER_IDS) or stored.get("target_layer_ids"), stored.get(_LAYER_IDS)
    ids = outputs or ([i - 1 for i in inputs] if inputs else None)
    if ids is None:
        return None
    if min(ids) < 0:
        raise ValueError(f"draft option {_LAYER_IDS} = {outputs or inputs}: supported are outputs of layers")
    return tuple(ids)


def save_eagle3(model: Eagle3Model, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the published format: config.json, and weights of `dtype` in model.safetensors."""
    options = model.options
    stored: dict[str, Any] = {
        "architectures": [QWEN3_ARCHITECTURE if options.head_norms else EAGLE3_ARCHITECTURE],
        "draft_vocab_size": options.draft_vocab_size,
        "block_size": options.block_size,
        "norm_before_residual": options.norm_before_residual,
        "rope_theta": dict(model.config.rope_parameters or {}).get("rope_theta"),  # older readers need it here
    }
    if (ids := options.target_layer_ids) is not None:
        stored |= {"eagle_config": {_LAYER_IDS: list(ids), "use_aux_hidden_state": True}}
        stored |= {_LAYER_IDS: [i + 1 for i in ids]}
    write_checkpoint(model, model.state_dict(), stored, directory, dtype)


def new_eagle3(
    target_config: Any,
    vocabulary: Tensor,
    *,
    block_size: int = Eagle3Options.block_size,
    target_layer_ids: Sequence[int] | None = None,
) -> Eagle3Model:
    """New draft for a target: one layer like the target's first, with its rotary base.

    It proposes the tokens of `vocabulary` (the target's ids, in any order).
    Raises ValueError for layers that the target does not have, and if there are not three of them.
    """
    num_layers = target_config.num_hidden_layers
    ids = tuple(target_layer_ids or eagle3_layer_ids(num_layers))
    if len(ids) != NUM_FEATURES:
        raise ValueError(f"target_layer_ids {list(ids)}: EAGLE-3 reads {NUM_FEATURES} layers")
    options = Eagle3Options(len(vocabulary), block_size, ids)
    options.layer_ids(num_layers)
    first_layer = layer_config(target_config, 0)
    config: dict[str, Any] = {name: getattr(first_layer, name, None) for name in _SHARED_WITH_TARGET} | {
        "num_hidden_layers": 1,
        "num_key_value_heads": num_kv_heads(first_layer),
        "head_dim": head_dim(first_layer),
        "rope_parameters": draft_rope(target_config),
        "tie_word_embeddings": False,
    }
    model = Eagle3Model(LlamaConfig(**config), options)
    model.use_vocabulary(vocabulary)
    return model
