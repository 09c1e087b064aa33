"""The train job: bad sweeps are refused before Ray starts; no kill and no lost store changes or loses the policy."""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blockpilot.policy.dataset import (
    open_examples,
    prompt_key,
    read_steps,
    split_examples,
    split_steps,
    write_examples,
    write_steps,
)
from blockpilot.policy.learned import Kind, PromptPolicy, StepPolicy
from blockpilot.policy.outcomes import fit_prior, losses, outcomes_of
from blockpilot.policy.reliability import mean_error, reliability
from blockpilot.policy.store import load_policy
from blockpilot.policy.training import Fit, FitSettings, FitTask, new_network, predict
from blockpilot.sweep.rows import Metadata, SweepRow, write_rows
from blockpilot.sweep.summary import Summary
from helpers.leases import take_over
from helpers.prices import price
from helpers.processes import Job, descendants
from helpers.sweeps import CANDIDATES, NUM_PLACES, PAIR, VOCAB_SIZE, metadata, synthetic_rows, with_choices
from jobs.common.config import ConfigError
from jobs.common.learned_from import LEARNED_FROM_FILE, LearnedFrom
from jobs.common.registry import Registry
from jobs.train import run, run_name
from jobs.training.config import TrainConfig
from jobs.training.dataset import Dataset, read_dataset
from jobs.training.record import save

ROOT = Path(__file__).parents[2]
WITH_PLAIN = (1, *CANDIDATES)
PROMPT, STEP = FitSettings("prompt"), FitSettings("step")
PRICE = price(pair=PAIR, row_s=0.02, launch_s=0.01, slot_s=0.005, token_s=0.015)


def write_sweep(
    folder: Path, rows: Sequence[SweepRow], made_by: Metadata | None = None, part: str = "part-0"
) -> None:
    write_rows(folder / "rows" / f"{part}.parquet", rows, made_by or metadata())


def write_price(folder: Path, **changes: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "price.json").write_text(dataclasses.replace(PRICE, **changes).to_json())  # type: ignore[arg-type]


def rows_with_choices(num_rows: int, seed: int) -> list[SweepRow]:
    return [with_choices(row, 1000 * seed + i) for i, row in enumerate(synthetic_rows(num_rows, seed))]


def cut(row: SweepRow, num: int) -> SweepRow:
    """The row with its first candidates only."""
    lists = ("candidates", "taus", "num_steps", "emitted_histograms", "accepted")
    return dataclasses.replace(row, **{name: getattr(row, name)[:num] for name in lists})


def not_dense(row: SweepRow) -> SweepRow:
    """As a sweep by `replay` records it."""
    return dataclasses.replace(row, accepted=[], step_places=[], step_contexts=b"", step_embeddings=b"")


