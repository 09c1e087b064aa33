"""Registry in an sqlite store, and the promotion rule."""

import dataclasses
import json
import math
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from blockpilot.policy.learned import Kind, PromptPolicy, StepPolicy
from blockpilot.policy.store import load_policy, save_policy
from blockpilot.types import PairId
from helpers.policies import register, step_policy, tiny_policy
from helpers.processes import Job
from helpers.servers import free_port
from helpers.stores import NUM_CREATORS
from helpers.trainings import ROOT, environment
from jobs.common.ray_train import MetricLog
from jobs.common.registry import HeldOut, Registry, Version, model_name, tracking_uri
from jobs.promote import MIN_PROMPTS, PromoteConfig, _judge
from jobs.promote import run as promote
from jobs.serving.champions import ChampionWatch
from jobs.training.config import TrainConfig

TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
MODEL = "blockpilot-smollm2-135m-instruct"
PAIR = PairId(TARGET, "1", "draft", "2")
ALONE = HeldOut(3.0, 2.8, 30.0, 28.0, 1.02, 1.12, num_prompts=MIN_PROMPTS)
GOOD = dataclasses.replace(ALONE, untrained_ratio=1.03, untrained_ratio_low=1.01, untrained_ratio_high=1.05)
"""Figures that also beat the untrained choice."""


def a_policy(seed: int = 0) -> PromptPolicy:
    return tiny_policy(PAIR, 20, (1, 4), training={"seed": seed}, seed=seed)


def new_version(registry: Registry, seed: int = 0, held_out: HeldOut | None = None, kind: Kind = "prompt") -> Version:
    save_policy(a_policy(seed) if kind == "prompt" else step_policy(PAIR, 20, seed=seed), "policy")
    version = register(registry, "policy", PAIR, **{"kind": "step"} if kind == "step" else {})
    if held_out:
        registry.log_held_out(version, held_out)
    return version


# --- metrics of a training ---


