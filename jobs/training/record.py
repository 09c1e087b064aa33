"""The record of a training: the policy's directory, what the held-back rows say of it, and what MLflow is told.

Everything is on disk before MLflow is told, so a lost store costs nothing: `log` can run again later.
"""

import dataclasses
import json
import math
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from blockpilot.control.acceptance import Prior
from blockpilot.policy.dataset import split_examples, split_steps
from blockpilot.policy.learned import LearnedPolicy, PromptInfo, PromptPolicy, Scalar, StepInfo, StepPolicy
from blockpilot.policy.offline import LookupReport, lookup_report
from blockpilot.policy.outcomes import Losses, Proposed, losses, outcomes_of
from blockpilot.policy.reliability import Bin, mean_error, reliability
from blockpilot.policy.store import FORMAT, INFO_FILE, load_policy, remove_policy, save_policy
from blockpilot.policy.training import FitTask, new_network
from blockpilot.storage import remove_folder, write_bytes, write_text
from blockpilot.sweep.rows import MIN_PROB
from blockpilot.types import CandidateSet
from jobs.common.learned_from import LearnedFrom
from jobs.common.ray_train import State
from jobs.common.registry import Registry, RunRecord, Version, kept_for_later, model_name
from jobs.training.config import TrainConfig
from jobs.training.dataset import Dataset

TRAINING_FILE, RELIABILITY_PICTURE = "training.json", "reliability.png"
NUM_RELIABILITY_STEPS = 2000
TRAINED, OWN = "trained", "draft"  # whose chances a reliability is of
TRAINING_TAG = "training"  # of a version: the id of the training that it was registered for
Content = dict[str, Any]


class TrainResult(NamedTuple):
    """A trained policy."""

    policy: Path
    version: Version | None
    report: LookupReport | Losses
    """Of kind `prompt`, and of kind `step`."""
    run_id: str


# --- on disk ---


def save(config: TrainConfig, data: Dataset, state: State) -> None:
    """Write the policy, what the held-back rows say of it, and all that MLflow is to know.

    All is written aside first, and `policy.json` takes its place last: a full disk leaves what was there, a kill no
    policy at worst, never one beside what another has learned from.
    """
    if data.task is None:
        policy, found = _of_prior(config, data, state)
    else:
        policy, found = _of_network(config, data, data.task, state)
    kind, report = policy.info.kind, {name: value for name, value in found["report"].items() if value == value}
    tags = {**policy.info.pair._asdict(), "format": FORMAT, "kind": kind, "sweep_id": data.id}
    prefix = "lookup" if kind == "prompt" else "nats"
    params = config.recorded(exclude={"fit"}) | dataclasses.asdict(config.fit)
    content = found | {
        "id": uuid.uuid4().hex,
        "params": params | {"sweep_id": data.id},
        "tags": tags | found.get("tags", {}) | {f"{prefix}.{name}": value for name, value in report.items()},
        "report": dict.fromkeys(found["report"]) | report,
    }
    aside = config.output / ".new"
    remove_folder(aside)
    LearnedFrom(frozenset(data.rows.prompts), data.taus).write(aside)
    write_text(aside / TRAINING_FILE, json.dumps(content) + "\n")
    if curves := curves_of(content):
        from jobs.common import figures  # a second to import

        write_bytes(aside / RELIABILITY_PICTURE, figures.reliability(curves))
    save_policy(policy, aside)
    remove_policy(config.output)
    for file in sorted(aside.iterdir(), key=lambda file: file.name == INFO_FILE):
        file.replace(config.output / file.name)
    aside.rmdir()


def _of_prior(config: TrainConfig, data: Dataset, state: State) -> tuple[LearnedPolicy, Content]:
    """The policy of kind `step`, and its entries of training.json."""
    training, validation = split_steps(data.folder, config.validation, config.fit.seed)
    provenance = _provenance(data, len(training), len(validation)) | {"seed": config.fit.seed}
    info = StepInfo(data.metadata.pair, data.metadata.vocab_size, provenance)
    policy = StepPolicy(state["weights"].numpy(), info, data.price)
    return policy, {
        "report": losses(policy, outcomes_of(validation))._asdict(),
        "reliability": _reliability(policy, validation),
        "num_examples": [len(training), len(validation)],
    }


