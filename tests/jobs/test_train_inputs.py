"""Training data of the train job; sweeps that cannot be trained on are refused before Ray starts."""

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from blockpilot.policy.dataset import open_examples, prompt_key, read_steps, split_examples, split_steps
from blockpilot.policy.training import FitSettings
from blockpilot.sweep.rows import Metadata, SweepRow
from helpers.command_line import error_of
from helpers.sweeps import CANDIDATES, NUM_PLACES, PAIR, metadata, synthetic_rows
from helpers.trainings import PRICE, WITH_PLAIN, dataset, rows_with_choices, run_job, write_price, write_sweep
from jobs.common.config import ConfigError
from jobs.common.registry import Registry
from jobs.train import run, run_name
from jobs.training.config import TrainConfig
from jobs.training.dataset import read_dataset

PROMPT, STEP = FitSettings("prompt"), FitSettings("step")


def cut(row: SweepRow, num: int) -> SweepRow:
    """Row with its first `num` candidates only."""
    lists = ("candidates", "taus", "num_steps", "emitted_histograms", "accepted")
    return dataclasses.replace(row, **{name: getattr(row, name)[:num] for name in lists})


def not_dense(row: SweepRow) -> SweepRow:
    """Row as a sweep by `replay` records it."""
    return dataclasses.replace(row, accepted=[], step_places=[], step_contexts=b"", step_embeddings=b"")


