"""The report: one page that needs no other file, with what the other jobs wrote; anything else is refused by name."""

import base64
import json
import re
from dataclasses import replace
from html import unescape
from itertools import product
from pathlib import Path

import pytest

from blockpilot.control.cost import PRICE_FILE
from blockpilot.evaluation.statistics import MethodRun, Totals
from blockpilot.prompts.files import Message, Prompt
from blockpilot.sweep.rows import SweepRow, write_rows
from blockpilot.sweep.summary import least_cost
from helpers.prices import price
from helpers.sweeps import CANDIDATES, PAIR, metadata, synthetic_rows
from jobs.common.registry import Registry
from jobs.evaluation import inputs as evaluate_inputs
from jobs.evaluation import result as evaluate_result
from jobs.evaluation.actor import Setting
from jobs.evaluation.inputs import ORACLE, POLICY, EvaluateConfig, Plan
from jobs.report import ReportConfig, ceilings, run

PRICE = price(pair=PAIR, rows=4, row_s=0.1, launch_s=0.2, slot_s=0.05, token_s=0.05, error=0.034)
SPEEDS = {"AR": 10.0, "B=2": 12.0, "B=4": 14.0, POLICY: 14.5, ORACLE: 15.0}


@pytest.fixture(autouse=True)
def _store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")


def write_evaluation(folder: Path, temperature: float = 0.0) -> Path:
    """What jobs/evaluate.py leaves, for runs of these speeds on two sets of two prompts."""
    prompts = tuple(Prompt(name, (Message("user", f"<{name}> {i}"),)) for name in ("maths", "code") for i in range(2))
    plan = Plan(prompts, evaluate_inputs.group(prompts, 1), None, {POLICY: folder}, None, None)
    methods = {name: {"AR": 1, "B=2": 2, "B=4": 4}.get(name) for name in SPEEDS}
    setting = Setting(PAIR, "float32", "cpu", methods, PRICE, 64, {}, {}, {})
    runs = [
        MethodRun(name, number, 0, Totals(1, 100, 100 / speed + 0.1 * number, 90, 40, 9.0, 40, 99, 120, 1))
        for number, (name, speed) in product(range(len(prompts)), SPEEDS.items())
    ]
    config = EvaluateConfig(prompts=("demo",), temperature=temperature, output=folder)
    evaluate_result.save(config, plan, setting, runs)
    return folder


def write_sweep(folder: Path, rows: list[SweepRow]) -> str:
    write_rows(folder / "rows" / "part-0.parquet", rows, metadata())
    (folder / PRICE_FILE).write_text(PRICE.to_json())
    return str(folder)


def with_trees(row: SweepRow) -> SweepRow:
    """Also with what the draft proposes: right choices that trees of so many nodes hold."""
    num = 7 * len(row.step_places)
    offers = {"step_ranks": bytes(num), "step_scores": bytes(16 * num), "step_log_probs": bytes(16 * num)}
    return replace(row, **offers, step_nodes=bytes([1, 2, 4, 8, 16, 32, 64] * len(row.step_places)))


def words(page: str) -> str:
    """The page as it is read, without pictures."""
    return " ".join(unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.S)).split())


def test_the_page_holds_everything_it_needs(tmp_path: Path) -> None:
    evaluations = tuple(write_evaluation(tmp_path / f"e{t}", t) for t in (0.0, 1.0))
    sweep = write_sweep(tmp_path / "swept", [with_trees(row) for row in synthetic_rows(20, 0)])
    page = run(ReportConfig(evaluations=evaluations, sweeps=(sweep,), output=tmp_path / "report")).read_text()
    assert not re.search(r'(src|href)="(?!data:|#)', page)  # nothing is fetched
    inside = [base64.b64decode(found) for found in re.findall(r"data:image/png;base64,([^\"]+)", page)]
    files = {file.name: file.read_bytes() for file in (tmp_path / "report").glob("*.png")}
    assert sorted(inside) == sorted(files.values())
    assert all(picture.startswith(b"\x89PNG") for picture in inside)
    assert {"speed_ups.png", "over_best_fixed.png", "cost_curves.png", "swept-tau_curves.png"} <= set(files)
    assert "swept-trees.png" in files
    assert re.findall(r"<pre>(\| \w+)", page) == 2 * [
        "| method",
        "| prompts",
    ]  # sentences wrap
    assert page.count("<pre>") == 4
    text = words(page)
    assert "T=0, one request at a time" in text
    assert "T=1, one request at a time" in text
    assert "What a step costs cpu, 1 threads; mean error on steps that the fit has not seen 3.4%" in text
    (run_id,) = [found.info.run_id for found in Registry.open()._client.search_runs(["1"])]
    logged = {item.path for item in Registry.open()._client.list_artifacts(run_id)}
    assert logged == {"report.html", *files}


