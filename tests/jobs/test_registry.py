"""The registry against a real sqlite store, and the rule of promotion."""

import dataclasses
import json
import math
import os
import shutil
import traceback
from pathlib import Path

import pytest
import torch

from blockpilot.policy.learned import Kind, PromptPolicy, StepPolicy
from blockpilot.policy.store import load_policy, save_policy
from blockpilot.types import PairId
from helpers.policies import step_policy, tiny_policy
from helpers.processes import Job
from helpers.servers import free_port
from helpers.stores import NUM_CREATORS
from jobs.common.ray_train import MetricLog
from jobs.common.registry import HeldOut, Registry, Version, model_name, tracking_uri
from jobs.promote import MIN_PROMPTS, PromoteConfig
from jobs.promote import run as promote
from jobs.serving.champions import ChampionWatch
from jobs.training.config import TrainConfig

TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
MODEL = "blockpilot-smollm2-135m-instruct"
PAIR = PairId(TARGET, "1", "draft", "2")
ALONE = HeldOut(3.0, 2.8, 30.0, 28.0, 1.02, 1.12, num_prompts=MIN_PROMPTS)
GOOD = dataclasses.replace(ALONE, untrained_ratio=1.03, untrained_ratio_low=1.01, untrained_ratio_high=1.05)
"""Beats the untrained choice, too."""
ROOT = Path(__file__).parents[2]


