"""The prepared decoder beside the transformers model that it was made from, with rotary embeddings of every kind."""

import copy
import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
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
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from blockpilot.models.cache import SlotCache
from blockpilot.models.layers import Rotary, RotaryTable
from blockpilot.models.packing import Packing
from blockpilot.models.target import Target
from blockpilot.pairs.loading import Pair

ORIGINAL, LONGEST = 32, 96  # positions
SHAPE = {
    **{"vocab_size": 272, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2},
    "max_position_embeddings": LONGEST,
}
HYBRID: dict[str, Any] = {
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 4, "head_dim": 64},
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE | changes))


def qwen3(**changes: Any) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE | changes))


def qwen3_moe(**changes: Any) -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE | EXPERTS | changes))


def gemma3(**changes: Any) -> PreTrainedModel:
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE | GEMMA | changes))
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def gemma4(**changes: Any) -> PreTrainedModel:
    """A Gemma 4 as the 31B: global heads are twice as wide, half as many, and their values are their keys."""
    model = Gemma4ForCausalLM(Gemma4TextConfig(**SHAPE | GEMMA4 | changes))
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if "q_norm" in name:  # holds the scale of attention scores
            torch.nn.init.normal_(parameter, 0.3, std=0.1)
        elif "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, std=0.3)
        elif name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
            torch.nn.init.uniform_(parameter, 0.3, 0.9)
    return model


def gpt_oss(**changes: Any) -> PreTrainedModel:
    """A gpt-oss with sinks that take a good part of the attention, and gates and ups that reach their bounds."""
    model = GptOssForCausalLM(GptOssConfig(**SHAPE | GPT_OSS | changes))
    for name, weight in model.named_parameters():
        if "sinks" in name or "bias" in name:
            torch.nn.init.normal_(weight)
        elif "gate_up_proj" in name:
            torch.nn.init.normal_(weight, std=0.5)
    return model


GPT_OSS: dict[str, Any] = {
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "pad_token_id": None},
    "rope_parameters": {
        **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        **{"rope_theta": 150000.0, "original_max_position_embeddings": 4},
    },
}
GEMMA: dict[str, Any] = {
    **{"query_pre_attn_scalar": 24, "sliding_window": 4, "tie_word_embeddings": True},
    **{"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "pad_token_id": None},
}
GEMMA4: dict[str, Any] = {
    **{"sliding_window": 4, "tie_word_embeddings": True, "pad_token_id": None, "final_logit_softcapping": 3.0},
    **{"head_dim": 16, "num_key_value_heads": 2, "global_head_dim": 32, "num_global_key_value_heads": 1},
    **{"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 40}
E2B: dict[str, Any] = {
    **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 272, "use_double_wide_mlp": True},
    **{"num_kv_shared_layers": 3, "num_hidden_layers": 6, "attention_k_eq_v": False, "num_key_value_heads": 1},
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"] * 2,
}
E2B["layer_types"] = E2B["layer_types"][:6]
ODD = {"head_dim": 10, "hidden_size": 44, "intermediate_size": 50}
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


def hybrid(**changes: Any) -> PreTrainedModel:
    """A Qwen3.5 with the proportions of the published ones: a quarter of a head is rotated, states are square."""
    return with_random_norms(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE | HYBRID | changes)))


def hybrid_moe(**changes: Any) -> PreTrainedModel:
    """A Qwen3.5-MoE with experts as wide as the shared one, as in the published ones."""
    experts = EXPERTS | {"shared_expert_intermediate_size": 32}
    return with_random_norms(Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**SHAPE | HYBRID | experts | changes)))


def with_random_norms(model: Any) -> PreTrainedModel:
    for name, parameter in model.named_parameters():
        if "norm" in name or "dt_bias" in name:  # initially all the same
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model


