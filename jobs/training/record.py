"""The record of a training: the policy's directory, what the held-back rows say of it, and what MLflow is told.

Everything is on disk before MLflow is told, so a lost store costs nothing: `log` can run again later.
"""

import dataclasses
import json
import math
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from blockpilot.policy.dataset import split_examples
from blockpilot.policy.learned import LearnedPolicy, PolicyInfo
from blockpilot.policy.nodes import NodeModel, Proposed, node_losses
from blockpilot.policy.offline import LookupReport, lookup_report
from blockpilot.policy.reliability import Bin, reliability
from blockpilot.policy.store import FORMAT, INFO_FILE, load_policy, remove_policy, save_policy
from blockpilot.policy.training import fitted_network, new_network, shrink
from blockpilot.storage import remove_folder, write_text
from blockpilot.sweep.rows import MIN_PROB
from jobs.common.learned_from import LearnedFrom
from jobs.common.registry import Registry, Version, kept_for_later, model_name
from jobs.training.config import TrainConfig
from jobs.training.dataset import Dataset

TRAINING_FILE = "training.json"
NUM_RELIABILITY_STEPS = 2000
TRAINING_TAG = "training"  # of a version: the id of the training that it was registered for


class TrainResult(NamedTuple):
    """A trained policy."""

    policy: Path
    version: Version | None
    report: LookupReport
    num_epochs: int
    run_id: str


def save(config: TrainConfig, data: Dataset, state: dict[str, Any]) -> None:
    """Write the policy of the best epoch, its look-ups on the held-back rows, and all that MLflow is to know.

    All is written aside first, and `policy.json` takes its place last: a full disk leaves what was there, a kill no
    policy at worst, never one beside what another has learned from.
    """
    settings, task = config.fit, data.task
    training, validation = split_examples(data.folder, config.validation, settings.seed)
    network = new_network(training, data.metadata.vocab_size, settings)
    network = fitted_network(network, state["best"], training, settings, task)
    found = lookup_report(network, task, training, validation)
    fell_back = config.fall_back and task.kind == "step" and not found.claims_gain
    if fell_back:
        shrink(network, training, task, 1.0)
    provenance = {
        "sweep_id": data.id,
        "num_train_examples": len(training),
        "num_validation_examples": len(validation),
        "best_epoch": state["progress"]["best_epoch"],
        "best_fixed_block_size": found.best_fixed_block_size,
        "dtype": data.metadata.dtype,
        "git_commit": data.metadata.git_commit,
        "rows": config.rows,
        **dataclasses.asdict(settings),
    }
    info = PolicyInfo(data.metadata.pair, data.candidates, config.objective, network.shape, MIN_PROB, provenance)
    nodes = fitted_nodes(state)
    labels = Counter(task.labels(training.taus).tolist())
    params = config.recorded(exclude={"fit"}) | dataclasses.asdict(settings)
    content = {
        "id": uuid.uuid4().hex,
        "params": params | {"sweep_id": data.id},
        "tags": _tags(info, data, found),
        "report": {name: value if value == value else None for name, value in found._asdict().items()},
        "history": state["history"],
        "num_epochs": state["progress"]["epoch"],
        "fell_back": fell_back,
        "num_examples": [len(training), len(validation)],
        "node_losses": None if nodes is None else node_losses(nodes, validation.outcomes),
        "reliability": None if nodes is None else _reliability(nodes, validation.proposed),
        "balance": {size: labels[i] for i, size in enumerate(data.candidates)},
    }
    aside = config.output / ".new"
    remove_folder(aside)
    LearnedFrom(frozenset(data.rows.prompts), data.taus).write(aside)
    write_text(aside / TRAINING_FILE, json.dumps(content) + "\n")
    save_policy(LearnedPolicy(info, network, data.price, nodes), aside)
    remove_policy(config.output)
    for file in sorted(aside.iterdir(), key=lambda file: file.name == INFO_FILE):
        file.replace(config.output / file.name)
    aside.rmdir()


def fitted_nodes(state: dict[str, Any]) -> NodeModel | None:
    """The node model of a training's last state; None where the rows hold nothing to learn it from."""
    if "nodes" not in state:
        return None
    model = NodeModel()
    model.load_state_dict(state["nodes"])
    return model


