"""Rotary embeddings of every kind of scaling: those of the transformers model, whatever lies beside a token."""

import copy
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from blockpilot.models.cache import SlotCache
from blockpilot.models.layers import Rotary, RotaryTable
from blockpilot.models.target import Target

ORIGINAL, LONGEST = 32, 96  # positions
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"factor": 3.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {
        **{"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [3.0 + i for i in range(8)]},
        **{"factor": 3.0, "original_max_position_embeddings": ORIGINAL},
    },
}
SHAPE = {
    **{"vocab_size": 272, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2},
    "max_position_embeddings": LONGEST,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "llama": lambda **rope: LlamaForCausalLM(LlamaConfig(**SHAPE, **rope)),
    "qwen3": lambda **rope: Qwen3ForCausalLM(Qwen3Config(**SHAPE, **rope)),
    "qwen3_moe": lambda **rope: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS, **rope)),
}


def written(kind: str, key: str = "rope_type") -> dict[str, Any]:
    """As transformers 4 writes it, with the key of its early versions, too."""
    return {"rope_theta": 1e4, "rope_scaling": {key: kind, **SCALINGS[kind]} if kind != "default" else None}


def embedding_of(kind: str) -> Qwen3RotaryEmbedding:
    return Qwen3RotaryEmbedding(Qwen3Config(head_dim=16, max_position_embeddings=LONGEST, **written(kind)))


def cache_of(length: int, num_spare: int = 0) -> SlotCache:
    return SlotCache(Qwen3Config(**SHAPE), 1, length, torch.float32, torch.device("cpu"), num_spare)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SCALINGS)
def test_rows_of_a_table_are_the_embeddings_own(kind: str, dtype: torch.dtype) -> None:
    """For texts that fill the cache, one longer or shorter than the last; spare columns change nothing."""
    table = RotaryTable(embedding_of(kind))
    for length in (40, 20, 90, 32):
        hidden, positions = torch.zeros(length, 16, dtype=dtype), torch.arange(length)
        found = table.table(cache_of(length, num_spare=9), hidden).at(positions)
        expected = Rotary.of(embedding_of(kind), hidden, positions)
        assert found.cosines.dtype == dtype
        assert found.cosines.equal(expected.cosines)
        assert found.sines.equal(expected.sines)


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_are_those_of_the_transformers_model(family: str, kind: str, key: str) -> None:
    """Of a text below the original length and of one that is three times as long, in two stretches."""
    torch.manual_seed(0)
    model: PreTrainedModel = FAMILIES[family](**written(kind, key)).eval().requires_grad_(False)
    stock = copy.deepcopy(model)
    target = Target(model, ())
    for length in (ORIGINAL - 2, LONGEST):
        tokens = torch.randint(0, 260, (1, length))
        cache, half = target.new_cache(1, length, num_spare=8), length // 2
        stretches = (tokens[:, :half], 0), (tokens[:, half:], half)
        hidden = [target.score_rows(part, start, cache, torch.tensor([0])).hidden for part, start in stretches]
        expected = stock(tokens).logits
        torch.testing.assert_close(target.logits(torch.cat(hidden, dim=1)), expected, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_the_kinds_differ() -> None:
    """Each kind, at the length at which it matters, gives other logits than no scaling: the test above can fail."""
    tokens = torch.randint(0, 260, (1, LONGEST))
    of_kind = {}
    for kind in SCALINGS:
        torch.manual_seed(0)
        of_kind[kind] = FAMILIES["llama"](**written(kind)).eval()(tokens).logits
    for kind in SCALINGS.keys() - {"default", "dynamic"}:  # dynamic: nothing up to max_position_embeddings
        assert (of_kind[kind] - of_kind["default"]).abs().max() > 0.1
