"""The named pairs as their publishers wrote them (transformers 4), and small checkpoints of the same form."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from blockpilot.drafts.dflash import DraftModel
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


def _draft(**changes: Any) -> Json:
    """Qwen3-4B-DFlash-b16's config.json, and others by what differs."""
    written = _QWEN3 | {
        **{"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}},
        **{"block_size": 16, "num_hidden_layers": 5, "max_window_layers": 5, "num_target_layers": 36},
        **{"dtype": "bfloat16", "layer_types": ["full_attention"] * 5, "transformers_version": "4.57.3"},
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    }
    del written["torch_dtype"]
    return written | changes


_SECOND = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}  # DFlash 2
_OF_SECOND: Json = _OF_8B | {
    **{"architectures": ["DFlash2DraftModel"], "auto_map": {"AutoModel": "dflash.DFlash2DraftModel"}},
    **{"is_causal": False, "final_logit_softcapping": None},
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]} | _SECOND,
}
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
PUBLISHED: dict[str, tuple[Json, Json]] = {
    "qwen3-4b": (_QWEN3, _draft()),
    "qwen3-8b": (_QWEN3 | _OF_8B, _draft(**_OF_8B)),
    "qwen3-8b-dflash2": (_QWEN3 | _OF_8B, _draft(**_OF_SECOND)),
    "llama31-8b": (_LLAMA, _draft(**_OF_LLAMA)),
    "qwen3-coder-30b-a3b": (_CODER, _draft(**_OF_CODER)),
}
"""Configurations of target and draft by the name of the pair."""

EOS = {"qwen3": [257, 256], "llama": [259, 258, 257], "qwen3_moe": [257, 256]}
VOCAB_SIZE, MASK_ID = 300, 269  # the tokenizer has 260 tokens: as with Qwen3, rows of the embedding have no text
_SMALL: Json = {
    **{"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": VOCAB_SIZE, "bos_token_id": 256, "initializer_range": 0.2},
}
_SMALL_TARGET: Json = _SMALL | {"num_hidden_layers": 6}
_SMALL_EXPERTS: Json = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def small_target(name: str, directory: Path, **changes: Any) -> Path:
    """A random checkpoint in shards, with the pair's own config.json but for its sizes; `changes` are to that."""
    written, _ = PUBLISHED[name]
    family = written["model_type"]
    small = _SMALL_TARGET | {"eos_token_id": EOS[family] if family == "llama" else EOS[family][0]}
    small |= {"head_dim": 16} if "head_dim" in written else {}
    small |= _SMALL_EXPERTS if "num_experts" in written else {}
    config = {key: value for key, value in (written | small | changes).items() if key in written or key in changes}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(json.dumps(config))))
    model.save_pretrained(directory, max_shard_size="60KB")
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"bos_token_id": 256, "do_sample": True, "eos_token_id": EOS[family], "temperature": 0.6}
    (directory / "generation_config.json").write_text(json.dumps(generation | {"transformers_version": "4.42.3"}))
    write_tokenizer(directory, "PreTrainedTokenizerFast" if family == "llama" else "Qwen2Tokenizer")
    return directory


def write_tokenizer(directory: Path, kind: str, **changes: Any) -> None:
    """tokenizer.json and tokenizer_config.json, as transformers 4 writes them."""
    byte_tokenizer().backend_tokenizer.save(str(directory / "tokenizer.json"))
    written = {"tokenizer_class": kind, "eos_token": "<eos>", "pad_token": "<pad>", "chat_template": CHAT_TEMPLATE}
    written |= {"model_max_length": 131072, "clean_up_tokenization_spaces": False} | changes
    (directory / "tokenizer_config.json").write_text(json.dumps(written))


def small_draft(name: str, directory: Path, **changes: Any) -> Path:
    """A random checkpoint with the pair's own config.json of the draft but for its sizes; `changes` are to that."""
    _, written = PUBLISHED[name]
    num_layers = 2
    small = _SMALL | {"head_dim": 16, "num_hidden_layers": num_layers, "layer_types": ["full_attention"] * num_layers}
    parts = {key: value for key, value in written["dflash_config"].items() if key in _SECOND}
    own = parts | {"mask_token_id": MASK_ID, "target_layer_ids": [1, 2, 4]}
    config = written | small | {"num_target_layers": 6, "eos_token_id": 257, "dflash_config": own} | changes
    torch.manual_seed(2)
    draft = DraftModel(Qwen3Config.from_dict(json.loads(json.dumps(config))))
    weights = {key: torch.randn_like(value) * 0.2 + (value.dim() == 1) for key, value in draft.state_dict().items()}
    return write_draft(directory, config, weights)


def write_draft(directory: Path, config: Json, weights: Mapping[str, Tensor]) -> Path:
    """A draft's checkpoint of this config.json."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file({name: value.contiguous() for name, value in weights.items()}, directory / "model.safetensors")
    return directory
