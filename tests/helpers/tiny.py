"""Tiny random targets and drafts, and byte tokenizers."""

from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.dflash_checkpoint import new_draft_config

MASK_ID, EOS_ID = 258, 257
SHAPE: dict[str, Any] = {
    **{"vocab_size": 260, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 6},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024},
    **{"bos_token_id": None, "eos_token_id": EOS_ID, "pad_token_id": 256},
    **{"tie_word_embeddings": True, "initializer_range": 0.2},
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens 0..255, then <pad>, <eos>, <mask>, <unused>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    vocab |= {"<pad>": 256, "<eos>": EOS_ID, "<mask>": MASK_ID, "<unused>": 259}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<eos>", "<mask>", "<unused>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", chat_template=CHAT_TEMPLATE
    )


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Variant of `byte_tokenizer` in Llama 2's format: bytes are pieces `<0xNN>`, plus one word."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {"<pad>": 256, "<eos>": EOS_ID, "<mask>": MASK_ID, "\u2581a": 259}
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<pad>", "<eos>", "<mask>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", chat_template=CHAT_TEMPLATE
    )


# --- targets: random ones of every family, with changes of their configurations ---


def _model(family: str, seed: int, sizes: Mapping[str, Any]) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))


@torch.no_grad()
def _spread(model: Any, mean: float | None, std: float) -> Any:
    """The model with random norms around `mean`, or around their values if None, and random scales."""
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name or "dt_bias" in name:
            weight.add_(std * torch.randn_like(weight)) if mean is None else weight.normal_(mean, std)
        elif name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
            weight.uniform_(0.5, 1.5)
    return model


def tiny_target(seed: int = 0, **changes: Any) -> Any:
    """A Llama."""
    return _model("llama", seed, SHAPE | changes)


def tiny_mixture(seed: int = 0, **changes: Any) -> Any:
    """A Qwen3-MoE whose first layer is dense."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
    return _model("qwen3_moe", seed, SHAPE | {"head_dim": 12} | experts | changes)


WINDOW = 9  # tokens
GEMMA: dict[str, Any] = {
    **{"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": WINDOW},
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}


def tiny_gemma(seed: int = 0, **changes: Any) -> Any:
    """A Gemma 3, two of three layers with a window."""
    return _spread(_model("gemma3_text", seed, SHAPE | GEMMA | changes), 0.0, 0.3)


GEMMA4: dict[str, Any] = {
    **{"head_dim": 12, "global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    **{"sliding_window": WINDOW, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 9.0},
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}


def tiny_gemma4(seed: int = 0, **changes: Any) -> Any:
    """A Gemma 4, two of three layers with a window and smaller heads."""
    return _spread(_model("gemma4_text", seed, SHAPE | GEMMA4 | changes), 1.0, 0.3)


def tiny_gemma4_of_all_parts(seed: int = 0, **changes: Any) -> Any:
    """A `tiny_gemma4` with all parts of the published models: experts next to the MLPs, per-layer inputs, and upper
    layers that share the keys and values of lower ones."""
    experts = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}
    inputs = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 260}
    shared = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "num_hidden_layers": 4}
    layer_types = ["sliding_attention", "full_attention"] * 2
    return tiny_gemma4(seed, **experts | inputs | shared | {"layer_types": layer_types} | changes)


GPT_OSS: dict[str, Any] = {
    **{"head_dim": 12, "sliding_window": WINDOW, "num_local_experts": 8, "num_experts_per_tok": 2},
    "rope_parameters": {
        **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        **{"rope_theta": 150000.0, "original_max_position_embeddings": 32},
    },
}


def tiny_gpt_oss(seed: int = 0, **changes: Any) -> Any:
    """A gpt-oss, every other layer with a window; random sinks and biases, so that sinks and bounds matter."""
    model = _model("gpt_oss", seed, SHAPE | GPT_OSS | changes)
    for name, weight in model.named_parameters():
        if "sinks" in name or "bias" in name:
            weight.data.normal_()
    return model


def tiny_qwen3(seed: int = 0, **changes: Any) -> Any:
    """A Qwen3."""
    return _model("qwen3", seed, SHAPE | {"head_dim": 12} | changes)


def tiny_qwen2(seed: int = 0, **changes: Any) -> Any:
    """A Qwen2 or Qwen2.5, with random biases of queries, keys and values."""
    model = _model("qwen2", seed, SHAPE | changes)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.data.normal_()
    return model


def tiny_mistral(seed: int = 0, **changes: Any) -> Any:
    """A Mistral; all layers have a window, if `sliding_window` is not None."""
    return _model("mistral", seed, SHAPE | {"sliding_window": WINDOW} | changes)


def tiny_sliding(seed: int = 0) -> Any:
    """A Qwen3 whose upper layers have a window."""
    return tiny_qwen3(seed, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)


# Smaller weights than in the others: transformers' chunked rule deviates from the recurrent one by rounding.
HYBRID: dict[str, Any] = {
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 64, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "head_dim": 24, "initializer_range": 0.1, "num_hidden_layers": 4},
}


def tiny_hybrid(seed: int = 0, **changes: Any) -> Any:
    """A Qwen3.5, every fourth layer attention."""
    return _spread(_model("qwen3_5_text", seed, SHAPE | HYBRID | changes), None, 0.2)


def tiny_hybrid_mixture(seed: int = 0, **changes: Any) -> Any:
    """A Qwen3.5-MoE."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes = HYBRID | experts | {"shared_expert_intermediate_size": 64}
    return _spread(_model("qwen3_5_moe_text", seed, SHAPE | sizes | changes), None, 0.2)


# --- drafts ---


DFLASH2 = {"selector_rank": 6, "selector_top_k": 8, "conv_kernel_size": 2, "conv_group_size": 16}


def tiny_draft(
    target: PreTrainedModel, block_size: int = 4, seed: int = 1, num_layers: int = 2, **parts: Any
) -> DraftModel:
    """A random draft, with random edges and convolutions if its parts (`DraftOptions`) include them."""
    torch.manual_seed(seed)
    shape = {"num_layers": num_layers, "block_size": block_size}
    draft = DraftModel(new_draft_config(target.config, mask_token_id=MASK_ID, **shape, **parts))
    with torch.no_grad():
        if draft.edges is not None:
            draft.edges.successors.normal_()
        for name, parameter in draft.named_parameters():
            if "_conv." in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return draft
