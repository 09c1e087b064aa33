"""Train job: kills, another Ray cluster and a lost MLflow store neither change nor lose the policy."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
import torch

from blockpilot.policy.dataset import prompt_key, split_examples, split_steps, write_examples, write_steps
from blockpilot.policy.learned import Kind, PromptPolicy, StepPolicy
from blockpilot.policy.outcomes import fit_prior, losses, outcomes_of
from blockpilot.policy.reliability import mean_error, reliability
from blockpilot.policy.store import load_policy
from blockpilot.policy.training import Fit, FitSettings, FitTask, new_network, predict
from blockpilot.sweep.rows import SweepRow
from blockpilot.sweep.summary import Summary
from helpers import one_process
from helpers.leases import take_over
from helpers.patience import wait_until
from helpers.processes import Job, descendants, is_running
from helpers.sweeps import NUM_PLACES, PAIR, VOCAB_SIZE, metadata, synthetic_rows
from helpers.trainings import (
    PRICE,
    ROOT,
    WITH_PLAIN,
    dataset,
    environment,
    rows_with_choices,
    run_job,
    write_price,
    write_sweep,
)
from jobs.common.learned_from import LEARNED_FROM_FILE, LearnedFrom
from jobs.common.registry import Registry
from jobs.train import _work, run
from jobs.training.config import TrainConfig
from jobs.training.dataset import read_dataset
from jobs.training.record import save

EPOCHS = 60
CHECKPOINTS = "policy/train/*/checkpoint_*/state.pt"
PROGRAM = """
import sys
from jobs import train
from jobs.training.config import TrainConfig
train.run(TrainConfig.model_validate_json(sys.argv[1]))
"""  # as a workflow does: not all settings are on the command line
OTHER = """
import os, time
from pathlib import Path
import ray
from jobs.common.cluster import connect
connect(include_dashboard=True)
address = ray.get_runtime_context().gcs_address
# As `ray start` does, for Ray to take this for the machine's latest cluster.
(Path(os.environ["RAY_TMPDIR"]) / "ray" / "ray_current_cluster").write_text(address)
print(f"another cluster at {address}.", flush=True)
time.sleep(10**6)
"""


class OtherCluster(NamedTuple):
    """A cluster that Ray finds first in this environment."""

    process: Job
    environment: dict[str, str]
    address: str


@pytest.fixture
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OtherCluster]:
    folder = tmp_path_factory.mktemp("other")
    with tempfile.TemporaryDirectory(prefix="bp", ignore_cleanup_errors=True) as temporary:  # short, for sockets
        variables = environment() | {"RAY_TMPDIR": temporary, "RAY_DEDUP_LOGS": "0", "PYTHONPATH": str(ROOT)}
        process = Job(["-c", OTHER], cwd=folder, env=variables, output=folder / "log")
        process.wait_for(lambda: "another cluster at" in process.log)
        match = re.search(r"another cluster at (.*)\.", process.log)
        assert match
        yield OtherCluster(process, variables, match[1])
        assert process.poll() is None
        ray.shutdown()  # disconnect first: the end of a cluster ends the processes connected to it
        process.terminate()
        process.wait(60)


def kill_worker_and_driver(config: TrainConfig, folder: Path, other: OtherCluster) -> None:
    """Kill one of two workers, then the driver, each after a new checkpoint; the other cluster stays unused."""

    def wait_for_checkpoint() -> None:
        before = set(folder.glob(CHECKPOINTS))
        job.wait_for(lambda: set(folder.glob(CHECKPOINTS)) - before)

    arguments = ["-c", PROGRAM, config.model_dump_json()]
    job = Job(arguments, cwd=folder, env=other.environment, output=folder / "said")
    try:
        wait_for_checkpoint()
        workers = descendants(job.pid, "RayTrainWorker")
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)
        wait_for_checkpoint()
        assert not descendants(other.process.pid, "ray::Train")
        for complaint in ("multiple active Ray instances", "Cleaning up placement group"):
            assert complaint not in job.log
    finally:
        train_processes = descendants(job.pid, "Train")
        job.kill()
        wait_until(lambda: not any(map(is_running, train_processes)), 60)


@pytest.mark.ray
@pytest.mark.usefixtures("registry")
@pytest.mark.filterwarnings("ignore")  # Ray's warnings
def test_neither_kills_nor_a_full_disk_change_a_policy(
    other: OtherCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Policy equal to that of plain `Fit`, trained next to another cluster and then on it. The next run writes a file
    that could not be written."""
    rows = synthetic_rows(240, 0)
    write_sweep(tmp_path / "sweep", rows[:100])
    write_sweep(tmp_path / "sweep", rows[100:], metadata(git_commit="later"), "part-1")
    write_price(tmp_path / "sweep")
    settings = FitSettings("prompt", hidden=64, epochs=EPOCHS, batch_size=16, lr=3e-4, dropout=0.0)
    config = TrainConfig(sweep=("sweep",), output=Path("policy"), fit=settings, num_workers=2, checkpoint_every=5)
    kill_worker_and_driver(config, tmp_path, other)

    monkeypatch.setenv("RAY_ADDRESS", other.address)
    monkeypatch.setenv("RAY_TMPDIR", other.environment["RAY_TMPDIR"])
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")  # bounds the latency of a report
    obstacle = tmp_path / "policy" / LEARNED_FROM_FILE  # blocks a file that the job writes
    obstacle.mkdir()
    with pytest.raises(IsADirectoryError):
        run(config)
    obstacle.rmdir()
    run(config)

    output = capsys.readouterr().out
    assert f"192 examples, 48 held back; {EPOCHS} epochs" in output
    assert "registered as blockpilot-target-1b version 1" in output
    policy = load_policy(tmp_path / "policy")
    assert isinstance(policy, PromptPolicy)
    assert policy.price == PRICE
    assert not (tmp_path / "policy" / "train").exists()  # no checkpoints left behind

    folder = tmp_path / "examples"
    write_examples(folder, [rows], WITH_PLAIN)
    training, validation = split_examples(folder, 0.2, 0)
    task = FitTask("throughput", WITH_PLAIN, torch.tensor(PRICE.relative(WITH_PLAIN, rows=1)))
    fit = Fit(new_network(training, VOCAB_SIZE, settings), training, validation, settings, task)
    epoch_losses = [fit.run_epoch() for _ in range(EPOCHS)]
    assert fit.done
    # 720 steps of Adam; gradients are summed in another order over two ranks.
    expected = new_network(training, VOCAB_SIZE, settings)
    expected.load_state_dict(fit.best)
    torch.testing.assert_close(
        predict(policy.network, validation), predict(expected, validation), rtol=0.01, atol=0.01
    )

    check_what_is_kept(tmp_path, rows, epoch_losses, config)


