"""Export job on a synthetic sweep: the options in the file follow from the rows and the step price."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from blockpilot.control.cost import PRICE_FILE, StepPrice, read_price
from blockpilot.evaluation.static import PromptTotals, choose_static
from blockpilot.pairs.checkpoints import EMBEDDED_DRAFT_DIRECTORY
from blockpilot.pairs.table import EMBEDDED_DRAFT
from blockpilot.sweep.rows import read_parts, write_rows
from helpers.command_line import error_of
from helpers.prices import price
from helpers.sweeps import CANDIDATES, PAIR, metadata, synthetic_rows
from jobs.export import IDLE_DRAFT, ExportConfig, run, sglang_options, vllm_options

EMBEDDED = PAIR._replace(draft=EMBEDDED_DRAFT)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sweep of four prompts in two parts, with a step price at which long drafts pay in small batches."""
    folder, rows = tmp_path_factory.mktemp("sweep"), synthetic_rows(4, 0, trails=0.8)
    for part in (0, 1):
        sweep_metadata = metadata(pair=EMBEDDED, config={"temperature": 0.0})
        write_rows(folder / "rows" / f"part-{part}.parquet", rows[part::2], sweep_metadata)
    write_price(folder, token_s=0.1)
    return folder


def write_price(folder: Path, **changes: Any) -> Path:
    file = folder / PRICE_FILE
    file.write_text(price(**{"pair": EMBEDDED, "rows": 8, **changes}).to_json())
    return file


def best_numbers(sweep: Path, step_price: StepPrice, most: int) -> list[int]:
    """Fastest number of drafted tokens for each batch size from 1 to `most`, by exhaustive search; a draft that is
    loaded slows steps without drafted tokens down."""
    rows = [row for part in read_parts(sweep / "rows") for row in part.rows]
    tau = {
        size: sum(row.taus[i] * row.num_steps[i] for row in rows) / sum(row.num_steps[i] for row in rows)
        for i, size in enumerate(CANDIDATES)
    } | {1: 1.0}

    def best(batch: int, idle_draft: float) -> int:
        slowed = {1: 1 + idle_draft}
        return max(sorted(tau), key=lambda size: tau[size] / step_price.chains_s(size, batch) / slowed.get(size, 1.0))

    without_draft = [best(batch, 0.0) - 1 for batch in range(1, most + 1)]
    return [best(batch, IDLE_DRAFT) - 1 for batch in range(1, most + 1)] if any(without_draft) else without_draft


@pytest.mark.parametrize("token_s", [0.0, 0.02, 0.3])
def test_vllm_gets_the_fastest_number_of_every_batch_size(sweep: Path, tmp_path: Path, token_s: float) -> None:
    price_path = write_price(tmp_path, token_s=token_s)
    exported = run(ExportConfig(sweep=str(sweep), price=str(price_path), max_batch_size=12, output=tmp_path))
    options = json.loads(exported.file.read_text())
    best = best_numbers(sweep, read_price(price_path), 12)
    schedule = options.pop("num_speculative_tokens_per_batch_size", [[1, 12, options["num_speculative_tokens"]]])
    assert [num for first, last, num in schedule for _ in range(first, last + 1)] == best
    assert schedule[0][0] == 1
    assert options == {
        "method": "dflash",
        "model": str(EMBEDDED_DRAFT_DIRECTORY),
        "num_speculative_tokens": max(best),
    }


def test_the_single_number_is_the_best_for_all_batch_sizes_together(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = run(ExportConfig(sweep=str(sweep), single=True, output=tmp_path))
    options = json.loads(exported.file.read_text())
    assert "num_speculative_tokens_per_batch_size" not in options
    assert options["num_speculative_tokens"] == exported.chosen.single - 1
    output = capsys.readouterr().out
    assert f"over {exported.chosen.single - 1} for all" in output
    assert "tau of 4 prompts at T=0" in output
    assert "warning: seconds of vllm's own steps may differ: sweep with --engine vllm" in output
    assert f'--speculative-config "$(cat {exported.file})"' in output
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines() if line[0] == "|"][2:]
    assert [line[0] for line in table] == ["1", "2", "4", "8"]
    for line in table:
        choice = exported.chosen.choices[int(line[0]) - 1]
        assert line[1] == str(choice.block_size - 1)
        assert line[3].startswith(f"{choice.speedup.value:.2f} ({choice.speedup.low:.2f} to ")


def test_sglang_counts_the_anchor_among_the_draft_tokens(sweep: Path, tmp_path: Path) -> None:
    exported = run(ExportConfig(sweep=str(sweep), engine="sglang", output=tmp_path))
    options = yaml.safe_load(exported.file.read_text())
    assert exported.file.suffix == ".yaml"
    assert options["speculative-algorithm"] == "DFLASH"
    assert options["speculative-num-draft-tokens"] == exported.chosen.single
    price_path = write_price(tmp_path, token_s=0.02, is_sequential=True)
    exported = run(ExportConfig(sweep=str(sweep), price=str(price_path), engine="sglang", output=tmp_path))
    options = yaml.safe_load(exported.file.read_text())
    numbers = {name: options[f"speculative-{name}"] for name in ("algorithm", "num-steps", "eagle-topk")}
    assert numbers == {"algorithm": "EAGLE3", "num-steps": exported.chosen.single - 1, "eagle-topk": 1}
    assert options["speculative-num-draft-tokens"] == exported.chosen.single


def test_a_draft_of_the_hub_is_named_with_the_revision_that_was_swept() -> None:
    totals = {4: PromptTotals(np.array([26.0, 34.0]), np.array([10.0, 10.0]))}
    chosen = choose_static(totals, price(), [1, 2])
    options = {"method": "dflash", "model": "org/draft", "num_speculative_tokens": 3, "revision": "rev-d"}
    assert vllm_options(chosen, metadata(), "dflash", single=False) == options
    assert sglang_options(chosen, metadata(), "dflash")["speculative-draft-model-revision"] == "rev-d"


def test_where_drafting_does_not_pay_there_is_no_file(sweep: Path, tmp_path: Path) -> None:
    price_path = write_price(tmp_path, token_s=50.0)
    for engine in ("vllm", "sglang"):
        with pytest.raises(ValueError, match="plain decoding is the fastest: serve without a draft"):
            run(ExportConfig(sweep=str(sweep), price=str(price_path), engine=engine, output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_together_is_refused_by_name(sweep: Path, tmp_path: Path) -> None:
    price_path = write_price(tmp_path, pair=EMBEDDED._replace(draft_revision="other"))
    with pytest.raises(ValueError, match=r"not of the same models \(pair\.draft_revision: 'other' and"):
        run(ExportConfig(sweep=str(sweep), price=str(price_path), output=tmp_path))
    with pytest.raises(ValueError, match="rows: no such file"):
        run(ExportConfig(sweep=str(tmp_path), output=tmp_path))
    part = next(read_parts(sweep / "rows"))
    write_rows(tmp_path / "one" / "rows" / "part-0.parquet", part.rows[:1], part.metadata)
    write_price(tmp_path / "one")
    error = error_of(ExportConfig, run, f"--sweep {tmp_path / 'one'} --output {tmp_path}")
    assert error == "error: 1 prompts: intervals need at least 2\n"
