"""Result of an evaluation: the best fixed block size, the table, and the figures logged to MLflow."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import scipy.stats

from blockpilot.evaluation.statistics import Comparison, MethodRun, Totals
from blockpilot.pairs.loading import Pair
from blockpilot.policy.dataset import prompt_key
from blockpilot.prompts.files import Message, Prompt
from blockpilot.types import PairId
from helpers.evaluations import changed, plan_of, price_here, write_policy
from helpers.policies import register
from jobs import evaluate
from jobs.common.learned_from import LearnedFrom
from jobs.common.registry import CHAMPION, UNTRAINED, Registry, Version
from jobs.evaluation.actor import Setting
from jobs.evaluation.inputs import AR, CONTROL, MEANS, ORACLE, POLICY, RANDOM, EvaluateConfig, Swept, find_policies
from jobs.evaluation.result import best_fixed_of, known_taus, log, save


def run_of(method: str, prompt: int, tokens_per_s: float, step_s: float = 1.0) -> MethodRun:
    """Run of an answer of 100 tokens at this speed and step time."""
    later = {"num_later_tokens": 8, "num_later_steps": 10, "later_s": 10 * step_s}
    counts = {"num_verified": 10, "num_emitted": 20, "sum_block_sizes": 20, "num_equal": 1}
    total_s = 100 / tokens_per_s
    return MethodRun(method, prompt, 0, Totals(num_requests=1, num_tokens=100, total_s=total_s, **later, **counts))  # type: ignore[arg-type]


def setting_of(pair: PairId, *methods: str) -> Setting:
    sizes = {m: 1 if m == AR else int(m[2:]) if m.startswith("B=") else None for m in methods}
    return Setting(pair, "float32", "cpu", sizes, price_here(pair), 30, {}, {}, {})


# The best fixed block size


def test_best_fixed_is_chosen_before_the_held_out_prompts_are_seen(tiny_pair: Pair) -> None:
    setting = setting_of(tiny_pair.id, AR, "B=2", "B=4", POLICY)
    step_s = {AR: 1.0, "B=2": 1.2, "B=4": 1.5, POLICY: 0.1}
    tokens_per_s = {AR: 10.0, "B=2": 30.0, "B=4": 20.0, POLICY: 40.0}
    runs = [run_of(method, prompt, tokens_per_s[method], step_s[method]) for prompt in range(2) for method in step_s]

    def best(taus: dict[int, float]) -> tuple[int, str]:
        return best_fixed_of(Comparison(runs), setting, taus, "others")

    assert best({2: 1.5, 4: 2.0}) == (4, "others")  # 1.25 and 1.33 against 1
    assert best({2: 1.5, 4: 1.7})[0] == 2
    assert best({2: 1.1, 4: 1.2, 8: 9.0})[0] == 1  # 8 was not measured
    assert best({}) == (2, "these prompts")


def test_taus_known_beforehand_are_the_sweep_s_or_those_that_the_policy_keeps(
    config: EvaluateConfig, questions: list[Prompt], policy_dir: Path, tiny_pair: Pair
) -> None:
    LearnedFrom(frozenset({"key"}), {0.0: {2: 1.5, 4: 2.0}, 1.0: {2: 1.1}}).write(policy_dir)
    plan = plan_of(config, questions, {POLICY: policy_dir})
    assert known_taus(plan, config) == ({2: 1.5, 4: 2.0}, "the policy's training prompts")
    other_configs = [
        changed(config, **options) for options in ({"temperature": 1.0}, {"temperature": 0.5}, {"mixed": True})
    ]
    assert [known_taus(plan, other_config)[0] for other_config in other_configs] == [{2: 1.1}, {}, {}]
    swept = plan._replace(sweep=Swept(tiny_pair.id, (2, 4), {2: 1.9}))
    assert known_taus(swept, config) == ({2: 1.9}, "the sweep's prompts")
    assert known_taus(plan_of(config, questions), config)[0] == {}


# The table


class Saved(NamedTuple):
    table: str
    result: dict[str, Any]


def saved(
    config: EvaluateConfig,
    pair: Pair,
    speeds: Mapping[str, Sequence[float]],
    sets: Sequence[str],
    champion: int | None = None,
) -> Saved:
    """Saved result of methods with these speeds by prompt; each entry of `sets` is a prompt's set."""
    texts = [Prompt(name, (Message("user", f"{name} {i}"),)) for i, name in enumerate(sets)]
    runs = [run_of(method, i, by_prompt[i]) for i in range(len(sets)) for method, by_prompt in speeds.items()]
    save(config, plan_of(config, texts, champion=champion), setting_of(pair.id, *speeds), runs)
    result = json.loads((config.output / "evaluation.json").read_text())
    return Saved((config.output / "table.md").read_text(), result)


