"""Result of jobs/evaluate.py: figures, table and conclusions, on disk and in MLflow."""

import json
import math
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from blockpilot.evaluation.statistics import (
    Comparison,
    Figures,
    Interval,
    MethodRun,
    chosen_across,
    fastest_block_size,
)
from blockpilot.evaluation.tables import cells, markdown, with_range
from blockpilot.pairs.table import NO_DRAFT
from blockpilot.storage import write_bytes, write_text
from jobs.common.build import git_commit, versions
from jobs.common.registry import CHAMPION, UNTRAINED, HeldOut, Registry, Version, kept_for_later
from jobs.evaluation.actor import Setting
from jobs.evaluation.inputs import AR, CONTROL, ORACLE, POLICY, STATIC, TREE_PREFIX, EvaluateConfig, Plan, method_name

RESULT_FILE, TABLE_FILE = "evaluation.json", "table.md"
RUNS_FILE = "runs.json"  # the measurements behind the figures
PICTURES = SPEED_UPS, OVER_BEST_FIXED, STEP_COST = "speed_ups.png", "over_best_fixed.png", "step_cost.png"


class EvaluateResult(NamedTuple):
    """Result of an evaluation."""

    figures: list[Figures]  # AR first, then block sizes ascending, baselines, policies, and the oracle
    best_fixed: int
    held_out: HeldOut | None  # None without a policy
    table: str  # with caption and conclusions
    run_id: str


def save(config: EvaluateConfig, plan: Plan, setting: Setting, runs: Sequence[MethodRun]) -> None:
    """Compute the figures and write them, with everything that `log` needs."""
    statics = [m for m, size in setting.block_sizes.items() if size is not None or m.startswith(TREE_PREFIX)]
    static = chosen_across(runs, statics, STATIC)
    comparison = _comparison([*runs, *static.runs], setting)
    best, chosen_on = best_fixed_of(comparison, setting, *known_taus(plan, config))
    champion = plan.champion if CHAMPION in setting.block_sizes else None
    untrained = UNTRAINED in setting.block_sizes
    held_out = (
        _held_out(comparison, method_name(best), champion, untrained) if POLICY in setting.block_sizes else None
    )
    by_set = _by_set(plan, runs, setting, best)
    figures = comparison.figures(AR)
    over_static = {
        m: comparison.ratio("tokens_per_s", m, STATIC) for m in (UNTRAINED, POLICY) if m in comparison.methods
    }
    shown = bool(plan.sweep or plan.learned_from(POLICY).prompts)
    table = _describe(config, plan, setting, figures, by_set, best, chosen_on, held_out, shown)
    table += _beside_static(over_static, static.methods)
    content = {
        "config": config.recorded(),
        "setting": setting._asdict()
        | {"pair": setting.pair._asdict(), "price": json.loads(setting.price.to_json())}
        | {"rivals": {name: pair._asdict() for name, pair in setting.rivals.items()}}
        | {"shown_held_out": shown},
        "versions": versions(),
        "git_commit": git_commit(),
        "policy_version": plan.version._asdict() if plan.version else None,
        "best_fixed": {"block_size": best, "chosen_on": chosen_on},
        "best_static": {"methods": static.methods, "over": {m: plain(ratio) for m, ratio in over_static.items()}},
        "held_out": asdict(held_out) if held_out else None,
        "figures": [{name: plain(value) for name, value in asdict(row).items()} for row in figures],
        "by_set": {name: {method: plain(ratio) for method, ratio in row.items()} for name, row in by_set.items()},
        "table": table,
    }
    measured = {
        "prompts": [{"set": prompt.set, "text": prompt.text} for prompt in plan.prompts],
        "runs": list(map(stored_run, runs)),
    }
    write_text(config.output / RUNS_FILE, json.dumps(measured, indent=1) + "\n")
    write_text(config.output / RESULT_FILE, json.dumps(content, indent=1) + "\n")
    write_text(config.output / TABLE_FILE, table + "\n")
    pictures = _pictures(config, setting, figures, by_set)
    for name in PICTURES:
        if name in pictures:
            write_bytes(config.output / name, pictures[name])
        else:  # of an earlier evaluation
            (config.output / name).unlink(missing_ok=True)