def test_evaluations_that_differ_in_nothing_else_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    folders = [write_evaluation(tmp_path / name) for name in ("here", "there")]
    other = write_evaluation(tmp_path / "warm", 1.0)
    text = words(run(ReportConfig(evaluations=(*folders, other), output=tmp_path / "report")).read_text())
    for title in ("T=0, one request at a time (here)", "T=0, one request at a time (there)"):
        assert f"{title}: all" in text
    assert "T=1, one request at a time: all" in text


def test_folders_of_one_name_are_told_apart_by_what_they_are_in(tmp_path: Path) -> None:
    """Neither an evaluation nor a sweep's pictures take the place of the other's."""
    for place in ("monday", "friday"):
        (tmp_path / place).mkdir()
    evaluations = tuple(write_evaluation(tmp_path / place / "e") for place in ("monday", "friday"))
    sweeps = tuple(write_sweep(tmp_path / place / "swept", synthetic_rows(20, 0)) for place in ("monday", "friday"))
    page = run(ReportConfig(evaluations=evaluations, sweeps=sweeps, output=tmp_path / "report"))
    text = words(page.read_text())
    for place in ("monday", "friday"):
        assert f"T=0, one request at a time ({place}/e): all" in text
        assert f"Sweep {place}/swept" in text
        assert (page.parent / f"{place}-swept-tau_curves.png").exists()


def test_an_evaluation_from_before_there_were_prices_is_shown_without_one(tmp_path: Path) -> None:
    folders = [write_evaluation(tmp_path / f"e{t}", t) for t in (0.0, 1.0)]
    file = folders[0] / "evaluation.json"
    found = json.loads(file.read_text())
    found["setting"]["costs"] = found["setting"].pop("price")
    file.write_text(json.dumps(found))
    alone, both = (
        words(run(ReportConfig(evaluations=tuple(shown), output=tmp_path / "report")).read_text())
        for shown in (folders[:1], folders)
    )
    assert "T=0, one request at a time: all" in alone
    assert "What a step costs" not in alone
    assert "What a step costs" in both


def test_a_result_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "e")
    with pytest.raises(ValueError, match=r"e is given 2 times"):
        run(ReportConfig(evaluations=(folder, folder), output=tmp_path / "report"))
    assert not (tmp_path / "report").exists()


def test_a_policy_of_either_kind_is_shown(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "e")
    kinds: dict[str, dict[str, object]] = {
        "step": {
            "report": {"trained": 1.25, "own": 1.5},
            "reliability": {"trained": [[10, 0.3, 0.31]], "draft": [[10, 0.3, 0.2]]},
        },
        "prompt": {
            "report": {"gain": 0.02, "gain_low": -0.01, "gain_high": 0.05, "best_fixed_block_size": 4},
            "balance": {"2": 30, "4": 70},
        },
    }
    shown = {}
    for kind, content in kinds.items():
        file = tmp_path / kind / "training.json"
        file.parent.mkdir()
        params = {"kind": kind, "objective": "throughput"}
        file.write_text(json.dumps(content | {"params": params, "num_examples": [80, 20]}))
        output = tmp_path / f"report-{kind}"
        page = run(ReportConfig(evaluations=(folder,), policy=file.parent, output=output))
        shown[kind] = words(page.read_text())
        assert (output / "policy-reliability.png").exists() == (kind == "step")
    assert (
        "kind step; 80 examples, 20 held back. Their choices take 1.250 nats a slot, by the draft's own "
        "probabilities 1.500." in shown["step"]
    )
    assert "it gains +2.0% over B=4 (-1.0% to +5.0%)" in shown["prompt"]
    assert "4 70 70%" in shown["prompt"]