def ratios(held_out: dict[str, float], name: str) -> list[float]:
    return [held_out[f"{name}_ratio{end}"] for end in ("", "_low", "_high")]


def test_the_table_compares_the_policy(config: EvaluateConfig, tiny_pair: Pair) -> None:
    speeds = {AR: 10, "B=2": 20, RANDOM: 15, POLICY: 24, CHAMPION: 22, ORACLE: 30}
    table, result = saved(config, tiny_pair, {m: [s] * 3 for m, s in speeds.items()}, "aaa", champion=4)
    caption, conclusions = table.splitlines()[0], table.splitlines()[-5:]
    assert caption == (
        f"{tiny_pair.id.target} with {tiny_pair.id.draft}, float32 on cpu: 3 prompts, one at a time, once; "
        "12 tokens at most, temperature 0. In brackets: 95% intervals over prompts."
    )
    figures = [
        ["Best fixed block size: 2, chosen on these prompts."],
        ["Policy", "best fixed", "1.200", "(1.200 to 1.200)", "1.000 of its tau"],
        ["Policy", "champion version 4", "1.091", "(1.091 to 1.091)"],
        ["Oracle", "1.500 (1.500 to 1.500)", "captures 40%", "regret is 20.0%"],
        ["Best static", "B=2", "1.200 (1.200 to 1.200)"],
    ]
    for line, words in zip(conclusions, figures, strict=True):
        assert [word for word in words if word not in line] == [], line
    assert "by prompt set" not in table
    assert result["table"] + "\n" == table
    assert result["by_set"].keys() == {"a"}
    assert (result["held_out"]["champion"], result["held_out"]["champion_ratio"]) == (4, pytest.approx(24 / 22))


def test_only_what_was_measured_is_compared_with(config: EvaluateConfig, tiny_pair: Pair) -> None:
    """Ratio to the untrained choice by prompt, so that prompts slow with both do not widen the interval."""
    speeds = {AR: [10] * 3, "B=2": [20] * 3, UNTRAINED: [20.0, 10.0, 40.0], POLICY: [21.0, 10.5, 42.0]}
    table, result = saved(config, tiny_pair, speeds, "aaa", champion=4)
    assert "Policy over the untrained choice: 1.050 of its tokens/s (1.050 to 1.050)." in table
    assert ratios(result["held_out"], "untrained") == pytest.approx([1.05] * 3)
    assert "champion" not in table  # it was left out
    assert result["held_out"]["champion"] == 0
    del speeds[UNTRAINED]
    table, result = saved(config, tiny_pair, speeds, "aaa")
    assert "untrained" not in table
    assert ratios(result["held_out"], "untrained") == [0, 0, 0]


