"""Rotary tables: those of a model's own embedding, whatever its kind of scaling."""

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from blockpilot.models.layers import Rotary, RotaryTable

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "llama3": {
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "dynamic": {"factor": 2.0},
}


def embedding_of(kind: str) -> Qwen3RotaryEmbedding:
    scaling = {"rope_type": kind, "rope_theta": 10000.0, **SCALINGS[kind]}
    return Qwen3RotaryEmbedding(Qwen3Config(head_dim=16, max_position_embeddings=64, rope_parameters=scaling))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SCALINGS)
def test_rows_of_a_table_are_the_embeddings_own(kind: str, dtype: torch.dtype) -> None:
    """Also in a cache that is longer than the last, and where rows depend on the longest position (dynamic)."""
    table = RotaryTable(embedding_of(kind))
    for num_columns in (40, 20, 100):
        positions = torch.randint(0, num_columns, (9,))
        hidden = torch.zeros(9, 16, dtype=dtype)
        found, expected = table.at(positions, num_columns, hidden), Rotary.of(embedding_of(kind), hidden, positions)
        assert found.cosines.dtype == dtype
        assert found.cosines.equal(expected.cosines)
        assert found.sines.equal(expected.sines)
