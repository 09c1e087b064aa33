"""Evaluate: decode held-out prompts with every method, interleaved, and report what was measured.

Methods are plain decoding (AR), every fixed block size, and a policy that chooses after each request's prefill.
One process runs them all: for each prompt, or group of prompts that share a batch, every method in an order that
rotates, so that drifts of the machine fall on all of them. Nothing is looked up in a sweep; a sweep, when given,
only says which prompts are no longer held out and which fixed block size would have been chosen beforehand.
"""

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from jinja2 import TemplateError
from pydantic import Field, field_validator
from ray.exceptions import RayTaskError

from blockpilot.engine import Engine, Policy, Request
from blockpilot.files import write_text
from blockpilot.measure import decode_group
from blockpilot.pairs import Pair, PairId
from blockpilot.policy import load_policy
from blockpilot.prompts import Prompt, load_prompts
from blockpilot.records import prompt_ids, read_sweep
from blockpilot.report import Comparison, Figures, Interval, Run, cells, fastest_block_size, markdown
from blockpilot.sweep import MAX_BLOCK_SIZE, Summary, sampler_seed
from blockpilot.verify import Sampling
from jobs.cluster import actor_options, connect, num_threads
from jobs.config import Config, PairConfig, Place, absolute_in_submitted_job, main
from jobs.registry import CHAMPION, HeldOut, Registry, Version, model_name

