"""Configurations of the named pairs as published (transformers 4), and small checkpoints in the same formats."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
)

from blockpilot.drafts.base import Draft
from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.dflash_checkpoint import as_dflash
from blockpilot.drafts.eagle3 import Eagle3Model
from blockpilot.drafts.eagle3_checkpoint import EAGLE3_ARCHITECTURES, parse_eagle3
from blockpilot.pairs.loading import Pair
from blockpilot.types import PairId
from helpers.tiny import CHAT_TEMPLATE, byte_tokenizer

Json = dict[str, Any]

_QWEN3: Json = {
    **{"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
    **{"bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu"},
    **{"hidden_size": 2560, "initializer_range": 0.02, "intermediate_size": 9728},
    **{"max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3"},
    **{"num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06},
    **{"rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True},
    **{"torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True},
    **{"use_sliding_window": False, "vocab_size": 151936},
}
_OF_8B: Json = {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
_LLAMA3: Json = {
    **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
}
_LLAMA: Json = {
    **{"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
    **{"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu"},
    **{"hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336},
    **{"max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32},
    **{"num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05},
    **{"rope_scaling": _LLAMA3, "rope_theta": 500000.0, "tie_word_embeddings": False},
    **{"torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256},
}
_QWEN25: Json = {
    **{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643},
    **{"eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02},
    **{"intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2"},
    **{"num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06},
    **{"rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    **{"transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 152064},
}
_MISTRAL_NEMO: Json = {
    **{"architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2},
    **{"head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02},
    **{"intermediate_size": 14336, "max_position_embeddings": 131072, "model_type": "mistral"},
    **{"num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05},
    **{"rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    **{"transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 131072},
}
_CODER: Json = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "attention_dropout": 0.0, "decoder_sparse_step": 1},
    **{"eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048},
    **{"initializer_range": 0.02, "intermediate_size": 5472, "max_position_embeddings": 262144},
    **{"max_window_layers": 28, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768},
    **{"norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8},
    **{"num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "qkv_bias": False},
    **{"rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.0},
    **{"shared_expert_intermediate_size": 0, "sliding_window": None, "tie_word_embeddings": False},
    **{"torch_dtype": "bfloat16", "transformers_version": "4.52.3", "use_cache": True, "use_qk_norm": True},
    **{"use_sliding_window": False, "vocab_size": 151936},
}


_QWEN35_TEXT: Json = {
    **{"attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16"},
    **{"eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu"},
    **{"hidden_size": 2560, "initializer_range": 0.02, "intermediate_size": 9216, "model_type": "qwen3_5_text"},
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16},
    **{"linear_num_value_heads": 32, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32"},
    **{"max_position_embeddings": 262144, "num_attention_heads": 16, "num_hidden_layers": 32},
    **{"num_key_value_heads": 4, "rms_norm_eps": 1e-06, "tie_word_embeddings": True, "vocab_size": 248320},
    "rope_parameters": {
        **{"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default"},
        **{"rope_theta": 10000000, "partial_rotary_factor": 0.25},
    },
}
_QWEN35: Json = {
    **{"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": True},
    "text_config": _QWEN35_TEXT,
    "vision_config": {"depth": 24, "hidden_size": 1024, "num_heads": 16, "out_hidden_size": 2560},
}


def _draft(**changes: Any) -> Json:
    """Qwen3-4B-DFlash-b16's config.json with changes."""
    written = _QWEN3 | {
        **{"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}},
        **{"block_size": 16, "num_hidden_layers": 5, "max_window_layers": 5, "num_target_layers": 36},
        **{"dtype": "bfloat16", "layer_types": ["full_attention"] * 5, "transformers_version": "4.57.3"},
        "dflash_config": _OF_FIVE,
    }
    del written["torch_dtype"]
    return written | changes


_LAYERS = [1, 9, 17, 25, 33]
_OF_FIVE: Json = {"mask_token_id": 151669, "target_layer_ids": _LAYERS}
_OF_LLAMA: Json = {
    **{"block_size": 10, "hidden_size": 4096, "intermediate_size": 12288, "num_target_layers": 32},
    **{"bos_token_id": 128000, "eos_token_id": 128009, "vocab_size": 128256, "max_position_embeddings": 131072},
    **{"rope_theta": 500000.0, "rope_scaling": _LLAMA3, "tie_word_embeddings": False},
    "dflash_config": {"mask_token_id": 128002, "target_layer_ids": [1, 8, 15, 22, 29]},
}
_OF_CODER: Json = {
    **{"hidden_size": 2048, "intermediate_size": 6144, "num_key_value_heads": 4, "num_target_layers": 48},
    **{"layer_types": ["full_attention"] * 8, "num_hidden_layers": 8, "max_window_layers": 8},
    **{"rope_theta": 10000000, "max_position_embeddings": 262144, "tie_word_embeddings": False},
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 7, 14, 20, 26, 32, 39, 45]},
}
_OF_QWEN35: Json = {
    **{"hidden_size": 2560, "intermediate_size": 9216, "vocab_size": 248320, "num_target_layers": 32},
    **{"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    **{"max_position_embeddings": 262144, "sliding_window": 4096, "use_sliding_window": True},
    **{"rope_theta": 10000000, "tie_word_embeddings": False},
    "dflash_config": {"mask_token_id": 248077, "target_layer_ids": [1, 5, 9, 13, 17, 21, 25, 29]},
}


def _deepspec(target: Json, **changes: Any) -> Json:
    """Config.json of DeepSpec's drafts: the target's fields, with options at the top level."""
    fields = {key: value for key, value in target.items() if key != "torch_dtype"}
    options = {"dtype": "bfloat16", "num_target_layers": 36, "target_layer_ids": _LAYERS}
    return fields | options | {"tie_word_embeddings": False} | changes


_DSPARK: Json = {
    **{"architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": 151669, "num_anchors": 512},
    **{"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5, "markov_rank": 256},
    **{"markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True},
}
_DEEPSPEC_EAGLE3: Json = {
    **{"architectures": ["Qwen3Eagle3Model"], "num_hidden_layers": 1, "layer_types": ["full_attention"]},
    **{"ttt_length": 7, "step_loss_decay": 0.8, "draft_num_hidden_layers": 1},
}


def _speculators(network: Json, kind: str, num_drafted: int, **changes: Any) -> Json:
    """Config.json of vLLM's speculators: the network's configuration is nested."""
    methods = [{"proposal_type": "greedy", "speculative_tokens": num_drafted}]
    return {
        **{"speculators_model_type": kind, "dtype": "float32", "target_hidden_size": None},
        "speculators_config": {"algorithm": kind, "proposal_methods": methods},
        "transformer_layer_config": network,
        **changes,
    }


_DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
_OF_DFLASH2: Json = _DFLASH2 | {
    **{"architectures": ["DFlash2DraftModel"], "block_size": 16, "mask_token_id": 151669},
    **{"aux_hidden_state_layer_ids": [i + 1 for i in _LAYERS], "sample_from_anchor": False},
    **{"draft_vocab_size": 151936, "sliding_window_non_causal": False},
}
_NETWORK_8B = _QWEN3 | _OF_8B | {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
_OF_EAGLE3: Json = {
    **{"architectures": ["Eagle3Speculator"], "draft_vocab_size": 32000, "norm_before_residual": True},
}
_EAGLE3_LLAMA: Json = _LLAMA | {
    **{"num_hidden_layers": 1, "head_dim": 128, "max_position_embeddings": 2048, "rope_theta": 10000.0},
    **{"rope_scaling": None},
}


class PublishedPair(NamedTuple):
    """Configurations of target and draft, and the block size that the draft was trained for."""

    target: Json
    draft: Json
    block_size: int


_TARGET_8B = _QWEN3 | _OF_8B
PUBLISHED = {
    "qwen3-4b": PublishedPair(_QWEN3, _draft(), 16),
    "qwen3-4b-dspark": PublishedPair(_QWEN3, _deepspec(_QWEN3, **_DSPARK), 8),
    "qwen3-8b": PublishedPair(_TARGET_8B, _draft(**_OF_8B), 16),
    "qwen3-8b-dflash2": PublishedPair(_TARGET_8B, _speculators(_NETWORK_8B, "dflash2", 15, **_OF_DFLASH2), 16),
    "qwen3-8b-dspark": PublishedPair(_TARGET_8B, _deepspec(_TARGET_8B, **_DSPARK), 8),
    "qwen3-8b-jetspec": PublishedPair(
        _TARGET_8B, _draft(**_OF_8B, dflash_config=_OF_FIVE | {"causal_head": True}), 16
    ),
    "qwen3-8b-eagle3": PublishedPair(_TARGET_8B, _deepspec(_TARGET_8B, **_DEEPSPEC_EAGLE3), 8),
    "llama31-8b": PublishedPair(_LLAMA, _draft(**_OF_LLAMA), 10),
    "llama31-8b-eagle3": PublishedPair(_LLAMA, _speculators(_EAGLE3_LLAMA, "eagle3", 5, **_OF_EAGLE3), 6),
    "qwen3-coder-30b-a3b": PublishedPair(_CODER, _draft(**_OF_CODER), 16),
    "qwen35-4b": PublishedPair(_QWEN35, _draft(**_OF_QWEN35), 16),
}
"""By the name of the pair."""
TARGETS = {name: pair.target for name, pair in PUBLISHED.items()} | {
    "qwen25-7b": _QWEN25,
    "mistral-nemo": _MISTRAL_NEMO,
}
"""By the name of the pair, and targets that have no named pair."""

EOS = {"llama": [259, 258, 257], "mistral": [257]}
EOS |= {family: [257, 256] for family in ("qwen2", "qwen3", "qwen3_moe", "qwen3_5")}
VOCAB_SIZE, MASK_ID = 300, 269  # the tokenizer has 260 tokens: as with Qwen3, the embedding has more rows
_SMALL: Json = {
    **{"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": VOCAB_SIZE, "bos_token_id": 256, "initializer_range": 0.2},
}
_SMALL_TARGET: Json = _SMALL | {"num_hidden_layers": 6}
_SMALL_EXPERTS: Json = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SMALL_STATES: Json = {
    **{"linear_key_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "initializer_range": 0.1},
    **{"linear_value_head_dim": 32, "layer_types": _QWEN35_TEXT["layer_types"][:6]},
}
_SMALL_VISION: Json = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}


def text_config(name: str) -> Json:
    """Configuration of a target's language model."""
    target = TARGETS[name]
    return dict(target.get("text_config", target))


def small_target(name: str, directory: Path, **changes: Any) -> Path:
    """A random target checkpoint in shards; its config.json is the pair's with small sizes and `changes`."""
    written, text = TARGETS[name], text_config(name)
    family = written["model_type"]
    small = _SMALL_TARGET | {"eos_token_id": EOS[family] if family == "llama" else EOS[family][0]}
    small |= {"head_dim": 16} if "head_dim" in text else {}
    small |= _SMALL_EXPERTS if "num_experts" in text else {}
    small |= _SMALL_STATES if "linear_key_head_dim" in text else {}
    config = {key: value for key, value in (text | small | changes).items() if key in text or key in changes}
    if "text_config" in written:
        config = written | {"text_config": config, "vision_config": _SMALL_VISION}
    torch.manual_seed(1)
    model = _new_target(config)
    model.save_pretrained(directory, max_shard_size="60KB")
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"bos_token_id": 256, "do_sample": True, "eos_token_id": EOS[family], "temperature": 0.6}
    (directory / "generation_config.json").write_text(json.dumps(generation | {"transformers_version": "4.42.3"}))
    write_tokenizer(directory, "PreTrainedTokenizerFast" if family == "llama" else "Qwen2Tokenizer")
    return directory


def _new_target(config: Json) -> PreTrainedModel:
    """The network of a config.json with random weights."""
    parsed = AutoConfig.for_model(**json.loads(json.dumps(config)))
    if "text_config" in config:
        return Qwen3_5ForConditionalGeneration(parsed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(parsed)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):  # transformers begins with zeros
            weight.data.normal_()
    return model


def new_draft(config: Json) -> Draft:
    """The network of a config.json with random weights."""
    config = json.loads(json.dumps(config))
    if set(config["architectures"]) & set(EAGLE3_ARCHITECTURES):
        return Eagle3Model(*parse_eagle3(config))
    return DraftModel(Qwen3Config.from_dict(as_dflash(config)))


def write_tokenizer(directory: Path, kind: str, **changes: Any) -> None:
    """Write tokenizer.json and tokenizer_config.json as transformers 4 does."""
    byte_tokenizer().backend_tokenizer.save(str(directory / "tokenizer.json"))
    written = {"tokenizer_class": kind, "eos_token": "<eos>", "pad_token": "<pad>", "chat_template": CHAT_TEMPLATE}
    written |= {"model_max_length": 131072, "clean_up_tokenization_spaces": False} | changes
    (directory / "tokenizer_config.json").write_text(json.dumps(written))


@cache
def shapes(name: str) -> Pair:
    """The pair in bfloat16 on the meta device, without memory for weights."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            target, draft = _new_target(text_config(name)), new_draft(PUBLISHED[name].draft)
    finally:
        torch.set_default_dtype(torch.float32)
    if isinstance(draft, Eagle3Model):  # token ids of its LM head, not on the meta device
        draft.d2t = torch.zeros(len(draft.d2t), dtype=torch.int64)
    no_tokenizer: Any = None
    return Pair(PairId("target", "0", "draft", "0"), target, draft, no_tokenizer)


def small_draft(name: str, directory: Path, **changes: Any) -> Path:
    """A random draft checkpoint; its config.json is the pair's with small sizes and `changes`."""
    config = _small_draft(PUBLISHED[name].draft) | changes
    torch.manual_seed(2)
    draft = new_draft(config)
    weights = {key: torch.randn_like(value) * 0.2 + (value.dim() == 1) for key, value in draft.named_parameters()}
    if isinstance(draft, Eagle3Model):
        weights = {key.replace("midlayer.", "layers.0."): value for key, value in weights.items()}
        weights |= {"embed_tokens.weight": torch.randn(VOCAB_SIZE, 48)}
        if "transformer_layer_config" in config:  # the others propose all tokens
            draft.use_vocabulary(torch.arange(5, 5 + len(draft.d2t)) % VOCAB_SIZE)
            weights |= {"d2t": draft.d2t, "t2d": draft.t2d, "verifier_norm.weight": torch.zeros(48)}
    elif "markov_rank" in config:
        weights |= {"embed_tokens.weight": torch.randn(VOCAB_SIZE, 48), "lm_head.weight": torch.randn(VOCAB_SIZE, 48)}
        weights |= {"confidence_head.proj.weight": torch.randn(1, 48 + config["markov_rank"])}
    return write_draft(directory, config, weights)


def _small_draft(written: Json) -> Json:
    """A draft's config.json with small sizes."""
    if (network := written.get("transformer_layer_config")) is not None:
        sizes = {"draft_vocab_size": min(written["draft_vocab_size"], VOCAB_SIZE)}
        if "aux_hidden_state_layer_ids" in written:
            sizes |= {"aux_hidden_state_layer_ids": [2, 3, 5], "mask_token_id": MASK_ID}
        return written | sizes | {"transformer_layer_config": _small_draft(network)}
    layers = written.get("layer_types", ["full_attention"])[-2:]
    small = _SMALL | {"head_dim": 16, "num_hidden_layers": len(layers), "num_target_layers": 6, "eos_token_id": 257}
    small |= {"layer_types": layers} if "layer_types" in written else {}
    if written.get("dflash_config"):
        small_options = {"mask_token_id": MASK_ID, "target_layer_ids": [1, 2, 4]}
        small |= {"dflash_config": written["dflash_config"] | small_options}
    if "target_layer_ids" in written:
        small |= {"target_layer_ids": [0, 1, 2, 3, 4]}
    if "mask_token_id" in written:
        small |= {"mask_token_id": MASK_ID}
    return written | small


def write_draft(directory: Path, config: Json, weights: Mapping[str, Tensor]) -> Path:
    """Write a draft's checkpoint with this config.json; returns its directory."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file({name: value.contiguous() for name, value in weights.items()}, directory / "model.safetensors")
    return directory