@pytest.mark.usefixtures("in_one_process")
def test_a_step_policy_is_fitted_once_reported_and_registered(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Policy fitted by one of two workers; its report is printed, saved in the directory and logged to MLflow."""
    rows = rows_with_choices(60, 0)
    rows = [dataclasses.replace(row, temperature=float(i % 2)) for i, row in enumerate(rows)]
    write_sweep(tmp_path / "sweep", rows)
    write_price(tmp_path / "sweep")
    config = TrainConfig(sweep=("sweep",), output=Path("policy"), num_workers=2)
    work = functools.partial(_work, config, read_dataset(config, tmp_path / "data"))
    [[(_, fitted)], [other_report]] = (one_process.reports_of(work, rank, num_workers=2) for rank in range(2))
    assert fitted is not None
    assert other_report == ({}, None)
    run(config)
    policy = load_policy(tmp_path / "policy")
    assert isinstance(policy, StepPolicy)
    assert (policy.price, policy.info.vocab_size, policy.info.pair) == (PRICE, VOCAB_SIZE, PAIR)
    assert sorted(file.name for file in (tmp_path / "policy").iterdir() if file.is_file() and file.suffix) == [
        *("learned_from.json", "policy.json", "price.json", "reliability.png", "training.json")
    ]

    write_steps(tmp_path / "examples", [rows])
    training, validation = split_steps(tmp_path / "examples", 0.2, 0)
    expected = fit_prior(outcomes_of(training))
    for weights in (policy.weights, fitted["weights"]):
        assert np.allclose(weights, expected.weights)  # other threads sum in another order
    fit_nats, draft_nats = losses(expected, outcomes_of(validation))
    assert fit_nats < draft_nats - 0.01  # choices are right 0.7 times as often as the draft's probabilities predict
    errors = [mean_error(reliability(prior, validation)) for prior in (expected, None)]
    assert errors[0] < errors[1]
    num = len(validation)
    report = (
        f"train: {60 * NUM_PLACES - num} examples, {num} held back; policy in policy, registered as "
        "blockpilot-target-1b version 1\n"
        f"train: held-back choices: {fit_nats:.3f} nats a slot, by the draft's own probabilities {draft_nats:.3f}; "
        f"mean error of a node's chance {errors[0]:.3f}, of the draft's own {errors[1]:.3f}"
    )
    assert report in capsys.readouterr().out

    (version,) = registry.versions("blockpilot-target-1b")
    assert version.tags.items() >= {**PAIR._asdict(), "kind": "step", "format": "5"}.items()
    assert float(version.tags["nats.trained"]) == pytest.approx(fit_nats)
    assert version.run_id is not None
    metrics = registry._client.get_run(version.run_id).data.metrics
    assert (metrics["nats_trained"], metrics["nats_own"]) == pytest.approx((fit_nats, draft_nats))
    assert (metrics["reliability_error_trained"], metrics["reliability_error_draft"]) == pytest.approx(errors)
    artifacts = {item.path for item in registry._client.list_artifacts(version.run_id)}
    assert artifacts == {"training.json", "reliability.json", "reliability.png"}
    registered = load_policy(registry.download(version, tmp_path / "downloaded"))
    assert isinstance(registered, StepPolicy)
    assert np.array_equal(registered.weights, policy.weights)
    assert LearnedFrom.read(tmp_path / "downloaded").prompts == {prompt_key(row.prompt) for row in rows}
    assert sorted(file.name for file in (tmp_path / "downloaded").iterdir()) == [  # no lease, no picture
        *("learned_from.json", "policy.json", "price.json", "training.json")
    ]


def check_what_is_kept(
    folder: Path, rows: Sequence[SweepRow], losses: Sequence[dict[str, float]], config: TrainConfig
) -> None:
    """Check the training data and results recorded in the policy's directory, the MLflow run and the version."""
    sweep_id = dataset(folder, sweep=(str(folder / "sweep"),), fit=config.fit).id
    policy, learned_from = load_policy(folder / "policy"), LearnedFrom.read(folder / "policy")
    assert learned_from.prompts == {prompt_key(row.prompt) for row in rows}
    assert learned_from.taus == {0.0: Summary().add(rows).tau_curve}
    record = json.loads((folder / "policy" / "training.json").read_text())
    assert record["params"]["sweep_id"] == policy.info.training["sweep_id"] == sweep_id
    assert (record["num_epochs"], len(record["history"])) == (EPOCHS, EPOCHS)
    assert record["balance"].keys() == set(map(str, WITH_PLAIN))
    assert sum(record["balance"].values()) == record["num_examples"][0]
    assert max(record["balance"], key=record["balance"].get) != "1"

    registry = Registry.open(f"sqlite:///{folder}/mlflow.db")
    (version,) = registry.versions("blockpilot-target-1b")
    tags = {"candidates": "1,2,4,6,8", "sweep_id": sweep_id, "kind": "prompt", "objective": "throughput"}
    assert version.tags.items() >= {**PAIR._asdict(), **tags}.items()
    assert version.run_id is not None
    for name in losses[0]:
        history = registry._client.get_metric_history(version.run_id, name)
        assert [point.step for point in history] == list(range(1, EPOCHS + 1))  # each epoch once, despite the kills
        assert [point.value for point in history] == pytest.approx([epoch[name] for epoch in losses], rel=1e-2)
    recorded = registry._client.get_run(version.run_id)
    assert recorded.info.status == "FINISHED"
    assert recorded.data.tags["sweep_id"] == sweep_id
    assert (recorded.data.params["epochs"], recorded.data.params["num_workers"]) == (str(EPOCHS), "2")
    assert recorded.data.metrics["lookup_policy"] == pytest.approx(record["report"]["policy"])
    assert [item.path for item in registry._client.list_artifacts(version.run_id)] == ["training.json"]
    downloaded = registry.download(version, folder / "downloaded")
    registered = load_policy(downloaded)
    assert isinstance(registered, PromptPolicy)
    assert isinstance(policy, PromptPolicy)
    weights = registered.network.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in policy.network.state_dict().items())
    assert LearnedFrom.read(downloaded) == learned_from


