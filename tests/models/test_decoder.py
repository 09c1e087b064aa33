"""The prepared decoder against the transformers model that it is made from, with every kind of rotary embeddings."""

import copy
import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from blockpilot.models.cache import SlotCache
from blockpilot.models.decoder import check_network
from blockpilot.models.packing import Packing
from blockpilot.models.rotary import Rotary, RotaryTable
from blockpilot.models.target import Target
from helpers.tiny import (
    tiny_gemma,
    tiny_gemma4,
    tiny_gemma4_of_all_parts,
    tiny_gpt_oss,
    tiny_hybrid,
    tiny_hybrid_mixture,
    tiny_mistral,
    tiny_mixture,
    tiny_qwen2,
    tiny_qwen3,
    tiny_target,
)

ORIGINAL, LONGEST = 32, 96  # positions
SHAPE: dict[str, Any] = {
    **{"vocab_size": 272, "hidden_size": 64, "num_hidden_layers": 3, "head_dim": 16, "tie_word_embeddings": False},
    "max_position_embeddings": LONGEST,
}
ODD = {"head_dim": 10, "hidden_size": 44, "intermediate_size": 50}
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
WINDOWS: dict[str, Any] = {
    **{"sliding_window": 4, "tie_word_embeddings": True},
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
# A Gemma 4 like the 31B: global heads are twice as wide, half as many, and their keys are also their values.
GEMMA4 = WINDOWS | {"global_head_dim": 32, "final_logit_softcapping": 3.0, "use_bidirectional_attention": "vision"}
GEMMA4["layer_types"] = ["sliding_attention", "full_attention", "full_attention"]
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 40}
E2B: dict[str, Any] = {
    **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 272, "use_double_wide_mlp": True},
    **{"num_kv_shared_layers": 3, "num_hidden_layers": 6, "attention_k_eq_v": False, "num_key_value_heads": 1},
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
GPT_OSS: dict[str, Any] = {"num_local_experts": 4, "sliding_window": 4, "swiglu_limit": 2.0}  # many reach it
EXPERTS = {"num_experts": 4, "mlp_only_layers": []}
# The proportions of the published Qwen3.5: a quarter of a head is rotated, states are square.
HYBRID: dict[str, Any] = {
    **{"linear_num_key_heads": 4, "linear_value_head_dim": 32, "head_dim": 64, "initializer_range": 0.2},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
HYBRID_MOE = HYBRID | {"num_experts": 4, "shared_expert_intermediate_size": 32}  # as wide as an expert
OWN_VALUES, NARROW = {"attention_k_eq_v": False}, {"moe_intermediate_size": 20}
WIDE_SHARED = {"shared_expert_intermediate_size": 100, "num_experts": 7}
LAYER_INPUTS = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 272}