MODELS = {
    "llama": llama,
    "llama with biases, tied": lambda: llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "one query for every key": lambda: llama(num_key_value_heads=4),
    "qwen3": qwen3,
    "llama, nothing padded": lambda: llama(head_dim=32),
    "llama, all padded": lambda: llama(head_dim=10, hidden_size=44, intermediate_size=50, vocab_size=265),
    "qwen3, nothing padded": lambda: qwen3(head_dim=64),
    "qwen3 with a window": lambda: qwen3(**SLIDING),
    "gemma3": gemma3,
    "gemma3, all padded": lambda: gemma3(head_dim=10, hidden_size=44, intermediate_size=50, vocab_size=265),
    "gemma3, not tied, with biases": lambda: gemma3(tie_word_embeddings=False, attention_bias=True),
    "gemma4": gemma4,
    "gemma4, all padded": lambda: gemma4(head_dim=10, global_head_dim=24, hidden_size=44, intermediate_size=50),
    "gemma4, values of their own, no soft cap": lambda: gemma4(attention_k_eq_v=False, final_logit_softcapping=None),
    "gemma4, a mixture": lambda: gemma4(**GEMMA4_EXPERTS),
    "gemma4, a mixture, all padded": lambda: gemma4(**GEMMA4_EXPERTS | ODD),
    "gemma4, inputs of layers": lambda: gemma4(hidden_size_per_layer_input=32, vocab_size_per_layer_input=272),
    "gemma4, as E2B": lambda: gemma4(**E2B),
    "gemma4, as E2B, all padded": lambda: gemma4(**E2B | ODD | {"hidden_size_per_layer_input": 12}),
    "gemma4, all at once": lambda: gemma4(**E2B | GEMMA4_EXPERTS | {"attention_k_eq_v": True}),
    "gpt_oss": gpt_oss,
    "gpt_oss, all padded": lambda: gpt_oss(head_dim=10, hidden_size=44, intermediate_size=52, vocab_size=265),
    "gpt_oss, one query for every key": lambda: gpt_oss(num_key_value_heads=4, swiglu_limit=2.0),
    "gpt_oss, whole panels of experts": lambda: gpt_oss(num_local_experts=16),  # their biases need no padding
    "qwen3_moe": qwen3_moe,
    "qwen3_moe with a window": lambda: qwen3_moe(use_sliding_window=True, sliding_window=4),
    "qwen3_moe, all padded": lambda: qwen3_moe(head_dim=10, hidden_size=44, moe_intermediate_size=20, vocab_size=265),
    "qwen3_moe, weights of experts that sum to 1": lambda: qwen3_moe(norm_topk_prob=True),
    "qwen3_moe with a dense layer": lambda: qwen3_moe(mlp_only_layers=[1]),
    "qwen3_5": hybrid,
    "qwen3_5, two values for every key": lambda: hybrid(linear_num_key_heads=2, linear_value_head_dim=64),
    "qwen3_5, odd widths": lambda: hybrid(head_dim=24, hidden_size=44, intermediate_size=50, vocab_size=265),
    "qwen3_5, a shorter window": lambda: hybrid(linear_conv_kernel_dim=3),
    "qwen3_5_moe": hybrid_moe,
    "qwen3_5_moe, a wide shared expert": lambda: hybrid_moe(shared_expert_intermediate_size=100, num_experts=7),
    "qwen3_5_moe, odd widths": lambda: hybrid_moe(head_dim=24, hidden_size=44, moe_intermediate_size=20),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("in_c")
@torch.inference_mode()
def test_computes_what_the_model_does(name: str) -> None:
    """Logits, and features of layers in any order; the model itself stays one to call, and keeps its state."""
    torch.manual_seed(0)
    model = MODELS[name]().eval().requires_grad_(False)
    stock = copy.deepcopy(model)
    target = Target(model, (2, 0))
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
    """Logits and features of transformers, after a prompt in two parts that is longer than the window."""
    torch.manual_seed(seed)
    model, choice = MODELS[name]().eval().requires_grad_(False), random.Random(seed)
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


@torch.inference_mode()
def test_the_real_model_writes_as_transformers_does(embedded_pair: Pair) -> None:
    """Logits of SmolLM2-135M in two stretches."""
    target = Target(embedded_pair.target, (0,))
    tokens = torch.tensor([embedded_pair.tokenizer("The capital of France is Paris, and that of Italy").input_ids])
    cache, slots = target.new_cache(2, 32), torch.tensor([1])
    first, second = (target.score_rows(tokens[:, i : i + 5], i, cache, slots).hidden for i in (0, 5))
    logits = target.logits(torch.cat([first, second], dim=1))
    torch.testing.assert_close(logits, embedded_pair.target(tokens[:, :10]).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's maps of the process")
def test_the_checkpoint_is_not_kept_mapped(tmp_path: Path) -> None:
    """Embeddings and norms are copied out of it: packed weights and their file would be memory twice."""
    llama().save_pretrained(tmp_path)
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
    """As transformers 4 writes it, with the key of its early versions, too."""
    if kind == "default":
        return {"rope_theta": 1e4, "rope_scaling": None}
    original = {"original_max_position_embeddings": ORIGINAL} if kind in ("llama3", "yarn", "longrope") else {}
    return {"rope_theta": 1e4, "rope_scaling": {key: kind, **SCALINGS[kind], **original}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SCALINGS)
def test_rows_of_a_table_are_those_of_the_embedding(kind: str, dtype: torch.dtype) -> None:
    """For texts that fill the cache, one longer or shorter than the last; spare columns change nothing."""
    config = Qwen3Config(head_dim=16, max_position_embeddings=LONGEST, **written(kind))
    table = RotaryTable(Qwen3RotaryEmbedding(config))
    for length in (40, 20, 90, 32):
        hidden, positions = torch.zeros(length, 16, dtype=dtype), torch.arange(length)
        cache = SlotCache(Qwen3Config(**SHAPE), 1, length, torch.float32, torch.device("cpu"), 9)
        rows = table.table(cache, hidden).at(positions)
        expected = Rotary.of(Qwen3RotaryEmbedding(config), hidden, positions)
        assert rows.cosines.dtype == dtype
        assert rows.cosines.equal(expected.cosines)
        assert rows.sines.equal(expected.sines)


@pytest.mark.parametrize(
    ("family", "key"), [(llama, "rope_type"), (llama, "type"), (qwen3, "type"), (qwen3_moe, "rope_type")]
)
@pytest.mark.parametrize("kind", SCALINGS)
@torch.inference_mode()
def test_logits_are_those_of_the_transformers_model(family: Any, kind: str, key: str) -> None:
    """Of a text below the original length and of one that is three times as long, in two stretches."""
    torch.manual_seed(0)
    model: PreTrainedModel = family(**written(kind, key)).eval().requires_grad_(False)
    stock = copy.deepcopy(model)
    target = Target(model, ())
    for length in (ORIGINAL - 2, LONGEST):
        tokens = torch.randint(0, 260, (1, length))
        cache, half = target.new_cache(1, length, num_spare=8), length // 2
        stretches = (tokens[:, :half], 0), (tokens[:, half:], half)
        hidden = [target.score_rows(part, start, cache, torch.tensor([0])).hidden for part, start in stretches]
        expected = stock(tokens).logits
        torch.testing.assert_close(target.logits(torch.cat(hidden, dim=1)), expected, rtol=1e-3, atol=1e-3)
