"""Exactness of targets whose rotary embedding depends on the longest text: batches, blocks and the prefix cache."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.types import Request, Sampling
from helpers.engines import NEVER, plain_text, run, text_of

LENGTH = 96
SCALINGS: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 2.0},
    "longrope": {
        **{"short_factor": [1.0] * 6, "long_factor": [4.0 + i for i in range(6)], "factor": 4.0},
        "original_max_position_embeddings": 32,
    },
}


@pytest.fixture(params=SCALINGS)
def pair(request: pytest.FixtureRequest, tiny_pair: Pair) -> Pair:
    kind = str(request.param)
    config = tiny_pair.target.config.to_dict()
    config |= {"max_position_embeddings": LENGTH, "rope_parameters": None, "rope_theta": 1e4}
    config["rope_scaling"] = {"rope_type": kind, **SCALINGS[kind]}
    torch.manual_seed(3)
    target = LlamaForCausalLM(LlamaConfig.from_dict(config)).eval().requires_grad_(False)
    return Pair(tiny_pair.id, target, tiny_pair.draft, tiny_pair.tokenizer)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(4.0, seed=2)])
def test_no_row_depends_on_those_beside_it(pair: Pair, sampling: Sampling) -> None:
    """Long and short texts together, in blocks and trees, with a prefix cache: each equals its plain decoding."""
    prompts = [tuple(range(40, 40 + n)) for n in (70, 12, 28, 20)]
    asked = [Request(p, 24, sampling, size, NEVER) for p, size in zip(prompts, (6, 4, 8, 1), strict=True)]
    asked[2] = replace(asked[2], layout="tree")
    alone = [
        text_of(run(Engine(pair, num_slots=1, max_length=LENGTH), [replace(request, block_size=1)])[0])
        for request in asked
    ]
    engine = Engine(pair, num_slots=3, max_length=LENGTH, prefix_tokens=512, max_prefill_tokens=16)
    for _ in range(2):  # the second time from the prefix cache
        assert [text_of(steps) for steps in run(engine, asked)] == alone
    assert engine.num_kept_tokens
    # A text that fills the engine is the transformers model's.
    assert alone[0] == plain_text(pair, prompts[0], 24, sampling)