# --- bad input ---


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bad input must be found before a cluster or a store is asked for."""

    def started(**_: object) -> None:
        raise AssertionError("started Ray or MLflow")

    monkeypatch.setattr("jobs.train.connect", started)
    monkeypatch.setattr("jobs.train.Registry.open", started)
    monkeypatch.chdir(tmp_path)


def refused(**config: object) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        run(TrainConfig(**{"sweep": ("sweep",), "objective": "tau", "fit": PROMPT, **config}))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.usefixtures("no_ray")
class TestRefuses:
    def test_missing_sweep(self) -> None:
        assert "sweep nowhere: no such" in refused(sweep=("nowhere",))
        write_sweep(Path("sweep"), synthetic_rows(10, 0))
        assert "sweep nowhere: no such" in refused(sweep=("sweep", "nowhere"))

    def test_empty_directory(self) -> None:
        Path("sweep").mkdir()
        assert "no Parquet files in sweep" in refused()

    def test_too_few_prompts(self) -> None:
        rows = synthetic_rows(20, 0)
        write_sweep(Path("sweep"), [dataclasses.replace(row, prompt=f"p{i % 7}") for i, row in enumerate(rows)])
        assert "7 different prompts; needed: 8" in refused()

    def test_one_candidate(self) -> None:
        write_sweep(Path("sweep"), [cut(row, 1) for row in synthetic_rows(10, 0)], metadata(candidates=[2]))
        assert "one candidate [2]" in refused()

    def test_mixed_pairs_in_one_sweep(self) -> None:
        write_sweep(Path("sweep"), synthetic_rows(10, 0))
        other = metadata(pair=PAIR._replace(draft="org/other-draft"))
        write_sweep(Path("sweep"), synthetic_rows(10, 1), other, "part-1")
        message = refused()
        assert "pair.draft: 'org/draft' and 'org/other-draft'" in message

    def test_sweeps_of_different_pairs(self) -> None:
        write_sweep(Path("sweep"), synthetic_rows(10, 0))
        other = metadata(pair=PAIR._replace(draft_revision="retrained"))
        write_sweep(Path("other"), synthetic_rows(10, 1), other)
        message = refused(sweep=("sweep", "other"))
        assert "sweep and other: made for different pairs or candidates" in message
        assert "pair.draft_revision: 'rev-d' and 'retrained'" in message

    def test_sweeps_of_different_candidates(self) -> None:
        write_sweep(Path("sweep"), synthetic_rows(10, 0))
        write_sweep(Path("other"), [cut(row, 3) for row in synthetic_rows(10, 1)], metadata(candidates=[2, 4, 6]))
        assert "(candidates: [2, 4, 6, 8] and [2, 4, 6])" in refused(sweep=("sweep", "other"))

    def test_the_same_prompt_in_two_sweeps(self) -> None:
        rows = synthetic_rows(20, 0)
        write_sweep(Path("sweep"), rows[:12])
        write_sweep(Path("other"), rows[11:])
        message = f"sweep other: prompt {rows[11].prompt_id} is in another of the sweeps"
        assert message in refused(sweep=("sweep", "other"))

    def test_tau_that_is_no_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = synthetic_rows(10, 0)
        rows[3] = dataclasses.replace(rows[3], taus=[float("nan"), *rows[3].taus[1:]])
        with monkeypatch.context() as unchecked:
            unchecked.setattr("blockpilot.sweep.rows._validate_all", lambda *_: None)
            write_sweep(Path("sweep"), rows)
        assert "tau of block size 2 is nan" in refused()

    def test_candidates_that_are_not_there(self) -> None:
        write_sweep(Path("sweep"), synthetic_rows(10, 0))
        assert "candidates (2, 3, 4): 3 is none of the sweep's [2, 4, 6, 8]" in refused(candidates=(2, 3, 4))
        assert "candidates (4, 2): each must be larger" in refused(candidates=(4, 2))
        assert "candidates (4,): at least 2 are needed" in refused(candidates=(4,))

    @pytest.mark.parametrize("change", [{"hidden": 0}, {"dropout": 1.0}, {"lr": 0.0}, {"patience": 0}, {"seed": -1}])
    def test_settings_that_cannot_be(self, change: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=rf"fit: {next(iter(change))} .*: must ") as caught:
            TrainConfig(fit=FitSettings(**change))
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("dense", [False, True])
    def test_steps_of_a_sweep_without_choices(self, dense: bool) -> None:
        rows = synthetic_rows(10, 0)
        write_sweep(Path("sweep"), rows if dense else list(map(not_dense, rows)))
        complaint = (
            "none of 10 rows has recorded choices of a draft: sweep with --method dense, or train --kind prompt"
        )
        assert complaint in refused(fit=STEP)

    def test_candidates_of_kind_step(self) -> None:
        with pytest.raises(ConfigError, match=r"candidates \(2, 4\): kind step has none; train --kind prompt"):
            TrainConfig(candidates=(2, 4))

    def test_throughput_without_the_price_of_a_step(self) -> None:
        write_sweep(Path("sweep"), synthetic_rows(10, 0))
        message = refused(objective="throughput")
        assert "sweep sweep: no price.json for objective 'throughput'" in message
        assert "--objective tau" in message
        (Path("sweep") / "price.json").write_text("{}")
        assert "sweep/price.json: not the step price of a pair" in refused(objective="throughput")

    @pytest.mark.parametrize("change", [{"pair": PAIR._replace(draft_revision="old")}, {"dtype": "bfloat16"}])
    def test_throughput_with_the_price_of_another_pair(self, change: dict[str, object]) -> None:
        write_sweep(Path("sweep"), synthetic_rows(10, 0))
        write_price(Path("sweep"), **change)
        message = refused(objective="throughput", fit=PROMPT)
        assert message.startswith("sweep/price.json: price of ")
        assert "draft_revision='rev-d'), float32" in message
        assert str(next(iter(change.values()))) in message
        assert refused(fit=STEP) == message  # which would keep it

    def test_leaving_everything_out(self) -> None:
        write_sweep(Path("sweep"), synthetic_rows(10, 0))
        assert "no rows are left without the sets other, synthetic" in refused(leave_out=("other", "synthetic"))

    def test_relative_output_in_a_submitted_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
        assert "runs/policy: must be absolute" in refused()


def run_job(folder: Path, *arguments: object) -> tuple[int, str]:
    """The job as a user runs it, in a folder where nothing is set up: exit code, and what it said."""
    output = folder.with_suffix(".said")
    job = Job([ROOT / "jobs" / "train.py", *arguments], cwd=folder, env=environment(), output=output)
    return job.wait(100), job.log


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS")}


def test_command_line_error_is_one_line(tmp_path: Path) -> None:
    assert run_job(tmp_path, "--sweep", "nowhere") == (2, "error: sweep nowhere: no such file or directory\n")
    assert not list(tmp_path.iterdir())


def test_the_command_line_has_few_options(tmp_path: Path) -> None:
    shown = re.findall(r"^\W*(--[a-z-]+)", run_job(tmp_path, "--help")[1], re.MULTILINE)
    assert len(set(shown)) == len(shown) <= 18
    assert {"--sweep", "--kind", "--hidden", "--relog"} <= set(shown)


def test_nothing_to_log(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    done = run_job(tmp_path, "--relog", "--output", "policy")
    assert done == (2, "error: output policy: no training.json, nothing to log\n")


# --- what is learned from ---


@pytest.fixture
def sweeps(tmp_path: Path) -> tuple[str, str]:
    """Two sweeps of one pair, with other settings and sets; the second one's first part is of a set of its own."""
    rows = [dataclasses.replace(row, temperature=1.0) for row in rows_with_choices(18, 1)]
    write_sweep(tmp_path / "one", rows_with_choices(24, 0))
    write_price(tmp_path / "one")
    others = [dataclasses.replace(row, prompt_set="other") for row in rows[:8]]
    write_sweep(tmp_path / "two", others, metadata(config={"seed": 0, "temperature": 1.0}))
    later = metadata(config={"seed": 0, "temperature": 1.0}, git_commit="later")
    write_sweep(tmp_path / "two", rows[8:], later, "part-1")
    return str(tmp_path / "one"), str(tmp_path / "two")