# --- bad input ---


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fail if Ray or MLflow starts: bad input must be refused before."""
    for name in ("connect", "Registry.open"):
        monkeypatch.setattr(f"jobs.train.{name}", lambda **_: pytest.fail("started Ray or MLflow"))
    monkeypatch.chdir(tmp_path)


def refused(**config: object) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        run(TrainConfig(**{"sweep": ("sweep",), "objective": "tau", "fit": PROMPT, **config}))
    assert "\n" not in str(caught.value)
    return str(caught.value)


ROWS = synthetic_rows(20, 0)
OF_SEVEN_PROMPTS = [dataclasses.replace(row, prompt=f"p{i % 7}") for i, row in enumerate(ROWS)]
OTHERS = synthetic_rows(10, 1)
RETRAINED = metadata(pair=PAIR._replace(draft_revision="retrained"))
NO_CHOICES = "none of 20 rows has recorded choices of a draft: sweep with --method dense, or train --kind prompt"


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("rows", "made_by", "config", "message"),
    [
        (ROWS, metadata(), {"sweep": ("sweep", "nowhere")}, "sweep nowhere: no such"),
        ([], metadata(), {}, "no Parquet files in sweep"),
        (OF_SEVEN_PROMPTS, metadata(), {}, "7 different prompts; needed: 8"),
        ([cut(row, 1) for row in ROWS], metadata(candidates=[2]), {}, "one candidate [2]"),
        (
            ROWS,
            metadata(),
            {"candidates": (2, 3, 4)},
            "candidates (2, 3, 4): 3 is not a candidate of the sweep [2, 4, 6, 8]",
        ),
        (ROWS, metadata(), {"candidates": (4, 2)}, "candidates (4, 2): each must be larger"),
        (ROWS, metadata(), {"candidates": (4,)}, "candidates (4,): at least 2 are needed"),
        (ROWS, metadata(), {"fit": STEP}, NO_CHOICES),
        (list(map(not_dense, ROWS)), metadata(), {"fit": STEP}, NO_CHOICES),
        (ROWS, metadata(), {"leave_out": ("synthetic",)}, "no rows are left without the sets synthetic"),
    ],
)
def test_sweeps_that_cannot_be_trained_on_are_refused(
    rows: list[SweepRow], made_by: Metadata, config: dict[str, object], message: str
) -> None:
    Path("sweep").mkdir()
    if rows:
        write_sweep(Path("sweep"), rows, made_by)
    assert message in refused(**config)


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("rows", "made_by", "message"),
    [
        (OTHERS, RETRAINED, "(pair.draft_revision: 'rev-d' and 'retrained')"),
        ([cut(row, 3) for row in OTHERS], metadata(candidates=[2, 4, 6]), "(candidates: [2, 4, 6, 8] and [2, 4, 6])"),
        (ROWS[19:], metadata(), f"sweep other: prompt {ROWS[19].prompt_id} is in another of the sweeps"),
    ],
)
def test_sweeps_that_do_not_fit_together_are_refused(rows: list[SweepRow], made_by: Metadata, message: str) -> None:
    write_sweep(Path("sweep"), ROWS)
    write_sweep(Path("other"), rows, made_by)
    assert message in refused(sweep=("sweep", "other"))
    if made_by == RETRAINED:  # two parts of one sweep, too
        write_sweep(Path("sweep"), rows, made_by, "part-1")
        assert message[1:-1] in refused()


def test_settings_that_cannot_be_are_refused() -> None:
    changes: list[dict[str, Any]] = [{"hidden": 0}, {"dropout": 1.0}, {"lr": 0.0}, {"patience": 0}, {"seed": -1}]
    for change in changes:
        with pytest.raises(ConfigError, match=rf"fit: {next(iter(change))} .*: must ") as caught:
            TrainConfig(fit=FitSettings(**change))
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"candidates \(2, 4\): kind step has none; train --kind prompt"):
        TrainConfig(candidates=(2, 4))


@pytest.mark.usefixtures("no_ray")
def test_throughput_needs_the_step_price_of_the_sweeps_pair() -> None:
    write_sweep(Path("sweep"), ROWS)
    message = refused(objective="throughput")
    assert "sweep sweep: no price.json for objective 'throughput'" in message
    assert "--objective tau" in message
    Path("sweep", "price.json").write_text("{}")
    assert "sweep/price.json: not the step price of a pair" in refused(objective="throughput")
    for name, value in (("pair", PAIR._replace(draft_revision="old")), ("dtype", "bfloat16")):
        write_price(Path("sweep"), **{name: value})
        message = refused(objective="throughput")
        assert message.startswith("sweep/price.json: price of ")
        assert "draft_revision='rev-d'), float32" in message
        assert str(value) in message
        assert refused(fit=STEP) == message  # which would store the price


def test_the_command_line(tmp_path: Path, registry: Registry) -> None:
    """One-line error for bad input, without a file; --help shows only the important ones of the many options."""
    (folder := tmp_path / "folder").mkdir()
    assert run_job(folder, "--sweep", "nowhere") == (2, "error: sweep nowhere: no such file or directory\n")
    assert not list(folder.iterdir())
    options = re.findall(r"^\W*(--[a-z-]+)", run_job(folder, "--help")[1], re.MULTILINE)
    assert len(set(options)) == len(options) <= 18
    assert {"--sweep", "--kind", "--hidden", "--relog"} <= set(options)
    error = error_of(TrainConfig, run, "--relog --output folder")
    assert error == "error: output folder: no training.json, nothing to log\n"


# --- training data ---


@pytest.fixture
def sweeps(tmp_path: Path) -> tuple[str, str]:
    """Two sweeps of one pair with different settings; the first part of the second has another prompt set."""
    rows = [dataclasses.replace(row, temperature=1.0) for row in rows_with_choices(18, 1)]
    write_sweep(tmp_path / "one", rows_with_choices(24, 0))
    write_price(tmp_path / "one")
    other_rows = [dataclasses.replace(row, prompt_set="other") for row in rows[:8]]
    write_sweep(tmp_path / "two", other_rows, metadata(config={"seed": 0, "temperature": 1.0}))
    later_metadata = metadata(config={"seed": 0, "temperature": 1.0}, git_commit="later")
    write_sweep(tmp_path / "two", rows[8:], later_metadata, "part-1")
    return str(tmp_path / "one"), str(tmp_path / "two")


def test_rows_of_several_sweeps_come_together(sweeps: tuple[str, str], tmp_path: Path) -> None:
    data = dataset(tmp_path, sweep=sweeps)
    assert data.rows.num_examples == (24 + 18) * NUM_PLACES
    assert Counter(data.rows.sets) == {"synthetic": 24 + 10, "other": 8}
    assert set(data.rows.prompts) == {prompt_key(f"prompt {s} {i}") for s, n in ((0, 24), (1, 18)) for i in range(n)}
    held_out = round(0.25 * 42)
    training, validation = split_steps(data.folder, 0.25, 0)
    assert (len(training), len(validation)) == ((42 - held_out) * NUM_PLACES, held_out * NUM_PLACES)
    assert int(read_steps(data.folder).drawn.sum()) == 18 * NUM_PLACES
    prompt_data = dataset(tmp_path, sweep=sweeps, fit=PROMPT)
    assert prompt_data.rows.num_examples == 42
    assert [len(side) for side in split_examples(prompt_data.folder, 0.25, 0)] == [42 - held_out, held_out]


def test_plain_decoding_is_a_candidate_when_cost_counts(sweeps: tuple[str, str], tmp_path: Path) -> None:
    data = dataset(tmp_path, sweep=sweeps, rows=4, fit=PROMPT)
    assert data.task is not None
    assert data.task.candidates == WITH_PLAIN
    assert data.price == PRICE
    draft_costs = [0.01 + 4 * 0.02 * (size - 1) for size in CANDIDATES]
    assert data.task.step_costs.tolist() == pytest.approx([1, *(1 + extra / 1.08 for extra in draft_costs)])
    single_row_task = dataset(tmp_path, sweep=sweeps, rows=1, fit=PROMPT).task
    assert single_row_task is not None
    assert single_row_task.step_costs.tolist() == pytest.approx(
        [1, *(1 + (0.01 + 0.02 * (size - 1)) / 1.02 for size in CANDIDATES)]
    )
    assert (open_examples(data.folder).taus[:, 0] == 1).all()
    tau_data = dataset(tmp_path, sweep=sweeps, objective="tau", fit=PROMPT)
    assert tau_data.task is not None
    assert (tau_data.task.candidates, tau_data.price) == (tuple(CANDIDATES), None)
    assert len(set(tau_data.task.step_costs.tolist())) == 1
    for sweep, price in zip(sweeps, (PRICE, None), strict=True):  # a step policy needs none: decoding measures it
        step_data = dataset(tmp_path, sweep=(sweep,))
        assert (step_data.price, step_data.task) == (price, None)


def test_candidates_and_sets_are_those_asked_for(sweeps: tuple[str, str], tmp_path: Path) -> None:
    data = dataset(tmp_path, sweep=sweeps[:1], fit=PROMPT, objective="tau", candidates=(2, 8))
    assert data.task is not None
    assert data.task.candidates == (2, 8)
    rows = sorted(synthetic_rows(24, 0), key=lambda row: row.prompt_id)
    taus = torch.tensor([[row.taus[0], row.taus[3]] for row in rows])
    torch.testing.assert_close(open_examples(data.folder).taus, taus, rtol=0, atol=1e-6)
    plain_task = dataset(tmp_path, sweep=sweeps[:1], fit=PROMPT, candidates=(2, 4)).task
    assert plain_task is not None
    assert plain_task.candidates == (1, 2, 4)
    filtered_data = dataset(tmp_path, sweep=sweeps, leave_out=("other", "unknown"))
    assert filtered_data.rows.num_examples == (24 + 10) * NUM_PLACES
    assert set(filtered_data.rows.sets) == {"synthetic"}
    assert filtered_data.id != dataset(tmp_path, sweep=sweeps).id


def test_a_dataset_is_identified_by_its_rows_and_steps_in_any_order(tmp_path: Path) -> None:
    """Id of a dataset from its rows: a killed training must not resume from a checkpoint of other examples."""
    first, *other_rows = rows_with_choices(10, 0)
    columns = ("step_contexts", "step_embeddings", "step_ranks", "step_scores", "step_log_probs")
    halves = {name: getattr(first, name)[: len(getattr(first, name)) // 2] for name in columns}
    changes: list[dict[str, Any]] = [
        {"step_places": first.step_places[: NUM_PLACES // 2], **halves},
        {"step_ranks": other_rows[0].step_ranks},
        {"step_scores": other_rows[0].step_scores},
        {"temperature": 1.0},
    ]

    def dataset_id(*parts: list[SweepRow]) -> str:
        for i, rows in enumerate(parts):
            write_sweep(tmp_path / "sweep", rows, part=f"part-{i}")
        return dataset(tmp_path, sweep=(str(tmp_path / "sweep"),)).id

    ids = [dataset_id([dataclasses.replace(first, **change), *other_rows]) for change in ({}, *changes)]
    assert len({*ids, dataset_id(other_rows)}) == len(changes) + 2
    assert dataset_id(other_rows[5:], [first, *other_rows[:5]]) == ids[0]


def test_a_run_is_named_by_what_its_result_depends_on(sweeps: tuple[str, str], tmp_path: Path) -> None:
    """Different name for every setting that affects the result, since Ray Train resumes a run of the same name."""

    def name(**changes: object) -> str:
        config = TrainConfig(**{"sweep": sweeps, "fit": PROMPT, **changes})  # type: ignore[arg-type]
        data = read_dataset(config, tmp_path / "examples")
        return run_name(config, data)

    first = name()
    assert name(output=tmp_path / "x", max_failures=9, checkpoint_every=1, num_cpus=0.5) == first
    fit_settings: dict[str, Any] = {
        **{"hidden": 8, "epochs": 3, "batch_size": 9, "lr": 0.1, "dropout": 0.1, "patience": 2, "seed": 2},
        **{"anneal": False, "weight_decay": 0.0, "max_support": 5, "kind": "step"},
    }
    config_settings = {
        **{"validation": 0.3, "num_workers": 2, "rows": 4, "candidates": (2, 4)},
        **{"leave_out": ("other",), "sweep": sweeps[:1], "objective": "tau"},
    }
    changes: list[dict[str, object]] = [
        {"fit": dataclasses.replace(PROMPT, **{field: value})} for field, value in fit_settings.items()
    ]
    changes += [{field: value} for field, value in config_settings.items()]
    assert len({first, *(name(**change) for change in changes)}) == 1 + len(changes)
