"""Evaluate: decode held-out prompts with every method, interleaved, and report what was measured.

Methods are plain decoding (AR), every fixed block size, a random one, learned policies, a controller by running
means that learns nothing beforehand (EV), and an oracle, which knows each prompt's best size and is a bound. One
process runs them all (`jobs/evaluator.py`). Nothing is looked up in a sweep; a sweep, when given, only says which
prompts are no longer held out and which fixed block size would have been chosen beforehand.

Every group of prompts, which share a queue, is on disk when it is done, and the same command goes on after a kill.
The result is on disk before MLflow is told; where that cannot be reached, `--relog` tells it later.
"""

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, field_validator

from blockpilot.costs import COSTS_FILE, StepCosts
from blockpilot.examples import prompt_key
from blockpilot.files import is_file, join, write_text
from blockpilot.pairs import PairId
from blockpilot.policy import INFO_FILE, WEIGHTS_FILE, load_policy
from blockpilot.prompts import Prompt, load_prompts
from blockpilot.records import prompt_ids, read_parts
from blockpilot.report import (
    Comparison,
    Figures,
    Interval,
    Run,
    Totals,
    cells,
    fastest_block_size,
    markdown,
    with_range,
)
from blockpilot.sweep import MAX_BLOCK_SIZE, Summary
from jobs.cluster import connect
from jobs.config import Config, PairConfig, Place, absolute_in_submitted_job, main
from jobs.evaluator import AR, EV, ORACLE, POLICY, RANDOM, Setting, Work, evaluator, method_name
from jobs.registry import CHAMPION, HeldOut, Registry, Version, kept_for_later, model_name
from jobs.train import PROMPTS_FILE

NEWEST, NO_POLICY = "newest", "none"
RESULT_FILE, TABLE_FILE, RUNS_FILE = "evaluation.json", "table.md", "runs.jsonl"
BASELINES = {"random": RANDOM, "ev": EV, "oracle": ORACLE}
LINE_INTERVAL_S = 5  # between progress lines