def dataset(folder: Path, **config: object) -> Dataset:
    return read_dataset(TrainConfig(**config), folder / "examples")  # type: ignore[arg-type]


def test_rows_of_several_sweeps_come_together(sweeps: tuple[str, str], tmp_path: Path) -> None:
    data = dataset(tmp_path, sweep=sweeps)
    assert data.rows.num_examples == (24 + 18) * NUM_PLACES
    assert Counter(data.rows.sets) == {"synthetic": 24 + 10, "other": 8}
    assert set(data.rows.prompts) == {prompt_key(f"prompt {s} {i}") for s, n in ((0, 24), (1, 18)) for i in range(n)}
    held_out = round(0.25 * 42)
    training, validation = split_steps(data.folder, 0.25, 0)
    assert (len(training), len(validation)) == ((42 - held_out) * NUM_PLACES, held_out * NUM_PLACES)
    assert int(read_steps(data.folder).drawn.sum()) == 18 * NUM_PLACES
    of_prompts = dataset(tmp_path, sweep=sweeps, fit=PROMPT)
    assert of_prompts.rows.num_examples == 42
    assert [len(side) for side in split_examples(of_prompts.folder, 0.25, 0)] == [42 - held_out, held_out]


def test_plain_decoding_is_a_candidate_when_cost_counts(sweeps: tuple[str, str], tmp_path: Path) -> None:
    data = dataset(tmp_path, sweep=sweeps, rows=4, fit=PROMPT)
    assert data.task is not None
    assert data.task.candidates == WITH_PLAIN
    assert data.price == PRICE
    drafted = [0.01 + 4 * 0.02 * (size - 1) for size in CANDIDATES]
    assert data.task.step_costs.tolist() == pytest.approx([1, *(1 + extra / 1.08 for extra in drafted)])
    alone = dataset(tmp_path, sweep=sweeps, rows=1, fit=PROMPT).task
    assert alone is not None
    assert alone.step_costs.tolist() == pytest.approx(
        [1, *(1 + (0.01 + 0.02 * (size - 1)) / 1.02 for size in CANDIDATES)]
    )
    assert (open_examples(data.folder).taus[:, 0] == 1).all()
    paper = dataset(tmp_path, sweep=sweeps, objective="tau", fit=PROMPT)
    assert paper.task is not None
    assert (paper.task.candidates, paper.price) == (tuple(CANDIDATES), None)
    assert len(set(paper.task.step_costs.tolist())) == 1


