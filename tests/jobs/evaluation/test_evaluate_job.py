"""Evaluate job: finished groups are kept, and the whole job by command."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from blockpilot.evaluation.statistics import MethodRun
from blockpilot.pairs.loading import Pair
from blockpilot.policy.store import save_policy
from blockpilot.prompts.files import Prompt, answer_limit, load_prompts
from blockpilot.sweep.rows import Metadata, SweepRow, write_rows
from helpers.evaluations import (
    FIXED,
    NUM_TOKENS,
    QUESTIONS,
    Watched,
    changed,
    plan_of,
    price_here,
    prompt_file,
    retrained,
    write_policy,
)
from helpers.leases import take_over
from helpers.policies import register, step_policy, tiny_policy
from helpers.processes import Job
from jobs import evaluate
from jobs.common.lease import Lease
from jobs.common.registry import CHAMPION, UNTRAINED, Registry, model_name
from jobs.evaluation.actor import Setting
from jobs.evaluation.inputs import AR, CONTROL, MEANS, ORACLE, POLICY, RANDOM, STATIC, EvaluateConfig
from jobs.evaluation.result import PICTURES

ROOT = Path(__file__).parents[3]
Call = Callable[..., list[MethodRun]]


# Finished groups


class KilledError(Exception):
    pass


def runs_file(evaluator: Watched) -> Path:
    return evaluate._runs_file(evaluator._config, evaluator._plan, evaluator.setting)


def measure_all(evaluator: Watched, call: Call) -> Iterator[MethodRun]:
    config, plan = evaluator._config, evaluator._plan
    with Lease(config.output) as lease:
        yield from evaluate._measure_all(call, config, plan, runs_file(evaluator), lease)


def test_what_was_measured_is_kept_and_a_torn_line_is_not(
    start: Callable[..., Watched], questions: list[Prompt], tiny_pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    price = price_here(tiny_pair.id)
    evaluator = start(price=price, baselines=(), repeats=2, concurrency=2, waves=1)
    path, decoded = runs_file(evaluator), list[tuple[int, ...]]()

    def call(method: str, *position: int) -> list[MethodRun]:
        if len(decoded) == 5:
            raise KilledError
        decoded.append(position)
        return evaluator.call(method, *position)

    before: list[MethodRun] = []
    with pytest.raises(KilledError):
        before.extend(measure_all(evaluator, call))
    lines = path.read_text().splitlines()
    assert len(lines) == 5
    with path.open("a") as file:
        file.write(lines[-1].replace('"place": [1, 0]', '"place": [1, 1]')[:-30])

    decoded.clear()
    capsys.readouterr()
    runs = list(measure_all(evaluator, call))
    assert "evaluate: going on after 5 of 8 groups" in capsys.readouterr().out
    assert decoded == [(1, 1), (1, 2), (1, 3)]
    assert path.read_text().splitlines()[:5] == lines
    expected = [(repeat, g + i, m) for repeat in range(2) for g in (0, 2, 4, 6) for m in FIXED for i in range(2)]
    assert [(run.repeat, run.prompt, run.method) for run in runs] == expected
    assert runs[: 5 * 4 * 2] == before  # to the last digit of their seconds
    # After a kill before the result is written, nothing is measured again.
    assert list(measure_all(evaluator, pytest.fail)) == runs


def test_a_driver_that_lost_its_lease_keeps_no_group(start: Callable[..., Watched], tiny_pair: Pair) -> None:
    evaluator = start(price=price_here(tiny_pair.id), baselines=(), concurrency=2, waves=1)

    def call(method: str, *position: int) -> list[MethodRun]:
        if position == (0, 1):
            take_over(evaluator._config.output)
        return evaluator.call(method, *position)

    with pytest.raises(ValueError, match="process id 7 on elsewhere has taken over; this driver stops"):
        list(measure_all(evaluator, call))
    assert len(runs_file(evaluator).read_text().splitlines()) == 1


def test_other_settings_prompts_policies_or_weights_start_anew(
    config: EvaluateConfig,
    questions: list[Prompt],
    policy_dir: Path,
    tiny_pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Separate file of finished groups for each combination of settings, prompts, policies, weights and code."""
    base_setting = Setting(tiny_pair.id, "float32", "cpu", {}, price_here(tiny_pair.id), 30, {}, {}, {})

    def file(
        texts: Sequence[Prompt] = questions,
        rivals: Sequence[Path] = (),
        setting: Setting = base_setting,
        **changes: object,
    ) -> str:
        test_config = changed(config, **changes)
        policies = {POLICY: policy_dir, **{f"rival {i}": rival for i, rival in enumerate(rivals)}}
        return evaluate._runs_file(test_config, plan_of(test_config, texts, policies), setting).name

    first = file()
    assert file(output=tmp_path / "elsewhere", accelerator_type="H100") == first
    names = {
        first,
        *(file(**{name: value}) for name, value in (("seed", 3), ("temperature", 1.0), ("max_new_tokens", 5))),
        *(file(**{name: value}) for name, value in (("concurrency", 2), ("waves", 2), ("baselines", ("random",)))),
        file(questions[:7]),
        file(questions[::-1]),
        file(rivals=[policy_dir]),
        file(setting=base_setting._replace(pair=retrained(tiny_pair).id)),
        file(setting=base_setting._replace(dtype="bfloat16")),
        file(setting=base_setting._replace(device="cuda")),
    }
    write_policy(policy_dir, tiny_pair, 4)
    names.add(file())
    save_policy(tiny_policy(tiny_pair.id, tiny_pair.vocab_size, (2, 4)), policy_dir)
    names.add(file())
    for seed in (0, 1):
        save_policy(step_policy(tiny_pair.id, tiny_pair.vocab_size, seed=seed), policy_dir)
        names.add(file())
    assert len(names) == 17
    monkeypatch.setattr("jobs.evaluate.git_commit", lambda: "another commit")
    names.add(file())
    monkeypatch.setattr("jobs.evaluate.versions", lambda: {"torch": "1.0"})
    names.add(file())
    assert len(names) == 19


