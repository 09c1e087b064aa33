"""Pictures and tables of a sweep."""

from dataclasses import replace

import pytest

from blockpilot.sweep.rows import SweepRow
from blockpilot.sweep.summary import Summary
from helpers.prices import price
from helpers.sweeps import PAIR, metadata, synthetic_rows
from jobs.sweeping.screen import pictures, show

PRICE = price(pair=PAIR, rows=4, row_s=0.1, launch_s=0.2, slot_s=0.05, token_s=0.05, error=0.034)


def is_png(content: bytes) -> bool:
    return content.startswith(b"\x89PNG")


def with_trees(row: SweepRow) -> SweepRow:
    """Row with recorded choices of the draft, accepted up to depths 1 to 7 by trees of 1 to 64 nodes."""
    num = 7 * len(row.step_places)
    choices = {"step_ranks": bytes(num), "step_scores": bytes(16 * num), "step_log_probs": bytes(16 * num)}
    return replace(row, **choices, step_nodes=bytes([1, 2, 4, 8, 16, 32, 64] * len(row.step_places)))


def test_a_sweep_shows_tau_by_prompt_set(capsys: pytest.CaptureFixture[str]) -> None:
    rows = synthetic_rows(20, 0)
    halves = {"maths": rows[:12], "code": rows[12:]}
    by_set = {name: Summary().add(set_rows) for name, set_rows in halves.items()}
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
    images = pictures(summary, {"all": summary}, 8, PRICE if priced else None)
    assert images.keys() == ({"tau_curves.png", "trees.png"} if has_trees else {"tau_curves.png"})
    assert all(map(is_png, images.values()))


def test_totals_by_set_add_up_to_those_of_all_rows() -> None:
    rows = [with_trees(row) for row in synthetic_rows(12, 0)]
    parts = [Summary().add(rows[:5]), Summary().add(rows[5:])]
    assert Summary.total(parts) == Summary().add(rows)