@pytest.mark.parametrize("of_oracle", [[20, 20, 20], [18, 20, 40]])
def test_without_certain_headroom_there_is_nothing_to_capture(
    config: EvaluateConfig, tiny_pair: Pair, of_oracle: list[float]
) -> None:
    speeds = {AR: [10] * 3, "B=2": [20] * 3, POLICY: [19] * 3, ORACLE: of_oracle}
    table = saved(config, tiny_pair, speeds, "aaa").table
    assert "there is nothing to capture" in table
    assert "captures" not in table


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_speeds_by_prompt_set(config: EvaluateConfig, tiny_pair: Pair) -> None:
    """A set of one prompt has no interval and no line; fixed block sizes have no column."""
    speeds = {AR: [10] * 6, "B=2": [20] * 6, MEANS: [30, 30, 20, 20, 20, 10], POLICY: [22] * 2 + [18] * 4}
    table, result = saved(config, tiny_pair, speeds, "aabbbc")
    lines = table.splitlines()
    start = lines.index("Speed over that of B=2, by prompt set:") + 2
    rows = [cells(line) for line in lines[start : start + 6]]
    assert rows[0] == ["prompts", MEANS, POLICY]
    assert rows[2] == ["a", "1.500 (1.500 to 1.500)", "1.100 (1.100 to 1.100)"]
    assert rows[3] == ["b", "1.000 (1.000 to 1.000)", "0.900 (0.900 to 0.900)"]
    overall = (6 / 20) / (2 / 22 + 4 / 18)  # tokens over seconds of all prompts
    assert rows[4][0] == "all"
    assert rows[4][2].startswith(f"{overall:.3f} (0.8")
    assert rows[5] == [""]
    assert list(result["by_set"]) == ["a", "b", "all"]
    assert result["by_set"]["a"]["B=2"]["value"] == 1


def test_a_set_named_all_is_not_taken_for_the_total(config: EvaluateConfig, tiny_pair: Pair) -> None:
    speeds = {AR: [10] * 4, "B=2": [20] * 4, CONTROL: [10, 10, 9, 9], POLICY: [22, 22, 20, 20]}
    by_set = saved(config, tiny_pair, speeds, ["all", "all", "b", "b"]).result["by_set"]
    assert list(by_set) == ["b", "all"]
    assert by_set["all"][POLICY]["value"] == pytest.approx((4 / 20) / (2 / 22 + 2 / 20))


def test_pictures_of_an_earlier_evaluation_are_removed(config: EvaluateConfig, tiny_pair: Pair) -> None:
    saved(config, tiny_pair, {AR: [10] * 2, "B=2": [20] * 2, POLICY: [22] * 2}, "aa")
    assert (config.output / "over_best_fixed.png").exists()
    saved(config, tiny_pair, {AR: [10] * 2, "B=2": [20] * 2}, "aa")
    assert sorted(file.name for file in config.output.glob("*.png")) == ["speed_ups.png", "step_cost.png"]


def test_the_control_tells_the_timing_noise(config: EvaluateConfig, tiny_pair: Pair) -> None:
    """Control compared with AR, which does the same work; their difference widens the intervals of other methods."""
    speeds = {AR: [10] * 4, "B=2": [20] * 4, CONTROL: [10.2, 10.2, 9.9, 9.9], POLICY: [20] * 4}
    lines = saved(config, tiny_pair, speeds, "aabb").table.splitlines()
    overall = (4 / 10) / (2 / 10.2 + 2 / 9.9)
    (noise,) = [line for line in lines if f"{overall:.3f} (0.978 to" in line and CONTROL in line]
    assert "0.990 to 1.020" in noise
    start = next(i for i, line in enumerate(lines) if "by prompt set:" in line) + 2
    assert cells(lines[start])[1] == CONTROL
    factor = 1.02 ** float(scipy.stats.t.ppf(0.975, 1))  # prompts do not differ; the two engines do, by 2%
    assert cells(lines[start + 2])[1:3] == ["1.020 (1.020 to 1.020)", f"1.000 ({1 / factor:.3f} to {factor:.3f})"]
    assert CONTROL not in saved(config, tiny_pair, {AR: [10] * 2, "B=2": [20] * 2}, "aa").table
    assert "0.900 (0.900 to 0.900)" in saved(config, tiny_pair, {AR: [10] * 2, CONTROL: [9] * 2}, "aa").table


# Logging to MLflow


class Measured(NamedTuple):
    """A finished evaluation of version 2, with version 1 as champion."""

    config: EvaluateConfig
    version: Version
    registry: Registry


