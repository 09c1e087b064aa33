"""Report: evaluations, sweeps and a policy on one self-contained page, report.html, and its plots as PNGs.

Everything is read from what the other jobs wrote; nothing is decoded. Ceilings of a sweep are upper bounds: the best
block size for each prompt in hindsight, and the best one at every step.
"""

import json
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count, product
from pathlib import Path, PurePath
from statistics import geometric_mean
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader
from pydantic import Field

from blockpilot.control.cost import PRICE_FILE, Load, StepPrice, read_price
from blockpilot.evaluation.oracle import Table, potential
from blockpilot.evaluation.statistics import Interval
from blockpilot.evaluation.tables import loads_up_to, with_range
from blockpilot.storage import is_file, join, write_bytes, write_text
from blockpilot.sweep.rows import SweepRow, read_parts
from blockpilot.sweep.summary import Summary, least_cost
from jobs.common import figures
from jobs.common.config import Config, Place, absolute_in_submitted_job, main
from jobs.common.registry import Registry, kept_for_later
from jobs.evaluation.inputs import CONTROL, ORACLE, method_name
from jobs.evaluation.result import RESULT_FILE, read_figure, read_figures
from jobs.training.record import TRAINING_FILE, curves_of

PAGE_FILE = "report.html"
TEMPLATE = "report.html.jinja"
ALL = "all"


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
    templates = PackageLoader("jobs", "common")
    environment = Environment(loader=templates, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.get_template(TEMPLATE).render(sections=parts, b64encode=b64encode)
    write_text(output / PAGE_FILE, page)


def sections(config: ReportConfig) -> Iterable[Section]:
    """All parts, in order."""
    evaluations = _read_evaluations(config.evaluations)
    for title, found in evaluations.items():
        yield Section(title, found["table"])
    yield from _compared(evaluations)
    for place, label in zip(config.sweeps, _labels(config.sweeps), strict=True):
        yield _of_sweep(place, label)
    if config.policy is not None:
        yield _of_policy(config.policy)


# --- evaluations ---


def _read_evaluations(folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """By title; those that differ in neither temperature nor load have their folders' names, too."""
    found = [_read(folder / RESULT_FILE, "evaluation", "figures") for folder in folders]
    titles = list(map(_title, found))
    return {
        f"{title} ({label})" if titles.count(title) > 1 else title: each
        for title, label, each in zip(titles, _labels(folders), found, strict=True)
    }


def _labels(places: Iterable[str | Path]) -> list[str]:
    """The last parts of paths, as few as tell them apart. Raises ValueError if one is given twice."""
    paths = [PurePath(place) for place in places]
    for path, times in Counter(paths).items():
        if times > 1:
            raise ValueError(f"{path} is given {times} times: a report shows a result once")
    by_depth = ([str(PurePath(*path.parts[-num:])) for path in paths] for num in count(1))
    return next(labels for labels in by_depth if len(set(labels)) == len(labels))


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
    """Speed-ups over plain decoding, and over the best fixed block size by prompt set."""
    speeds = {
        title: {row.method: row.speedup for row in map(read_figures, found["figures"]) if row.method != "AR"}
        for title, found in evaluations.items()
    }
    yield Section(
        "Speed-up over plain decoding",
        "Measured on held-out prompts; 95% intervals over prompts. The oracle chooses in hindsight and is a bound.",
        pictures={"speed_ups.png": figures.speed_ups(speeds)},
    )
    yield from _together(evaluations, speeds)
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
    for fields in [found["setting"]["price"] for found in evaluations.values() if "price" in found["setting"]][:1]:
        price = StepPrice.from_fields(fields)
        yield Section(
            "What a step costs",
            f"{price.device}; mean error on steps that the fit has not seen {price.error:.1%}",
            pictures={"cost_curves.png": figures.cost_curves(price)},
        )


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


def _of_sweep(place: Place, label: str) -> Section:
    by_set = defaultdict[str, list[SweepRow]](list)
    for part in read_parts(place):
        for row in part.rows:  # without what is large and not shown
            light = replace(row, probs_ids=[], probs=[], context=[], step_contexts=b"", step_embeddings=b"")
            light = replace(light, step_scores=b"", step_log_probs=b"")
            by_set[row.prompt_set].append(light)
    metadata, sets = part.metadata, dict(sorted(by_set.items()))
    every = [row for rows in sets.values() for row in rows]
    loads, ways = {1: [1.0] * len(metadata.candidates)}, {"by tau": [1.0] * len(metadata.candidates)}
    price = read_price(join(place, PRICE_FILE)) if is_file(join(place, PRICE_FILE)) else None
    if price is not None:
        loads = {num: price.relative(metadata.candidates, num) for num in loads_up_to(price.rows)}
        ways |= {f"by tokens/s, {num} row{'s' * (num > 1)}": each for num, each in loads.items()}
    best = {name: Counter(_best_size(row, step_costs) for row in every) for name, step_costs in ways.items()}
    curves = {name: Summary().add(rows).tau_curve for name, rows in sets.items()}
    name = label.replace("/", "-")
    total = Summary().add(every)
    trees = {f"{name}-trees.png": _trees(total, price, metadata.block_size - 1)} if total.num_places else {}
    return Section(
        f"Sweep {label}",
        f"{metadata.pair.target} with {metadata.pair.draft}, {metadata.dtype}. Ceilings are gains over the best "
        "fixed block size in hindsight, noise included, by the price of a step: no policy can have more.",
        table=[
            {"rows": str(num), "set": name, **ceilings(rows, step_costs)}
            for num, step_costs in loads.items()
            for name, rows in (sets | {ALL: every}).items()
        ],
        pictures={
            f"{name}-tau_curves.png": figures.tau_curves(curves, metadata.block_size),
            f"{name}-best_block_sizes.png": figures.best_sizes(best, metadata.block_size),
            **trees,
        },
    )


def _trees(total: Summary, price: StepPrice | None, deepest: int) -> bytes:
    """Trees of all sizes, out of `deepest` drafted positions, beside chains, which draft no more than they have."""
    taus = {"chain": total.chain_curve, "tree": total.tree_curve}
    speeds = {}
    if price is not None:
        for rows, (layout, curve) in product(loads_up_to(price.rows), taus.items()):
            loads = {n: Load(rows, rows * (n if layout == "chain" else deepest), rows * n) for n in curve}
            costs = {n: price.seconds(load) / price.seconds(Load(rows)) for n, load in loads.items()}
            speeds[f"{layout}, {rows} row{'s' * (rows > 1)}"] = {n: tau / costs[n] for n, tau in curve.items()}
    return figures.tree_curves(taus, speeds)


def _best_size(row: SweepRow, step_costs: Sequence[float]) -> int:
    return row.candidates[int((np.array(row.taus) / step_costs).argmax())]


def ceilings(rows: Sequence[SweepRow], step_costs: Sequence[float]) -> dict[str, str]:
    """Cells of a table: what block sizes could give on these rows, by the costs of a step."""
    candidates = rows[0].candidates
    tokens = np.array([sum(n * count for n, count in enumerate(row.emitted_histograms[0])) for row in rows], float)
    seconds = np.array([row.num_steps for row in rows]) * step_costs
    there = potential(Table(np.tile(tokens[:, None], len(candidates)), seconds), candidates)
    least = sum(least_cost(row.accepted, step_costs) for row in rows if row.accepted)
    return {
        "prompts": str(len(rows)),
        "best fixed": method_name(there.best_fixed),
        "times plain decoding": f"{there.best_fixed_rate:.3f}",
        "random": f"{there.random / there.best_fixed_rate - 1:+.1%}",
        "best for each prompt": f"{there.headroom:+.1%}",
        "best at every step": f"{tokens.sum() / least / there.best_fixed_rate - 1:+.1%}" if least else "-",
    }


# --- the policy ---


def _of_policy(folder: Path) -> Section:
    found = _read(folder / TRAINING_FILE, "training", "report")
    params, report = found["params"], found["report"]
    training, validation = found["num_examples"]
    begin = f"{training} examples, {validation} held back."
    if params["kind"] == "step":
        return Section(
            "The policy",
            f"kind step; {begin} Their choices take {_nats(report['trained'])} nats a slot, by the draft's own "
            f"probabilities {_nats(report['own'])}.",
            pictures={"policy-reliability.png": figures.reliability(curves_of(found))},
        )
    balance = found["balance"]
    return Section(
        "The policy",
        f"kind prompt, objective {params['objective']}; {begin} Looked up there (a diagnostic, not a "
        f"result) it gains {report['gain']:+.1%} over B={report['best_fixed_block_size']} "
        f"({report['gain_low']:+.1%} to {report['gain_high']:+.1%}).",
        table=[
            {"best block size": size, "examples": str(num), "share": f"{num / sum(balance.values()):.0%}"}
            for size, num in balance.items()
        ],
    )


def _nats(value: float | None) -> str:
    return "no" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main(ReportConfig, run)