def _pictures(
    config: EvaluateConfig, setting: Setting, figures: Sequence[Figures], by_set: Mapping[str, Mapping[str, Interval]]
) -> dict[str, bytes]:
    """PNGs by file name: speed-ups over AR, adaptive methods over the best fixed size by prompt set, step cost."""
    from jobs.common import figures as plots  # a second to import

    methods = [m for m in (UNTRAINED, POLICY, ORACLE) if any(m in row for row in by_set.values())]
    speed_ups = {row.method: row.speedup for row in figures if row.method != AR}
    pictures = {SPEED_UPS: plots.speed_ups({load_name(temperature_name(config), config.concurrency): speed_ups})}
    if methods:
        pictures[OVER_BEST_FIXED] = plots.over_best_fixed(by_set, methods)
    return pictures | {STEP_COST: plots.cost_curves(setting.price)}


def temperature_name(config: EvaluateConfig) -> str:
    """The temperature, or both of mixed traffic."""
    return f"0 and {config.temperature:g}, mixed" if config.mixed else f"{config.temperature:g}"


def load_name(temperature: str, concurrency: int) -> str:
    """Name of an evaluation's load in tables and pictures."""
    return f"T={temperature}, {concurrency} request{'s' * (concurrency > 1)} at a time"


def log(output: Path, registry: Registry) -> EvaluateResult:
    """Print the result in `output`, and log it to MLflow."""
    if not (output / RESULT_FILE).exists():
        raise ValueError(f"output {output}: no {RESULT_FILE}, nothing to log")
    content = json.loads((output / RESULT_FILE).read_text(encoding="utf-8"))
    print(content["table"], flush=True)
    figures = [read_figures(row) for row in content["figures"]]
    held_out = HeldOut(**content["held_out"]) if content["held_out"] else None
    version = Version(**content["policy_version"]) if content["policy_version"] else None
    best = int(content["best_fixed"]["block_size"])
    with kept_for_later(registry.uri, output), registry.log_run("evaluate") as record:
        record.log_params(content["config"])
        record.log_tags(content["setting"]["pair"] | {"best_fixed_block_size": best})
        record.log_metrics(_metrics(figures))
        record.log_table([cells(row) for row in figures], "table.json")
        for file in (output / name for name in (TABLE_FILE, RESULT_FILE, RUNS_FILE, *PICTURES)):
            if file.exists():  # a stored result may lack its runs
                record.log_artifact(file)
        if version and held_out and content["setting"]["shown_held_out"]:
            registry.log_held_out(version, held_out)
            registry.tag_version(version, {"heldout.run_id": record.id})
    if version and not content["setting"]["shown_held_out"]:
        print(f"evaluate: not recorded with version {version.number}: --sweep must show the prompts held out")
    return EvaluateResult(figures, best, held_out, content["table"], record.id)


def stored_run(run: MethodRun) -> dict[str, Any]:
    """A run as JSON."""
    return run._asdict() | {"totals": asdict(run.totals)}


