"""The plug-in inside vLLM, on the embedded pair in float32; where vLLM is installed (docs/vllm.md)."""

import dataclasses
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blockpilot.pairs.checkpoints import find_draft, find_target
from blockpilot.pairs.loading import Pair
from blockpilot.pairs.table import EMBEDDED_DRAFT, EMBEDDED_TARGET
from blockpilot.policy.learned import LearnedPolicy
from blockpilot.policy.store import save_policy
from blockpilot.types import Prefill
from helpers.patience import Patience, patient
from helpers.policies import tiny_policy
from helpers.vllm_engine import EngineProcess, vllm_process
from jobs.common.registry import Registry
from jobs.vllm_plugin.hooks import SCHEDULER_HOOKS, SERVING_HOOKS, WORKER_HOOKS, Hook, missing

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import
]
QUESTIONS = (
    "Write a poem about the sea.",
    "What is 12 times 7?",
    "List five colours.",
    "Who was Isaac Newton?",
    "Write a function in Python that reverses a list.",
    "Say hello in French.",
)
NUM_DRAFTED, NUM_TOKENS = 7, 24


@pytest.fixture(scope="module")
def prompts(embedded_pair: Pair) -> list[list[int]]:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    template = embedded_pair.tokenizer.apply_chat_template
    return [list(template(chat, add_generation_prompt=True, return_dict=False)) for chat in chats]


@pytest.fixture(scope="module")
def policy(embedded_pair: Pair) -> LearnedPolicy:
    """Random weights, large enough that prompts differ in what they are given."""
    policy = tiny_policy(embedded_pair.id, embedded_pair.vocab_size, (1, 2, 4, 8))
    policy.network.rows.mul_(30)
    return policy


@pytest.fixture(scope="module")
def models() -> dict[str, str]:
    target, draft = find_target(EMBEDDED_TARGET), find_draft(EMBEDDED_DRAFT)
    return {"target": str(target.directory), "draft": str(draft.directory)}


@pytest.fixture(scope="module")
def adaptive(
    models: dict[str, str], registry: Registry, policy: LearnedPolicy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """An engine with the plug-in, which follows the registry's champion."""
    folder = tmp_path_factory.mktemp("adaptive")
    crown(registry, policy, folder / "first")
    settings = {"target": EMBEDDED_TARGET, "draft": EMBEDDED_DRAFT, "store": registry.uri, "registry_every_s": 0.2}
    with vllm_process(folder, **models, num_drafted=NUM_DRAFTED, settings=settings) as engine:
        yield engine


def crown(registry: Registry, policy: LearnedPolicy, directory: Path) -> None:
    save_policy(policy, directory)
    with registry.log_run("train") as record:
        version = registry.register_policy(directory, target=EMBEDDED_TARGET, run_id=record.id, tags={})
    registry.set_champion(version)


def request(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"prompt_ids": prompt, "max_new_tokens": NUM_TOKENS, "stops": False, **more}


@pytest.mark.parametrize(
    "hook", SCHEDULER_HOOKS + WORKER_HOOKS + SERVING_HOOKS, ids=lambda hook: f"{hook.name}-{hook.parts[0]}"
)
def test_this_vllm_has_every_hook(hook: Hook) -> None:
    assert missing([hook]) == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speculative_config": None}, "speculative_config is missing"),
        ({"scheduler_config": SimpleNamespace(async_scheduling=True)}, "--no-async-scheduling"),
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, "pipeline_parallel_size 2"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=1, worker_cls="auto")}, "worker_cls auto"),
    ],
)
def test_options_that_the_plugin_cannot_work_with_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    from jobs.vllm_plugin.scheduler import WORKER_CLASS, check_config

    config: dict[str, Any] = {
        "speculative_config": SimpleNamespace(num_speculative_tokens_per_batch_size=None),
        "scheduler_config": SimpleNamespace(async_scheduling=False),
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1, worker_cls=WORKER_CLASS),
        "use_v2_model_runner": False,
    }
    check_config(SimpleNamespace(**config))
    with pytest.raises(ValueError, match=named):
        check_config(SimpleNamespace(**config | changes))