def _reliability(prior: Prior, steps: Proposed) -> dict[str, list[Bin]]:
    """Reliability of the trained chances and of the draft's own, on some of the steps."""
    every = -(-len(steps) // NUM_RELIABILITY_STEPS)
    some = Proposed(*(values[:: max(1, every)] for values in steps))
    return {TRAINED: reliability(prior, some), OWN: reliability(None, some)}


def _of_network(config: TrainConfig, data: Dataset, task: FitTask, state: State) -> tuple[LearnedPolicy, Content]:
    """The policy of kind `prompt` with the best epoch's weights, and its entries of training.json."""
    settings, candidates = config.fit, CandidateSet(task.candidates)
    training, validation = split_examples(data.folder, config.validation, settings.seed)
    network = new_network(training, data.metadata.vocab_size, settings)
    network.load_state_dict(state["best"])
    found = lookup_report(network, task, training, validation)
    provenance = _provenance(data, len(training), len(validation)) | {
        "best_epoch": state["progress"]["best_epoch"],
        "best_fixed_block_size": found.best_fixed_block_size,
        "rows": config.rows,
        **dataclasses.asdict(settings),
    }
    info = PromptInfo(data.metadata.pair, candidates, task.objective, network.shape, MIN_PROB, provenance)
    labels = Counter(task.labels(training.taus).tolist())
    return PromptPolicy(info, network, data.price), {
        "report": found._asdict(),
        "tags": {"objective": task.objective, "candidates": ",".join(map(str, candidates))},
        "history": state["history"],
        "num_epochs": state["progress"]["epoch"],
        "num_examples": [len(training), len(validation)],
        "balance": {size: labels[i] for i, size in enumerate(candidates)},
    }


def _provenance(data: Dataset, num_training: int, num_validation: int) -> dict[str, Scalar]:
    return {
        "sweep_id": data.id,
        "num_train_examples": num_training,
        "num_validation_examples": num_validation,
        "dtype": data.metadata.dtype,
        "git_commit": data.metadata.git_commit,
    }


# --- in MLflow and on screen ---


def log(output: Path, registry: Registry) -> TrainResult:
    """Tell MLflow of the training that `output` holds, and register its policy, once however often this is asked."""
    if not (output / TRAINING_FILE).exists():
        raise ValueError(f"output {output}: no {TRAINING_FILE}, nothing to log")
    found = json.loads((output / TRAINING_FILE).read_text(encoding="utf-8"))
    known: dict[str, Any] = {name: math.nan if value is None else value for name, value in found["report"].items()}
    report = Losses(**known) if found["params"]["kind"] == "step" else LookupReport(**known)
    with kept_for_later(registry.uri, output):
        version = _registered(registry, output, found.get("id"))
        if version is not None:
            run_id = str(version.run_id)
        else:
            run_id, version = _log_anew(output, registry, found, report)
    result = TrainResult(output, version, report, run_id)
    print(describe(result, found))
    return result


def _registered(registry: Registry, output: Path, training: str | None) -> Version | None:
    """The version that a training was registered as, if it was; trainings had no id before 2026-11-27."""
    if training is None:
        return None
    name = model_name(load_policy(output).info.pair.target)
    versions = registry.versions(name) if registry.has_model(name) else []
    return next((version for version in versions if version.tags.get(TRAINING_TAG) == training), None)


def _log_anew(
    output: Path, registry: Registry, found: Content, report: LookupReport | Losses
) -> tuple[str, Version | None]:
    """Record a run, with all that `found` holds, and register its policy where that is wanted."""
    params, version = found["params"], None
    with registry.log_run("train") as record:
        record.log_params(params)
        record.log_tags({"sweep_id": params["sweep_id"]})
        if isinstance(report, Losses):
            _log_prior(record, output, found, report)
        else:
            _log_network(record, found, report)
        record.log_artifact(output / TRAINING_FILE)
        if params["register_version"]:
            target, tags = load_policy(output).info.pair.target, found["tags"] | {TRAINING_TAG: found["id"]}
            version = registry.register_policy(output, target=target, run_id=record.id, tags=tags)
    return record.id, version


def _log_prior(record: RunRecord, output: Path, found: Content, report: Losses) -> None:
    record.log_metrics({f"nats_{name}": value for name, value in report._asdict().items() if value == value})
    curves = curves_of(found)
    record.log_metrics({f"reliability_error_{name}": mean_error(bins) for name, bins in curves.items() if bins})
    if (picture := output / RELIABILITY_PICTURE).exists():
        record.log_artifact(picture)
    if rows := [{"chances": name, **bin_._asdict()} for name, bins in curves.items() for bin_ in bins]:
        record.log_table(rows, "reliability.json")


def _log_network(record: RunRecord, found: Content, report: LookupReport) -> None:
    for epoch, metrics in enumerate(found["history"], start=1):
        record.log_metrics(metrics, step=epoch)
    record.log_metrics({f"lookup_{key}": value for key, value in report._asdict().items() if value == value})
    record.log_metrics({f"best_for_{size}": count for size, count in found["balance"].items()})


def curves_of(found: Content) -> dict[str, list[Bin]]:
    """Reliability in a training.json, by whose chances it is of; nothing of kind `prompt`."""
    return {name: list(map(Bin._make, bins)) for name, bins in found.get("reliability", {}).items()}


def describe(result: TrainResult, found: Content) -> str:
    """The short report on screen."""
    report, version = result.report, result.version
    where = f"policy in {result.policy}"
    where += f", registered as {version.name} version {version.number}" if version else ""
    training, validation = found["num_examples"]
    begin = f"train: {training} examples, {validation} held back; "
    if isinstance(report, Losses):
        return f"{begin}{where}\n{_describe_prior(report, curves_of(found))}"
    return f"{begin}{found['num_epochs']} epochs; {where}\n{_describe_network(report, found)}"


def _describe_prior(report: Losses, curves: Mapping[str, Sequence[Bin]]) -> str:
    errors = {name: f"{mean_error(bins):.3f}" if bins else "none" for name, bins in curves.items()}
    return (
        f"train: held-back choices: {report.trained:.3f} nats a slot, by the draft's own probabilities "
        f"{report.own:.3f}; mean error of a node's chance {errors[TRAINED]}, of the draft's own {errors[OWN]}"
    )


def _describe_network(report: LookupReport, found: Content) -> str:
    verdict = "a gain" if report.claims_gain else "no gain that the rows can show"
    total = sum(found["balance"].values())
    balance = ", ".join(f"B={size} {count / total:.0%}" for size, count in found["balance"].items())
    rate = "tau" if found["params"]["objective"] == "tau" else "speed-up over plain decoding"
    return (
        f"train: best block size of the examples: {balance}\n"
        f"train: held-back examples, looked up (a diagnostic, not a result): accuracy {report.accuracy:.2f} "
        f"(best fixed B={report.best_fixed_block_size}: {report.accuracy_best_fixed:.2f}); "
        f"{rate} {report.policy:.3f} (best fixed {report.best_fixed:.3f}, random {report.random:.3f}, "
        f"oracle {report.oracle:.3f}); gain {report.gain_low:+.1%} to {report.gain_high:+.1%}: {verdict}"
    )