def plain(value: Any) -> Any:
    """A figure as JSON; NaN becomes null."""
    if isinstance(value, Interval):
        return {name: plain(part) for name, part in value._asdict().items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def read_figures(row: Mapping[str, Any]) -> Figures:
    """The inverse of `plain`, for the row of a method."""
    return Figures(**{name: read_figure(value) for name, value in row.items()})


def read_figure(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Interval(**{name: read_figure(part) for name, part in value.items()})
    return math.nan if value is None else value


def known_taus(plan: Plan, config: EvaluateConfig) -> tuple[Mapping[int, float], str]:
    """Taus of fixed block sizes before the evaluation, and the name of their prompts; empty if unknown.

    A policy stores them by temperature, so they are unknown for mixed traffic, which has two.
    """
    if plan.sweep is not None:
        return plan.sweep.taus, "the sweep's prompts"
    taus = {} if config.mixed else plan.learned_from(POLICY).taus.get(config.temperature, {})
    return taus, "the policy's training prompts"


def best_fixed_of(
    comparison: Comparison, setting: Setting, taus: Mapping[int, float], chosen_on: str
) -> tuple[int, str]:
    """The fastest fixed block size (1 is AR), and the name of the prompts that it was selected on.

    With `taus`, by tau over the measured seconds per step, so that the selection does not use the held-out prompts.
    Otherwise by the speeds measured on them.
    """
    fixed = {size: method for method, size in setting.block_sizes.items() if size is not None}
    if taus:
        step_s = {size: comparison.figure("step_s", method).value for size, method in fixed.items()}
        return fastest_block_size({1: 1.0} | dict(taus), step_s), chosen_on
    speed = {size: comparison.figure("tokens_per_s", method).value for size, method in fixed.items()}
    return fastest_block_size(speed, dict.fromkeys(speed, 1.0)), "these prompts"


def _comparison(runs: Sequence[MethodRun], setting: Setting) -> Comparison:
    return Comparison(runs, control=(CONTROL, AR) if CONTROL in setting.block_sizes else None)


def _held_out(comparison: Comparison, best_fixed: str, champion: int | None, untrained: bool) -> HeldOut:
    ratio = comparison.ratio("tokens_per_s", POLICY, best_fixed)
    not_measured = Interval(0.0, 0.0, 0.0)
    over = comparison.ratio("tokens_per_s", POLICY, CHAMPION) if champion else not_measured
    over_untrained = comparison.ratio("tokens_per_s", POLICY, UNTRAINED) if untrained else not_measured
    return HeldOut(
        policy_tau=comparison.figure("tau", POLICY).value,
        best_fixed_tau=comparison.figure("tau", best_fixed).value,
        policy_speed=comparison.figure("tokens_per_s", POLICY).value,
        best_fixed_speed=comparison.figure("tokens_per_s", best_fixed).value,
        speed_ratio_low=ratio.low,
        speed_ratio_high=ratio.high,
        num_prompts=comparison.num_prompts,
        champion=champion or 0,
        champion_ratio=over.value,
        champion_ratio_low=over.low,
        champion_ratio_high=over.high,
        untrained_ratio=over_untrained.value,
        untrained_ratio_low=over_untrained.low,
        untrained_ratio_high=over_untrained.high,
    )


def _by_set(plan: Plan, runs: Sequence[MethodRun], setting: Setting, best: int) -> dict[str, dict[str, Interval]]:
    """Speed ratio of each method by prompt set and over all: to the best fixed block size (control: to AR)."""
    baselines = {method: AR if method == CONTROL else method_name(best) for method in setting.block_sizes}
    names = list(dict.fromkeys(prompt.set for prompt in plan.prompts))
    runs_by_set = {name: [run for run in runs if plan.prompts[run.prompt].set == name] for name in names}
    if len(names) > 1:
        runs_by_set.pop("all", None)  # a set of this name; the row of all prompts must be the last
        runs_by_set["all"] = list(runs)
    return {
        name: {method: comparison.ratio("tokens_per_s", method, baseline) for method, baseline in baselines.items()}
        for name, set_runs in runs_by_set.items()
        if len({run.prompt for run in set_runs}) > 1
        for comparison in [_comparison(set_runs, setting)]
    }


def _describe(
    config: EvaluateConfig,
    plan: Plan,
    setting: Setting,
    figures: Sequence[Figures],
    by_set: Mapping[str, Mapping[str, Interval]],
    best: int,
    chosen_on: str,
    held_out: HeldOut | None,
    shown_held_out: bool,
) -> str:
    """Caption, tables and conclusions."""
    prompts = f"{len(plan.prompts)} {'held-out ' if shown_held_out else ''}prompts"
    concurrency = "one at a time" if config.concurrency == 1 else f"{config.concurrency} at a time"
    limits = sorted({config.limit(prompt) for prompt in plan.prompts})
    limit = str(limits[0]) if len(limits) == 1 else f"{limits[0]} to {limits[-1]}"
    rivals = "".join(f" ({name}: {pair.draft})" for name, pair in setting.rivals.items())
    draft = f"with {setting.pair.draft}" if setting.pair.draft != NO_DRAFT else "without a draft"
    times = "once" if config.repeats == 1 else f"{config.repeats} times"
    caption = (
        f"{setting.pair.target} {draft}{rivals}, {setting.dtype} on {setting.device}: "
        f"{prompts}, {concurrency}, {times}; {limit} tokens at most, "
        f"temperature {temperature_name(config)}. In brackets: 95% intervals over prompts."
    )
    lines = [caption, "", markdown([cells(row) for row in figures]), ""]
    lines.append(f"Best fixed block size: {best}{' (AR)' * (best == 1)}, chosen on {chosen_on}.")
    compared = [m for m, size in setting.block_sizes.items() if size is None]
    if len(by_set) > 1 and compared:
        control_note = f" ({CONTROL}: over AR's)" * (CONTROL in compared)
        title = f"Speed over that of B={best}{control_note}, by prompt set:"
        rows = [{"prompts": name} | {m: with_range(row[m], 3) for m in compared} for name, row in by_set.items()]
        lines += ["", title, "", markdown(rows), ""]
    if CONTROL in compared:
        lines.append(_clock(by_set))
    if held_out is not None:
        ratio = held_out.policy_speed / held_out.best_fixed_speed
        lines.append(
            f"Policy over best fixed: {ratio:.3f} of its tokens/s "
            f"({held_out.speed_ratio_low:.3f} to {held_out.speed_ratio_high:.3f}), "
            f"{held_out.policy_tau / held_out.best_fixed_tau:.3f} of its tau."
        )
        over_all = list(by_set.values())[-1]
        lines += _beside(over_all.get(ORACLE), held_out)
    return "\n".join(lines)


def _clock(by_set: Mapping[str, Mapping[str, Interval]]) -> str:
    """A line on timing noise: the control over AR, by prompt set and over all prompts (the last row)."""
    *ratios, over_all = [row[CONTROL] for row in by_set.values()]
    values = [ratio.value for ratio in ratios]
    range_by_set = f"; by set {min(values):.3f} to {max(values):.3f}" if ratios else ""
    return (
        f"Clock: {CONTROL}, which is the same work by another engine, made {with_range(over_all, 3)} of AR's "
        f"tokens/s{range_by_set}. The intervals of the other ratios are wider by it."
    )


def _beside(oracle: Interval | None, held_out: HeldOut) -> list[str]:
    """Lines that compare the policy with the untrained choice, the champion and the oracle."""
    lines = []
    if held_out.has_untrained:
        lines.append(
            f"Policy over the untrained choice: {held_out.untrained_ratio:.3f} of its tokens/s "
            f"({held_out.untrained_ratio_low:.3f} to {held_out.untrained_ratio_high:.3f})."
        )
    if held_out.champion:
        lines.append(
            f"Policy over champion version {held_out.champion:g}: {held_out.champion_ratio:.3f} of its tokens/s "
            f"({held_out.champion_ratio_low:.3f} to {held_out.champion_ratio_high:.3f})."
        )
    if oracle is not None:
        policy = held_out.policy_speed / held_out.best_fixed_speed
        captured = (
            f"The policy captures {(policy - 1) / (oracle.value - 1):.0%} of what that is above 1"
            if oracle.low > 1
            else "That is not above 1 beyond its interval: there is nothing to capture"
        )
        lines.append(
            f"Oracle, one block size for each prompt, known in hindsight: {with_range(oracle, 3)} of the best "
            f"fixed tokens/s. {captured}; the policy's regret is {1 - policy / oracle.value:.1%} of the oracle's."
        )
    return lines


def _beside_static(over: Mapping[str, Interval], chosen: Sequence[str]) -> str:
    """Lines that compare adaptive methods with the best static method, chains and trees."""
    ways = " and ".join(dict.fromkeys(chosen))
    return "".join(
        f"\nBest static way: {ways}, each half of the prompts' chosen on the other half. "
        f"{method} over it: {with_range(ratio, 3)} of its tokens/s."
        for method, ratio in over.items()
    )


def _metrics(figures: Sequence[Figures]) -> dict[str, float]:
    """Metrics by names that MLflow allows: 'B=4' -> 'B4.tau', 'B4.tau_low', ..."""
    metrics: dict[str, float] = {}
    for row in figures:
        method = re.sub(r"[^\w .:/-]", "_", row.method.translate(_NOT_IN_A_NAME))
        method = posixpath.normpath(method).lstrip("./")  # the method of a rival may be its path
        for name, value in asdict(row).items():
            key = f"{method}.{name}"
            if isinstance(value, Interval):
                metrics |= {key: value.value, f"{key}_low": value.low, f"{key}_high": value.high}
            elif not isinstance(value, str):
                metrics[key] = value
    return metrics


_NOT_IN_A_NAME = str.maketrans("", "", "=()")