@pytest.mark.usefixtures("in_one_process")
def test_a_lost_store_costs_no_policy(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policy saved although the MLflow store is lost during training; --relog logs the results later."""
    write_sweep(tmp_path / "sweep", synthetic_rows(60, 0))
    settings = FitSettings("prompt", hidden=32, epochs=10, batch_size=16, lr=1e-3, patience=5)
    store, sweep = tmp_path / "mlflow.db", (str(tmp_path / "sweep"),)
    store_bytes = store.read_bytes()

    def lose_store(*arguments: Any) -> object:
        store.write_bytes(b"no database any more " * 1000)
        return one_process.train(*arguments)

    monkeypatch.setattr("jobs.train.train", lose_store)
    with pytest.raises((ValueError, OSError)) as error:
        run(TrainConfig(sweep=sweep, output=Path("policy"), fit=settings, objective="tau"))
    assert str(error.value).startswith(f"MLflow store sqlite:///{store}: ")
    assert str(error.value).endswith("The results are in policy; --relog logs them later")
    policy = load_policy(tmp_path / "policy")
    record_bytes = (tmp_path / "policy" / "training.json").read_bytes()

    store.write_bytes(store_bytes)
    code, output = run_job(tmp_path, "--relog", "--output", "policy")
    assert code == 0, output
    assert "policy in policy, registered as blockpilot-target-1b version 1" in output
    assert run(TrainConfig(relog=True, output=Path("policy"))).version is not None  # the one above
    assert (tmp_path / "policy" / "training.json").read_bytes() == record_bytes
    record = json.loads(record_bytes)
    validation = [epoch["validation_loss"] for epoch in record["history"]]
    assert policy.info.training["best_epoch"] == validation.index(min(validation)) + 1

    registry = Registry.open()
    (version,) = registry.versions("blockpilot-target-1b")
    assert version.run_id is not None
    recorded = registry._client.get_run(version.run_id)
    assert recorded.info.status == "FINISHED"
    assert recorded.data.params["hidden"] == "32"
    assert recorded.data.tags["sweep_id"] == version.tags["sweep_id"] == record["params"]["sweep_id"]
    losses = registry._client.get_metric_history(version.run_id, "validation_loss")
    assert [point.value for point in losses] == validation
    assert {item.path for item in registry._client.list_artifacts(version.run_id)} == {"training.json"}


def saved_training(folder: Path, num_rows: int, seed: int, kind: Kind) -> Callable[[], None]:
    """Function that saves a training of synthetic rows, each time it is called."""
    sweep = folder / f"sweep-{seed}"
    write_sweep(sweep, rows_with_choices(num_rows, seed))
    settings = FitSettings(kind, hidden=8, epochs=1, batch_size=16)
    config = TrainConfig(sweep=(str(sweep),), output=folder / "policy", fit=settings, objective="tau")
    data = read_dataset(config, folder / f"examples-{kind}-{seed}")
    if data.task is None:
        training, _ = split_steps(data.folder, config.validation, settings.seed)
        state = {"weights": torch.from_numpy(fit_prior(outcomes_of(training)).weights)}
        return lambda: save(config, data, state)
    training, validation = split_examples(data.folder, config.validation, settings.seed)
    fit = Fit(new_network(training, VOCAB_SIZE, settings), training, validation, settings, data.task)
    fit.run_epoch()
    return lambda: save(config, data, fit.state_dict())


@pytest.mark.parametrize("kinds", [("prompt", "prompt"), ("prompt", "step"), ("step", "prompt")])
def test_a_kill_while_a_policy_is_saved_mixes_no_two(
    kinds: tuple[Kind, Kind], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record of the training data matches the saved policy after a kill between any two files."""
    monkeypatch.setattr("jobs.common.figures.reliability", lambda curves: b"as good as any picture")
    save_old, save_new = (
        saved_training(tmp_path, rows, seed, kind)
        for (rows, seed), kind in zip(((40, 0), (60, 1)), kinds, strict=True)
    )
    policy, replace = tmp_path / "policy", Path.replace
    for when in range(8):
        save_old()
        old_info, counter = load_policy(policy).info, itertools.count()

        def killed(self: Path, target: Path, when: int = when, counter: Iterator[int] = counter) -> Path:
            if next(counter) == when:
                raise KeyboardInterrupt
            return replace(self, target)

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(Path, "replace", killed)
            save_new()
        if (policy / "policy.json").exists():
            num_prompts = len(LearnedFrom.read(policy).prompts)
            assert num_prompts == (40 if load_policy(policy).info == old_info else 60), when
        save_new()
        assert len(LearnedFrom.read(policy).prompts) == 60
        assert load_policy(policy).info != old_info
        assert not (policy / ".new").exists()


@pytest.mark.usefixtures("in_one_process", "registry")
def test_a_driver_that_lost_its_lease_saves_no_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lease taken over by another driver during training: the first driver stops without saving."""
    write_sweep(tmp_path / "sweep", rows_with_choices(40, 0))
    output = tmp_path / "policy"

    def train(*arguments: Any) -> object:
        take_over(output)
        return one_process.train(*arguments)

    monkeypatch.setattr("jobs.train.train", train)
    with pytest.raises(ValueError, match="process id 7 on elsewhere has taken over; this driver stops"):
        run(TrainConfig(sweep=("sweep",), objective="tau", output=output))
    assert not (output / "policy.json").exists()
    assert (output / "train" / "examples").exists()  # they are the new driver's now