def _reliability(nodes: NodeModel, proposed: Proposed) -> dict[str, list[Bin]]:
    """Reliability of the node model's chances and of the draft's own, on some of the steps."""
    every = -(-len(proposed) // NUM_RELIABILITY_STEPS)
    some = Proposed(*(values[:: max(1, every)] for values in proposed))
    return {"node model": reliability(nodes, some), "draft": reliability(None, some)}


def _tags(info: PolicyInfo, data: Dataset, found: LookupReport) -> dict[str, object]:
    lookup = {f"lookup.{name}": value for name, value in found._asdict().items() if value == value}
    candidates = ",".join(map(str, info.candidates))
    kind = {"format": FORMAT, "objective": info.objective, "kind": info.kind}
    return {**info.pair._asdict(), **kind, "candidates": candidates, "sweep_id": data.id, **lookup}


def log(output: Path, registry: Registry) -> TrainResult:
    """Tell MLflow of the training that `output` holds, and register its policy, once however often this is asked."""
    if not (output / TRAINING_FILE).exists():
        raise ValueError(f"output {output}: no {TRAINING_FILE}, nothing to log")
    found = json.loads((output / TRAINING_FILE).read_text(encoding="utf-8"))
    known: dict[str, Any] = {name: math.nan if value is None else value for name, value in found["report"].items()}
    lookup = LookupReport(**known)
    with kept_for_later(registry.uri, output):
        version = _registered(registry, output, found.get("id"))
        if version is not None:
            run_id = str(version.run_id)
        else:
            run_id, version = _log_anew(output, registry, found, lookup)
    result = TrainResult(output, version, lookup, found["num_epochs"], run_id)
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
    output: Path, registry: Registry, found: dict[str, Any], lookup: LookupReport
) -> tuple[str, Version | None]:
    """Record a run, with all that `found` holds, and register its policy where that is wanted."""
    params, version = found["params"], None
    with registry.log_run("train") as record:
        record.log_params(params)
        record.log_tags({"sweep_id": params["sweep_id"]})
        for epoch, metrics in enumerate(found["history"], start=1):
            record.log_metrics(metrics, step=epoch)
        record.log_metrics({f"lookup_{key}": value for key, value in lookup._asdict().items() if value == value})
        record.log_metrics({f"best_for_{size}": count for size, count in found["balance"].items()})
        record.log_artifact(output / TRAINING_FILE)
        if params["register_version"]:
            target, tags = load_policy(output).info.pair.target, found["tags"] | {TRAINING_TAG: found["id"]}
            version = registry.register_policy(output, target=target, run_id=record.id, tags=tags)
    return record.id, version


def describe(result: TrainResult, found: dict[str, Any]) -> str:
    """The short report on screen."""
    lookup, version = result.report, result.version
    where = f", registered as {version.name} version {version.number}" if version else ""
    verdict = "a gain" if lookup.claims_gain else "no gain that the rows can show"
    if found["fell_back"]:
        verdict += "; so the policy expects the same of every request, and takes the best fixed size at each load"
    training, validation = found["num_examples"]
    nodes = found["node_losses"]
    of_nodes = f"; node model {nodes[0]:.3f} nats a slot, the draft itself {nodes[1]:.3f}" if nodes else ""
    total = sum(found["balance"].values())
    balance = ", ".join(f"B={size} {count / total:.0%}" for size, count in found["balance"].items())
    r2 = "" if lookup.r2 != lookup.r2 else f" R2 of taus {lookup.r2:.2f};"
    return (
        f"train: {training} examples, {validation} held back; {result.num_epochs} epochs; "
        f"policy in {result.policy}{where}{of_nodes}\n"
        f"train: best block size of the examples: {balance}\n"
        f"train: held-back examples, looked up (a diagnostic, not a result):{r2} accuracy {lookup.accuracy:.2f} "
        f"(best fixed B={lookup.best_fixed_block_size}: {lookup.accuracy_best_fixed:.2f}); "
        f"{_rate(found)} {lookup.policy:.3f} (best fixed {lookup.best_fixed:.3f}, random {lookup.random:.3f}, "
        f"oracle {lookup.oracle:.3f}); gain {lookup.gain_low:+.1%} to {lookup.gain_high:+.1%}: {verdict}"
    )


def _rate(found: dict[str, Any]) -> str:
    return "tau" if found["params"]["objective"] == "tau" else "times plain decoding"
