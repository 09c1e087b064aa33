"""Shapes of targets, pairs with random weights on a device, and the bytes that a step of a pair has to read.

A mixture of experts reads the experts that its tokens are routed to. With random weights the routing is independent:
n tokens with k experts each read E (1 - (1 - k / E)^n) of E experts on average.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
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
from blockpilot.engine.engine import Engine
from blockpilot.models.states import StateCache
from blockpilot.pairs.loading import Pair
from blockpilot.types import PairId

Sizes = dict[str, Any]
NewModel = Callable[[], PreTrainedModel]


class Shape(NamedTuple):
    """Family and sizes of a target."""

    config: Any
    model: Any
    sizes: Sizes

    def new(self) -> PreTrainedModel:
        model: PreTrainedModel = self.model(self.config(**{"max_position_embeddings": 4096} | self.sizes))
        return model


_HEADS: Sizes = {"head_dim": 128, "num_attention_heads": 32, "vocab_size": 151936}
_QWEN3: Sizes = _HEADS | {"num_hidden_layers": 36, "num_key_value_heads": 8}
_4B: Sizes = {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
_8B: Sizes = {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
_CODER: Sizes = _HEADS | {"hidden_size": 2048, "num_hidden_layers": 48, "num_key_value_heads": 4}
_CODER |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
_HYBRID: Sizes = {"head_dim": 256, "num_attention_heads": 16, "vocab_size": 248320, "num_key_value_heads": 4}
_HYBRID |= {"hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "tie_word_embeddings": True}
_HYBRID_08B: Sizes = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24}
_HYBRID_08B |= {"num_attention_heads": 8, "num_key_value_heads": 2}
_HYBRID_08B |= {"linear_num_key_heads": 16, "linear_num_value_heads": 16}
_GPT_OSS: Sizes = {"num_hidden_layers": 24, "num_local_experts": 32, "pad_token_id": None}
SHAPES = {
    "4b": Shape(Qwen3Config, Qwen3ForCausalLM, _QWEN3 | _4B),
    "8b": Shape(Qwen3Config, Qwen3ForCausalLM, _QWEN3 | _8B),
    "coder-30b": Shape(Qwen3MoeConfig, Qwen3MoeForCausalLM, _CODER),
    "gpt-oss-20b": Shape(GptOssConfig, GptOssForCausalLM, _GPT_OSS),
    "qwen3.5-0.8b": Shape(Qwen3_5TextConfig, Qwen3_5ForCausalLM, _HYBRID | _HYBRID_08B),
    "qwen3.5-4b": Shape(Qwen3_5TextConfig, Qwen3_5ForCausalLM, _HYBRID),
}
TINY: Sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "vocab_size": 512, "head_dim": 32, "max_position_embeddings": 2048}
_TINY_EXPERTS: Sizes = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
_TINY_STATES: Sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32}
_TINY_STATES |= {"linear_value_head_dim": 32, "shared_expert_intermediate_size": 64}
_TINY_SINKS: Sizes = {"num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 32, "pad_token_id": None}
_TINY_GEMMA4: Sizes = {"global_head_dim": 64, "sliding_window": 32, "num_kv_shared_layers": 2, "pad_token_id": None}
_TINY_GEMMA4 |= {
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 512,
    "final_logit_softcapping": 30.0,
}
_TINY_GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"] * 3}
_CHECKED: Sizes = TINY | {"initializer_range": 0.1, "tie_word_embeddings": False}
FAMILIES = {
    "qwen3": Shape(Qwen3Config, Qwen3ForCausalLM, _CHECKED),
    "llama": Shape(LlamaConfig, LlamaForCausalLM, _CHECKED | {"tie_word_embeddings": True}),
    "qwen3_moe": Shape(Qwen3MoeConfig, Qwen3MoeForCausalLM, _CHECKED | _TINY_EXPERTS),
    "qwen3_5_moe": Shape(Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, _CHECKED | _TINY_EXPERTS | _TINY_STATES),
    "gpt_oss": Shape(GptOssConfig, GptOssForCausalLM, _CHECKED | _TINY_SINKS),
    "gemma4": Shape(Gemma4TextConfig, Gemma4ForCausalLM, _CHECKED | _TINY_GEMMA4),
}
"""Small targets, whose texts are checked."""


@contextmanager
def new_weights(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Give models created in the block reproducible random weights, on the device and in the dtype."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(default)


def random_pair(target: NewModel, device: torch.device, dtype: torch.dtype, **draft: Any) -> Pair:
    """A target and a draft with random weights, created on the device."""
    with new_weights(device, dtype):
        model = target()
        network = DraftModel(new_draft_config(model.config, mask_token_id=model.config.vocab_size - 1, **draft))
    for module in (model, network):
        nn.Module.to(module, device=device, dtype=dtype).eval().requires_grad_(False)
    no_tokenizer: Any = None
    pair = Pair(PairId("random", "0", "random", "0"), model, network, no_tokenizer)
    _ = pair.prepared_draft
    return pair


def step_bytes(engine: Engine, tokens: int, length: int) -> tuple[float, float]:
    """Bytes of the weights and caches that a step reads with `tokens` per row, and those of the target alone.

    length: columns of a row in the caches.
    """
    pair, cache = engine.pair, engine._cache
    model: Any = pair.target
    config, rows = model.config, cache.layers.shape[2]
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    target: float = sum(weight.nbytes for weight in model.parameters())
    target -= 0 if head.data_ptr() == embeddings.data_ptr() else embeddings.nbytes
    if num_experts := getattr(config, "num_experts", 0):
        experts = sum(weight.nbytes for name, weight in model.named_parameters() if ".experts." in name)
        target -= experts * (1 - config.num_experts_per_tok / num_experts) ** (rows * tokens)
    target += cache.layers[..., 0, :].nbytes * length
    if isinstance(cache, StateCache):
        target += 2 * cache.matrices.nbytes  # read and written
    if tokens == 1:
        return target, target
    draft_cache = engine._drafter.cache.layers
    draft = sum(weight.nbytes for weight in pair.draft.parameters()) + head.nbytes
    return target + draft + draft_cache[..., 0, :].nbytes * length, target
