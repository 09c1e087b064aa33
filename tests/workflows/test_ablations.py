"""The policy ablations: every variant is a valid training, fits are kept, and the table compares them."""

import json
from pathlib import Path

import pytest

from blockpilot.control.price import StepCosts
from blockpilot.evaluation.step_costs import COSTS_FILE, costs_to_json
from blockpilot.sweep.rows import write_rows
from helpers.sweeps import CANDIDATES, PAIR, metadata, synthetic_rows
from jobs.train import TrainConfig
from workflows.ablations import AblationsConfig, Datasets, run, variants

CHOSEN = ("input top_k", "k=1: B=4..6, tau", "every step: scalars")


def a_sweep(folder: Path) -> str:
    write_rows(folder / "rows" / "part-0.parquet", synthetic_rows(40, 0), metadata())
    seconds = tuple((1.0 + 0.1 * b,) for b in (1, *CANDIDATES))
    costs = StepCosts(PAIR, "float32", "cpu, 1 threads", (1, *CANDIDATES), (1,), 64, seconds, seconds, seconds)
    (folder / COSTS_FILE).write_text(costs_to_json(costs))
    return str(folder)


def test_every_variant_is_a_training() -> None:
    found = variants((1, 2, 3, 4, 5, 6, 7, 8), (100,))
    configs = [TrainConfig(**changes) for changes in found.values()]
    assert len({config.model_dump_json() for config in configs}) == len(configs)  # each differs from all others
    assert [found[f"k={k}: B={5 - k}..{5 + k}, tau"]["candidates"] for k in (1, 3)] == [
        (4, 5, 6),
        (2, 3, 4, 5, 6, 7, 8),
    ]


def test_unknown_variants_are_refused(tmp_path: Path) -> None:
    config = AblationsConfig(sweep=(a_sweep(tmp_path / "sweep"),), output=tmp_path / "out", variants=("nope",))
    with pytest.raises(ValueError, match="variants 'nope': must be of paper's: class, probs"):
        run(config)


def test_fits_that_differ_in_seed_or_network_read_the_same_examples(tmp_path: Path) -> None:
    """Written anew beside a fit that reads them, they were lost to it."""
    sweep = (a_sweep(tmp_path / "sweep"),)
    data, base = Datasets(tmp_path), TrainConfig(sweep=sweep, reads="prefill", head="class", inputs=("probs",))
    first = data.of(base)
    assert data.of(base.model_copy(update={"seed": 1, "hidden": 64, "num_prompts": 20})) is first
    others = [{"objective": "tau"}, {"candidates": (4, 6)}, {"reads": "step", "head": "tau", "inputs": ("context",)}]
    folders = {data.of(base.model_copy(update=change)).folder for change in others}
    assert len({first.folder, *folders}) == 4


@pytest.mark.ray
def test_fits_are_kept_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "workflows.ablations.PAPER", {"head": "class", "reads": "prefill", "inputs": ("probs",), "epochs": 2}
    )
    config = AblationsConfig(
        sweep=(a_sweep(tmp_path / "sweep"),), output=tmp_path / "out", variants=CHOSEN, seeds=2, num_prompts=()
    )
    table = run(config)
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == list(CHOSEN)
    assert table + "\n" == (tmp_path / "out" / "table.md").read_text()
    fits = json.loads((tmp_path / "out" / "fits.json").read_text())
    assert len(fits) == 6
    assert all(fit["gain_low"] <= fit["gain"] <= fit["gain_high"] for fit in fits.values())
    assert all(fit["oracle"] >= fit["best_fixed"] for fit in fits.values())
    before = capsys.readouterr().out
    assert before.count("to come") == 6
    assert run(config) == table
    assert "to come" not in capsys.readouterr().out  # nothing was fitted again