def test_metrics_wait_while_the_store_is_away(
    registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Metrics that a worker could not log are logged by the next worker, each once; training goes on meanwhile."""
    with registry.log_run("train") as record:
        store, run_id = tmp_path / "mlflow.db", record.id
        log = MetricLog(registry.uri, run_id)
        log.add(10, {"loss": 3.0})
        log.flush()
        store_bytes = store.read_bytes()
        store.write_bytes(b"no database at all" * 1000)
        log.add(20, {"loss": 2.0})
        log.flush()
        log.add(30, {"loss": 1.0})
        log.flush()
        assert "metrics of 2 steps are logged later" in caplog.text
        checkpoint_metrics = [(10, {"loss": 3.0}), *log.waiting]
        store.write_bytes(store_bytes)
        MetricLog(registry.uri, run_id, checkpoint_metrics).flush()
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
    """No secret in logged parameters, nor in the settings that are saved with a result."""
    config = TrainConfig(sweep=("s3://KEY:SECRET@bucket/sweep", "https://host/b?X-Amz-Signature=SECRET"))
    assert "SECRET" not in json.dumps(config.recorded())
    with registry.log_run("train") as run:
        run.log_params(config.model_dump(mode="json"))
    logged = registry._client.get_run(run.id).data.params["sweep"]
    assert logged == "['s3://***@bucket/sweep', 'https://host/b?X-Amz-Signature=***']"


def test_the_stores_address_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Absolute address of the store; a submitted job, whose directory is temporary, must be given one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri() == f"sqlite:///{tmp_path}/mlflow.db"
    for address, absolute in (("sqlite:///other/x.db", f"sqlite:///{tmp_path}/other/x.db"), ("http://m:5000", None)):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        assert tracking_uri() == (absolute or address)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(ValueError, match="MLFLOW_TRACKING_URI"):
        tracking_uri()


@pytest.mark.parametrize(
    ("uri", "word"),
    [
        ("sqlite:////no/such/directory/mlflow.db", "no such directory"),
        ("sqlite:///text.db", "not a database"),
        ("http://127.0.0.1:9", "Connection refused"),
        ("./mlruns", "filesystem"),
        ("ftp://somewhere", "unsupported URI"),
    ],
)
def test_a_store_that_is_not_there(uri: str, word: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (tmp_path / "text.db").write_text("not a database " * 100)
    uri = uri.replace("text.db", f"{tmp_path}/text.db")
    with pytest.raises(ValueError, match=word) as caught:
        Registry.open(uri)
    assert uri in str(caught.value)
    assert "\n" not in str(caught.value)


def test_processes_that_create_the_store_at_once(empty_store: Path) -> None:
    """Store created by concurrent processes has the run of each (without the lock it is damaged permanently)."""
    registry = Registry.open(f"sqlite:///{empty_store}")
    experiment = registry._client.get_experiment_by_name("create")
    assert experiment is not None
    assert len(registry._client.search_runs([experiment.experiment_id])) == NUM_CREATORS


# --- runs ---


def test_run_round_trip(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.txt").write_text("a")
    rows = [{"method": "AR", "tau": 1.0}, {"method": "B=8", "tau": 2.0}]
    with registry.log_run("evaluate") as run:
        run.log_params({"seed": 3, "checkpoint_every": 400})
        run.log_tags({"kind": "test"})
        run.log_metrics({"tau": 2.5}, step=1)
        run.log_table(rows, "table.json")
        run.log_artifact(tmp_path / "out", "folder")
    stored = registry._client.get_run(run.id)
    assert stored.info.status == "FINISHED"
    assert (stored.data.params, stored.data.metrics) == ({"seed": "3", "checkpoint_every": "400"}, {"tau": 2.5})
    assert stored.data.tags["kind"] == "test"
    artifacts = tmp_path / "mlartifacts" / run.id / "artifacts"  # next to the store, in any directory
    assert (artifacts / "folder" / "a.txt").read_text() == "a"
    table = registry._client.load_table(stored.info.experiment_id, "table.json", [run.id])
    assert table.to_dict("records") == rows

    with registry.log_run("evaluate", run_id=run.id) as continued:
        assert registry._client.get_run(run.id).info.status == "RUNNING"
        continued.log_params({"seed": 3, "checkpoint_every": 600, "num_validation": 20})
        continued.log_metrics({"tau": 3.5}, step=2)
    stored = registry._client.get_run(run.id)
    assert stored.data.params == {"seed": "3", "checkpoint_every": "400", "num_validation": "20"}  # first value stays
    assert [registry.run(run.id).last_step(name) for name in ("tau", "other")] == [2, -1]
    assert stored.info.status == "FINISHED"


def test_a_run_that_raises_is_failed_and_an_unknown_one_is_named(registry: Registry) -> None:
    with pytest.raises(RuntimeError, match="boom"), registry.log_run("train") as run:
        raise RuntimeError("boom")
    assert registry._client.get_run(run.id).info.status == "FAILED"
    with pytest.raises(ValueError, match="run nope"):
        registry.run("nope")


# --- policies ---


def test_policy_round_trip(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies unchanged after registration and download, from any working directory."""
    first, second, third = new_version(registry, 1), new_version(registry, 2), new_version(registry, 3, kind="step")
    assert (model_name(TARGET), first.name, first.number, second.number) == (MODEL, MODEL, 1, 2)
    assert first.tags == PAIR._asdict()
    assert [version.number for version in registry.versions(MODEL)] == [1, 2, 3]
    registry.set_champion(first)
    shutil.rmtree("policy")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    registry = Registry.open(registry.uri)
    copy = tmp_path / "champion"
    loaded = load_policy(registry.download(registry.champion(MODEL), copy))
    assert isinstance(loaded, PromptPolicy)
    assert loaded.info == a_policy(1).info
    assert torch.equal(loaded.network.head.weight, a_policy(1).network.head.weight)
    registry.set_champion(second)
    assert load_policy(registry.download(registry.champion(MODEL), copy)).info == a_policy(2).info
    third_policy = load_policy(registry.download(third, copy))
    assert isinstance(third_policy, StepPolicy)
    assert (third_policy.weights == step_policy(PAIR, 20, seed=3).weights).all()
    assert not list(tmp_path.glob(".champion*"))


def test_held_out_figures_travel_as_tags(registry: Registry) -> None:
    """Held-out figures in tags; None if some are missing because the evaluation was killed between two tags."""
    version = new_version(registry)
    registry.tag_version(version, {"heldout.policy_tau": 3.0, "heldout.policy_speed": 30.0})
    assert registry.version(MODEL, 1).held_out is None
    for figures in (GOOD, beside(1, 1.05, 1.2)):
        registry.log_held_out(version, figures)
        assert registry.version(MODEL, 1).held_out == figures


def test_a_killed_evaluation_mixes_no_figures(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill after each of the tags: results of two evaluations together never count."""
    old, new = (dataclasses.replace(GOOD, policy_speed=speed, num_prompts=num) for speed, num in ((30, 20), (40, 30)))
    version = new_version(registry)
    write, num_left = registry._client.set_model_version_tag, 0

    def write_or_die(*arguments: str) -> None:
        nonlocal num_left
        if not num_left:
            raise KeyboardInterrupt
        num_left -= 1
        write(*arguments)

    for num_tags in range(1, len(dataclasses.fields(HeldOut)) + 1):
        registry.log_held_out(version, old)
        num_left = num_tags
        with monkeypatch.context() as patch:
            patch.setattr(registry._client, "set_model_version_tag", write_or_die)
            with pytest.raises(KeyboardInterrupt):
                registry.log_held_out(version, new)
        figures = registry.version(MODEL, 1).held_out
        assert figures is not None
        assert figures.num_prompts == 0
    assert promote(PromoteConfig(model=MODEL)).reason.startswith("measured on 0 held-out prompts")


def test_a_promotion_without_evidence_is_recorded_first(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: str) -> None:
        raise KeyboardInterrupt

    new_version(registry)
    monkeypatch.setattr("mlflow.MlflowClient.set_registered_model_alias", die)
    with pytest.raises(KeyboardInterrupt):
        promote(PromoteConfig(model=MODEL, force=True))
    assert registry.version(MODEL, 1).tags["promoted.forced"].startswith("no held-out figures")


def test_missing_names_are_named(registry: Registry) -> None:
    def missing(pattern: str, look_up: Callable[[], object]) -> None:
        with pytest.raises(ValueError, match=pattern):
            look_up()

    missing("blockpilot-none", lambda: registry.versions("blockpilot-none"))
    missing("blockpilot-none@champion", lambda: registry.champion("blockpilot-none"))
    missing(MODEL, lambda: promote(PromoteConfig()))
    new_version(registry)
    assert registry.find_champion(MODEL) is None
    missing(f"{MODEL}@champion", lambda: registry.champion(MODEL))
    missing(r"version 9 of .*not found", lambda: registry.version(MODEL, 9))
    missing("version 5", lambda: promote(PromoteConfig(version=5)))


# --- promotion ---


def beside(champion: int, low: float, high: float, figures: HeldOut = GOOD) -> HeldOut:
    """`figures` measured in the same runs as this champion, with this interval of the speed ratio."""
    ratios = {"champion_ratio": (low + high) / 2, "champion_ratio_low": low, "champion_ratio_high": high}
    return dataclasses.replace(figures, champion=champion, **ratios)


def over_untrained(low: float, high: float, figures: HeldOut = GOOD) -> HeldOut:
    """`figures` measured in the same runs as the untrained choice, with this interval of the speed ratio."""
    ratio = (low + high) / 2
    return dataclasses.replace(figures, untrained_ratio=ratio, untrained_ratio_low=low, untrained_ratio_high=high)


def a_version(number: int, figures: HeldOut | None, **tags: str) -> Version:
    held_out = (
        {f"heldout.{name}": str(value) for name, value in dataclasses.asdict(figures).items()} if figures else {}
    )
    return Version(MODEL, number, None, PAIR._asdict() | held_out | tags)


FEW = dataclasses.replace(GOOD, num_prompts=MIN_PROMPTS - 1)
SLOW = dataclasses.replace(GOOD, policy_speed=27.0, speed_ratio_low=0.9, speed_ratio_high=0.99)
AS_FAST = dataclasses.replace(GOOD, policy_speed=27.9, speed_ratio_low=0.95, speed_ratio_high=1.0)
SLOWER = "slower than the best fixed block size on held-out prompts, 0.964 (0.900 to 0.990) of its speed"
NOT_BESIDE = "not measured together with the untrained choice; run jobs/evaluate.py with baseline 'untrained'"
NOT_BESIDE_1 = "not measured together with champion version 1; run jobs/evaluate.py on it again"
UNTRAINED, FIRST = "does not beat the untrained choice", "does not beat champion version 1"


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        (None, "no held-out figures; run jobs/evaluate.py on it first"),
        (FEW, "measured on 11 held-out prompts, at least 12 are needed; run jobs/evaluate.py on more"),
        (SLOW, SLOWER),
        (ALONE, NOT_BESIDE),
        (over_untrained(1.0, 1.1), f"{UNTRAINED}, 1.050 (1.000 to 1.100) of its speed"),
        (over_untrained(0.8, 0.9), f"{UNTRAINED}, 0.850 (0.800 to 0.900) of its speed"),
        (over_untrained(math.nan, math.nan), f"{UNTRAINED}, - of its speed"),
    ],
)
def test_a_champion_must_beat_what_needs_no_training(figures: HeldOut | None, reason: str) -> None:
    """Refusal both of a first champion and of a successor, even of one that beats the present champion."""
    assert _judge(a_version(2, figures), None) == (False, reason)
    champion_figures = figures and beside(1, 1.1, 1.3, figures)
    assert _judge(a_version(2, champion_figures), a_version(1, GOOD)) == (False, reason)


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        (GOOD, NOT_BESIDE_1),
        (beside(7, 1.1, 1.3), NOT_BESIDE_1),
        (beside(1, 1.0, 1.1), f"{FIRST}, 1.050 (1.000 to 1.100) of its speed"),
        (beside(1, 0.8, 0.9), f"{FIRST}, 0.850 (0.800 to 0.900) of its speed"),
        (beside(1, math.nan, math.nan), f"{FIRST}, - of its speed"),
        (beside(1, 1.001, 1.08, AS_FAST), ""),
    ],
)
def test_a_challenger_must_beat_the_champion_of_its_pair_and_format(figures: HeldOut, reason: str) -> None:
    """Champion of another pair, or of a format that cannot be loaded: replaced without a comparison."""
    assert _judge(a_version(2, figures), a_version(1, GOOD)) == (not reason, reason or "it follows version 1")
    for change in ({"draft": "another"}, {"draft_revision": "3"}, {"target_revision": "9"}, {"format": "2"}):
        assert _judge(a_version(2, figures), a_version(1, GOOD, **change)) == (True, "it follows version 1")


def test_promotion_moves_the_alias_and_records_force(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    """Promotion of policies of both kinds; the first champion may be only as fast as the best fixed block size."""

    def promoted(figures: HeldOut | None, kind: Kind = "prompt", force: bool = False) -> tuple[bool, int | None]:
        new_version(registry, 0, figures, kind=kind)
        result = promote(PromoteConfig(model=MODEL, force=force))
        return result.promoted, result.champion

    assert promoted(None) == (False, None)
    assert registry.find_champion(MODEL) is None
    assert f"{MODEL} version 1 is not the champion: no held-out figures; run " in capsys.readouterr().out
    assert promoted(AS_FAST, force=True) == (True, 2)
    assert capsys.readouterr().out == f"promote: {MODEL} version 2 is the champion: the first champion of its model\n"
    assert "promoted.forced" not in registry.champion(MODEL).tags  # it was not needed
    assert promote(PromoteConfig()).reason == "it already was"
    assert promoted(beside(2, 0.9, 1.1), "step") == (False, 2)
    assert registry.champion(MODEL).number == 2
    assert promoted(beside(2, 0.9, 1.1), "step", force=True) == (True, 4)
    reason = "does not beat champion version 2, 1.000 (0.900 to 1.100) of its speed"
    assert registry.champion(MODEL).tags["promoted.forced"] == reason
    assert promoted(beside(4, 1.01, 1.1)) == (True, 5)
    assert promote(PromoteConfig(version=3)).reason.startswith("not measured together with champion version 5")


def test_a_refusal_is_one_line_and_status_2(registry: Registry, tmp_path: Path) -> None:
    new_version(registry)
    job = Job([ROOT / "jobs" / "promote.py"], cwd=tmp_path, env=environment(), output=tmp_path / "said")
    reason = "no held-out figures; run jobs/evaluate.py on it first"
    assert job.wait(100) == 2
    assert job.log == f"promote: {MODEL} version 1 is not the champion: {reason}\nerror: not promoted: {reason}\n"
