"""A tiny random target and draft with a tokenizer of bytes."""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

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
    """As `byte_tokenizer`, with the bytes as pieces `<0xNN>` and one word, in Llama 2's manner."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {"<pad>": 256, "<eos>": EOS_ID, "<mask>": MASK_ID, "\u2581a": 259}
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<pad>", "<eos>", "<mask>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", chat_template=CHAT_TEMPLATE
    )


def tiny_target(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A random Llama, with changes of its configuration."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE | changes))


def tiny_mixture(seed: int = 0, **changes: Any) -> Qwen3MoeForCausalLM:
    """A random Qwen3-MoE, its first layer dense, with changes of its configuration."""
    torch.manual_seed(seed)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE | {"head_dim": 12} | experts | changes))


WINDOW = 9  # tokens
GEMMA: dict[str, Any] = {
    **{"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": WINDOW},
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}


def tiny_gemma(seed: int = 0, **changes: Any) -> Gemma3ForCausalLM:
    """A random Gemma 3 with random norms, two of three layers with a window, and changes of its configuration."""
    torch.manual_seed(seed)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE | GEMMA | changes))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_(std=0.3)
    return model


GEMMA4: dict[str, Any] = {
    **{"head_dim": 12, "global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    **{"sliding_window": WINDOW, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 9.0},
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}


def tiny_gemma4(seed: int = 0, **changes: Any) -> Gemma4ForCausalLM:
    """A random Gemma 4 with random norms and scales, two of three layers with a window and smaller heads, and changes
    of its configuration."""
    torch.manual_seed(seed)
    model = Gemma4ForCausalLM(Gemma4TextConfig(**SHAPE | GEMMA4 | changes))
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                weight.normal_(1.0, std=0.3)
            elif name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
                weight.uniform_(0.5, 1.5)
    return model


def tiny_gemma4_of_all_parts(seed: int = 0, **changes: Any) -> Gemma4ForCausalLM:
    """As `tiny_gemma4`, with all that published ones have: experts beside the MLPs, inputs of every layer, and upper
    layers that read the keys of lower ones."""
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


def tiny_gpt_oss(seed: int = 0, **changes: Any) -> GptOssForCausalLM:
    """A random gpt-oss, every other layer with a window, whose sinks and bounds matter, with changes of its
    configuration."""
    torch.manual_seed(seed)
    model = GptOssForCausalLM(GptOssConfig(**SHAPE | GPT_OSS | changes))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "sinks" in name or "bias" in name:
                weight.normal_()
    return model


def tiny_qwen3(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """A random Qwen3, with changes of its configuration."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"head_dim": 12} | changes))


def tiny_sliding(seed: int = 0) -> Qwen3ForCausalLM:
    """A random Qwen3 whose upper layers have a window."""
    return tiny_qwen3(seed, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)


HYBRID: dict[str, Any] = {
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 64, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "head_dim": 24, "initializer_range": 0.1, "num_hidden_layers": 4},
}


def tiny_hybrid(seed: int = 0, **changes: Any) -> Qwen3_5ForCausalLM:
    """A random Qwen3.5, every fourth layer attention, with changes of its configuration.

    Its weights are smaller than those of the others: transformers' chunks round away from the recurrent rule.
    """
    torch.manual_seed(seed)
    return _with_random_norms(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE | HYBRID | changes)))


def tiny_hybrid_mixture(seed: int = 0, **changes: Any) -> Qwen3_5MoeForCausalLM:
    """A random Qwen3.5-MoE, as `tiny_hybrid`."""
    torch.manual_seed(seed)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes = HYBRID | experts | {"shared_expert_intermediate_size": 64}
    return _with_random_norms(Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**SHAPE | sizes | changes)))


def _with_random_norms(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if "norm" in name or "dt_bias" in name:  # initially all the same
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model


DFLASH2 = {"selector_rank": 6, "selector_top_k": 8, "conv_kernel_size": 2, "conv_group_size": 16}


def tiny_draft(
    target: PreTrainedModel, block_size: int = 4, seed: int = 1, num_layers: int = 2, **parts: Any
) -> DraftModel:
    """A random draft, with random edges and convolutions where its parts (`DraftOptions`) ask for them."""
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
