"""Pictures that evaluations, sweeps and trainings write beside their output."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from blockpilot.evaluation.statistics import MethodRun, Totals
from blockpilot.prompts.files import Message, Prompt
from blockpilot.sweep.rows import SweepRow
from blockpilot.sweep.summary import Summary
from helpers.prices import price
from helpers.sweeps import PAIR, metadata, synthetic_rows
from jobs.common.registry import Registry
from jobs.evaluation import inputs, result
from jobs.evaluation.actor import Setting
from jobs.evaluation.inputs import ORACLE, POLICY, EvaluateConfig, Plan
from jobs.sweeping.screen import pictures, show

PRICE = price(pair=PAIR, rows=4, row_s=0.1, launch_s=0.2, slot_s=0.05, token_s=0.05, error=0.034)
SPEEDS = {"AR": 10.0, "B=2": 12.0, "B=4": 14.0, POLICY: 14.5, ORACLE: 15.0}


def is_png(content: bytes) -> bool:
    return content.startswith(b"\x89PNG")


def test_an_evaluation_draws_its_figures_and_logs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    prompts = tuple(Prompt(name, (Message("user", f"{name} {i}"),)) for name in ("maths", "code") for i in range(2))
    plan = Plan(prompts, inputs.group(prompts, 1), None, {POLICY: tmp_path}, None, None)
    methods = {name: {"AR": 1, "B=2": 2, "B=4": 4}.get(name) for name in SPEEDS}
    runs = [
        MethodRun(name, number, 0, Totals(1, 100, 100 / speed + 0.1 * number, 90, 40, 9.0, 40, 99, 120, 1))
        for number, (name, speed) in product(range(len(prompts)), SPEEDS.items())
    ]
    config = EvaluateConfig(prompts=("demo",), output=tmp_path / "evaluate")
    result.save(config, plan, Setting(PAIR, "float32", "cpu", methods, PRICE, 64, {}, {}, {}), runs)
    assert all(is_png((config.output / name).read_bytes()) for name in result.PICTURES)
    registry = Registry.open()
    logged = result.log(config.output, registry)
    files = {item.path for item in registry._client.list_artifacts(logged.run_id)}
    assert files >= {*result.PICTURES, result.RESULT_FILE, result.TABLE_FILE}


def with_trees(row: SweepRow) -> SweepRow:
    """Also with what the draft proposes: right choices that trees of so many nodes hold."""
    num = 7 * len(row.step_places)
    offers = {"step_ranks": bytes(num), "step_scores": bytes(16 * num), "step_log_probs": bytes(16 * num)}
    return replace(row, **offers, step_nodes=bytes([1, 2, 4, 8, 16, 32, 64] * len(row.step_places)))


def test_a_sweep_shows_tau_by_prompt_set(capsys: pytest.CaptureFixture[str]) -> None:
    rows = synthetic_rows(20, 0)
    halves = {"maths": rows[:12], "code": rows[12:]}
    by_set = {name: Summary().add(of_set) for name, of_set in halves.items()}
    show(Summary().add(rows), by_set, metadata(), "dense", PRICE)
    _, table = capsys.readouterr().out.split("tau by prompt set")
    assert "code (8)" in table
    assert "maths (12)" in table
    (line,) = [line for line in table.splitlines() if line.startswith("│ 4 ")]
    assert [float(cell) for cell in line.strip("│").split("│")[1:]] == pytest.approx(
        [by_set[name].tau_curve[4] for name in ("code", "maths")], abs=5e-4
    )


@pytest.mark.parametrize("has_trees", [True, False])
@pytest.mark.parametrize("priced", [True, False])
def test_a_sweep_draws_its_curves(has_trees: bool, priced: bool) -> None:
    rows = [with_trees(row) if has_trees else row for row in synthetic_rows(8, 0)]
    summary = Summary().add(rows)
    drawn = pictures(summary, {"all": summary}, 8, PRICE if priced else None)
    assert drawn.keys() == ({"tau_curves.png", "trees.png"} if has_trees else {"tau_curves.png"})
    assert all(map(is_png, drawn.values()))


def test_totals_by_set_add_up_to_those_of_all_rows() -> None:
    rows = [with_trees(row) for row in synthetic_rows(12, 0)]
    parts = [Summary().add(rows[:5]), Summary().add(rows[5:])]
    assert Summary.total(parts) == Summary().add(rows)