class EvaluateConfig(Config):
    """Which methods to measure, on which prompts, and how."""

    pair: PairConfig = PairConfig()
    prompts: tuple[str, ...] = Field(min_length=1)
    """Prompt sets by name, and files (.jsonl, .parquet, .txt); none that the policy has learned from."""
    num_prompts: int | None = Field(default=None, ge=1)
    """Prompts of each set and file; all of them by default."""
    shuffle_seed: int = 0
    """Draws which prompts of a set come first."""
    policy: str = CHAMPION
    """"champion" or "newest" of the registry, the directory of a policy, or "none"."""
    rivals: tuple[str, ...] = (CHAMPION,)
    """Policies to measure beside it: directories, and "champion" (left out where there is no other)."""
    baselines: tuple[str, ...] = ("random", "ev", "oracle")
    """What else to measure: random, ev, oracle; none by `--baselines` alone."""
    block_sizes: tuple[int, ...] | None = None
    """Fixed block sizes, ascending. Default: the policy's candidates, or quarters of the draft's trained one."""
    sweep: tuple[Place, ...] = ()
    """Sweeps that the policy learned from: their prompts are refused, and the best fixed block size is theirs."""
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of the target's distribution; 1 is all of it."""
    seed: int = Field(default=1, ge=-(2**62), lt=2**62)
    """Seed of the sampler, another than the sweep's; each repeat adds one."""
    max_new_tokens: int = Field(default=128, ge=2)
    """Tokens of an answer at most."""
    concurrency: int = Field(default=1, ge=1)
    """Requests decoded together; when one ends, the next one begins."""
    waves: int = Field(default=4, ge=1)
    """Prompts of a group, which share a queue, over the concurrency: the more, the less its end counts."""
    repeats: int = Field(default=1, ge=1)
    """Times that everything is run."""
    output: Path = Path("runs/evaluate")
    """Directory of the result; an absolute path in a submitted job."""
    accelerator_type: str | None = None
    """Run on a GPU of this type. Otherwise a GPU where there are any."""
    num_cpus: float = Field(default=1.0, gt=0)
    """CPU cores; also torch threads (at least one)."""
    relog: bool = False
    """Measure nothing: tell MLflow of the finished evaluation in `output`."""

    @field_validator("block_sizes")
    @classmethod
    def _check_block_sizes(cls, sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if sizes is not None and (sorted(set(sizes)) != list(sizes) or not sizes or sizes[0] < 2):
            raise ValueError(f"{sizes}: must be ascending and at least 2 (1 is AR, which is always measured)")
        if sizes and sizes[-1] > MAX_BLOCK_SIZE:
            raise ValueError(f"{sizes}: must be at most {MAX_BLOCK_SIZE}")
        return sizes

    @field_validator("baselines")
    @classmethod
    def _check_baselines(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := sorted(set(names) - set(BASELINES)):
            raise ValueError(f"{unknown[0]!r}: must be of {', '.join(BASELINES)}")
        return names


class EvaluateResult(NamedTuple):
    """What was measured."""

    figures: list[Figures]  # AR first, then block sizes ascending, baselines, policies, and the oracle
    best_fixed: int
    best_fixed_chosen_on: str
    held_out: HeldOut | None  # None without a policy
    table: str  # with caption and conclusions
    output: Path
    run_id: str


class Swept(NamedTuple):
    """What is used of sweeps."""

    pair: PairId
    candidates: tuple[int, ...]
    taus: dict[int, float]


class Plan(NamedTuple):
    """What to do, checked before any model is loaded."""

    prompts: tuple[Prompt, ...]
    groups: tuple[tuple[int, ...], ...]
    """Places of the prompts that share a queue; all of one set."""
    sweep: Swept | None
    policies: dict[str, Path]
    version: Version | None  # of the policy, when it is a registered one
    champion: int | None  # number of the version that is measured beside it


def run(config: EvaluateConfig) -> EvaluateResult:
    """Measure and record; raises ValueError for bad input before Ray starts."""
    absolute_in_submitted_job(config.output, "output")
    if config.relog:
        return _log(config.output, Registry.open())
    prompts, swept = read_inputs(config)
    registry = Registry.open()
    plan = Plan(prompts, group(prompts, config.concurrency * config.waves), swept, *find_policies(config, registry))
    _check_held_out(plan)
    work = _work(config, plan)
    connect()
    with evaluator(work, config.accelerator_type, config.num_cpus) as call:
        setting: Setting = call("load")
        for name, reason in setting.left_out.items():
            print(f"evaluate: {name} is left out: {reason}")
        runs = list(_measure_all(call, config, work, setting.pair))
    _save(config, plan, setting, runs)
    (config.output / RUNS_FILE).unlink()
    return _log(config.output, registry)


# Before Ray starts


def read_inputs(config: EvaluateConfig) -> tuple[tuple[Prompt, ...], Swept | None]:
    """The prompts, and the sweeps if there are any. Raises ValueError where they do not fit the configuration."""
    config.pair.names()
    drawn = [p for name in config.prompts for p in load_prompts(name, config.num_prompts, config.shuffle_seed)]
    prompts = tuple({prompt.text: prompt for prompt in drawn}.values())
    if len(prompts) < 2:
        raise ValueError(f"{len(prompts)} prompts: intervals need at least two")
    return prompts, _read_sweeps(config, prompts) if config.sweep else None


def group(prompts: Sequence[Prompt], num: int) -> tuple[tuple[int, ...], ...]:
    """Places of prompts that share a queue, so many at most, set by set."""
    by_set: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        by_set.setdefault(prompt.set, []).append(place)
    return tuple(tuple(places[i : i + num]) for places in by_set.values() for i in range(0, len(places), num))


def _read_sweeps(config: EvaluateConfig, prompts: Sequence[Prompt]) -> Swept:
    texts, summary, fitting = {prompt.text for prompt in prompts}, Summary(), Summary()
    for place in config.sweep:
        for part in read_parts(place):
            _check_names(f"sweep {place}", part.metadata.pair, config)
            seen = [row for row in part.rows if row.prompt in texts]
            if seen:
                raise ValueError(
                    f"{len(seen)} of {len(prompts)} prompts are in sweep {place} and so not held out; "
                    f"the first: {seen[0].prompt_id} {seen[0].prompt[:60]!r}"
                )
            if config.seed <= part.metadata.config["seed"] < config.seed + config.repeats:
                raise ValueError(
                    f"seed {config.seed}: must be another than the sweep's {part.metadata.config['seed']}"
                )
            if config.block_sizes and not set(config.block_sizes) & set(part.metadata.candidates):
                raise ValueError(
                    f"block_sizes {config.block_sizes}: none is a candidate of the sweep {part.metadata.candidates}"
                )
            summary.add(part.rows)
            fitting.add([row for row in part.rows if row.temperature == config.temperature])
    metadata = part.metadata
    taus = (fitting if fitting.num_rows else summary).tau_curve
    return Swept(metadata.pair, tuple(metadata.candidates), taus)


def _check_names(what: str, made_for: PairId, config: EvaluateConfig) -> None:
    target, draft = config.pair.models
    if (made_for.target, made_for.draft) != (target, draft):
        raise ValueError(
            f"{what}: made for target {made_for.target} with draft {made_for.draft}; "
            f"to be evaluated: target {target} with draft {draft}"
        )


def find_policies(config: EvaluateConfig, registry: Registry) -> tuple[dict[str, Path], Version | None, int | None]:
    """Directories of the policy and its rivals by the name of the method; the policy's version and the champion's.

    Raises ValueError where there is no such policy or it is for other models.
    """
    if config.policy == NO_POLICY:
        return {}, None, None
    version = None
    directory = Path(config.policy).absolute()
    if config.policy in (CHAMPION, NEWEST):
        version = _find_version(config, registry)
        directory = _download(config, registry, version)
    policies, champion = {POLICY: directory}, None
    for rival in config.rivals:
        if rival == CHAMPION:
            found = _find_champion(config, registry)
            if found is not None and found != version:
                policies[CHAMPION], champion = _download(config, registry, found), found.number
        else:
            name = Path(rival).name
            policies[str(rival) if name in (*policies, CHAMPION) else name] = Path(rival).absolute()
    for name, place in list(policies.items()):
        try:
            made_for = load_policy(place).info.pair
        except ValueError as error:
            if name != CHAMPION:
                raise
            print(f"evaluate: the champion is left out: {error}")
            del policies[CHAMPION]
            champion = None
            continue
        if name == POLICY:  # rivals of another pair are left out when it is loaded
            _check_names(f"policy {place}", made_for, config)
    return policies, version, champion


def _download(config: EvaluateConfig, registry: Registry, version: Version) -> Path:
    return registry.download(version, config.output / f"{version.name}-{version.number}")


def _find_champion(config: EvaluateConfig, registry: Registry) -> Version | None:
    try:
        return registry.find_champion(model_name(config.pair.models[0]))
    except ValueError:  # no such model
        return None


def _find_version(config: EvaluateConfig, registry: Registry) -> Version:
    name = model_name(config.pair.models[0])
    try:
        if config.policy == CHAMPION:
            return registry.champion(name)
        return registry.versions(name)[-1]
    except (ValueError, IndexError) as error:
        reason = f"{name} has no versions" if isinstance(error, IndexError) else str(error)
        raise ValueError(f"{reason}. Give the directory of a policy, or --policy {NO_POLICY}") from None


def _check_held_out(plan: Plan) -> None:
    """Raise ValueError where a policy remembers to have been trained on one of the prompts."""
    for directory in plan.policies.values():
        known = _training_prompts(directory)
        seen = [prompt for prompt in plan.prompts if prompt_key(prompt.text) in known]
        if seen:
            key = prompt_ids(seen[0], 0, 0.0)[0]
            raise ValueError(
                f"{len(seen)} of {len(plan.prompts)} prompts are among those that policy {directory} was trained on; "
                f"the first: {key} {seen[0].text[:60]!r}"
            )


def _training_prompts(directory: Path) -> set[str]:
    file = directory / PROMPTS_FILE
    return set(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else set()


def _work(config: EvaluateConfig, plan: Plan) -> Work:
    costs = join(config.sweep[0], COSTS_FILE) if config.sweep else ""
    return Work(
        config.pair,
        plan.prompts,
        plan.groups,
        plan.policies,
        config.block_sizes,
        tuple(BASELINES[name] for name in config.baselines),
        StepCosts.read(costs) if costs and is_file(costs) else None,
        plan.sweep.pair if plan.sweep else None,
        config.temperature,
        config.top_p,
        config.seed,
        config.max_new_tokens,
        config.concurrency,
    )


# Measuring


def _measure_all(call: Any, config: EvaluateConfig, work: Work, pair: PairId) -> Iterator[Run]:
    """Every repeat of every group, one at a time, with a line of progress every few seconds; what an earlier process
    with the same settings has measured is read from its file.
    """
    file, places, identity = config.output / RUNS_FILE, list(_places(config, work)), _identity(config, work, pair)
    done = _read_runs(file, identity)
    if done:
        print(f"evaluate: going on after {len(done)} of {len(places)} groups")
    else:
        write_text(file, json.dumps({"identity": identity}) + "\n")
    started = last_line = time.monotonic()
    num_before = len(done)
    with file.open("a", encoding="utf-8") as log:
        for number, place in enumerate(places, start=1):
            if place not in done:
                done[place] = call("measure", *place)
                content = [run._asdict() | {"totals": asdict(run.totals)} for run in done[place]]
                log.write(json.dumps({"place": place, "runs": content}) + "\n")
                log.flush()
            yield from done[place]
            now = time.monotonic()
            if now - last_line >= LINE_INTERVAL_S or number == len(places):
                left = (now - started) / max(number - num_before, 1) * (len(places) - number)
                print(f"evaluate: {number}/{len(places)} groups, {left:.0f} s left", flush=True)
                last_line = now


def _places(config: EvaluateConfig, work: Work) -> Iterator[tuple[int, int]]:
    return ((repeat, number) for repeat in range(config.repeats) for number in range(len(work.groups)))


def _identity(config: EvaluateConfig, work: Work, pair: PairId) -> str:
    """A hash of all that the runs depend on."""
    settings = config.model_dump(mode="json", exclude={"output", "relog", "accelerator_type"})
    prompts = [(p.set, p.text) for p in work.prompts]
    key = repr((settings, pair, list(work.policies), prompts, work.groups, work.costs))
    digest = hashlib.sha256(key.encode())
    for directory in work.policies.values():
        for name in (INFO_FILE, WEIGHTS_FILE):
            digest.update((directory / name).read_bytes())
    return digest.hexdigest()


def _read_runs(file: Path, identity: str) -> dict[tuple[int, int], list[Run]]:
    """Groups that are done, by (repeat, group); none in a file of other settings. A torn last line is left out."""
    if not file.exists():
        return {}
    first, *lines = file.read_text(encoding="utf-8").split("\n")
    if first != json.dumps({"identity": identity}):
        return {}
    whole = lines[:-1]  # what follows the last newline is empty, or torn
    write_text(file, "".join(f"{line}\n" for line in (first, *whole)))
    found = map(json.loads, whole)
    return {tuple(each["place"]): [_read_run(run) for run in each["runs"]] for each in found}


def _read_run(found: dict[str, Any]) -> Run:
    return Run(**found | {"totals": Totals(**found["totals"])})


# Reporting


def _save(config: EvaluateConfig, plan: Plan, setting: Setting, runs: Sequence[Run]) -> None:
    """Work out the figures and write them, with all that MLflow is to know."""
    comparison = Comparison(runs, seed=config.seed)
    best, chosen_on = _best_fixed(comparison, setting, plan.sweep)
    champion = plan.champion if CHAMPION in setting.block_sizes else None
    held_out = _held_out(comparison, method_name(best), champion) if POLICY in setting.block_sizes else None
    by_set = _by_set(config, plan, runs, setting, best)
    figures = comparison.figures(AR)
    shown = bool(plan.sweep) or any(_training_prompts(directory) for directory in plan.policies.values())
    table = _describe(config, plan, setting, figures, by_set, best, chosen_on, held_out)
    content = {
        "config": config.model_dump(mode="json"),
        "setting": setting._asdict()
        | {"pair": setting.pair._asdict(), "costs": json.loads(setting.costs.to_json()), "shown_held_out": shown},
        "versions": {name: package_version(name) for name in ("torch", "transformers")},
        "policy_version": plan.version._asdict() if plan.version else None,
        "best_fixed": {"block_size": best, "chosen_on": chosen_on},
        "held_out": asdict(held_out) if held_out else None,
        "figures": [{name: plain(value) for name, value in asdict(row).items()} for row in figures],
        "by_set": {name: {method: plain(ratio) for method, ratio in row.items()} for name, row in by_set.items()},
        "table": table,
        "prompts": [{"set": prompt.set, "text": prompt.text} for prompt in plan.prompts],
        "runs": [run._asdict() | {"totals": asdict(run.totals)} for run in runs],
    }
    write_text(config.output / RESULT_FILE, json.dumps(content, indent=1) + "\n")
    write_text(config.output / TABLE_FILE, table + "\n")


def _log(output: Path, registry: Registry) -> EvaluateResult:
    """Show the result that `output` holds, and tell MLflow of it."""
    if not (output / RESULT_FILE).exists():
        raise ValueError(f"output {output}: no {RESULT_FILE}, nothing to log")
    found = json.loads((output / RESULT_FILE).read_text(encoding="utf-8"))
    print(found["table"], flush=True)
    figures = [read_figures(row) for row in found["figures"]]
    held_out = HeldOut(**found["held_out"]) if found["held_out"] else None
    version = Version(**found["policy_version"]) if found["policy_version"] else None
    best = found["best_fixed"]
    with kept_for_later(registry.uri, output), registry.log_run("evaluate") as record:
        record.log_params(found["config"])
        record.log_tags(found["setting"]["pair"] | {"best_fixed_block_size": best["block_size"]})
        record.log_metrics(_metrics(figures))
        record.log_table([cells(row) for row in figures], "table.json")
        for name in (TABLE_FILE, RESULT_FILE):
            record.log_artifact(output / name)
        if version and held_out and found["setting"]["shown_held_out"]:
            registry.log_held_out(version, held_out)
            registry.tag_version(version, {"heldout.run_id": record.id})
    if version and not found["setting"]["shown_held_out"]:
        print(f"evaluate: not recorded with version {version.number}: --sweep must show the prompts held out")
    return EvaluateResult(figures, best["block_size"], best["chosen_on"], held_out, found["table"], output, record.id)


def plain(value: Any) -> Any:
    """A figure for JSON, which has no NaN."""
    if isinstance(value, Interval):
        return {name: plain(part) for name, part in value._asdict().items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def read_figures(row: Mapping[str, Any]) -> Figures:
    """The inverse of `plain` for a method's row."""
    return Figures(**{name: read_figure(value) for name, value in row.items()})


def read_figure(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Interval(**{name: read_figure(part) for name, part in value.items()})
    return math.nan if value is None else value


def _best_fixed(comparison: Comparison, setting: Setting, sweep: Swept | None) -> tuple[int, str]:
    """The fastest fixed block size (1 is AR), and on which prompts it was chosen.

    With a sweep, by tau on its prompts over the seconds of a step here: the choice has not seen the held-out
    prompts. Otherwise by what was measured on them.
    """
    fixed = {size: method for method, size in setting.block_sizes.items() if size is not None}
    step_s = {size: comparison.figure("step_s", method).value for size, method in fixed.items()}
    if sweep is not None:
        return fastest_block_size({1: 1.0} | sweep.taus, step_s), "the sweep's prompts"
    speed = {size: comparison.figure("tokens_per_s", method).value for size, method in fixed.items()}
    return fastest_block_size(speed, dict.fromkeys(speed, 1.0)), "these prompts"


def _held_out(comparison: Comparison, best_fixed: str, champion: int | None) -> HeldOut:
    ratio = comparison.ratio("tokens_per_s", POLICY, best_fixed)
    over = comparison.ratio("tokens_per_s", POLICY, CHAMPION) if champion else None
    return HeldOut(
        policy_tau=comparison.figure("tau", POLICY).value,
        best_fixed_tau=comparison.figure("tau", best_fixed).value,
        policy_speed=comparison.figure("tokens_per_s", POLICY).value,
        best_fixed_speed=comparison.figure("tokens_per_s", best_fixed).value,
        speed_ratio_low=ratio.low,
        speed_ratio_high=ratio.high,
        champion=champion or 0,
        champion_ratio=over.value if over else 0.0,
        champion_ratio_low=over.low if over else 0.0,
        champion_ratio_high=over.high if over else 0.0,
    )


def _by_set(
    config: EvaluateConfig, plan: Plan, runs: Sequence[Run], setting: Setting, best: int
) -> dict[str, dict[str, Interval]]:
    """For every set, and for all of them, the speed of each method over that of the best fixed block size."""
    names = list(dict.fromkeys(prompt.set for prompt in plan.prompts))
    of_sets = {name: [run for run in runs if plan.prompts[run.prompt].set == name] for name in names}
    if len(names) > 1:
        of_sets["all"] = list(runs)
    return {
        name: {method: comparison.ratio("tokens_per_s", method, method_name(best)) for method in setting.block_sizes}
        for name, some in of_sets.items()
        if len({run.prompt for run in some}) > 1
        for comparison in [Comparison(some, seed=config.seed)]
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
) -> str:
    """Caption, tables and what follows from them."""
    threads = f", {setting.num_threads} thread{'s' * (setting.num_threads > 1)}" if setting.device == "cpu" else ""
    prompts = f"{len(plan.prompts)} {'held-out ' if plan.sweep else ''}prompts"
    together = "one at a time" if config.concurrency == 1 else f"{config.concurrency} at a time"
    times = "once" if config.repeats == 1 else f"{config.repeats} times"
    caption = (
        f"{setting.pair.target} with {setting.pair.draft}, {setting.dtype} on {setting.device}{threads}: "
        f"{prompts}, {together}, {times}; {config.max_new_tokens} tokens at most, "
        f"temperature {config.temperature:g}. In brackets: 95% intervals over prompts."
    )
    lines = [caption, "", markdown([cells(row) for row in figures]), ""]
    lines.append(f"Best fixed block size: {best}{' (AR)' * (best == 1)}, chosen on {chosen_on}.")
    compared = [m for m, size in setting.block_sizes.items() if size is None]
    if len(by_set) > 1 and compared:
        lines += ["", f"Speed over that of B={best}, by prompt set:", "", _set_table(by_set, compared), ""]
    if held_out is not None:
        ratio = held_out.policy_speed / held_out.best_fixed_speed
        lines.append(
            f"Policy over best fixed: {ratio:.3f} of its tokens/s "
            f"({held_out.speed_ratio_low:.3f} to {held_out.speed_ratio_high:.3f}), "
            f"{held_out.policy_tau / held_out.best_fixed_tau:.3f} of its tau."
        )
        lines += _beside(figures, held_out)
    return "\n".join(lines)


def _set_table(by_set: Mapping[str, Mapping[str, Interval]], methods: Sequence[str]) -> str:
    return markdown(
        [{"prompts": name, **{m: with_range(row[m], 3) for m in methods}} for name, row in by_set.items()]
    )


def _beside(figures: Sequence[Figures], held_out: HeldOut) -> list[str]:
    """What the policy is worth beside the champion and the oracle."""
    lines = []
    if held_out.champion:
        lines.append(
            f"Policy over champion version {held_out.champion:g}: {held_out.champion_ratio:.3f} of its tokens/s "
            f"({held_out.champion_ratio_low:.3f} to {held_out.champion_ratio_high:.3f})."
        )
    oracle = next((row.tokens_per_s.value for row in figures if row.method == ORACLE), None)
    if oracle is not None:
        fixed, policy = held_out.best_fixed_speed, held_out.policy_speed
        captured = (
            f"captures {(policy - fixed) / (oracle - fixed):.0%} of that" if oracle > fixed else "has none to capture"
        )
        lines.append(
            f"Oracle, one block size for each prompt, known in hindsight: {oracle / fixed:.3f} of the best "
            f"fixed tokens/s. The policy {captured}; its regret is {1 - policy / oracle:.1%} of them."
        )
    return lines


def _metrics(figures: Sequence[Figures]) -> dict[str, float]:
    """Names as MLflow allows them: 'B=4' -> 'B4.tau', 'B4.tau_low', ..."""
    metrics: dict[str, float] = {}
    for row in figures:
        for name, value in asdict(row).items():
            key = f"{row.method.translate(_NOT_IN_A_NAME)}.{name}"
            if isinstance(value, Interval):
                metrics |= {key: value.value, f"{key}_low": value.low, f"{key}_high": value.high}
            elif not isinstance(value, str):
                metrics[key] = value
    return metrics


_NOT_IN_A_NAME = str.maketrans("", "", "=()")


if __name__ == "__main__":
    main(EvaluateConfig, run)