def test_each_request_of_a_batch_has_the_block_size_that_the_policy_chooses_from_its_prefill(
    adaptive: EngineProcess, prompts: list[list[int]], policy: LearnedPolicy, embedded_pair: Pair
) -> None:
    answers = adaptive.decode([request(prompt) for prompt in prompts])
    found = [max(answer["verified"], default=0) + 1 for answer in answers]
    logits = [embedded_pair.target(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    chosen = [policy(Prefill(each, None, len(prompt))) for each, prompt in zip(logits, prompts, strict=True)]
    assert found == chosen
    assert len(set(found)) > 1


def test_texts_are_vllms_own_plain_ones_wherever_its_own_drafts_give_them(
    adaptive: EngineProcess, models: dict[str, str], prompts: list[list[int]], tmp_path: Path
) -> None:
    plain = {"target": models["target"], "draft": None, "num_drafted": 0}
    drafts = {"method": "dflash", "model": models["draft"], "num_speculative_tokens": NUM_DRAFTED}
    alone = [request(prompt) for prompt in prompts]
    with vllm_process(tmp_path, **plain) as engine:
        wanted = [answer["tokens"] for answer in engine.decode(alone)]
    with vllm_process(tmp_path, **plain, speculative_config=drafts) as engine:
        stock = [answer["tokens"] for answer in engine.decode(alone)]
    agreed = [i for i, (a, b) in enumerate(zip(wanted, stock, strict=True)) if a == b]
    assert len(agreed) >= len(prompts) - 1
    for sizes in ([None] * 6, [1, 2, 3, 4, 6, 8], [8, 1, 8, 1, 8, 1]):
        batch = [request(prompt, block_size=size) for prompt, size in zip(prompts, sizes, strict=True)]
        ours = [answer["tokens"] for answer in adaptive.decode(batch)]
        assert [ours[i] for i in agreed] == [wanted[i] for i in agreed]


def test_a_request_that_asks_for_a_block_size_gets_it(adaptive: EngineProcess, prompts: list[list[int]]) -> None:
    sizes = [1, 2, 5, 8, 32]
    batch = [request(prompt, block_size=size) for prompt, size in zip(prompts, sizes, strict=False)]
    verified = [set(answer["verified"]) for answer in adaptive.decode(batch)]
    assert verified == [set(), {1}, {4}, {7}, {7}]


def test_wrong_block_sizes_are_refused_and_neighbours_go_on(
    adaptive: EngineProcess, prompts: list[list[int]]
) -> None:
    good = [request(prompt, block_size=4) for prompt in prompts[:2]]
    wanted = adaptive.decode(good)
    bad: list[Any] = [0, 33, "4", 2.5, True]
    *refused, first, second = adaptive.decode([request(prompts[0], block_size=size) for size in bad] + good)
    for size, error in zip(bad, refused, strict=True):
        assert error == f"blockpilot_block_size {size!r}: must be an integer from 1 (no drafts) to 32"
    assert [first, second] == wanted


def test_a_new_champion_is_used_while_vllm_runs(
    adaptive: EngineProcess, prompts: list[list[int]], registry: Registry, policy: LearnedPolicy, tmp_path: Path
) -> None:
    other = tiny_policy(policy.info.pair, policy.info.shape.vocab_size, (6,))
    crown(registry, other, tmp_path / "second")
    patience = Patience(patient(60))
    found: set[int] = set()
    while found != {5} and patience.left:
        answers = adaptive.decode([request(prompt, max_new_tokens=8) for prompt in prompts])
        found = {num for answer in answers for num in answer["verified"]}
    assert found == {5}


def test_a_champion_for_other_models_is_not_used(
    adaptive: EngineProcess, prompts: list[list[int]], registry: Registry, policy: LearnedPolicy, tmp_path: Path
) -> None:
    before = adaptive.decode([request(prompts[0])])
    info = dataclasses.replace(policy.info, pair=policy.info.pair._replace(draft="someone/else"))
    crown(registry, LearnedPolicy(info, policy.network), tmp_path / "third")
    time.sleep(1)
    assert adaptive.decode([request(prompts[0])]) == before
