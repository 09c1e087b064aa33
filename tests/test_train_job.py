"""The train job: bad sweeps are refused before Ray starts; a killed worker does not change the policy."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from processes import descendants
from test_fit import PAIR, VOCAB_SIZE, dense, metadata, synthetic_rows

from blockpilot.fit import Fit, FitSettings, examples, new_network, split_rows
from blockpilot.policy import load_policy
from blockpilot.records import Metadata, SweepRow, write_rows
from jobs.registry import Registry
from jobs.train import TrainConfig, run

ROOT = Path(__file__).parent.parent


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bad input must be found before a cluster or a store is asked for."""

    def started(**_: object) -> None:
        raise AssertionError("started Ray or MLflow")

    monkeypatch.setattr("jobs.train.connect", started)
    monkeypatch.setattr("jobs.train.Registry.open", started)
    monkeypatch.chdir(tmp_path)


def write_sweep(folder: Path, rows: list[SweepRow], made_by: Metadata, part: str = "part-0") -> None:
    write_rows(folder / "rows" / f"{part}.parquet", rows, made_by)


def refused(**config: object) -> str:
    with pytest.raises(ValueError, match=r"sweep|output|tau") as caught:
        run(TrainConfig(**{"sweep": "sweep", **config}))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.usefixtures("no_ray")
class TestRefuses:
    def test_missing_sweep(self) -> None:
        assert "sweep nowhere: no such" in refused(sweep="nowhere")

    def test_empty_directory(self) -> None:
        Path("sweep").mkdir()
        assert "no Parquet files in sweep" in refused()

    def test_too_few_prompts(self) -> None:
        rows = synthetic_rows(20, 0)
        same = [dataclasses.replace(row, prompt=f"p{i % 7}") for i, row in enumerate(rows)]
        write_sweep(Path("sweep"), same, metadata())
        assert "7 different prompts; needed: 8" in refused()

    def test_one_candidate(self) -> None:
        cut = {"candidates": 1, "taus": 1, "num_steps": 1, "emitted_histograms": 1}
        rows = [
            dataclasses.replace(row, **{name: getattr(row, name)[:n] for name, n in cut.items()})
            for row in synthetic_rows(10, 0)
        ]
        write_sweep(Path("sweep"), rows, metadata(candidates=[2]))
        assert "one candidate [2]" in refused()

    def test_mixed_pairs(self) -> None:
        write_sweep(Path("sweep"), synthetic_rows(10, 0), metadata())
        other = metadata(pair=PAIR._replace(draft="org/other-draft"))
        write_sweep(Path("sweep"), synthetic_rows(10, 1), other, "part-1")
        message = refused()
        assert "pair.draft" in message
        assert "org/other-draft" in message

    def test_tau_that_is_no_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = synthetic_rows(10, 0)
        rows[3] = dataclasses.replace(rows[3], taus=[float("nan"), *rows[3].taus[1:]])
        with monkeypatch.context() as unchecked:
            unchecked.setattr("blockpilot.records._validate_all", lambda *_: None)
            write_sweep(Path("sweep"), rows, metadata())
        assert "tau of block size 2 is nan" in refused()

    def test_relative_output_in_a_submitted_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
        assert "runs/policy: must be absolute" in refused()


def test_command_line_error_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "jobs" / "train.py", "--sweep", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: sweep nowhere: no such file or directory\n"
    assert not list(tmp_path.iterdir())


# --- a whole run, with a kill ---

CHECKPOINTS = "policy/train/*/checkpoint_*/state.pt"
SETTINGS = FitSettings(hidden=256, epochs=30, batch_size=8, lr=3e-4, dropout=0.0, patience=None)


Job = subprocess.Popen[str]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Job]]:
    """Starts the train job on a synthetic sweep in two part files, with two workers, each time in the same way."""
    rows = synthetic_rows(240, 0)
    write_sweep(tmp_path / "sweep", rows[:100], metadata(), "part-0")
    write_sweep(tmp_path / "sweep", rows[100:], metadata(git_commit="later"), "part-1")
    options = {f"--{k.replace('_', '-')}": v for k, v in dataclasses.asdict(SETTINGS).items()}
    options |= {"--sweep": "sweep", "--output": "policy", "--num-workers": 2, "--checkpoint-every": 5}
    command = [sys.executable, str(ROOT / "jobs" / "train.py")]
    command += [str(part) for option in options.items() for part in option]
    environment = {k: v for k, v in os.environ.items() if k not in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS")}
    jobs = []

    def start_job() -> Job:
        with (tmp_path / "stdout").open("w") as out:
            job = subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True
            )
        jobs.append(job)
        return job

    yield start_job
    for job in jobs:
        if job.poll() is None:
            job.terminate()
            job.wait(30)


def wait_for_checkpoint(folder: Path, job: Job) -> None:
    """Returns when there is one that was not there before."""
    before = set(folder.glob(CHECKPOINTS))
    deadline = time.monotonic() + 200
    while not set(folder.glob(CHECKPOINTS)) - before:
        assert job.poll() is None, "ended before its next checkpoint"
        assert time.monotonic() < deadline, "no checkpoint in 200 s"
        time.sleep(0.05)


@pytest.mark.ray
def test_kills_change_nothing(start: Callable[[], Job], tmp_path: Path) -> None:
    """Two data-parallel workers, one killed, then the driver killed: in the end the policy of plain `Fit`."""
    job = start()
    wait_for_checkpoint(tmp_path, job)
    workers = descendants(job.pid, "RayTrainWorker")
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    wait_for_checkpoint(tmp_path, job)
    job.kill()
    job.wait(30)
    job = start()
    assert job.wait(300) == 0, (tmp_path / "stdout").read_text()

    output = (tmp_path / "stdout").read_text()
    assert "192 rows, 48 held back; 30 epochs" in output
    assert "registered as blockpilot-target-1b version 1" in output
    policy = load_policy(tmp_path / "policy")
    assert not (tmp_path / "policy" / "train").exists()  # no checkpoints left behind

    train, validation = split_rows(synthetic_rows(240, 0), 0.2, 0)
    network = new_network(examples(train), VOCAB_SIZE, SETTINGS)
    fit = Fit(network, examples(train), examples(validation), SETTINGS)
    losses = []
    while not fit.done:
        losses.append(fit.run_epoch().train.mean_loss)
    for row in validation:
        alone = network(*examples([row]).probs)[0]
        # 720 Adam steps; gradients are summed in another order over two ranks.
        torch.testing.assert_close(policy.logits(dense(row)), alone, rtol=1e-2, atol=1e-2)

    registry = Registry.open(f"sqlite:///{tmp_path}/mlflow.db")
    (version,) = registry.versions("blockpilot-target-1b")
    assert version.tags["candidates"] == "2,4,6,8"
    assert version.tags["draft"] == PAIR.draft
    assert version.run_id is not None
    history = registry._client.get_metric_history(version.run_id, "train_loss")
    assert [point.step for point in history] == list(range(1, 31))  # each epoch once, despite the kills
    assert [point.value for point in history] == pytest.approx(losses, rel=1e-3)
    assert registry._client.get_run(version.run_id).info.status == "FINISHED"
    downloaded = load_policy(registry.download(version, tmp_path / "downloaded"))
    assert torch.equal(downloaded.network.rows, policy.network.rows)