Build = Callable[..., PreTrainedModel]
MODELS: dict[str, tuple[Build, dict[str, Any]]] = {
    "llama": (tiny_target, {}),
    "llama with biases, tied": (tiny_target, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "one query for every key": (tiny_target, {"num_key_value_heads": 4}),
    "llama, nothing padded": (tiny_target, {"head_dim": 32}),
    "llama, all padded": (tiny_target, ODD | {"vocab_size": 265}),
    "mistral": (tiny_mistral, {"sliding_window": None}),
    "mistral with a window": (tiny_mistral, {"sliding_window": 4}),
    "qwen2": (tiny_qwen2, {}),
    "qwen2 with a window, all padded": (tiny_qwen2, SLIDING | ODD),
    "qwen3": (tiny_qwen3, {}),
    "qwen3, nothing padded": (tiny_qwen3, {"head_dim": 64}),
    "qwen3 with a window": (tiny_qwen3, SLIDING),
    "gemma3": (tiny_gemma, WINDOWS),
    "gemma3, all padded": (tiny_gemma, WINDOWS | ODD | {"vocab_size": 265}),
    "gemma3, not tied, with biases": (tiny_gemma, WINDOWS | {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma4": (tiny_gemma4, GEMMA4),
    "gemma4, all padded": (tiny_gemma4, GEMMA4 | ODD | {"global_head_dim": 24}),
    "gemma4, values of their own, no soft cap": (
        tiny_gemma4,
        GEMMA4 | OWN_VALUES | {"final_logit_softcapping": None},
    ),
    "gemma4, a mixture": (tiny_gemma4, GEMMA4 | GEMMA4_EXPERTS),
    "gemma4, a mixture, all padded": (tiny_gemma4, GEMMA4 | GEMMA4_EXPERTS | ODD),
    "gemma4, inputs of layers": (tiny_gemma4, GEMMA4 | LAYER_INPUTS),
    "gemma4, as E2B": (tiny_gemma4, GEMMA4 | E2B),
    "gemma4, as E2B, all padded": (tiny_gemma4, GEMMA4 | E2B | ODD | {"hidden_size_per_layer_input": 12}),
    "gemma4, all at once": (tiny_gemma4, GEMMA4 | E2B | GEMMA4_EXPERTS | {"attention_k_eq_v": True}),
    "gpt_oss": (tiny_gpt_oss, GPT_OSS),
    "gpt_oss, all padded": (tiny_gpt_oss, GPT_OSS | ODD | {"intermediate_size": 52, "vocab_size": 265}),
    "gpt_oss, one query for every key": (tiny_gpt_oss, GPT_OSS | {"num_key_value_heads": 4, "swiglu_limit": 7.0}),
    "gpt_oss, whole panels of experts": (tiny_gpt_oss, GPT_OSS | {"num_local_experts": 16}),  # biases are not padded
    "qwen3_moe": (tiny_mixture, EXPERTS),
    "qwen3_moe with a window": (tiny_mixture, EXPERTS | SLIDING | {"max_window_layers": 0}),
    "qwen3_moe, all padded": (tiny_mixture, EXPERTS | ODD | {"moe_intermediate_size": 20, "vocab_size": 265}),
    "qwen3_moe, weights of experts that sum to 1": (tiny_mixture, EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe with a dense layer": (tiny_mixture, EXPERTS | {"mlp_only_layers": [1]}),
    "qwen3_5": (tiny_hybrid, HYBRID),
    "qwen3_5, two values a key": (
        tiny_hybrid,
        HYBRID | {"linear_num_key_heads": 2, "linear_value_head_dim": 64},
    ),
    "qwen3_5, odd widths": (tiny_hybrid, HYBRID | ODD | {"head_dim": 24, "vocab_size": 265}),
    "qwen3_5, a shorter window": (tiny_hybrid, HYBRID | {"linear_conv_kernel_dim": 3}),
    "qwen3_5_moe": (tiny_hybrid_mixture, HYBRID_MOE),
    "qwen3_5_moe, a wide shared expert": (tiny_hybrid_mixture, HYBRID_MOE | WIDE_SHARED),
    "qwen3_5_moe, odd widths": (tiny_hybrid_mixture, HYBRID_MOE | ODD | {"head_dim": 24, **NARROW}),
}


def model_of(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    build, family_config = MODELS[name]
    return build(seed, **SHAPE | family_config | changes).eval().requires_grad_(False)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("in_c")
@torch.inference_mode()
def test_computes_what_the_model_does(name: str) -> None:
    """Logits, and features of layers in any order; the model itself can still be called, with the same state dict."""
    model = model_of(name)
    stock, target = copy.deepcopy(model), Target(model, (2, 0))
    tokens = torch.randint(0, 260, (3, 9))
    scored = target.score_rows(tokens, 0, target.new_cache(3, 9), torch.arange(3))
    expected = stock(tokens, output_hidden_states=True)
    torch.testing.assert_close(target.logits(scored.hidden), expected.logits, rtol=1e-4, atol=1e-4)
    features = torch.cat([expected.hidden_states[i + 1] for i in (2, 0)], dim=-1)
    torch.testing.assert_close(scored.features, features, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(tokens).logits, expected.logits, rtol=1e-4, atol=1e-4)
    state, before = model.state_dict(), stock.state_dict()
    assert state.keys() == before.keys()
    assert all(weight.equal(state[name]) for name, weight in before.items())


@pytest.mark.parametrize("name", ["gemma3", *(name for name in MODELS if name.startswith("gemma4"))])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("in_c")
@torch.inference_mode()
def test_tokens_of_a_tree_are_those_of_their_texts(name: str, seed: int) -> None:
    """Same logits and features as in transformers, after a prompt in two chunks that is longer than the window."""
    model, choice = model_of(name, seed), random.Random(seed)
    stock, target, start = copy.deepcopy(model), Target(model, (0, 2)), choice.randint(6, 14)
    parents = [choice.choice([i, i, choice.randint(0, i)]) for i in range(choice.randint(3, 9))]
    if not seed:
        parents = list(range(len(parents)))  # a chain
    prompt, block = torch.randint(0, 260, (start,)), torch.randint(0, 260, (1 + len(parents),))
    slot, cache = torch.tensor([1]), target.new_cache(2, 32)
    for first, last in ((0, 4), (4, start)):
        target.score_rows(prompt[None, first:last], first, cache, slot)
    tree = Packing([len(block)], [start], torch.device("cpu"), [parents])
    view = cache.view(slot[tree.rows], tree.columns, slot, tree.length)
    scored = target.score(block, view, tree, features=True)
    assert scored.features is not None
    logits = target.logits(scored.hidden)
    for node in range(len(block)):
        path = [node]
        while path[0]:
            path.insert(0, parents[path[0] - 1])
        expected = stock(torch.cat([prompt, block[path]])[None], output_hidden_states=True)
        features = torch.cat([expected.hidden_states[i + 1][0, -1] for i in (0, 2)])
        torch.testing.assert_close(logits[node], expected.logits[0, -1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(scored.features[node], features, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's maps of the process")
def test_the_checkpoint_is_not_kept_mapped(tmp_path: Path) -> None:
    """Embeddings and norms are copied: packed weights and the mapped file would take the memory twice."""
    model_of("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    file = str(tmp_path / "model.safetensors")
    assert file in Path("/proc/self/maps").read_text()
    Target(model, [0])
    gc.collect()
    assert file not in Path("/proc/self/maps").read_text()


# --- rotary embeddings ---


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 3.0},
    "longrope": {
        **{"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [3.0 + i for i in range(8)]},
        "factor": 3.0,
    },
}


def written(kind: str, key: str = "rope_type") -> dict[str, Any]:
    """Rotary options as transformers 4 writes them; early versions use the key `type`."""
    if kind == "default":
        return {"rope_theta": 1e4, "rope_scaling": None}
    original = {"original_max_position_embeddings": ORIGINAL} if kind in ("llama3", "yarn", "longrope") else {}
    return {"rope_theta": 1e4, "rope_scaling": {key: kind, **SCALINGS[kind], **original}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SCALINGS)
def test_rows_of_a_table_are_those_of_the_embedding(kind: str, dtype: torch.dtype) -> None:
    """Same rows for texts that fill the cache, longer or shorter than the last one; spare columns change nothing.

    The scaling "dynamic" begins beyond the configuration's length.
    """
    longest = ORIGINAL if kind == "dynamic" else LONGEST
    config = Qwen3Config(head_dim=16, max_position_embeddings=longest, **written(kind))
    table = RotaryTable(Qwen3RotaryEmbedding(config))
    for length in (40, 20, 90, 32, 50):
        hidden, positions = torch.zeros(length, 16, dtype=dtype), torch.arange(length)
        cache = SlotCache(tiny_qwen3(**SHAPE).config, 1, length, torch.float32, torch.device("cpu"), 9)
        rows = table.table(cache, hidden).at(positions)
        expected = Rotary.of(Qwen3RotaryEmbedding(config), hidden, positions)
        assert rows.cosines.dtype == dtype
        assert rows.cosines.equal(expected.cosines)
        assert rows.sines.equal(expected.sines)


@pytest.mark.parametrize(
    ("family", "key"), [("llama", "rope_type"), ("llama", "type"), ("qwen3", "type"), ("qwen3_moe", "rope_type")]
)
@pytest.mark.parametrize("kind", SCALINGS)
@torch.inference_mode()
def test_logits_are_those_of_the_transformers_model(family: str, kind: str, key: str) -> None:
    """Texts below the original length and of three times that length, in two chunks."""
    model = model_of(
        family, **written(kind, key), **{"max_position_embeddings": ORIGINAL} if kind == "dynamic" else {}
    )
    stock, target = copy.deepcopy(model), Target(model, ())
    for length in (ORIGINAL - 2, LONGEST):
        tokens = torch.randint(0, 260, (1, length))
        cache, half = target.new_cache(1, length, num_spare=8), length // 2
        stretches = (tokens[:, :half], 0), (tokens[:, half:], half)
        hidden = [target.score_rows(part, start, cache, torch.tensor([0])).hidden for part, start in stretches]
        expected = stock(tokens).logits
        torch.testing.assert_close(target.logits(torch.cat(hidden, dim=1)), expected, rtol=1e-3, atol=1e-3)


# --- unsupported configurations ---

MIXTURES = (tiny_mixture, tiny_gpt_oss, tiny_hybrid_mixture)


@pytest.mark.parametrize(
    ("build", "change", "message"),
    [
        (tiny_gemma, {"hidden_activation": "gelu"}, "hidden_activation = gelu: supported: gelu_pytorch_tanh"),
        (tiny_gemma, {"final_logit_softcapping": 30.0}, r"final_logit_softcapping = 30\.0: supported: None"),
        (tiny_gemma, {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        (tiny_gemma, {"sliding_window": None}, "layer_types sliding_attention: sliding_window must be given"),
        (tiny_gemma4, {"use_bidirectional_attention": "all"}, "attention = all: supported: vision, None"),
        (tiny_gemma4, {"hidden_activation": "silu"}, "hidden_activation = silu: supported: gelu_pytorch_tanh"),
        (tiny_hybrid, {"linear_key_head_dim": 20}, "linear_key_head_dim = 20: must be a multiple of 32"),
        (tiny_hybrid, {"linear_num_value_heads": 5}, "5 value heads: must be a multiple of its 2 key heads"),
        (tiny_hybrid, {"hidden_act": "gelu"}, "hidden_act = gelu: supported: silu"),
        (tiny_hybrid, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config fp8"),
        (tiny_target, {"is_causal": False}, "is_causal = False: supported: True"),
        *((build, {"num_experts_per_tok": 9}, "num_experts_per_tok = 9: must be 1 to 8") for build in MIXTURES),
        (tiny_gemma4_of_all_parts, {"top_k_experts": 9}, "top_k_experts = 9: must be 1 to 8"),
    ],
)
def test_what_is_not_built_is_refused_by_name(build: Build, change: dict[str, Any], message: str) -> None:
    config = build().config
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        check_network(config)
