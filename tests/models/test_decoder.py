"""The prepared decoder beside the transformers model that it was made from."""

import copy
import gc
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from blockpilot.models import kernels
from blockpilot.models.target import Target
from blockpilot.pairs.loading import Pair

SHAPE = {
    **{"vocab_size": 272, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def llama(**changes: object) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE | changes))


def qwen3(**changes: object) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE | changes))


def qwen3_moe(**changes: object) -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE | EXPERTS | changes))


MODELS = {
    "llama": llama,
    "llama with biases, tied": lambda: llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama 3": lambda: llama(rope_parameters=LLAMA3),
    "one query for every key": lambda: llama(num_key_value_heads=4),
    "qwen3": qwen3,
    "llama, nothing padded": lambda: llama(head_dim=32),
    "llama, all padded": lambda: llama(head_dim=10, hidden_size=44, intermediate_size=50, vocab_size=265),
    "qwen3, nothing padded": lambda: qwen3(head_dim=64),
    "qwen3_moe": qwen3_moe,
    "qwen3_moe, all padded": lambda: qwen3_moe(head_dim=10, hidden_size=44, moe_intermediate_size=20, vocab_size=265),
    "qwen3_moe, weights of experts that sum to 1": lambda: qwen3_moe(norm_topk_prob=True),
    "qwen3_moe with a dense layer": lambda: qwen3_moe(mlp_only_layers=[1]),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("packed", [True, False])
@torch.inference_mode()
def test_computes_what_the_model_does(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, and features of layers in any order; the model itself stays one to call."""
    if not packed:
        monkeypatch.setattr(kernels, "native_product", lambda *_, **__: None)
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
    state = model.state_dict()
    assert {name: weight.equal(state[name]) for name, weight in stock.state_dict().items()} == dict.fromkeys(
        state, True
    )


@torch.inference_mode()
def test_the_real_model_writes_as_transformers_does(embedded_pair: Pair) -> None:
    """Logits of SmolLM2-135M in two stretches."""
    target = Target(embedded_pair.target, (0,))
    tokens = torch.tensor([embedded_pair.tokenizer("The capital of France is Paris, and that of Italy").input_ids])
    cache, slots = target.new_cache(2, 32), torch.tensor([1])
    first, second = (target.score_rows(tokens[:, i : i + 5], i, cache, slots).hidden for i in (0, 5))
    found = target.logits(torch.cat([first, second], dim=1))
    torch.testing.assert_close(found, embedded_pair.target(tokens[:, :10]).logits, rtol=1e-3, atol=1e-3)


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