@pytest.fixture
def registry(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A store of its own, which jobs find in the working directory."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Registry.open()


def a_policy(seed: int = 0) -> PromptPolicy:
    return tiny_policy(PAIR, 20, (1, 4), training={"seed": seed}, seed=seed)


def register(
    registry: Registry, seed: int = 0, held_out: HeldOut | None = None, pair: PairId = PAIR, kind: Kind = "prompt"
) -> Version:
    save_policy(a_policy(seed) if kind == "prompt" else step_policy(pair, 20, seed=seed), "policy")
    with registry.log_run("train") as run:
        tags = pair._asdict() | ({"kind": "step"} if kind == "step" else {})
        version = registry.register_policy("policy", target=TARGET, run_id=run.id, tags=tags)
    if held_out:
        registry.log_held_out(version, held_out)
    return version


# --- metrics of a training ---


def test_metrics_wait_while_the_store_is_away(
    registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A training goes on meanwhile; its next worker logs what the last one could not, and nothing twice."""
    with registry.log_run("train") as record:
        store, run_id = tmp_path / "mlflow.db", record.id
        log = MetricLog(registry.uri, run_id)
        log.add(10, {"loss": 3.0})
        log.flush()
        kept = store.read_bytes()
        store.write_bytes(b"no database at all" * 1000)
        log.add(20, {"loss": 2.0})
        log.flush()
        log.add(30, {"loss": 1.0})
        log.flush()
        assert "metrics of 2 steps are logged later" in caplog.text
        of_checkpoint = [(10, {"loss": 3.0}), *log.waiting]
        store.write_bytes(kept)
        MetricLog(registry.uri, run_id, of_checkpoint).flush()
    history = registry._client.get_metric_history(run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(10, 3.0), (20, 2.0), (30, 1.0)]


# --- the store ---


def test_a_password_in_the_stores_address_is_told_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    address = f"http://somebody:a-secret@127.0.0.1:{free_port()}"
    with pytest.raises(ValueError, match=r"MLflow store http://\*\*\*@127") as error:
        Registry.open(address)
    assert "a-secret" not in "".join(traceback.format_exception(error.value))
    watch = ChampionWatch(MODEL, address, Path("nowhere"), 1.0, lambda directory, number: None)
    assert "a-secret" not in watch.error
    assert "***@127.0.0.1" in watch.error


def test_logged_settings_hold_no_secrets(registry: Registry) -> None:
    """As they are written beside a result, too."""
    config = TrainConfig(sweep=("s3://KEY:SECRET@bucket/sweep", "https://host/b?X-Amz-Signature=SECRET"))
    assert "SECRET" not in json.dumps(config.recorded())
    with registry.log_run("train") as run:
        run.log_params(config.model_dump(mode="json"))
    logged = registry._client.get_run(run.id).data.params["sweep"]
    assert logged == "['s3://***@bucket/sweep', 'https://host/b?X-Amz-Signature=***']"


def test_model_name() -> None:
    assert model_name(TARGET) == MODEL


def test_uri_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri() == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///other/x.db")
    assert tracking_uri() == f"sqlite:///{tmp_path}/other/x.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    assert tracking_uri() == "http://mlflow:5000"


def test_a_submitted_job_needs_a_lasting_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ValueError, match="MLFLOW_TRACKING_URI"):
        tracking_uri()


@pytest.mark.parametrize(
    ("uri", "word"),
    [
        ("sqlite:////no/such/directory/mlflow.db", "no such directory"),
        ("http://127.0.0.1:9", "Connection refused"),
        ("./mlruns", "filesystem"),
        ("ftp://somewhere", "unsupported URI"),
    ],
)
def test_a_store_that_is_not_there(uri: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ValueError, match=word) as caught:
        Registry.open(uri)
    assert uri in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("not a database " * 100)
    with pytest.raises(ValueError, match=r"mlflow\.db"):
        Registry.open(f"sqlite:///{tmp_path}/mlflow.db")


def test_processes_that_create_the_store_at_once(empty_store: Path) -> None:
    """Both wrote a run into the store they made (without the lock it is destroyed for good)."""
    registry = Registry.open(f"sqlite:///{empty_store}")
    experiment = registry._client.get_experiment_by_name("create")
    assert experiment is not None
    assert len(registry._client.search_runs([experiment.experiment_id])) == NUM_CREATORS


# --- runs ---


def test_continued_run_keeps_the_settings_it_began_with(registry: Registry) -> None:
    with registry.log_run("train") as run:
        run.log_params({"seed": 3, "checkpoint_every": 400})
    with registry.log_run("train", run_id=run.id) as continued:
        continued.log_params({"seed": 3, "checkpoint_every": 600, "num_validation": 20})
    stored = registry._client.get_run(run.id).data.params
    assert stored == {"seed": "3", "checkpoint_every": "400", "num_validation": "20"}


def test_run_round_trip(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.txt").write_text("a")
    with registry.log_run("evaluate") as run:
        run.log_params({"seed": 3})
        run.log_tags({"kind": "test"})
        run.log_metrics({"tau": 2.5}, step=1)
        run.log_table([{"method": "AR", "tau": 1.0}, {"method": "B=8", "tau": 2.0}], "table.json")
        run.log_artifact(tmp_path / "out", "folder")
        assert run.last_step("tau") == 1
        assert run.last_step("other") == -1
    stored = registry._client.get_run(run.id)
    assert stored.info.status == "FINISHED"
    assert (stored.data.params, stored.data.metrics) == ({"seed": "3"}, {"tau": 2.5})
    assert stored.data.tags["kind"] == "test"
    artifacts = tmp_path / "mlartifacts" / run.id / "artifacts"  # beside the store, whatever the directory
    assert (artifacts / "folder" / "a.txt").read_text() == "a"
    table = registry._client.load_table(stored.info.experiment_id, "table.json", [run.id])
    assert table.to_dict("records") == [{"method": "AR", "tau": 1.0}, {"method": "B=8", "tau": 2.0}]


def test_run_resumes_by_id(registry: Registry) -> None:
    with registry.log_run("train") as run:
        run.log_metrics({"loss": 1.0}, step=1)
    with registry.log_run("train", run_id=run.id) as again:
        assert registry._client.get_run(run.id).info.status == "RUNNING"
        again.log_metrics({"loss": 0.5}, step=2)
    assert again.id == run.id
    assert registry.run(run.id).last_step("loss") == 2
    assert registry._client.get_run(run.id).info.status == "FINISHED"


def test_run_that_raises_is_failed(registry: Registry) -> None:
    with pytest.raises(RuntimeError, match="boom"), registry.log_run("train") as run:
        raise RuntimeError("boom")
    assert registry._client.get_run(run.id).info.status == "FAILED"


def test_unknown_run(registry: Registry) -> None:
    with pytest.raises(ValueError, match="run nope"):
        registry.run("nope")


# --- policies ---


def test_policy_round_trip(registry: Registry, tmp_path: Path) -> None:
    first, second = register(registry, 1), register(registry, 2)
    assert (first.name, first.number, second.number) == (MODEL, 1, 2)
    assert first.tags == PAIR._asdict()
    assert [v.number for v in registry.versions(MODEL)] == [1, 2]
    registry.set_champion(first)
    shutil.rmtree("policy")
    loaded = load_policy(registry.download(registry.champion(MODEL), tmp_path / "champion"))
    assert isinstance(loaded, PromptPolicy)
    assert loaded.info == a_policy(1).info
    assert torch.equal(loaded.network.head.weight, a_policy(1).network.head.weight)
    registry.set_champion(second)
    again = registry.download(registry.champion(MODEL), tmp_path / "champion")
    assert load_policy(again).info == a_policy(2).info
    assert {f.name for f in tmp_path.iterdir()} >= {"champion"}
    assert not list(tmp_path.glob(".champion*"))


def test_step_policy_round_trip(registry: Registry, tmp_path: Path) -> None:
    version = register(registry, 3, kind="step")
    loaded = load_policy(registry.download(version, tmp_path / "copy"))
    assert isinstance(loaded, StepPolicy)
    assert (loaded.weights == step_policy(PAIR, 20, seed=3).weights).all()


def test_download_does_not_depend_on_the_working_directory(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = register(registry)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = Registry.open(registry.uri)
    assert load_policy(again.download(version, tmp_path / "copy")).info == a_policy().info


def test_held_out_figures_travel_as_tags(registry: Registry) -> None:
    version = register(registry)
    assert version.held_out is None
    registry.log_held_out(version, GOOD)
    stored = registry.version(MODEL, 1)
    assert stored.held_out == GOOD
    assert stored.tags["heldout.policy_tau"] == "3.0"
    registry.log_held_out(version, beside(1, 1.05, 1.2))
    assert registry.version(MODEL, 1).held_out == beside(1, 1.05, 1.2)


def test_figures_that_are_not_whole_are_none(registry: Registry) -> None:
    """Of an evaluation that was killed between two tags, or of one that knew no champions."""
    version = register(registry)
    registry.tag_version(version, {"heldout.policy_tau": 3.0, "heldout.policy_speed": 30.0})
    assert registry.version(MODEL, 1).held_out is None


def test_missing_names_are_named(registry: Registry) -> None:
    with pytest.raises(ValueError, match="blockpilot-none"):
        registry.versions("blockpilot-none")
    with pytest.raises(ValueError, match="blockpilot-none@champion"):
        registry.champion("blockpilot-none")
    register(registry)
    assert registry.find_champion(MODEL) is None
    with pytest.raises(ValueError, match=f"{MODEL}@champion"):
        registry.champion(MODEL)
    with pytest.raises(ValueError, match=r"version 9 of .*not found"):
        registry.version(MODEL, 9)


# --- promotion ---


def beside(champion: int, low: float, high: float, figures: HeldOut = GOOD) -> HeldOut:
    """`figures` that were measured in the same runs as a champion."""
    return dataclasses.replace(
        figures,
        champion=champion,
        champion_ratio=(low + high) / 2,
        champion_ratio_low=low,
        champion_ratio_high=high,
    )


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        (None, "no held-out figures; run jobs/evaluate.py on it first"),
        (
            dataclasses.replace(GOOD, num_prompts=MIN_PROMPTS - 1),
            "measured on 11 held-out prompts, at least 12 are needed; run jobs/evaluate.py on more",
        ),
        (
            dataclasses.replace(GOOD, policy_speed=27.0, speed_ratio_low=0.9, speed_ratio_high=0.99),
            "slower than the best fixed block size on held-out prompts, 0.964 (0.900 to 0.990) of its speed",
        ),
    ],
)
def test_the_first_champion_earns_it_too(registry: Registry, figures: HeldOut | None, reason: str) -> None:
    register(registry, 1, figures)
    result = promote(PromoteConfig())
    assert (result.promoted, result.reason, result.champion) == (False, reason, None)
    assert registry.find_champion(MODEL) is None


def test_the_first_champion_may_be_as_fast_as_the_best_fixed_block_size(
    registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    register(registry, 1, dataclasses.replace(GOOD, policy_speed=27.9, speed_ratio_low=0.95, speed_ratio_high=1.0))
    result = promote(PromoteConfig())
    assert result.promoted
    assert capsys.readouterr().out == f"promote: {MODEL} version 1 is the champion: the first of its model\n"
    assert registry.champion(MODEL).number == 1
    assert promote(PromoteConfig()).promoted  # again, without harm


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        (None, "no held-out figures"),
        (
            beside(
                1, 1.1, 1.3, dataclasses.replace(GOOD, policy_speed=27.0, speed_ratio_low=0.9, speed_ratio_high=0.99)
            ),
            "slower than the best fixed block size on held-out prompts, 0.964 (0.900 to 0.990) of its speed",
        ),
        (GOOD, "not measured beside champion version 1; run jobs/evaluate.py on it again"),
        (beside(7, 1.1, 1.3), "not measured beside champion version 1"),
        (beside(1, 0.99, 1.05), "does not beat champion version 1, 1.020 (0.990 to 1.050) of its speed"),
        (beside(1, 1.0, 1.1), "does not beat champion version 1, 1.050 (1.000 to 1.100) of its speed"),
        (beside(1, 0.8, 0.9), "does not beat champion version 1, 0.850 (0.800 to 0.900) of its speed"),
    ],
)
def test_challenger_is_refused(registry: Registry, figures: HeldOut | None, reason: str) -> None:
    register(registry, 1, GOOD)
    promote(PromoteConfig())
    register(registry, 2, figures)
    result = promote(PromoteConfig(model=MODEL))
    assert (result.promoted, result.champion) == (False, 1)
    assert reason in result.reason
    assert registry.champion(MODEL).number == 1


def test_challenger_that_beats_the_champion_follows(registry: Registry) -> None:
    register(registry, 1, GOOD)
    promote(PromoteConfig())
    register(registry, 2, beside(1, 1.001, 1.08))
    register(registry, 3)
    assert not promote(PromoteConfig()).promoted  # the newest has no figures
    result = promote(PromoteConfig(version=2))
    assert (result.promoted, result.reason, result.champion) == (True, "it follows version 1", 2)
    assert registry.champion(MODEL).number == 2


def test_a_champion_that_came_in_between_has_to_be_beaten_itself(registry: Registry) -> None:
    register(registry, 1, GOOD)
    promote(PromoteConfig())
    register(registry, 2, beside(1, 1.2, 1.3))
    register(registry, 3, beside(1, 1.1, 1.2))
    assert promote(PromoteConfig(version=2)).promoted
    result = promote(PromoteConfig(version=3))
    assert (result.promoted, result.reason[:43]) == (False, "not measured beside champion version 2; run")


@pytest.mark.parametrize("change", [{"draft": "another"}, {"draft_revision": "3"}, {"target_revision": "9"}])
def test_the_champion_of_another_pair_does_not_stand_in_the_way(registry: Registry, change: dict[str, str]) -> None:
    other = PAIR._replace(**change)
    register(registry, 1, GOOD)
    promote(PromoteConfig())
    register(registry, 2, None, other)
    assert "no held-out figures" in promote(PromoteConfig()).reason
    register(
        registry, 3, dataclasses.replace(GOOD, policy_speed=27.0, speed_ratio_low=0.9, speed_ratio_high=0.99), other
    )
    assert "slower than the best fixed block size" in promote(PromoteConfig()).reason
    register(registry, 4, GOOD, other)
    assert promote(PromoteConfig()).promoted
    register(registry, 5, GOOD, other)
    assert "not measured beside champion version 4" in promote(PromoteConfig()).reason


def test_force_is_recorded(registry: Registry) -> None:
    register(registry, 1, GOOD)
    promote(PromoteConfig())
    register(registry, 2, beside(1, 0.9, 1.1))
    assert promote(PromoteConfig(force=True)).promoted
    champion = registry.champion(MODEL)
    assert champion.number == 2
    reason = "does not beat champion version 1, 1.000 (0.900 to 1.100) of its speed"
    assert champion.tags["promoted.forced"] == reason


def test_force_that_was_not_needed_leaves_no_tag(registry: Registry) -> None:
    register(registry, 1, GOOD)
    assert promote(PromoteConfig(force=True)).promoted
    assert "promoted.forced" not in registry.champion(MODEL).tags


def test_a_refusal_is_one_line_and_status_2(registry: Registry, tmp_path: Path) -> None:
    register(registry)
    environment = {k: v for k, v in os.environ.items() if k != "MLFLOW_TRACKING_URI"}
    job = Job([ROOT / "jobs" / "promote.py"], cwd=tmp_path, env=environment, output=tmp_path / "said")
    reason = "no held-out figures; run jobs/evaluate.py on it first"
    assert job.wait(100) == 2
    assert job.log == f"promote: {MODEL} version 1 is not the champion: {reason}\nerror: not promoted: {reason}\n"


# Beside the untrained choice


def over_untrained(low: float, high: float, figures: HeldOut = GOOD) -> HeldOut:
    """`figures` that were measured in the same runs as the untrained choice."""
    ratio = (low + high) / 2
    return dataclasses.replace(figures, untrained_ratio=ratio, untrained_ratio_low=low, untrained_ratio_high=high)


NOT_BESIDE = "not measured beside the untrained choice; run jobs/evaluate.py with baseline 'untrained'"


@pytest.mark.parametrize("kind", ["prompt", "step"])
@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        (ALONE, NOT_BESIDE),
        (over_untrained(0.98, 1.04), "does not beat the untrained choice, 1.010 (0.980 to 1.040) of its speed"),
        (over_untrained(1.0, 1.1), "does not beat the untrained choice, 1.050 (1.000 to 1.100) of its speed"),
        (over_untrained(0.8, 0.9), "does not beat the untrained choice, 0.850 (0.800 to 0.900) of its speed"),
        (over_untrained(math.nan, math.nan), "does not beat the untrained choice, - of its speed"),
        (None, "no held-out figures"),
        (over_untrained(1.01, 1.1, dataclasses.replace(GOOD, num_prompts=11)), "measured on 11 held-out prompts"),
        (
            over_untrained(1.01, 1.1, dataclasses.replace(GOOD, speed_ratio_low=0.9, speed_ratio_high=0.99)),
            "slower than the best fixed block size",
        ),
    ],
)
def test_a_policy_must_beat_the_untrained_choice(
    registry: Registry, figures: HeldOut | None, reason: str, kind: Kind, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of its model, too: without any champion the untrained choice is served."""
    register(registry, 1, figures, kind=kind)
    result = promote(PromoteConfig())
    assert not result.promoted
    assert reason in result.reason
    assert f"{MODEL} version 1 is not the champion: {result.reason}" in capsys.readouterr().out
    assert registry.find_champion(MODEL) is None


def test_a_step_policy_that_beats_the_untrained_choice_is_promoted(registry: Registry) -> None:
    register(registry, 1, over_untrained(1.001, 1.1), kind="step")
    assert promote(PromoteConfig()).promoted
    register(registry, 2, over_untrained(0.99, 1.02, beside(1, 1.01, 1.2)), kind="step")
    result = promote(PromoteConfig())
    assert (result.promoted, result.champion) == (False, 1)  # it beats the champion, and not what needs no training
    register(registry, 3, over_untrained(1.01, 1.02, beside(1, 0.99, 1.2)), kind="step")
    assert "does not beat champion version 1" in promote(PromoteConfig()).reason
    register(registry, 4, over_untrained(1.01, 1.02, beside(1, 1.01, 1.2)), kind="step")
    assert promote(PromoteConfig()).champion == 4


def test_a_policy_can_be_forced(registry: Registry) -> None:
    register(registry, 1, ALONE, kind="step")
    assert promote(PromoteConfig(force=True)).promoted
    assert registry.version(MODEL, 1).tags["promoted.forced"] == NOT_BESIDE


def test_promote_names_what_is_missing(registry: Registry) -> None:
    with pytest.raises(ValueError, match=MODEL):
        promote(PromoteConfig())
    register(registry)
    with pytest.raises(ValueError, match="version 5"):
        promote(PromoteConfig(version=5))


def test_a_champion_of_another_format_does_not_stand_in_the_way(registry: Registry) -> None:
    """It cannot be decoded with, so nothing can be measured beside it."""
    old, new = register(registry, 0, GOOD), register(registry, 1, GOOD)
    registry.set_champion(old)
    registry.tag_version(new, {"format": 2})
    assert promote(PromoteConfig()).promoted
    result = promote(PromoteConfig())
    assert (result.promoted, result.reason) == (True, "it already was")
