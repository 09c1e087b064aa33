"""Record of a training: the policy's directory, its report on validation rows, and the MLflow run.

Everything is written to disk before it is logged to MLflow, so `log` can be repeated if the store is not reachable.
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
from blockpilot.control.cost import PRICE_FILE
from blockpilot.policy.dataset import split_examples, split_steps
from blockpilot.policy.learned import LearnedPolicy, PromptInfo, PromptPolicy, Scalar, StepInfo, StepPolicy
from blockpilot.policy.offline import LookupReport, lookup_report
from blockpilot.policy.outcomes import Losses, Proposed, losses, outcomes_of
from blockpilot.policy.reliability import Bin, mean_error, reliability
from blockpilot.policy.store import FORMAT, INFO_FILE, WEIGHTS_FILE, load_policy, remove_policy, save_policy
from blockpilot.policy.training import FitTask, new_network
from blockpilot.storage import remove_folder, write_bytes, write_text
from blockpilot.sweep.rows import MIN_PROB
from blockpilot.types import CandidateSet
from jobs.common.learned_from import LEARNED_FROM_FILE, LearnedFrom
from jobs.common.ray_train import State
from jobs.common.registry import Registry, RunRecord, Version, kept_for_later, model_name
from jobs.training.config import TrainConfig
from jobs.training.dataset import Dataset

TRAINING_FILE, RELIABILITY_PICTURE = "training.json", "reliability.png"
NUM_RELIABILITY_STEPS = 2000
REGISTERED_FILES = INFO_FILE, WEIGHTS_FILE, PRICE_FILE, LEARNED_FROM_FILE, TRAINING_FILE
TRAINED, DRAFT = "trained", "draft"  # sources of the acceptance probabilities
TRAINING_TAG = "training"  # tag of a version: the id of its training
Content = dict[str, Any]


class TrainResult(NamedTuple):
    """A trained policy."""

    policy: Path
    version: Version | None
    report: LookupReport | Losses
    """LookupReport of kind `prompt`, Losses of kind `step`."""
    run_id: str


# --- on disk ---


def save(config: TrainConfig, data: Dataset, state: State) -> None:
    """Write the policy, its report on validation rows, and everything that `log` needs.

    Files are written to a temporary folder and then moved, `policy.json` last: a full disk leaves the previous
    policy, and a kill at worst no policy, never a policy with the training prompts of another.
    """
    if data.task is None:
        policy, entries = _step_policy(config, data, state)
    else:
        policy, entries = _prompt_policy(config, data, data.task, state)
    kind, report = policy.info.kind, {name: value for name, value in entries["report"].items() if value == value}
    tags = {**policy.info.pair._asdict(), "format": FORMAT, "kind": kind, "sweep_id": data.id}
    prefix = "lookup" if kind == "prompt" else "nats"
    params = config.recorded(exclude={"fit"}) | dataclasses.asdict(config.fit)
    content = entries | {
        "id": uuid.uuid4().hex,
        "params": params | {"sweep_id": data.id},
        "tags": tags | entries.get("tags", {}) | {f"{prefix}.{name}": value for name, value in report.items()},
        "report": dict.fromkeys(entries["report"]) | report,
    }
    staging = config.output / ".new"
    remove_folder(staging)
    LearnedFrom(frozenset(data.rows.prompts), data.taus).write(staging)
    write_text(staging / TRAINING_FILE, json.dumps(content) + "\n")
    if curves := curves_of(content):
        from jobs.common import figures  # a second to import

        write_bytes(staging / RELIABILITY_PICTURE, figures.reliability(curves))
    save_policy(policy, staging)
    remove_policy(config.output)
    for file in sorted(staging.iterdir(), key=lambda file: file.name == INFO_FILE):
        file.replace(config.output / file.name)
    staging.rmdir()


def _step_policy(config: TrainConfig, data: Dataset, state: State) -> tuple[LearnedPolicy, Content]:
    """The policy of kind `step`, and its entries in training.json."""
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
    """Reliability of the trained acceptance probabilities and of the draft's probabilities, on a sample of steps."""
    stride = -(-len(steps) // NUM_RELIABILITY_STEPS)
    sample = Proposed(*(values[:: max(1, stride)] for values in steps))
    return {TRAINED: reliability(prior, sample), DRAFT: reliability(None, sample)}


def _prompt_policy(config: TrainConfig, data: Dataset, task: FitTask, state: State) -> tuple[LearnedPolicy, Content]:
    """The policy of kind `prompt` with the weights of the best epoch, and its entries in training.json."""
    settings, candidates = config.fit, CandidateSet(task.candidates)
    training, validation = split_examples(data.folder, config.validation, settings.seed)
    network = new_network(training, data.metadata.vocab_size, settings)
    network.load_state_dict(state["best"])
    report = lookup_report(network, task, training, validation)
    provenance = _provenance(data, len(training), len(validation)) | {
        "best_epoch": state["progress"]["best_epoch"],
        "best_fixed_block_size": report.best_fixed_block_size,
        "rows": config.rows,
        **dataclasses.asdict(settings),
    }
    info = PromptInfo(data.metadata.pair, candidates, task.objective, network.shape, MIN_PROB, provenance)
    labels = Counter(task.labels(training.taus).tolist())
    return PromptPolicy(info, network, data.price), {
        "report": report._asdict(),
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
    """Log the training in `output` to MLflow and register its policy; repeated calls register one version."""
    if not (output / TRAINING_FILE).exists():
        raise ValueError(f"output {output}: no {TRAINING_FILE}, nothing to log")
    content = json.loads((output / TRAINING_FILE).read_text(encoding="utf-8"))
    values: dict[str, Any] = {name: math.nan if value is None else value for name, value in content["report"].items()}
    report = Losses(**values) if content["params"]["kind"] == "step" else LookupReport(**values)
    with kept_for_later(registry.uri, output):
        version = _registered(registry, output, content.get("id"))
        if version is not None:
            run_id = str(version.run_id)
        else:
            run_id, version = _log_run(output, registry, content, report)
    result = TrainResult(output, version, report, run_id)
    print(describe(result, content))
    return result


def _registered(registry: Registry, output: Path, training: str | None) -> Version | None:
    """The version registered for a training id, if any; trainings before 2026-11-27 have no id."""
    if training is None:
        return None
    name = model_name(load_policy(output).info.pair.target)
    versions = registry.versions(name) if registry.has_model(name) else []
    return next((version for version in versions if version.tags.get(TRAINING_TAG) == training), None)


def _log_run(
    output: Path, registry: Registry, content: Content, report: LookupReport | Losses
) -> tuple[str, Version | None]:
    """Record a run with everything in `content`, and register its policy if configured."""
    params, version = content["params"], None
    with registry.log_run("train") as record:
        record.log_params(params)
        record.log_tags({"sweep_id": params["sweep_id"]})
        if isinstance(report, Losses):
            _log_prior(record, output, content, report)
        else:
            _log_network(record, content, report)
        record.log_artifact(output / TRAINING_FILE)
        if params["register_version"]:
            target, tags = load_policy(output).info.pair.target, content["tags"] | {TRAINING_TAG: content["id"]}
            # The directory also holds the driver's lease, and may hold pictures of an earlier training.
            options: dict[str, Any] = {"target": target, "run_id": record.id, "tags": tags, "files": REGISTERED_FILES}
            version = registry.register_policy(output, **options)
    return record.id, version


def _log_prior(record: RunRecord, output: Path, content: Content, report: Losses) -> None:
    record.log_metrics({f"nats_{name}": value for name, value in report._asdict().items() if value == value})
    curves = curves_of(content)
    record.log_metrics({f"reliability_error_{name}": mean_error(bins) for name, bins in curves.items() if bins})
    if (picture := output / RELIABILITY_PICTURE).exists():
        record.log_artifact(picture)
    if rows := [{"chances": name, **bin_._asdict()} for name, bins in curves.items() for bin_ in bins]:
        record.log_table(rows, "reliability.json")


def _log_network(record: RunRecord, content: Content, report: LookupReport) -> None:
    for epoch, metrics in enumerate(content["history"], start=1):
        record.log_metrics(metrics, step=epoch)
    record.log_metrics({f"lookup_{key}": value for key, value in report._asdict().items() if value == value})
    record.log_metrics({f"best_for_{size}": count for size, count in content["balance"].items()})


def curves_of(content: Content) -> dict[str, list[Bin]]:
    """Reliability curves of a training.json by source of the probabilities; empty for kind `prompt`."""
    return {name: list(map(Bin._make, bins)) for name, bins in content.get("reliability", {}).items()}


def describe(result: TrainResult, content: Content) -> str:
    """Short report on the screen."""
    report, version = result.report, result.version
    policy = f"policy in {result.policy}"
    policy += f", registered as {version.name} version {version.number}" if version else ""
    training, validation = content["num_examples"]
    examples = f"train: {training} examples, {validation} held back; "
    if isinstance(report, Losses):
        return f"{examples}{policy}\n{_describe_prior(report, curves_of(content))}"
    return f"{examples}{content['num_epochs']} epochs; {policy}\n{_describe_network(report, content)}"


def _describe_prior(report: Losses, curves: Mapping[str, Sequence[Bin]]) -> str:
    errors = {name: f"{mean_error(bins):.3f}" if bins else "none" for name, bins in curves.items()}
    return (
        f"train: held-back choices: {report.trained:.3f} nats a slot, by the draft's own probabilities "
        f"{report.own:.3f}; mean error of a node's chance {errors[TRAINED]}, of the draft's own {errors[DRAFT]}"
    )


def _describe_network(report: LookupReport, content: Content) -> str:
    verdict = "a gain" if report.claims_gain else "no significant gain"
    total = sum(content["balance"].values())
    balance = ", ".join(f"B={size} {count / total:.0%}" for size, count in content["balance"].items())
    rate = "tau" if content["params"]["objective"] == "tau" else "speed-up over plain decoding"
    return (
        f"train: best block size of the examples: {balance}\n"
        f"train: held-back examples, looked up (a diagnostic, not a result): accuracy {report.accuracy:.2f} "
        f"(best fixed B={report.best_fixed_block_size}: {report.accuracy_best_fixed:.2f}); "
        f"{rate} {report.policy:.3f} (best fixed {report.best_fixed:.3f}, random {report.random:.3f}, "
        f"oracle {report.oracle:.3f}); gain {report.gain_low:+.1%} to {report.gain_high:+.1%}: {verdict}"
    )
