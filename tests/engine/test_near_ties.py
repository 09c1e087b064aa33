"""Texts of targets whose tokens have nearly equal scores in pairs, so that the last bits of a score decide."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from blockpilot.engine.engine import Engine
from blockpilot.native.library import library_for
from blockpilot.pairs.loading import Pair
from blockpilot.types import LAYOUTS, Request, Sampling
from helpers.engines import NEVER, run, text_of
from helpers.fuzz import pair_of
from helpers.tiny import tiny_gemma4_of_all_parts, tiny_hybrid, tiny_hybrid_mixture, tiny_mixture, tiny_target

FP32, BF16 = torch.float32, torch.bfloat16
TARGETS: dict[str, tuple[Callable[..., Any], dict[str, Any], torch.dtype]] = {
    "experts": (tiny_mixture, {"head_dim": 32, "hidden_size": 64}, FP32),
    "experts, weights of experts that sum to 1": (tiny_mixture, {"norm_topk_prob": True, "num_experts": 7}, FP32),
    "experts in bfloat16": (tiny_mixture, {"num_experts_per_tok": 4}, BF16),
    "heads of 12": (tiny_target, {"head_dim": 12}, FP32),
    "heads of 12 in bfloat16": (tiny_target, {"head_dim": 12}, BF16),
    "odd widths": (tiny_target, {"head_dim": 10, "hidden_size": 44, "intermediate_size": 50}, FP32),
    "hybrid": (tiny_hybrid, {"num_hidden_layers": 5}, FP32),
    "hybrid in bfloat16": (tiny_hybrid, {"num_hidden_layers": 5, "linear_num_key_heads": 4}, BF16),
    "hybrid, odd widths": (tiny_hybrid, {"hidden_size": 44, "intermediate_size": 50, "num_hidden_layers": 5}, FP32),
    "hybrid with experts": (tiny_hybrid_mixture, {"num_hidden_layers": 5}, FP32),
    "hybrid with experts in bfloat16": (tiny_hybrid_mixture, {"num_hidden_layers": 5, "num_experts": 7}, BF16),
    "gemma4": (tiny_gemma4_of_all_parts, {"num_hidden_layers": 4}, FP32),
    "gemma4 in bfloat16": (tiny_gemma4_of_all_parts, {"num_hidden_layers": 4}, BF16),
    "an odd vocabulary in bfloat16": (tiny_target, {"vocab_size": 263}, BF16),
}


def with_near_ties(target: Any) -> Any:
    """The target with LM head rows in pairs that differ only in their last bits."""
    weight = target.lm_head.weight.detach().clone()
    even, odd = weight[0 : len(weight) // 2 * 2 : 2], weight[1::2]
    odd.copy_(even * (1 + 1e-7 * torch.randn(even.shape)))
    target.lm_head.weight = nn.Parameter(weight)
    return target


def texts_that_differ(pair: Pair, num: int) -> list[int]:
    """Indices of requests whose text in a batch of eight slots differs from plain decoding, one at a time."""
    prompts = [tuple((7 * i + 11 * k * k) % 256 for k in range(3 + i % 29)) for i in range(num)]
    requests = [
        Request(prompt, 40, Sampling(float(i % 2), seed=i), (1, 4, 8)[i % 3], NEVER, layout=LAYOUTS[i // 3 % 3])
        for i, prompt in enumerate(prompts)
    ]
    plain, batched = (Engine(pair, num_slots=slots, max_length=96, max_prefill_tokens=20) for slots in (1, 8))
    texts = map(text_of, run(batched, requests))
    expected = [text_of(run(plain, [replace(request, block_size=1)])[0]) for request in requests]
    return [i for i, pair_of_texts in enumerate(zip(texts, expected, strict=True)) if len(set(pair_of_texts)) > 1]


@pytest.mark.parametrize("name", TARGETS)
def test_layers_in_c_decode_bit_for_bit(name: str) -> None:
    target_of, changes, dtype = TARGETS[name]
    if library_for(dtype, torch.device("cpu")) is None:
        pytest.skip("no compiler, or no CPU for it")
    options = {"num_hidden_layers": 3, "tie_word_embeddings": False} | changes
    pair = pair_of(with_near_ties(target_of(**options)), dtype)
    assert Engine(pair, num_slots=1, max_length=8).exactness == "bit for bit: layers in C"
    assert texts_that_differ(pair, 18) == []


@pytest.mark.usefixtures("without_c")
@pytest.mark.parametrize("target_of", [tiny_target, tiny_mixture, tiny_hybrid, tiny_hybrid_mixture])
def test_layers_by_torch_decode_the_same_texts_where_nothing_nearly_ties(target_of: Callable[..., Any]) -> None:
    pair = pair_of(target_of(num_hidden_layers=4), FP32)
    assert Engine(pair, num_slots=1, max_length=8).exactness == "up to rounding: layers by torch (no C compiler)"
    assert texts_that_differ(pair, 18) == []