def test_a_step_policy_keeps_the_price_where_there_is_one(sweeps: tuple[str, str], tmp_path: Path) -> None:
    """It needs none: decoding measures its own."""
    for objective in ("tau", "throughput"):
        for place, there in zip(sweeps, (PRICE, None), strict=True):
            data = dataset(tmp_path, sweep=(place,), objective=objective)
            assert (data.price, data.task) == (there, None)


def test_some_of_the_candidates(sweeps: tuple[str, str], tmp_path: Path) -> None:
    data = dataset(tmp_path, sweep=sweeps[:1], fit=PROMPT, objective="tau", candidates=(2, 8))
    assert data.task is not None
    assert data.task.candidates == (2, 8)
    rows = sorted(synthetic_rows(24, 0), key=lambda row: row.prompt_id)
    wanted = torch.tensor([[row.taus[0], row.taus[3]] for row in rows])
    torch.testing.assert_close(open_examples(data.folder).taus, wanted, rtol=0, atol=1e-6)
    with_plain = dataset(tmp_path, sweep=sweeps[:1], fit=PROMPT, candidates=(2, 4)).task
    assert with_plain is not None
    assert with_plain.candidates == (1, 2, 4)


def test_sets_that_are_left_out(sweeps: tuple[str, str], tmp_path: Path) -> None:
    whole = dataset(tmp_path, sweep=sweeps)
    data = dataset(tmp_path, sweep=sweeps, leave_out=("other", "unknown"))
    assert data.rows.num_examples == (24 + 10) * NUM_PLACES
    assert set(data.rows.sets) == {"synthetic"}
    assert data.id != whole.id


@pytest.mark.parametrize("kind", ["prompt", "step"])
def test_the_order_of_parts_does_not_matter(kind: Kind, tmp_path: Path) -> None:
    rows, fit = rows_with_choices(30, 0), FitSettings(kind)
    write_sweep(tmp_path / "one", rows)
    for i, some in enumerate((rows[20:], rows[:20])):
        write_sweep(tmp_path / "two", some, part=f"part-{i}")
    first, second = (
        dataset(tmp_path / name, sweep=(str(tmp_path / name),), objective="tau", fit=fit) for name in ("one", "two")
    )
    assert first.id == second.id
    if kind == "prompt":
        for ours, theirs in zip(*(split_examples(d.folder, 0.2, 0) for d in (first, second)), strict=True):
            assert torch.equal(ours.taus, theirs.taus)
            assert torch.equal(ours.features.probs, theirs.features.probs)
    else:
        for ours, theirs in zip(*(split_steps(d.folder, 0.2, 0) for d in (first, second)), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(tuple(ours), tuple(theirs), strict=True))
    write_sweep(tmp_path / "two", rows[1:20], part="part-1")
    changed = dataset(tmp_path / "two", sweep=(str(tmp_path / "two"),), objective="tau", fit=fit)
    assert changed.id != first.id