# The job as a user runs it


@pytest.mark.ray
def test_the_job_goes_on_after_a_kill_measures_records_and_tags(
    config: EvaluateConfig,
    tiny_pair: Pair,
    policy_dir: Path,
    swept_rows: list[SweepRow],
    metadata: Metadata,
    registry: Registry,
    tmp_path: Path,
) -> None:
    write_rows(tmp_path / "sweep" / "part.parquet", swept_rows, metadata)
    registry.set_champion(register(registry, write_policy(tmp_path / "first", tiny_pair, 2), tiny_pair.id))
    version = register(registry, policy_dir, tiny_pair.id)
    old_policy = write_policy(tmp_path / "old", retrained(tiny_pair))
    odd_prompts = prompt_file(tmp_path / "odd.jsonl", ["", "long " * 300])
    arguments = f"""--prompts {config.prompts[0]} {odd_prompts} --policy newest --rivals champion {old_policy}
        --target {config.pair.target} --draft {config.pair.draft} --dtype float32 --sweep {tmp_path / "sweep"}
        --output {config.output} --concurrency 2 --waves 1 --max-new-tokens {NUM_TOKENS} --block-sizes 2 4
        --tree-sizes 3 --temperature 1 --repeats 2"""
    environment = os.environ | {"MLFLOW_TRACKING_URI": registry.uri, "OMP_NUM_THREADS": "1"}

    def start_job() -> Job:
        command = ["jobs/evaluate.py", *arguments.split()]
        return Job(command, cwd=ROOT, env=environment, output=tmp_path / "said")

    def lines() -> list[str]:
        """Complete lines of the file of finished groups."""
        return "".join(path.read_text() for path in config.output.glob("runs-*.jsonl")).split("\n")[:-1]

    job = start_job()
    job.wait_for(lambda: len(lines()) >= 2)
    job.kill()
    assert f"evaluate: old is left out: policy made for target {tiny_pair.id.target}" in job.log
    before = lines()
    assert 2 <= len(before) < 8
    (file,) = config.output.glob("runs-*.jsonl")
    with file.open("a") as torn:
        torn.write(before[0][:50])

    job = start_job()
    assert job.wait(300) == 0, job.log
    output = job.log
    assert f"evaluate: going on after {len(before)} of 8 groups" in output
    assert "evaluate: 8/8 groups, 0 s left" in output
    assert f"{odd_prompts}: 1 of 2 rows set aside: line 1: empty prompt" in output
    assert "evaluate: 1 of 9 prompts set aside: 'long long" in output
    assert not file.exists()

    table = (config.output / "table.md").read_text()
    assert table in output
    limits = [answer_limit(prompt, NUM_TOKENS) for prompt in load_prompts(config.prompts[0])]
    limit = f"{min(limits)} to {max(limits)} tokens at most"
    assert f", 1 threads: 8 held-out prompts, 2 at a time, 2 times; {limit}, temperature 1" in table
    methods = [AR, "B=2", "B=4", "tree 3", CONTROL, RANDOM, MEANS, UNTRAINED, POLICY, CHAMPION, ORACLE]
    names = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    assert names[2:] == [*methods, STATIC]

    result = json.loads((config.output / "evaluation.json").read_text())
    assert [row["method"] for row in result["figures"]] == [*methods, STATIC]
    assert {row["share_equal"] for row in result["figures"]} == {1.0}
    groups = [(repeat, number) for repeat in range(2) for number in range(4)]
    expected = [(repeat, 2 * number + i, m) for repeat, number in groups for m in methods for i in range(2)]
    measured = json.loads((config.output / "runs.json").read_text())
    runs = measured["runs"]
    assert [(run["repeat"], run["prompt"], run["method"]) for run in runs] == expected
    assert runs[: 2 * len(methods) * len(before)] == [run for line in before for run in json.loads(line)["runs"]]
    assert sorted(prompt["text"] for prompt in measured["prompts"]) == QUESTIONS
    assert result["best_fixed"]["chosen_on"] == "the sweep's prompts"
    assert result["policy_version"]["number"] == version.number
    plain, policy = result["figures"][0], result["figures"][methods.index(POLICY)]
    assert (plain["tau"]["value"], plain["mean_block_size"]) == (1.0, 1.0)
    totals = [run["totals"] for run in runs if run["method"] == POLICY]
    speed = pytest.approx(sum(t["num_tokens"] for t in totals) / sum(t["total_s"] for t in totals))
    assert policy["tokens_per_s"]["value"] == speed

    tagged = registry.version(model_name(tiny_pair.id.target), version.number)
    assert tagged.held_out is not None
    assert tagged.held_out.policy_speed == speed
    assert tagged.held_out.speed_ratio_low <= tagged.held_out.speed_ratio_high
    assert tagged.held_out.champion == 1
    logged = registry._client.get_run(tagged.tags["heldout.run_id"])
    assert logged.data.metrics["policy.tokens_per_s"] == speed
    assert logged.data.metrics["B2.tau"] == pytest.approx(result["figures"][1]["tau"]["value"])
    assert logged.data.params["concurrency"] == "2"
    assert all((config.output / name).read_bytes().startswith(b"\x89PNG") for name in PICTURES)
    artifacts = {item.path for item in registry._client.list_artifacts(tagged.tags["heldout.run_id"])}
    assert artifacts == {"evaluation.json", "runs.json", "table.json", "table.md", *PICTURES}
