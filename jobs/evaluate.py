"""Evaluate: decode held-out prompts with every method, interleaved, and report the measurements.

Methods are plain decoding (AR), fixed block sizes, draft trees of fixed sizes, a random block size, learned policies,
two untrained methods (chains by running means, and kind `step`, which adapts while decoding), other drafts of the
same target (`--rival-drafts`), and an oracle: the best block size of each prompt in hindsight (a bound). One process
decodes every text with all of them (`jobs/evaluation/actor.py`). Sweeps have two uses only: their prompts are refused
as not held out, and their taus select the best fixed block size before the evaluation. A policy stores both for the
sweeps that it was trained on.

Prompts that share a queue form a group. Each finished group is written to disk, and the same command continues after
a kill. The result is written before it is logged to MLflow; `--relog` logs it later if MLflow was not reachable.
"""

import hashlib
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from blockpilot.evaluation.statistics import MethodRun, Totals
from blockpilot.policy.store import INFO_FILE, WEIGHTS_FILE
from blockpilot.storage import write_text
from jobs.common.build import git_commit, versions
from jobs.common.cluster import connect, lone_actor
from jobs.common.config import Resources, absolute_in_submitted_job, main
from jobs.common.lease import Lease
from jobs.common.progress import Progress
from jobs.common.registry import Registry
from jobs.evaluation.actor import Evaluator, Setting
from jobs.evaluation.inputs import EvaluateConfig, Plan, plan_for, read_inputs
from jobs.evaluation.result import EvaluateResult, log, save, stored_run


def run(config: EvaluateConfig) -> EvaluateResult:
    """Measure and record; raises ValueError for bad input before Ray starts."""
    absolute_in_submitted_job(config.output, "output")
    if config.relog:
        return log(config.output, Registry.open())
    prompts, swept = read_inputs(config)
    registry = Registry.open()
    plan = plan_for(config, prompts, swept, registry)
    connect()
    resources = Resources(accelerator_type=config.accelerator_type, num_cpus=config.num_cpus)
    with Lease(config.output) as lease, lone_actor(Evaluator, resources, config, plan) as call:
        setting: Setting = call("load")
        if setting.set_aside:
            num, reasons = len(setting.set_aside), plan.reasons(setting.set_aside)
            print(f"evaluate: {num} of {len(plan.prompts)} prompts set aside: {reasons}")
            plan = plan.without(setting.set_aside, config)
        for name, reason in setting.left_out.items():
            print(f"evaluate: {name} is left out: {reason}")
        file = _runs_file(config, plan, setting)
        runs = list(_measure_all(call, config, plan, file, lease))
        lease.check()
        save(config, plan, setting, runs)
        file.unlink()
    return log(config.output, registry)


def _measure_all(call: Any, config: EvaluateConfig, plan: Plan, file: Path, lease: Lease) -> Iterator[MethodRun]:
    """Measure every group in every repeat, and show progress.

    `file` holds the groups that an earlier process with the same settings has finished; they are not repeated.
    """
    tasks, done = list(product(range(config.repeats), range(len(plan.groups)))), _read_runs(file)
    if done:
        print(f"evaluate: going on after {len(done)} of {len(tasks)} groups")
    progress = Progress("evaluate", len(tasks), "groups", len(done))
    config.output.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as log:
        for task in tasks:
            if task not in done:
                done[task] = call("measure", *task)
                lease.check()
                log.write(json.dumps({"place": task, "runs": list(map(stored_run, done[task]))}) + "\n")
                log.flush()
                progress.advance()
            yield from done[task]


def _runs_file(config: EvaluateConfig, plan: Plan, setting: Setting) -> Path:
    """File of the finished groups until the result is written; other settings have other files."""
    return config.output / f"runs-{_identity(config, plan, setting)[:12]}.jsonl"


def _identity(config: EvaluateConfig, plan: Plan, setting: Setting) -> str:
    """Hash of everything that the runs depend on: settings, models, device, code, prompts, step cost and policies."""
    settings = config.model_dump(mode="json", exclude={"output", "relog", "accelerator_type"})
    machine = setting.pair, *setting.rivals.values(), setting.dtype, setting.device
    prompts = [(p.set, p.text) for p in plan.prompts]
    build = git_commit(), versions()
    key = repr((settings, machine, build, list(plan.policies), prompts, plan.groups, plan.price))
    digest = hashlib.sha256(key.encode())
    for directory in plan.policies.values():
        for file in (directory / INFO_FILE, directory / WEIGHTS_FILE):  # kind `step` has only the first
            digest.update(file.read_bytes() if file.exists() else b"")
    return digest.hexdigest()


def _read_runs(file: Path) -> dict[tuple[int, int], list[MethodRun]]:
    """Finished groups by (repeat, group); removes an incomplete last line from the file."""
    if not file.exists():
        return {}
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]  # after the last newline: empty or incomplete
    write_text(file, "".join(f"{line}\n" for line in lines))
    records = map(json.loads, lines)
    return {tuple(record["place"]): [_read_run(run) for run in record["runs"]] for record in records}


def _read_run(fields: dict[str, Any]) -> MethodRun:
    return MethodRun(**fields | {"totals": Totals(**fields["totals"])})


if __name__ == "__main__":
    main(EvaluateConfig, run)
