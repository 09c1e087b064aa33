"""Evaluations of a target without a draft: plain decoding, and the untrained choice by lookup alone."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from blockpilot.pairs.loading import Pair
from blockpilot.policy.store import save_policy
from helpers.policies import tiny_policy
from jobs.common.config import PairConfig
from jobs.common.registry import UNTRAINED, Registry
from jobs.evaluation.actor import Evaluator
from jobs.evaluation.inputs import AR, CONTROL, MEANS, EvaluateConfig, plan_for, read_inputs
from jobs.evaluation.result import save

NO_REGISTRY = cast(Registry, None)


@pytest.fixture
def config(tiny_pair_dirs: tuple[Path, Path], tmp_path: Path) -> EvaluateConfig:
    prompts = tmp_path / "questions.txt"
    prompts.write_text("".join(f"again and again and again {i}\n" for i in range(4)))
    pair = PairConfig(target=str(tiny_pair_dirs[0]), dtype="float32")
    return EvaluateConfig(pair=pair, prompts=(str(prompts),), max_new_tokens=12, output=tmp_path / "out")


def test_plain_decoding_and_lookup_are_measured(config: EvaluateConfig) -> None:
    """Plain decoding and lookup only: no policy of the registry, and no baseline that needs a draft."""
    prompts, swept = read_inputs(config)
    plan = plan_for(config, prompts, swept, NO_REGISTRY)
    assert plan.policies == {}
    evaluator = Evaluator(config, plan)
    setting = evaluator.load()
    assert evaluator.methods == [AR, CONTROL, UNTRAINED]
    assert setting.left_out[MEANS] == "the pair has no draft"
    assert (setting.price.launch_s, setting.price.slot_s) == (0, 0)
    runs = [run for group in range(len(plan.groups)) for run in evaluator.measure(0, group)]
    assert len(runs) == 3 * len(prompts)
    assert all(run.totals.num_equal for run in runs)
    save(config, plan, setting, runs)
    result: dict[str, Any] = json.loads((config.output / "evaluation.json").read_text())
    assert result["best_fixed"]["block_size"] == 1
    assert "target without a draft, float32" in result["table"]


def test_a_policy_of_a_draft_is_refused(config: EvaluateConfig, tmp_path: Path, tiny_pair: Pair) -> None:
    save_policy(tiny_policy(tiny_pair.id, 260, (2, 3)), tmp_path / "policy")
    policy_config = config.model_copy(update={"policy": str(tmp_path / "policy")})
    with pytest.raises(ValueError, match=r"has no draft, policy .*policy needs one: --draft names one"):
        plan_for(policy_config, *read_inputs(policy_config), NO_REGISTRY)
