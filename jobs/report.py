"""Report: evaluations, sweeps and a policy on one self-contained page, report.html, and its plots as PNGs.

Everything is read from what the other jobs wrote; nothing is decoded. Ceilings of a sweep are upper bounds: the best
block size for each prompt in hindsight, and the best one at every step.
"""

import base64
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path, PurePath
from statistics import geometric_mean
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment
from pydantic import Field

from blockpilot.control.price import StepCosts
from blockpilot.evaluation.oracle import Table, potential
from blockpilot.evaluation.statistics import Interval
from blockpilot.evaluation.step_costs import COSTS_FILE, costs_from_fields, read_costs, relative_costs
from blockpilot.evaluation.tables import with_range
from blockpilot.storage import is_file, join, write_bytes, write_text
from blockpilot.sweep.rows import Metadata, SweepRow, read_parts
from blockpilot.sweep.summary import Summary, least_cost
from jobs.common import figures
from jobs.common.config import Config, Place, absolute_in_submitted_job, main
from jobs.common.registry import Registry, kept_for_later
from jobs.evaluation.inputs import CONTROL, ORACLE, method_name
from jobs.evaluation.result import RESULT_FILE, read_figure, read_figures
from jobs.train import TRAINING_FILE

PAGE_FILE = "report.html"
TEMPLATE = "report.html.jinja"
NAMES = "DFlash", "BlockPilot"
ALL = "all"
# arXiv 2606.31315, averages over seven benchmarks on an H100: speed-up and tau of DFlash at its trained block size,
# and of the paper's policy.
PAPER = {
    "Qwen3-4B, T=0": ((3.99, 6.31), (4.17, 6.59)),
    "Qwen3-4B, T=1": ((3.80, 5.35), (4.20, 5.92)),
    "Qwen3-8B, T=0": ((4.42, 6.13), (4.66, 6.46)),
    "Qwen3-8B, T=1": ((3.55, 5.00), (3.94, 5.55)),
    "Llama-3.1-8B, T=0": ((3.03, 4.48), (3.25, 4.82)),
    "Qwen3-Coder-30B-A3B, T=0": ((3.86, 5.68), (4.12, 6.05)),
}


class ReportConfig(Config):
    """What to show, and where."""

    evaluations: tuple[Path, ...] = Field(min_length=1)
    """Outputs of jobs/evaluate.py."""
    sweeps: tuple[Place, ...] = ()
    """Sweeps whose curves and ceilings are shown; dense ones have the ceiling at every step, too."""
    policy: Path | None = None
    """Output of jobs/train.py."""
    output: Path = Path("runs/report")
    """Directory of the page."""
    relog: bool = False
    """Draw nothing: log the finished report in `output` to MLflow."""


class Section(NamedTuple):
    """A part of the page."""

    title: str
    text: str
    table: Sequence[Mapping[str, str]] = ()
    pictures: Mapping[str, bytes] = {}  # a default of a NamedTuple, which nobody changes


def run(config: ReportConfig) -> Path:
    """Write the page and log it; raises ValueError for places that hold something else."""
    absolute_in_submitted_job(config.output, "output")
    if not config.relog:
        write(config.output, list(sections(config)))
    registry = Registry.open()
    with kept_for_later(registry.uri, config.output), registry.log_run("report") as record:
        for file in sorted(config.output.iterdir()):
            record.log_artifact(file)
    print(f"report: {config.output / PAGE_FILE}")
    return config.output / PAGE_FILE