@pytest.mark.parametrize("change", ["places", "ranks", "scores", "temperature"])
def test_other_steps_are_another_sweep(tmp_path: Path, change: str) -> None:
    """A training that was killed must not go on with the checkpoint of other examples."""
    rows = rows_with_choices(10, 0)
    write_sweep(tmp_path / "sweep", rows)
    first = dataset(tmp_path, sweep=(str(tmp_path / "sweep"),))
    before = read_steps(first.folder)
    columns = ("step_contexts", "step_embeddings", "step_ranks", "step_scores", "step_log_probs")
    halves = {name: getattr(rows[0], name)[: len(getattr(rows[0], name)) // 2] for name in columns}
    one: dict[str, Any] = {
        "places": {"step_places": rows[0].step_places[: NUM_PLACES // 2], **halves},
        "ranks": {"step_ranks": rows[1].step_ranks},
        "scores": {"step_scores": rows[1].step_scores},
        "temperature": {"temperature": 1.0},
    }[change]
    write_sweep(tmp_path / "sweep", [dataclasses.replace(rows[0], **one), *rows[1:]])
    other = dataset(tmp_path, sweep=(str(tmp_path / "sweep"),))
    now = read_steps(other.folder)
    alike = (a.shape == b.shape and torch.equal(a, b) for a, b in zip(tuple(before), tuple(now), strict=True))
    assert not all(alike)
    assert other.id != first.id


def test_a_run_is_named_by_what_its_result_depends_on(sweeps: tuple[str, str], tmp_path: Path) -> None:
    """Ray Train goes on with a run of the same name."""

    def name(**changes: object) -> str:
        config = TrainConfig(**{"sweep": sweeps, "fit": PROMPT, **changes})  # type: ignore[arg-type]
        data = read_dataset(config, tmp_path / "examples")
        return run_name(config, data)

    first = name()
    assert name(output=tmp_path / "x", max_failures=9, checkpoint_every=1, num_cpus=0.5) == first
    of_fit: dict[str, Any] = {
        **{"hidden": 8, "epochs": 3, "batch_size": 9, "lr": 0.1, "dropout": 0.1, "patience": 2, "seed": 2},
        **{"anneal": False, "weight_decay": 0.0, "max_support": 5, "kind": "step"},
    }
    others = {
        **{"validation": 0.3, "num_workers": 2, "rows": 4, "candidates": (2, 4)},
        **{"leave_out": ("other",), "sweep": sweeps[:1], "objective": "tau"},
    }
    changes: list[dict[str, object]] = [
        {"fit": dataclasses.replace(PROMPT, **{field: value})} for field, value in of_fit.items()
    ]
    changes += [{field: value} for field, value in others.items()]
    assert len({first, *(name(**change) for change in changes)}) == 1 + len(changes)


# --- whole runs ---

EPOCHS = 120
CHECKPOINTS = "policy/train/*/checkpoint_*/state.pt"
Start = Callable[[TrainConfig], Job]


PROGRAM = """
import sys
from jobs import train
from jobs.training.config import TrainConfig
try:
    train.run(TrainConfig.model_validate_json(sys.argv[1]))
except (ValueError, OSError) as error:
    sys.exit(f"error: {error}")
"""  # as a workflow does: not all settings are on the command line


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the train job."""
    jobs = []

    def start_job(config: TrainConfig) -> Job:
        arguments = ["-c", PROGRAM, config.model_dump_json()]
        jobs.append(Job(arguments, cwd=tmp_path, env=environment(), output=tmp_path / "stdout"))
        return jobs[-1]

    yield start_job
    for job in jobs:
        if job.poll() is None:
            job.terminate()
            job.wait(30)


def wait_for_checkpoint(folder: Path, job: Job) -> None:
    """Returns when there is one that was not there before."""
    before = set(folder.glob(CHECKPOINTS))
    job.wait_for(lambda: set(folder.glob(CHECKPOINTS)) - before)


@pytest.mark.ray
def test_kills_change_nothing(start: Start, tmp_path: Path) -> None:
    """Two data-parallel workers, one killed, then the driver killed: in the end the policy of plain `Fit`."""
    rows = synthetic_rows(240, 0)
    write_sweep(tmp_path / "sweep", rows[:100])
    write_sweep(tmp_path / "sweep", rows[100:], metadata(git_commit="later"), "part-1")
    write_price(tmp_path / "sweep")
    settings = FitSettings("prompt", hidden=64, epochs=EPOCHS, batch_size=16, lr=3e-4, dropout=0.0)
    config = TrainConfig(sweep=("sweep",), output=Path("policy"), fit=settings, num_workers=2, checkpoint_every=5)
    job = start(config)
    wait_for_checkpoint(tmp_path, job)
    workers = descendants(job.pid, "RayTrainWorker")
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    wait_for_checkpoint(tmp_path, job)
    job.kill()
    job = start(config)
    assert job.wait(300) == 0, job.log

    assert f"192 examples, 48 held back; {EPOCHS} epochs" in job.log
    assert "registered as blockpilot-target-1b version 1" in job.log
    policy = load_policy(tmp_path / "policy")
    assert isinstance(policy, PromptPolicy)
    assert policy.price == PRICE
    assert not (tmp_path / "policy" / "train").exists()  # no checkpoints left behind

    folder = tmp_path / "examples"
    write_examples(folder, [rows], WITH_PLAIN)
    training, validation = split_examples(folder, 0.2, 0)
    task = FitTask("throughput", WITH_PLAIN, torch.tensor(PRICE.relative(WITH_PLAIN, rows=1)))
    fit = Fit(new_network(training, VOCAB_SIZE, settings), training, validation, settings, task)
    losses_of = [fit.run_epoch() for _ in range(EPOCHS)]
    assert fit.done
    # 1440 steps of Adam; gradients are summed in another order over two ranks.
    expected = new_network(training, VOCAB_SIZE, settings)
    expected.load_state_dict(fit.best_weights())
    torch.testing.assert_close(
        predict(policy.network, validation), predict(expected, validation), rtol=0.01, atol=0.01
    )

    check_what_is_kept(tmp_path, rows, losses_of, config)


@pytest.mark.ray
def test_a_step_policy_is_fitted_once_reported_and_registered(start: Start, tmp_path: Path) -> None:
    """By one of two workers; the report is on screen, in the directory and in MLflow."""
    rows = rows_with_choices(60, 0)
    rows = [dataclasses.replace(row, temperature=float(i % 2)) for i, row in enumerate(rows)]
    write_sweep(tmp_path / "sweep", rows)
    write_price(tmp_path / "sweep")
    job = start(TrainConfig(sweep=("sweep",), output=Path("policy"), num_workers=2))
    assert job.wait(300) == 0, job.log
    policy = load_policy(tmp_path / "policy")
    assert isinstance(policy, StepPolicy)
    assert (policy.price, policy.info.vocab_size, policy.info.pair) == (PRICE, VOCAB_SIZE, PAIR)
    assert sorted(file.name for file in (tmp_path / "policy").iterdir() if file.is_file() and file.suffix) == [
        *("learned_from.json", "policy.json", "price.json", "training.json")
    ]

    write_steps(tmp_path / "examples", [rows])
    training, validation = split_steps(tmp_path / "examples", 0.2, 0)
    expected = fit_prior(outcomes_of(training))
    assert np.allclose(policy.weights, expected.weights)  # other threads sum in another order
    trained, own = losses(expected, outcomes_of(validation))
    assert trained < own - 0.01  # choices are right 0.7 times as often as the draft says
    errors = [mean_error(reliability(each, validation)) for each in (expected, None)]
    assert errors[0] < errors[1]
    num = len(validation)
    said = (
        f"train: {60 * NUM_PLACES - num} examples, {num} held back; policy in policy, registered as "
        "blockpilot-target-1b version 1\n"
        f"train: held-back choices: {trained:.3f} nats a slot, by the draft's own probabilities {own:.3f}; "
        f"mean error of a node's chance {errors[0]:.3f}, of the draft's own {errors[1]:.3f}"
    )
    assert said in job.log

    registry = Registry.open(f"sqlite:///{tmp_path}/mlflow.db")
    (version,) = registry.versions("blockpilot-target-1b")
    assert version.tags.items() >= {**PAIR._asdict(), "kind": "step", "format": "5"}.items()
    assert float(version.tags["nats.trained"]) == pytest.approx(trained)
    assert version.run_id is not None
    metrics = registry._client.get_run(version.run_id).data.metrics
    assert (metrics["nats_trained"], metrics["nats_own"]) == pytest.approx((trained, own))
    assert (metrics["reliability_error_trained"], metrics["reliability_error_draft"]) == pytest.approx(errors)
    artifacts = {item.path for item in registry._client.list_artifacts(version.run_id)}
    assert artifacts == {"training.json", "reliability.json"}
    there = load_policy(registry.download(version, tmp_path / "downloaded"))
    assert isinstance(there, StepPolicy)
    assert np.array_equal(there.weights, policy.weights)
    assert LearnedFrom.read(tmp_path / "downloaded").prompts == {prompt_key(row.prompt) for row in rows}


OTHER = """
import os, time
from pathlib import Path
import ray
from jobs.common.cluster import connect
connect(include_dashboard=True)
# As `ray start` does, for Ray to take this for the machine's latest cluster.
(Path(os.environ["RAY_TMPDIR"]) / "ray" / "ray_current_cluster").write_text(ray.get_runtime_context().gcs_address)
print("another cluster", flush=True)
time.sleep(10**6)
"""


@pytest.mark.ray
def test_another_cluster_on_the_machine_is_left_alone(tmp_path: Path) -> None:
    """It is the one that Ray finds first, and knows nothing of this training's controller."""
    write_sweep(tmp_path / "sweep", synthetic_rows(60, 0))
    settings = FitSettings("prompt", hidden=32, epochs=400, batch_size=16, lr=1e-3, patience=400)
    config = TrainConfig(sweep=("sweep",), output=Path("policy"), fit=settings, objective="tau", checkpoint_every=50)
    with tempfile.TemporaryDirectory(prefix="bp", ignore_cleanup_errors=True) as folder:  # short: sockets are in it
        both = environment() | {"RAY_TMPDIR": folder, "RAY_DEDUP_LOGS": "0", "PYTHONPATH": str(ROOT)}
        other = Job(["-c", OTHER], cwd=tmp_path, env=both, output=tmp_path / "other")
        other.wait_for(lambda: "another cluster" in other.log)
        job = Job(["-c", PROGRAM, config.model_dump_json()], cwd=tmp_path, env=both, output=tmp_path / "stdout")
        assert job.wait(300) == 0, job.log
        assert "policy in policy" in job.log
        assert other.poll() is None
        assert not descendants(other.pid, "ray::Train")
        other.terminate()
        other.wait(60)
    for complaint in ("multiple active Ray instances", "Cleaning up placement group"):
        assert complaint not in job.log


def check_what_is_kept(
    folder: Path, rows: Sequence[SweepRow], losses: Sequence[dict[str, float]], config: TrainConfig
) -> None:
    """The policy's directory, the MLflow run and the version tell what was learned from what."""
    sweep_id = dataset(folder, sweep=(str(folder / "sweep"),), fit=config.fit).id
    learned_from = LearnedFrom.read(folder / "policy")
    assert learned_from.prompts == {prompt_key(row.prompt) for row in rows}
    assert learned_from.taus == {0.0: Summary().add(rows).tau_curve}
    found = json.loads((folder / "policy" / "training.json").read_text())
    assert found["params"]["sweep_id"] == load_policy(folder / "policy").info.training["sweep_id"] == sweep_id
    assert (found["num_epochs"], len(found["history"])) == (EPOCHS, EPOCHS)
    num_train, _ = found["num_examples"]
    assert found["balance"].keys() == set(map(str, WITH_PLAIN))
    assert sum(found["balance"].values()) == num_train
    assert max(found["balance"], key=found["balance"].get) != "1"

    registry = Registry.open(f"sqlite:///{folder}/mlflow.db")
    (version,) = registry.versions("blockpilot-target-1b")
    assert version.tags.items() >= {**PAIR._asdict(), "candidates": "1,2,4,6,8", "sweep_id": sweep_id}.items()
    kind = {"kind": "prompt", "objective": "throughput"}
    assert version.tags.items() >= kind.items()
    assert version.run_id is not None
    for name in losses[0]:
        history = registry._client.get_metric_history(version.run_id, name)
        assert [point.step for point in history] == list(range(1, EPOCHS + 1))  # each epoch once, despite the kills
        assert [point.value for point in history] == pytest.approx([of[name] for of in losses], rel=1e-2)
    recorded = registry._client.get_run(version.run_id)
    assert recorded.info.status == "FINISHED"
    assert recorded.data.tags["sweep_id"] == sweep_id
    assert (recorded.data.params["epochs"], recorded.data.params["num_workers"]) == (str(EPOCHS), "2")
    assert recorded.data.metrics["lookup_policy"] == pytest.approx(found["report"]["policy"])
    assert [item.path for item in registry._client.list_artifacts(version.run_id)] == ["training.json"]
    downloaded = registry.download(version, folder / "downloaded")
    there, here = (load_policy(each) for each in (downloaded, folder / "policy"))
    assert isinstance(there, PromptPolicy)
    assert isinstance(here, PromptPolicy)
    weights = there.network.state_dict()
    assert all(torch.equal(weights[name], t) for name, t in here.network.state_dict().items())
    assert LearnedFrom.read(downloaded) == learned_from


@pytest.mark.ray
def test_neither_a_full_disk_nor_a_lost_store_costs_a_policy(start: Start, tmp_path: Path) -> None:
    """What could not be written or logged is later."""
    write_sweep(tmp_path / "sweep", synthetic_rows(60, 0))
    settings = FitSettings("prompt", hidden=32, epochs=10, batch_size=16, lr=1e-3, patience=5)
    (tmp_path / "policy" / LEARNED_FROM_FILE).mkdir(parents=True)  # where a file has to go
    store = tmp_path / "mlflow.db"
    sweep = (str(tmp_path / "sweep"),)
    config = TrainConfig(sweep=sweep, output=Path("policy"), fit=settings, objective="tau")

    job = start(config)
    assert job.wait(300) == 1
    assert "error: [Errno 21] Is a directory" in job.log
    (tmp_path / "policy" / LEARNED_FROM_FILE).rmdir()

    job = start(config)
    whole = store.read_bytes()
    job.wait_for(lambda: "Started a local Ray instance" in job.log)
    store.write_bytes(b"no database any more " * 1000)
    assert job.wait(300) == 1
    *_, error = job.log.splitlines()
    assert error.startswith(f"error: MLflow store sqlite:///{store}: ")
    assert error.endswith("The results are in policy; --relog logs them later")
    policy = load_policy(tmp_path / "policy")
    written = (tmp_path / "policy" / "training.json").read_bytes()

    store.write_bytes(whole)
    code, said = run_job(tmp_path, "--relog", "--output", "policy")
    assert code == 0, said
    assert "policy in policy, registered as blockpilot-target-1b version 1" in said
    assert (tmp_path / "policy" / "training.json").read_bytes() == written
    code, said = run_job(tmp_path, "--relog", "--output", "policy")  # told again, registered once
    assert code == 0, said
    assert "registered as blockpilot-target-1b version 1" in said
    found = json.loads(written)
    best = min(range(len(found["history"])), key=lambda i: found["history"][i]["validation_loss"]) + 1
    assert policy.info.training["best_epoch"] == best

    registry = Registry.open(f"sqlite:///{store}")
    (version,) = registry.versions("blockpilot-target-1b")
    assert version.run_id is not None
    recorded = registry._client.get_run(version.run_id)
    assert recorded.info.status == "FINISHED"
    assert recorded.data.params["hidden"] == "32"
    assert recorded.data.tags["sweep_id"] == version.tags["sweep_id"] == found["params"]["sweep_id"]
    losses = registry._client.get_metric_history(version.run_id, "validation_loss")
    assert [point.value for point in losses] == [epoch["validation_loss"] for epoch in found["history"]]
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


@pytest.mark.parametrize("when", range(8))
@pytest.mark.parametrize("kinds", [("prompt", "prompt"), ("prompt", "step"), ("step", "prompt")])
def test_a_kill_while_a_policy_is_saved_mixes_no_two(
    when: int, kinds: tuple[Kind, Kind], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a policy has learned from is its own, whichever file was the last one written."""
    old, new = (
        saved_training(tmp_path, rows, seed, kind)
        for (rows, seed), kind in zip(((40, 0), (60, 1)), kinds, strict=True)
    )
    old()
    before = load_policy(tmp_path / "policy")
    replace, done = Path.replace, itertools.count()

    def killed(self: Path, target: Path) -> Path:
        if next(done) == when:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with contextlib.suppress(KeyboardInterrupt):
        new()
    monkeypatch.setattr(Path, "replace", replace)
    if (tmp_path / "policy" / "policy.json").exists():
        num_prompts = len(LearnedFrom.read(tmp_path / "policy").prompts)
        assert num_prompts == (40 if load_policy(tmp_path / "policy").info == before.info else 60)
    new()
    assert len(LearnedFrom.read(tmp_path / "policy").prompts) == 60
    assert load_policy(tmp_path / "policy").info != before.info
    assert not (tmp_path / "policy" / ".new").exists()


def test_a_driver_that_lost_its_lease_saves_no_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another driver takes the output over while Ray Train works."""
    write_sweep(tmp_path / "sweep", rows_with_choices(40, 0))
    output = tmp_path / "policy"

    def train(*_: object) -> tuple[dict[str, object], dict[str, float]]:
        take_over(output)
        return {}, {}

    for name in ("connect", "scaling_config"):
        monkeypatch.setattr(f"jobs.train.{name}", lambda *_, **__: None)
    monkeypatch.setattr("jobs.train.train", train)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="process id 7 on elsewhere has taken over; this driver stops"):
        run(TrainConfig(sweep=(str(tmp_path / "sweep"),), objective="tau", output=output))
    assert not (output / "policy.json").exists()
    assert (output / "train" / "examples").exists()  # they are the new driver's now