def test_headroom_is_worked_out_from_the_ratios(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "e")
    found = json.loads((folder / "evaluation.json").read_text())
    row = found["by_set"]["all"]
    policy, oracle = row[POLICY]["value"], row[ORACLE]["value"]
    share = f"{(policy - 1) / (oracle - 1):.0%}"
    assert found["best_fixed"]["block_size"] == 4
    assert 1.02 < policy < oracle < 1.08
    page = run(ReportConfig(evaluations=(folder,), output=tmp_path / "report"))
    shown = re.search(r"T=0, one request at a time: all (\S+) \(.*?\) (\S+) \(.*?\) (\S+)", words(page.read_text()))
    assert shown is not None
    assert shown.groups() == (f"{policy:.3f}", f"{oracle:.3f}", share)


def test_methods_are_compared_over_evaluations_of_the_same_prompts(tmp_path: Path) -> None:
    """At T=1 B=4 makes 0.7 of plain decoding: B=2 is the better choice for both."""
    folders = [write_evaluation(tmp_path / f"e{t}", t) for t in (0.0, 1.0)]
    file = folders[1] / "evaluation.json"
    found = json.loads(file.read_text())
    for figures in found["figures"]:
        figures["speedup"]["value"] *= {"B=4": 0.5}.get(figures["method"], 1.0)
    file.write_text(json.dumps(found))
    text = words(run(ReportConfig(evaluations=tuple(folders), output=tmp_path / "report")).read_text())
    shown = {
        m: (x, y, mean) for m, x, y, mean in re.findall(r"(B=\d|policy) (\d\.\d\d) (\d\.\d\d) (\d\.\d{3})", text)
    }
    assert set(shown) == {"B=2", "B=4", POLICY}
    for x, y, mean in shown.values():
        assert float(mean) == pytest.approx((float(x) * float(y)) ** 0.5, abs=0.01)
    assert float(shown["B=4"][1]) == pytest.approx(float(shown["B=4"][0]) / 2, abs=0.01)
    assert float(shown["B=4"][2]) < 1 < float(shown["B=2"][2])
    alone = words(run(ReportConfig(evaluations=tuple(folders[:1]), output=tmp_path / "alone")).read_text())
    assert "One choice for all of these" in text
    assert "One choice for all of these" not in alone


def test_ceilings_are_those_of_a_slow_search() -> None:
    """Three anchors, two candidates: every sequence of choices is tried."""
    accepted, costs = [[0, 0, 0], [1, 0, 2]], [1.0, 1.4]

    def cost(choices: tuple[int, ...]) -> float:
        position, total = 0, 0.0
        while position < 3:
            choice = choices[position]
            total += costs[choice]
            position += accepted[choice][position] + 1
        return total

    assert least_cost(accepted, costs) == pytest.approx(min(map(cost, product((0, 1), repeat=3))))
    rows = synthetic_rows(30, 1)
    shown = ceilings(rows, [1.0] * len(CANDIDATES))
    tokens = [sum(n * count for n, count in enumerate(row.emitted_histograms[0])) for row in rows]
    fixed = [sum(tokens) / sum(row.num_steps[c] for row in rows) for c in range(len(CANDIDATES))]
    best = sum(tokens) / sum(min(row.num_steps) for row in rows)
    assert shown["times plain decoding"] == f"{max(fixed):.3f}"
    assert shown["best for each prompt"] == f"{best / max(fixed) - 1:+.1%}"


@pytest.mark.parametrize("content", [None, "{}", "[1", '["figures"]'])
def test_other_files_are_refused_by_name(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "evaluation.json").write_text(content)
    with pytest.raises(ValueError, match=r"evaluation\.json: not a finished evaluation"):
        run(ReportConfig(evaluations=(tmp_path,), output=tmp_path / "report"))
    assert not (tmp_path / "report").exists()


def test_a_finished_page_can_be_logged_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ReportConfig(evaluations=(write_evaluation(tmp_path / "e"),), output=tmp_path / "report")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/gone/mlflow.db")
    with pytest.raises(ValueError, match="no such directory"):
        run(config)
    written = (tmp_path / "report" / "report.html").read_bytes()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    run(config.model_copy(update={"relog": True}))
    assert (tmp_path / "report" / "report.html").read_bytes() == written