def write(output: Path, parts: Sequence[Section]) -> None:
    """The page with its pictures inside, and each picture as a file."""
    for part in parts:
        for name, picture in part.pictures.items():
            write_bytes(output / name, picture)
    template = resources.files("jobs.common").joinpath(TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    write_text(output / PAGE_FILE, environment.from_string(template).render(sections=parts, base64=_base64))


def _base64(picture: bytes) -> str:
    return base64.b64encode(picture).decode()


def sections(config: ReportConfig) -> Iterable[Section]:
    """All parts, in order."""
    evaluations = _read_evaluations(config.evaluations)
    for title, found in evaluations.items():
        yield Section(title, found["table"])
    yield from _compared(evaluations)
    for place, label in zip(config.sweeps, _labels(config.sweeps), strict=True):
        yield _of_sweep(place, label)
    if config.policy is not None:
        yield from _of_policy(config.policy)


# --- evaluations ---


def _read_evaluations(folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """By title; those that differ in neither temperature nor load have their folders' names, too."""
    found = [_read(folder / RESULT_FILE, "evaluation", "figures") for folder in folders]
    shared = Counter(map(_title, found))
    labels = _labels(list(map(str, folders)))
    return {
        _title(each) + (f" ({label})" if shared[_title(each)] > 1 else ""): each
        for label, each in zip(labels, found, strict=True)
    }


def _labels(places: Sequence[str]) -> list[str]:
    """The last parts of paths, as few as tell them apart. Raises ValueError if one is given twice."""
    for place, times in Counter(places).items():
        if times > 1:
            raise ValueError(f"{place} is given {times} times: a report shows a result once")
    parts = [PurePath(place).parts for place in places]
    for num in range(1, max(map(len, parts), default=0)):
        labels = [str(PurePath(*each[-num:])) for each in parts]
        if len(set(labels)) == len(places):
            return labels
    return list(places)


def _read(file: Path, what: str, field: str) -> dict[str, Any]:
    """A result file; ValueError for anything else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: not a finished {what} ({error})") from None
    if not isinstance(found, dict) or field not in found:
        raise ValueError(f"{file}: not a finished {what} (no {field!r})")
    return found


def _title(found: Mapping[str, Any]) -> str:
    config = found["config"]
    load = "one request at a time" if config["concurrency"] == 1 else f"{config['concurrency']} at a time"
    return f"T={config['temperature']:g}, {load}"


def _compared(evaluations: Mapping[str, Mapping[str, Any]]) -> Iterable[Section]:
    """Speed-ups over plain decoding, and over the best fixed block size by prompt set; the paper's beside them."""
    speeds = {
        title: {row.method: row.speedup for row in map(read_figures, found["figures"]) if row.method != "AR"}
        for title, found in evaluations.items()
    }
    paper = {
        title: dict(zip(NAMES, (_certain(fixed[0]), _certain(learned[0])), strict=True))
        for title, (fixed, learned) in PAPER.items()
    }
    yield Section(
        "Speed-up over plain decoding",
        "Measured on held-out prompts; 95% intervals over prompts. The oracle chooses in hindsight and is a bound.",
        pictures={"speed_ups.png": figures.speed_ups(speeds, "times plain decoding")},
    )
    yield from _together(evaluations, speeds)
    yield Section(
        "The paper's table",
        "arXiv 2606.31315 on an H100, with other models and drafts. Its released files choose for each prompt the "
        "block size that did best in the reported runs: an oracle.",
        table=[_paper_row(title, *figures_of) for title, figures_of in PAPER.items()],
        pictures={"paper.png": figures.speed_ups(paper, "times plain decoding")},
    )
    rows: dict[str, dict[str, Interval]] = {}
    for title, found in evaluations.items():
        for name, methods in found["by_set"].items():
            rows[f"{title}: {name}"] = {method: read_figure(value) for method, value in methods.items()}
    shown = [m for m in ("policy", ORACLE) if any(m in row for row in rows.values())]
    if shown:
        yield Section(
            "What choosing is worth",
            "Tokens a second over those of the best fixed block size, which was chosen on the training prompts, by "
            "set; and how much of the oracle's headroom the policy captures, where there is some beyond the "
            "interval. AR again does the work of AR: how far it is from 1 is the clock's noise, which the intervals "
            "do not hold.",
            table=[_headroom(name, row) for name, row in rows.items() if "policy" in row],
            pictures={"over_best_fixed.png": figures.over_best_fixed(rows, shown)},
        )
    first = next(iter(evaluations.values()))
    costs = costs_from_fields(dict(first["setting"]["costs"]))
    yield Section("What a step costs", costs.device, pictures={"cost_curves.png": figures.cost_curves(costs)})


def _together(
    evaluations: Mapping[str, Mapping[str, Any]], speeds: Mapping[str, Mapping[str, Interval]]
) -> Iterable[Section]:
    """What every method makes of several loads and temperatures, for a pair and prompt sets that several share."""
    alike = defaultdict[Any, list[str]](list)
    for title, found in evaluations.items():
        alike[found["setting"]["pair"]["target"], *found["by_set"]].append(title)
    for titles in alike.values():
        if len(titles) > 1:
            yield Section(
                "One choice for all of these",
                "Times plain decoding, and the geometric mean. A fixed block size is one for all of them, unless the "
                "load is known beforehand.",
                table=[
                    _mean_row(method, {title: speeds[title][method].value for title in titles})
                    for method in speeds[titles[0]]
                    if all(method in speeds[title] for title in titles)
                ],
            )


def _mean_row(method: str, speeds: Mapping[str, float]) -> dict[str, str]:
    each = {title: f"{speed:.2f}" for title, speed in speeds.items()}
    return {"method": method, **each, "geometric mean": f"{geometric_mean(speeds.values()):.3f}"}


def _paper_row(title: str, fixed: tuple[float, float], learned: tuple[float, float]) -> dict[str, str]:
    cells = {name: f"{speed:.2f}x, tau {tau:.2f}" for name, (speed, tau) in zip(NAMES, (fixed, learned), strict=True)}
    return {"pair": title, **cells, "gain": f"{learned[0] / fixed[0] - 1:+.1%}"}


def _certain(value: float) -> Interval:
    return Interval(value, value, value)


def _headroom(name: str, row: Mapping[str, Interval]) -> dict[str, str]:
    policy, oracle = row["policy"], row.get(ORACLE)
    share = f"{(policy.value - 1) / (oracle.value - 1):.0%}" if oracle and oracle.low > 1 else "-"
    return {
        "prompts": name,
        "policy": with_range(policy, 3),
        "oracle (bound)": with_range(oracle, 3) if oracle else "-",
        "share of the headroom": share,
        "AR again over AR": with_range(row[CONTROL], 3) if CONTROL in row else "-",
    }


# --- sweeps ---


class Ceiling:
    """What block sizes could give on some rows by the costs of a step; added row by row."""

    def __init__(self, candidates: Sequence[int], step_costs: Sequence[float]) -> None:
        self._candidates, self._costs = tuple(candidates), np.array(step_costs)
        self._tokens: list[int] = []
        self._seconds: list[Any] = []
        self._least = 0.0  # of dense rows, with the best candidate at every step

    def add(self, row: SweepRow) -> None:
        self._tokens.append(sum(n * count for n, count in enumerate(row.emitted_histograms[0])))
        self._seconds.append(np.array(row.num_steps) * self._costs)
        if row.accepted:
            self._least += least_cost(row.accepted, self._costs.tolist())

    def describe(self) -> dict[str, str]:
        """Cells of a table."""
        tokens, seconds = np.array(self._tokens, float), np.array(self._seconds)
        there = potential(Table(np.tile(tokens[:, None], (1, len(self._candidates))), seconds), self._candidates)
        at_every_step = f"{tokens.sum() / self._least / there.best_fixed_rate - 1:+.1%}" if self._least else "-"
        return {
            "prompts": str(len(tokens)),
            "best fixed": method_name(there.best_fixed),
            "times plain decoding": f"{there.best_fixed_rate:.3f}",
            "random": f"{there.random / there.best_fixed_rate - 1:+.1%}",
            "best for each prompt": f"{there.headroom:+.1%}",
            "best at every step": at_every_step,
        }


class SweepTotals:
    """Curves, counts and ceilings of a sweep by prompt set; added part by part."""

    def __init__(self, metadata: Metadata, costs: StepCosts | None) -> None:
        self.metadata = metadata
        candidates = metadata.candidates
        self._loads = {1: [1.0] * len(candidates)}
        self._ways = {"by tau": self._loads[1]}
        if costs is not None:
            self._loads = {rows: relative_costs(costs, candidates, rows) for rows in costs.rows}
            self._ways |= {f"by tokens/s, {n} row{'s' * (n > 1)}": each for n, each in self._loads.items()}
        self.by_set: dict[str, Summary] = {}
        self._ceilings: dict[tuple[int, str], Ceiling] = {}
        self._best = {name: Counter[int]() for name in self._ways}

    def add(self, row: SweepRow) -> None:
        self.by_set.setdefault(row.prompt_set, Summary()).add([row])
        for rows, step_costs in self._loads.items():
            for name in (row.prompt_set, ALL):
                self._ceilings.setdefault((rows, name), Ceiling(row.candidates, step_costs)).add(row)
        for name, step_costs in self._ways.items():
            self._best[name][row.candidates[int((np.array(row.taus) / step_costs).argmax())]] += 1

    @property
    def table(self) -> list[dict[str, str]]:
        order = sorted(self._ceilings, key=lambda key: (key[0], key[1] == ALL, key[1]))
        return [{"rows": str(key[0]), "set": key[1], **self._ceilings[key].describe()} for key in order]

    def pictures(self, name: str) -> dict[str, bytes]:
        curves = {prompt_set: summary.tau_curve for prompt_set, summary in sorted(self.by_set.items())}
        trained = self.metadata.block_size
        return {
            f"{name}-tau_curves.png": figures.tau_curves(curves, trained),
            f"{name}-best_block_sizes.png": figures.best_sizes(self._best, trained),
        }


def _of_sweep(place: Place, label: str) -> Section:
    costs = read_costs(join(place, COSTS_FILE)) if is_file(join(place, COSTS_FILE)) else None
    totals: SweepTotals | None = None
    for part in read_parts(place):
        totals = totals or SweepTotals(part.metadata, costs)
        for row in part.rows:
            totals.add(row)
    assert totals is not None, "read_parts gives at least one part"
    pair, dtype = totals.metadata.pair, totals.metadata.dtype
    return Section(
        f"Sweep {label}",
        f"{pair.target} with {pair.draft}, {dtype}. Ceilings are gains over the best fixed block size in hindsight, "
        "noise included, by the measured costs of a step: no policy can have more.",
        table=totals.table,
        pictures=totals.pictures(label.replace("/", "-")),
    )


# --- the policy ---


def _of_policy(folder: Path) -> Iterable[Section]:
    found = _read(folder / TRAINING_FILE, "training", "report")
    params, lookup = found["params"], found["report"]
    pictures = {}
    if found["sample"]:
        candidates = [int(size) for size in found["balance"]]
        sample = found["sample"]
        pictures["calibration.png"] = figures.calibration(candidates, sample["predicted"], sample["measured"])
    total = sum(found["balance"].values())
    training, validation = found["num_examples"]
    yield Section(
        "The policy",
        f"head {params['head']}, reads {params['reads']}, inputs {', '.join(params['inputs'])}, objective "
        f"{params['objective']}; {training} examples, {validation} held back. Looked up there (a diagnostic, not a "
        f"result) it gains {lookup['gain']:+.1%} over B={lookup['best_fixed_block_size']} "
        f"({lookup['gain_low']:+.1%} to {lookup['gain_high']:+.1%}).",
        table=[
            {"best block size": size, "examples": str(count), "share": f"{count / total:.0%}"}
            for size, count in found["balance"].items()
        ],
        pictures=pictures,
    )


if __name__ == "__main__":
    main(ReportConfig, run)