@pytest.fixture
def measured(config: EvaluateConfig, questions: list[Prompt], registry: Registry, tiny_pair: Pair) -> Measured:
    folder = config.output.parent
    directories = [write_policy(folder / str(size), tiny_pair, size) for size in (2, 3)]
    LearnedFrom(frozenset({prompt_key("something else")})).write(directories[1])
    champion, version = (register(registry, directory, tiny_pair.id) for directory in directories)
    registry.set_champion(champion)
    config = changed(config, policy="newest")
    policies, *numbers = find_policies(config, registry)
    plan = plan_of(config, questions[:3], policies, None, *numbers)
    speeds = {
        AR: (10, 10, 10),
        "B=2": (20, 20, 20),
        UNTRAINED: (20, 21, 19),
        POLICY: (24, 23, 25),
        CHAMPION: (21, 20, 22),
    }
    runs = [run_of(method, i, speed) for method, by_prompt in speeds.items() for i, speed in enumerate(by_prompt)]
    save(config, plan, setting_of(tiny_pair.id, *speeds), runs)
    return Measured(config, version, registry)


def test_a_version_is_tagged_with_its_speed_beside_the_champion(
    measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    """Version tagged with held-out figures only if the prompts are known to be outside its training data."""
    config, version, registry = measured
    file = config.output / "evaluation.json"
    stored = json.loads(file.read_text())
    assert stored["setting"]["shown_held_out"]  # by the training prompts recorded with the policy
    file.write_text(json.dumps(stored | {"setting": stored["setting"] | {"shown_held_out": False}}))
    result = log(config.output, registry)
    assert result.held_out is not None
    assert result.best_fixed == 2
    assert registry.version(version.name, version.number).held_out is None
    assert f"not recorded with version {version.number}: --sweep must show" in capsys.readouterr().out

    file.write_text(json.dumps(stored))
    result = log(config.output, registry)
    figures = registry.version(version.name, version.number).held_out
    assert figures is not None
    assert figures == result.held_out
    assert registry.version(version.name, version.number).tags["heldout.run_id"] == result.run_id
    speeds = {row.method: row.tokens_per_s.value for row in result.figures}
    assert (figures.champion, figures.policy_speed) == (1, pytest.approx(speeds[POLICY]))
    assert figures.champion_ratio == pytest.approx(speeds[POLICY] / speeds[CHAMPION])
    assert figures.champion_ratio_low <= figures.champion_ratio <= figures.champion_ratio_high
    assert figures.untrained_ratio_low < figures.untrained_ratio < figures.untrained_ratio_high


def test_rivals_of_any_name_are_logged(config: EvaluateConfig, tiny_pair: Pair, registry: Registry) -> None:
    names = {"/tmp/new": "tmp/new", "../new": "new", "v2+kl@3,b": "v2_kl_3_b", "a//b": "a/b", "run 1": "run 1"}
    saved(config, tiny_pair, {AR: [10] * 2, "B=2": [20] * 2} | {name: [15] * 2 for name in names}, "aa")
    metrics = registry._client.get_run(log(config.output, registry).run_id).data.metrics
    speeds = {metric.removesuffix(".tokens_per_s") for metric in metrics if metric.endswith(".tokens_per_s")}
    assert speeds == {"AR", "B2", "best static", *names.values()}


def test_neither_a_lost_store_nor_lost_artifacts_cost_a_result(measured: Measured) -> None:
    config, version, registry = measured
    store = config.output.with_name("mlflow.db")
    store_bytes = store.read_bytes()
    saved_files = {path: path.read_bytes() for path in config.output.glob("*.*")}
    artifacts = store.with_name("mlartifacts")
    message = f"The results are in {config.output}; --relog logs"
    store.write_bytes(b"no database any more " * 1000)
    with pytest.raises(ValueError, match=f"MLflow store .*{message}") as caught:
        log(config.output, registry)
    assert "\n" not in str(caught.value)
    store.write_bytes(store_bytes)
    shutil.rmtree(artifacts)
    artifacts.write_text("no directory")
    with pytest.raises(ValueError, match=message):
        log(config.output, registry)
    assert {path: path.read_bytes() for path in config.output.glob("*.*")} == saved_files
    artifacts.unlink()

    result = evaluate.run(changed(config, relog=True))
    reopened = Registry.open()
    assert reopened.version(version.name, version.number).held_out == result.held_out
    logged = reopened._client.get_run(result.run_id)
    assert logged.info.status == "FINISHED"
    speed = next(row for row in result.figures if row.method == POLICY).tokens_per_s.value
    assert logged.data.metrics["policy.tokens_per_s"] == pytest.approx(speed)
