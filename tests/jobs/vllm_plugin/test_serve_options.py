"""Serving by vLLM without vLLM: what is refused before anything is loaded, and the parts that need no engine."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from blockpilot.drafts.eagle3_checkpoint import save_eagle3
from blockpilot.pairs.loading import Pair
from blockpilot.policy.store import save_policy
from blockpilot.types import Request, Sampling
from helpers.eagle3 import random_eagle3
from helpers.policies import step_policy, tiny_policy
from helpers.prices import price
from helpers.tiny import tiny_target
from jobs.common.config import ConfigError, PairConfig
from jobs.serving.models import ModelConfig, find_policy
from jobs.vllm_plugin.pair import VllmPair
from jobs.vllm_plugin.served import VllmRow, refuse_unserved


@pytest.fixture
def pair_config(tiny_pair_dirs: tuple[Path, Path]) -> PairConfig:
    target, draft = map(str, tiny_pair_dirs)
    return PairConfig(target=target, draft=draft)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"prefix_tokens": 64}, "prefix_tokens: not with engine vllm"),
        ({"max_prefill_tokens": 64}, "max_prefill_tokens: not with engine vllm"),
        ({"policy": "untrained"}, "policy untrained: .* --price is needed"),
        ({"pair": {"device": "cpu"}}, "device cpu: with engine vllm it must be auto"),
        ({"engine": "blockpilot", "price": "price.json"}, "price: not with engine blockpilot"),
        ({"engine": "blockpilot", "vllm": {"enforce_eager": True}}, "vllm: not with engine blockpilot"),
        ({"vllm": {"tensor_parallel_size": 0}}, "tensor_parallel_size"),
        ({"engine": "sglang"}, "engine: .*'blockpilot' or 'vllm'"),
    ],
)
def test_settings_of_the_other_engine_are_refused_by_name(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ModelConfig(**{"engine": "vllm"} | settings)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_serving_by_vllm_needs_vllm(pair_config: PairConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"engine vllm: vLLM is not installed here \(docs/vllm.md\)"):
        find_policy(ModelConfig(pair=pair_config, engine="vllm", policy="4"), tmp_path)


def test_policies_and_prices_that_do_not_fit_are_refused_before_vllm_starts(
    pair_config: PairConfig, tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.serving.models.find_spec", lambda name: name)  # as if vLLM were installed
    save_policy(tiny_policy(tiny_pair.id, tiny_pair.vocab_size, (2, 4)), tmp_path / "prompt")
    save_policy(step_policy(tiny_pair, (2, 4)), tmp_path / "step")
    shared: dict[str, Any] = {"pair": pair_config, "engine": "vllm"}
    good = ModelConfig(**shared, policy=str(tmp_path / "prompt"))
    assert find_policy(good, tmp_path) == tmp_path / "prompt"
    with pytest.raises(ValueError, match="kind 'step'; with engine vllm it must be 'prompt'"):
        find_policy(ModelConfig(**shared, policy=str(tmp_path / "step")), tmp_path)
    (tmp_path / "price.json").write_text(price(token_s=0.01).to_json())
    with pytest.raises(ValueError, match=r"price .*price.json: made for target"):
        find_policy(ModelConfig(**shared, price=str(tmp_path / "price.json")), tmp_path)
    with pytest.raises(ValueError, match=r"nowhere\.json: not the step price of a pair"):
        find_policy(ModelConfig(**shared, price=str(tmp_path / "nowhere.json")), tmp_path)


def test_a_pair_is_known_as_the_loaded_one_without_its_weights(pair_config: PairConfig, tiny_pair: Pair) -> None:
    found = VllmPair.of(pair_config)
    for name in ("id", "vocab_size", "max_length", "stop_token_ids", "block_size"):
        assert getattr(found, name) == getattr(tiny_pair, name), name
    assert found.tokenizer.decode([70, 71]) == tiny_pair.tokenizer.decode([70, 71])


def test_a_draft_of_another_family_is_refused_by_name(pair_config: PairConfig, tmp_path: Path) -> None:
    draft = random_eagle3(tiny_target().config, torch.arange(5, 105), block_size=6)
    save_eagle3(draft, tmp_path, dtype=torch.float32)
    with pytest.raises(ValueError, match="eagle3; by vLLM only DFlash drafts are swept and served"):
        VllmPair.of(pair_config.model_copy(update={"draft": str(tmp_path)}))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_stop_strings_cut_the_tokens_of_vllm_as_the_other_engine_does(size: int, tiny_pair: Pair) -> None:
    from blockpilot.engine.detokenize import TextStream

    tokens = tiny_pair.tokenizer("a stop here")["input_ids"]

    def texts_of(stop: str) -> tuple[list[str], str | None]:
        row = VllmRow(Request((1,), 9, stop_strings=(stop,)), TextStream(tiny_pair.tokenizer, (stop,)))
        texts: list[str] = []
        reason = None
        for start in range(0, len(tokens), size):
            cut, reason = row.cut(tokens[start : start + size], "length" if start + size >= len(tokens) else None)
            texts += cut
            if reason:
                break
        return texts, reason

    stopped, reason = texts_of("op h")
    assert ("".join(stopped), reason) == ("a st", "stop")
    assert len(stopped) == len(tiny_pair.tokenizer("a stop h")["input_ids"])
    whole, reason = texts_of("hers")  # what was held back comes at the end
    assert ("".join(whole), reason, len(whole)) == ("a stop here", "length", len(tokens))


def test_sampling_that_vllm_does_not_do_beside_drafts_is_refused_by_name() -> None:
    refuse_unserved(Request((1,), 4, Sampling(0.5, 0.9, 20, 7), stop_token_ids=frozenset({5})))
    for request, name in (
        (Request((1,), 4, Sampling(min_p=0.1)), "min_p 0.1"),
        (Request((1,), 4, Sampling(presence_penalty=0.5)), "presence_penalty 0.5"),
        (Request((1,), 4, Sampling(frequency_penalty=0.5)), "frequency_penalty 0.5"),
        (Request((1,), 4, Sampling(repetition_penalty=1.1)), "repetition_penalty 1.1"),
        (Request((1,), 4, Sampling(logit_bias=((5, 1.0),))), "logit_bias"),
        (Request((1,), 4, min_new_tokens=2), "min_tokens 2"),
        (Request((1,), 4, num_prompt_logprobs=0), "prompt_logprobs 0"),
    ):
        with pytest.raises(ValueError, match=f"{name}.*: not with engine vllm"):
            refuse_unserved(request)