AR, POLICY = "AR", "policy"
NEWEST, NO_POLICY = "newest", "none"
RESULT_FILE, TABLE_FILE = "evaluation.json", "table.md"
NUM_WARM_UP_TOKENS = 8
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
    block_sizes: tuple[int, ...] | None = None
    """Fixed block sizes, ascending. Default: quarters of the draft's trained one, and the sweep's candidates."""
    sweep: Place | None = None
    """The sweep that the policy learned from: its prompts are refused, and the best fixed block size is its."""
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of the target's distribution; 1 is all of it."""
    seed: int = Field(default=1, ge=-(2**62), lt=2**62)
    """Seed of the sampler, another than the sweep's; each repeat adds one."""
    max_new_tokens: int = Field(default=128, ge=2)
    """Tokens of an answer at most."""
    concurrency: int = Field(default=1, ge=1)
    """Prompts decoded together; 1 is one request at a time."""
    repeats: int = Field(default=1, ge=1)
    """Times that everything is run."""
    output: Path = Path("runs/evaluate")
    """Directory of the result; an absolute path in a submitted job."""
    accelerator_type: str | None = None
    """Run on a GPU of this type. Otherwise a GPU where there are any."""
    num_cpus: float = Field(default=1.0, gt=0)
    """CPU cores; also torch threads (at least one)."""

    @field_validator("block_sizes")
    @classmethod
    def _check_block_sizes(cls, sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if sizes is not None and (sorted(set(sizes)) != list(sizes) or not sizes or sizes[0] < 2):
            raise ValueError(f"{sizes}: must be ascending and at least 2 (1 is AR, which is always measured)")
        if sizes and sizes[-1] > MAX_BLOCK_SIZE:
            raise ValueError(f"{sizes}: must be at most {MAX_BLOCK_SIZE}")
        return sizes


class EvaluateResult(NamedTuple):
    """What was measured."""

    figures: list[Figures]  # AR first, then block sizes ascending, then the policy
    best_fixed: int
    best_fixed_chosen_on: str
    held_out: HeldOut | None  # None without a policy
    table: str  # with caption and conclusions
    output: Path
    run_id: str


class Swept(NamedTuple):
    """What is used of a sweep."""

    pair: PairId
    candidates: tuple[int, ...]
    taus: dict[int, float]


class Plan(NamedTuple):
    """What to do, checked before any model is loaded."""

    prompts: tuple[Prompt, ...]
    sweep: Swept | None
    policy: Path | None
    version: Version | None  # of the policy, when it is a registered one

    def groups(self, concurrency: int) -> list[tuple[Prompt, ...]]:
        return [self.prompts[i : i + concurrency] for i in range(0, len(self.prompts), concurrency)]


class Setting(NamedTuple):
    """What the actor found: the pair, where it runs, and the methods in the order of the report."""

    pair: PairId
    dtype: str
    device: str
    num_threads: int
    methods: dict[str, int | None]  # block size, None: the policy's


def run(config: EvaluateConfig) -> EvaluateResult:
    """Measure and record; raises ValueError for bad input before Ray starts."""
    absolute_in_submitted_job(config.output, "output")
    prompts, swept = read_inputs(config)
    registry = Registry.open()
    plan = Plan(prompts, swept, *find_policy(config, registry))
    connect()
    with _evaluator(config, plan) as evaluator:
        setting: Setting = _get(evaluator.load.remote())
        runs = list(_measure_all(evaluator, config, len(plan.groups(config.concurrency))))
    return _report(config, plan, setting, runs, registry)


# Before Ray starts


def read_inputs(config: EvaluateConfig) -> tuple[tuple[Prompt, ...], Swept | None]:
    """The prompts, and the sweep if there is one. Raises ValueError where they do not fit the configuration."""
    config.pair.names()
    drawn = [p for name in config.prompts for p in load_prompts(name, config.num_prompts, config.shuffle_seed)]
    prompts = tuple({prompt.text: prompt for prompt in drawn}.values())
    if len(prompts) <= config.concurrency:
        raise ValueError(
            f"{len(prompts)} prompts {config.concurrency} at a time: intervals need at least two groups of prompts"
        )
    return prompts, _read_sweep(config, config.sweep, prompts) if config.sweep else None


def _read_sweep(config: EvaluateConfig, path: str, prompts: Sequence[Prompt]) -> Swept:
    rows, metadata = read_sweep(path)
    _check_names(f"sweep {path}", metadata.pair, config)
    swept = {row.prompt for row in rows}
    seen = [prompt.text for prompt in prompts if prompt.text in swept]
    if seen:
        raise ValueError(
            f"{len(seen)} of {len(prompts)} prompts are in sweep {path} and so not held out; "
            f"the first: {seen[0][:60]!r}"
        )
    if config.seed <= metadata.config["seed"] < config.seed + config.repeats:
        raise ValueError(f"seed {config.seed}: must be another than the sweep's {metadata.config['seed']}")
    if config.block_sizes and not set(config.block_sizes) & set(metadata.candidates):
        raise ValueError(f"block_sizes {config.block_sizes}: none is a candidate of the sweep {metadata.candidates}")
    return Swept(metadata.pair, tuple(metadata.candidates), Summary().add(rows).tau_curve)


def _check_names(what: str, made_for: PairId, config: EvaluateConfig) -> None:
    target, draft = config.pair.models
    if (made_for.target, made_for.draft) != (target, draft):
        raise ValueError(
            f"{what}: made for target {made_for.target} with draft {made_for.draft}; "
            f"to be evaluated: target {target} with draft {draft}"
        )


def find_policy(config: EvaluateConfig, registry: Registry) -> tuple[Path | None, Version | None]:
    """Directory of the policy, and its version if it is a registered one; (None, None) for "none".

    Raises ValueError where there is no such policy or it is for other models.
    """
    if config.policy == NO_POLICY:
        return None, None
    version = None
    directory = Path(config.policy).absolute()
    if config.policy in (CHAMPION, NEWEST):
        version = _find_version(config, registry)
        directory = registry.download(version, config.output / f"{version.name}-{version.number}")
    _check_names(f"policy {directory}", load_policy(directory).info.pair, config)
    return directory, version


def _find_version(config: EvaluateConfig, registry: Registry) -> Version:
    name = model_name(config.pair.models[0])
    try:
        if config.policy == CHAMPION:
            return registry.champion(name)
        return registry.versions(name)[-1]
    except (ValueError, IndexError) as error:
        reason = f"{name} has no versions" if isinstance(error, IndexError) else str(error)
        raise ValueError(f"{reason}. Give the directory of a policy, or --policy {NO_POLICY}") from None


# Measuring


class Evaluator:
    """The actor that holds the pair and runs every method; nothing else decodes while it measures."""

    def __init__(self, config: EvaluateConfig, plan: Plan, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._config, self._plan = config, plan

    def load(self) -> Setting:
        """Load, check that everything fits, and warm up. Raises ValueError where it does not."""
        config, plan = self._config, self._plan
        pair = config.pair.load()
        if plan.sweep and plan.sweep.pair != pair.id:
            raise ValueError(
                f"sweep {config.sweep}: made for {plan.sweep.pair}; this pair is {pair.id}: sweep it to another place"
            )
        self._policy = self._load_policy(pair)
        self._prompt_ids = {prompt: _encode(prompt, pair) for prompt in plan.prompts}
        longest = max(map(len, self._prompt_ids.values()))
        self._engine = Engine(
            pair,
            num_slots=config.concurrency,
            max_length=min(longest + config.max_new_tokens, pair.max_length),
            policy=self._policy,
            max_block_size=MAX_BLOCK_SIZE,
        )
        self._methods = self._name_methods(pair)
        for prompt in plan.prompts:
            self._check(prompt)
        for method in self._methods:
            decode_group(self._engine, self._requests(plan.prompts[:1], method, 0, NUM_WARM_UP_TOKENS))
        dtype = str(pair.target.dtype).removeprefix("torch.")
        return Setting(pair.id, dtype, pair.target.device.type, torch.get_num_threads(), self._methods)

    def measure(self, repeat: int, group: int) -> list[Run]:
        """Decode one group with every method, and compare the texts with AR's."""
        prompts, methods = self._plan.groups(self._config.concurrency)[group], list(self._methods)
        start = (repeat + group) % len(methods)
        measured = {
            method: decode_group(self._engine, self._requests(prompts, method, repeat, self._config.max_new_tokens))
            for method in methods[start:] + methods[:start]
        }
        texts = measured[AR].outputs
        return [Run(m, group, repeat, measured[m].totals(reference=texts)) for m in methods]

    def _load_policy(self, pair: Pair) -> Policy | None:
        if self._plan.policy is None:
            return None
        policy = load_policy(self._plan.policy)
        policy.check(pair)
        return policy

    def _name_methods(self, pair: Pair) -> dict[str, int | None]:
        sizes = self._config.block_sizes or default_block_sizes(
            pair.block_size, self._plan.sweep.candidates if self._plan.sweep else ()
        )
        methods: dict[str, int | None] = {_method(size): size for size in (1, *sizes)}
        return methods if self._policy is None else methods | {POLICY: None}

    def _requests(self, prompts: Sequence[Prompt], method: str, repeat: int, max_new_tokens: int) -> list[Request]:
        config, size = self._config, self._methods[method]
        seed = config.seed + repeat
        return [
            Request(
                self._prompt_ids[prompt],
                max_new_tokens,
                Sampling(
                    temperature=config.temperature,
                    top_p=config.top_p,
                    seed=sampler_seed(seed, prompt_ids(prompt, seed, config.temperature)[0]),
                ),
                size,
                self._engine.pair.stop_token_ids,
            )
            for prompt in prompts
        ]

    def _check(self, prompt: Prompt) -> None:
        (request,) = self._requests([prompt], AR, 0, self._config.max_new_tokens)
        try:
            self._engine.check(request)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.text[:60]!r} of {prompt.set}: {error}") from None


def _encode(prompt: Prompt, pair: Pair) -> tuple[int, ...]:
    try:
        return prompt.encode(pair.tokenizer)
    except (ValueError, TemplateError) as error:  # a chat template may refuse roles, or their order
        raise ValueError(f"prompt {prompt.text[:60]!r} of {prompt.set}: chat template: {error}") from None


def default_block_sizes(trained: int, candidates: Sequence[int]) -> tuple[int, ...]:
    """Quarters of the draft's trained block size, and a sweep's candidates; never 1."""
    quarters = {trained * quarter // 4 for quarter in range(1, 5)}
    return tuple(size for size in sorted(quarters | set(candidates)) if size > 1)


@contextmanager
def _evaluator(config: EvaluateConfig, plan: Plan) -> Iterator[Any]:
    options = actor_options(config.accelerator_type, config.num_cpus)
    remote: Any = ray.remote(Evaluator)
    evaluator = remote.options(**options).remote(config, plan, num_threads(config.num_cpus))
    try:
        yield evaluator
    finally:
        ray.kill(evaluator)


def _get(reference: Any) -> Any:
    """ray.get, with the actor's own ValueErrors."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, ValueError) else error) from None


def _measure_all(evaluator: Any, config: EvaluateConfig, num_groups: int) -> Iterator[Run]:
    """Every repeat of every group, one at a time, with a line of progress every few seconds."""
    places = [(repeat, group) for repeat in range(config.repeats) for group in range(num_groups)]
    started = last_line = time.monotonic()
    for done, place in enumerate(places, start=1):
        yield from _get(evaluator.measure.remote(*place))
        now = time.monotonic()
        if now - last_line >= LINE_INTERVAL_S or done == len(places):
            left = (now - started) / done * (len(places) - done)
            print(f"evaluate: {done}/{len(places)} groups, {left:.0f} s left", flush=True)
            last_line = now


# Reporting


def _report(
    config: EvaluateConfig, plan: Plan, setting: Setting, runs: Sequence[Run], registry: Registry
) -> EvaluateResult:
    """Work out the figures, show them, write them, and record them in MLflow."""
    comparison = Comparison(runs, seed=config.seed)
    best, chosen_on = _best_fixed(comparison, setting, plan.sweep)
    held_out = _held_out(comparison, _method(best)) if POLICY in setting.methods else None
    figures = comparison.figures(AR)
    table = _describe(config, plan, setting, figures, best, chosen_on, held_out)
    print(table, flush=True)
    content = {
        "config": config.model_dump(mode="json"),
        "setting": setting._asdict() | {"pair": setting.pair._asdict()},
        "versions": {name: package_version(name) for name in ("torch", "transformers")},
        "policy_version": plan.version.number if plan.version else None,
        "best_fixed": {"block_size": best, "chosen_on": chosen_on},
        "held_out": asdict(held_out) if held_out else None,
        "figures": [{name: _plain(value) for name, value in asdict(row).items()} for row in figures],
        "prompts": [prompt.text for prompt in plan.prompts],
        "runs": [run._asdict() | {"totals": asdict(run.totals)} for run in runs],
    }
    write_text(config.output / RESULT_FILE, json.dumps(content, indent=1) + "\n")
    write_text(config.output / TABLE_FILE, table + "\n")
    with registry.log_run("evaluate") as record:
        record.log_params(config.model_dump(mode="json"))
        record.log_tags(setting.pair._asdict() | {"best_fixed_block_size": best})
        record.log_metrics(_metrics(figures))
        record.log_table([cells(row) for row in figures], "table.json")
        for name in (TABLE_FILE, RESULT_FILE):
            record.log_artifact(config.output / name)
        if plan.version and plan.sweep and held_out:
            registry.log_held_out(plan.version, held_out)
            registry.tag_version(plan.version, {"heldout.run_id": record.id})
    if plan.version and not plan.sweep:
        print(f"evaluate: not recorded with version {plan.version.number}: --sweep must show the prompts held out")
    return EvaluateResult(figures, best, chosen_on, held_out, table, config.output, record.id)


def _plain(value: Any) -> Any:
    """A figure for JSON, which has no NaN."""
    if isinstance(value, Interval):
        return {name: _plain(part) for name, part in value._asdict().items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def _method(block_size: int) -> str:
    return AR if block_size == 1 else f"B={block_size}"


def _best_fixed(comparison: Comparison, setting: Setting, sweep: Swept | None) -> tuple[int, str]:
    """The fastest fixed block size (1 is AR), and on which prompts it was chosen.

    With a sweep, by tau on its prompts over the seconds of a step here: the choice has not seen the held-out
    prompts. Otherwise by what was measured on them.
    """
    fixed = {size: method for method, size in setting.methods.items() if size is not None}
    step_s = {size: comparison.figure("step_s", method).value for size, method in fixed.items()}
    if sweep is not None:
        return fastest_block_size({1: 1.0} | sweep.taus, step_s), "the sweep's prompts"
    speed = {size: comparison.figure("tokens_per_s", method).value for size, method in fixed.items()}
    return fastest_block_size(speed, dict.fromkeys(speed, 1.0)), "these prompts"


def _held_out(comparison: Comparison, best_fixed: str) -> HeldOut:
    ratio = comparison.ratio("tokens_per_s", POLICY, best_fixed)
    return HeldOut(
        policy_tau=comparison.figure("tau", POLICY).value,
        best_fixed_tau=comparison.figure("tau", best_fixed).value,
        policy_speed=comparison.figure("tokens_per_s", POLICY).value,
        best_fixed_speed=comparison.figure("tokens_per_s", best_fixed).value,
        speed_ratio_low=ratio.low,
        speed_ratio_high=ratio.high,
    )


def _describe(
    config: EvaluateConfig,
    plan: Plan,
    setting: Setting,
    figures: Sequence[Figures],
    best: int,
    chosen_on: str,
    held_out: HeldOut | None,
) -> str:
    """Caption, table and what follows from it."""
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
    if held_out is not None:
        ratio = held_out.policy_speed / held_out.best_fixed_speed
        lines.append(
            f"Policy over best fixed: {ratio:.3f} of its tokens/s "
            f"({held_out.speed_ratio_low:.3f} to {held_out.speed_ratio_high:.3f}), "
            f"{held_out.policy_tau / held_out.best_fixed_tau:.3f} of its tau."
        )
    return "\n".join(lines)


def _metrics(figures: Sequence[Figures]) -> dict[str, float]:
    """Names as MLflow allows them: 'B=4' -> 'B4.tau', 'B4.tau_low', ..."""
    metrics: dict[str, float] = {}
    for row in figures:
        for name, value in asdict(row).items():
            key = f"{row.method.replace('=', '')}.{name}"
            if isinstance(value, Interval):
                metrics |= {key: value.value, f"{key}_low": value.low, f"{key}_high": value.high}
            elif not isinstance(value, str):
                metrics[key] = value
    return metrics


if __name__ == "__main__":
    main(EvaluateConfig, run)
