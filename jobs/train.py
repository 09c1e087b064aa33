"""Train: the rows of sweeps -> a policy, through Ray Train, recorded in MLflow and registered as a new version.

Rows are checked, split by prompt and written to flat files before Ray Train starts; its workers map those, so nobody
holds all rows in memory (`blockpilot/policy/dataset.py`). `--search` first tries so many other networks and learning
rates as Ray tasks and goes on with the one whose held-back loss is the lowest. A killed worker costs the epochs since
the last checkpoint, a killed driver nothing more: the same command goes on, and the result depends on neither.

Everything is on disk before MLflow is told. Where it cannot be reached, `--relog` tells it later.
"""

import dataclasses
import functools
import hashlib
import json
import math
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray.train
import ray.train.torch
import torch
from pydantic import Field
from torch import Tensor

from blockpilot.control.price import StepCosts
from blockpilot.evaluation.step_costs import COSTS_FILE, read_costs, relative_costs
from blockpilot.policy.dataset import Examples, Index, split_examples, write_examples
from blockpilot.policy.learned import Head, LearnedPolicy, Objective, PolicyInfo, Reads, check_reads
from blockpilot.policy.network import Form, Input, Shape
from blockpilot.policy.offline import LookupReport, lookup_report
from blockpilot.policy.store import FORMAT, load_policy, save_policy
from blockpilot.policy.training import Fit, FitSettings, Task, fitted_network, new_network, predict, shrink
from blockpilot.storage import is_file, is_folder, join, write_text
from blockpilot.sweep.rows import MIN_PROB, Metadata, SweepRow, mismatch, read_parts
from blockpilot.sweep.summary import Summary
from blockpilot.types import CandidateSet
from jobs.common.cluster import connect
from jobs.common.config import Config, Place, absolute_in_submitted_job, main
from jobs.common.learned_from import LearnedFrom
from jobs.common.ray_train import report, saved_state, scaling_config, train
from jobs.common.registry import Registry, Version, kept_for_later

MIN_PROMPTS = 8
NUM_SAMPLES = 2000  # held-back examples whose predictions are kept for the report
TRAINING_FILE = "training.json"
SEARCHED: dict[str, tuple[Any, ...]] = {
    "hidden": (64, 256, 512, 1024, 2048),
    "depth": (1, 2, 3),
    "lr": (1e-4, 3e-4, 1e-3),
    "dropout": (0.0, 0.2, 0.5),
}
_DEFAULT = FitSettings()


class TrainConfig(Config):
    """What to train on, how, and where the policy goes."""

    sweep: tuple[Place, ...] = Field(default=("runs/sweep",), min_length=1)
    """Directories (or files) of sweeps: of one pair, dtype and candidate set, whatever their prompts and
    temperatures."""
    output: Path = Path("runs/policy")
    """Directory of the policy; checkpoints while it trains. Every node must see it."""
    head: Head = _DEFAULT.head
    """class: the paper's, which block size is the best. tau: tokens of a step with each, so that the choice follows
    the load."""
    reads: Reads = _DEFAULT.reads
    """prefill: one prediction for the whole answer, as in the paper. step: a new one before each step (needs a dense
    sweep)."""
    inputs: tuple[Input, ...] = _DEFAULT.inputs
    """Of the network: probs (the paper's: the distribution after the prompt), context (the draft's context vector
    before the anchor), anchor (the anchor's embedding), scalars (entropy, length, temperature)."""
    form: Form = _DEFAULT.form
    """What the probabilities are turned into."""
    max_support: int = Field(default=_DEFAULT.max_support, ge=1)
    """Token ids that the first layer knows on `probs`: those with the most mass in the sweep."""
    objective: Objective = "throughput"
    """tau: tokens a step. throughput: tokens a second by the step costs beside the sweep; plain decoding is then a
    candidate."""
    rows: int = Field(default=1, ge=1)
    """Active rows whose step costs labels and reports are for; a head `tau` follows any load in use."""
    candidates: tuple[int, ...] | None = None
    """Block sizes to choose from, some of the sweep's; all by default."""
    leave_out: tuple[str, ...] = ()
    """Prompt sets whose rows are not used."""
    num_prompts: int | None = Field(default=None, ge=1)
    """Prompts to train on at most, of those that are not held back."""
    hidden: int = Field(default=_DEFAULT.hidden, ge=1)
    """Width of the network."""
    depth: int = Field(default=_DEFAULT.depth, ge=1)
    """Its hidden layers."""
    epochs: int = Field(default=_DEFAULT.epochs, ge=1)
    """Passes over the examples at most."""
    batch_size: int = Field(default=_DEFAULT.batch_size, ge=1)
    """Examples of an optimizer step, over all workers."""
    lr: float = Field(default=_DEFAULT.lr, gt=0)
    """Learning rate of AdamW."""
    anneal: bool = _DEFAULT.anneal
    """Let the learning rate fall to zero over the epochs."""
    dropout: float = Field(default=_DEFAULT.dropout, ge=0, lt=1)
    """Share of hidden units dropped in training."""
    weight_decay: float = Field(default=_DEFAULT.weight_decay, ge=0)
    """Of AdamW; without it this is Adam."""
    patience: int | None = Field(default=_DEFAULT.patience, ge=1)
    """Stop after so many epochs without a lower validation loss; None runs all epochs and keeps the last."""
    validation: float = Field(default=0.2, gt=0, lt=1)
    """Share of the prompts held back to stop early and to report."""
    shrink: float = Field(default=_DEFAULT.shrink, ge=0, lt=1)
    """How far what a head `tau` expects is drawn to the mean of the training examples, 0: not at all."""
    seed: int = Field(default=_DEFAULT.seed, ge=0)
    """Of the split, the initial weights, the order of examples, dropout and the search."""
    search: int = Field(default=0, ge=0)
    """Draws of width, depth, learning rate and dropout to try beside the given ones."""
    fall_back: bool = True
    """Where a head `tau` shows no gain on the held-back prompts, make it expect the same of all: the best fixed block
    size at every load."""
    num_workers: int = Field(default=1, ge=1)
    """Data-parallel Ray Train workers."""
    num_cpus: float = Field(default=1.0, gt=0)
    """CPU cores of a worker."""
    accelerator_type: str | None = None
    """Put every worker on a GPU of this type. Otherwise a GPU where there are any."""
    checkpoint_every: int = Field(default=25, ge=1)
    """Epochs between checkpoints."""
    max_failures: int = Field(default=3, ge=0)
    """Lost workers to recover from."""
    register_version: bool = True
    """Register the policy as a new version of its target's model."""
    relog: bool = False
    """Train nothing: tell MLflow of the finished training in `output`."""


class TrainResult(NamedTuple):
    """A trained policy."""

    policy: Path
    version: Version | None
    report: LookupReport
    num_epochs: int
    run_id: str


class Dataset(NamedTuple):
    """Sweeps, ready to train on."""

    id: str
    """Hash of the rows."""
    metadata: Metadata
    candidates: CandidateSet
    costs: StepCosts | None
    step_costs: tuple[float, ...]
    folder: Path
    """Of the examples."""
    rows: Index
    taus: dict[float, dict[int, float]]
    """Over all rows, by temperature and block size."""


class Job(NamedTuple):
    """What a worker needs."""

    folder: Path
    vocab_size: int
    split: "Split"
    task: Task
    settings: FitSettings
    checkpoint_every: int


class Split(NamedTuple):
    """Which prompts are held back, and how many of the others are used."""

    validation: float
    seed: int
    num_prompts: int | None


def run(config: TrainConfig) -> TrainResult:
    """Train, save and register a policy; raises ValueError for bad input before Ray starts."""
    absolute_in_submitted_job(config.output, "output")
    if config.relog:
        return _log(config.output, Registry.open())
    check_reads(config.reads, config.head, config.inputs)
    storage = config.output.absolute() / "train"
    data = read_dataset(config, storage / "examples")
    registry = Registry.open()
    connect(include_dashboard=True)
    scaling = scaling_config(config.num_workers, config.accelerator_type, config.num_cpus)
    job = plan(config, data)
    trials = search(config, job, storage / f"trials-{_run_name(config, data, job)}.json") if config.search else []
    if trials:
        job = job._replace(settings=min(trials, key=lambda trial: trial.loss).settings)
    state, _ = train(
        functools.partial(_work, job), scaling, storage, _run_name(config, data, job), config.max_failures
    )
    _save(config, data, job, trials, state)
    shutil.rmtree(storage)  # the same command trains anew from here on
    return _log(config.output, registry)


# --- before Ray starts ---


def read_dataset(config: TrainConfig, folder: Path) -> Dataset:
    """Read and check sweeps part by part and write their examples. Raises ValueError where nothing can be learned."""
    for place in config.sweep:
        if not (is_file(place) or is_folder(place)):
            raise ValueError(f"sweep {place}: no such file or directory")
    metadata = next(read_parts(config.sweep[0])).metadata
    if len(metadata.candidates) < 2:
        raise ValueError(f"sweep {config.sweep[0]}: one candidate {metadata.candidates}; at least 2 are needed")
    candidates = _candidates(config, metadata)
    costs = _read_costs(config, metadata) if config.objective == "throughput" else None
    digests, totals = list[bytes](), defaultdict[float, Summary](Summary)
    index = write_examples(folder, _parts(config, metadata, digests, totals), tuple(candidates), config.reads)
    if (num_prompts := len(set(index.prompts))) < MIN_PROMPTS:
        raise ValueError(f"sweep {config.sweep[0]}: {num_prompts} different prompts; needed: {MIN_PROMPTS}")
    step_costs = relative_costs(costs, tuple(candidates), config.rows) if costs else [1.0] * len(candidates)
    digest = hashlib.sha256(metadata.to_json().encode() + b"".join(sorted(digests))).hexdigest()[:16]
    taus = {temperature: of_rows.tau_curve for temperature, of_rows in totals.items()}
    data = Dataset(digest, metadata, candidates, costs, tuple(step_costs), folder, index, taus)
    sizes = index.sizes
    Shape(
        config.inputs, metadata.vocab_size, sizes.context, sizes.anchor, sizes.candidates, config.hidden, config.depth
    )
    return data


def _parts(
    config: TrainConfig, metadata: Metadata, digests: list[bytes], totals: Mapping[float, Summary]
) -> Iterator[list[SweepRow]]:
    """The rows to train on, part by part; `digests` gets one of each, `totals` are by temperature."""
    seen: set[str] = set()
    for place in config.sweep:
        for part in read_parts(place):
            if found := mismatch(metadata, part.metadata, ignored=("config",)):
                raise ValueError(f"{config.sweep[0]} and {place}: made for different pairs or candidates ({found})")
            rows = [row for row in part.rows if row.prompt_set not in config.leave_out]
            if twice := next((row.prompt_id for row in rows if row.prompt_id in seen), None):
                raise ValueError(f"sweep {place}: prompt {twice} is in another of the sweeps, too")
            seen.update(row.prompt_id for row in rows)
            digests += map(_digest, rows)
            for row in rows:
                totals[row.temperature].add([row])
            yield rows
    if not seen:
        raise ValueError(f"sweep {config.sweep[0]}: no rows are left without the sets {', '.join(config.leave_out)}")


def _digest(row: SweepRow) -> bytes:
    """A hash of all that examples are made of."""
    prefill = row.prompt_id, row.taus, row.probs_ids, row.probs, row.context, row.num_prompt_tokens, row.temperature
    digest = hashlib.sha256(repr((prefill, row.step_places, row.accepted)).encode())
    digest.update(row.step_contexts)
    digest.update(row.step_embeddings)
    return digest.digest()


def _candidates(config: TrainConfig, metadata: Metadata) -> CandidateSet:
    """Those asked for, or the sweep's; with plain decoding where costs count."""
    there = metadata.candidates
    wanted = config.candidates or tuple(there)
    CandidateSet(wanted)
    if unknown := sorted(set(wanted) - {1, *there}):
        raise ValueError(f"candidates {wanted}: {unknown[0]} is none of the sweep's {there}")
    if config.objective == "throughput":
        wanted = tuple(sorted({1, *wanted}))
    if len(wanted) < 2:
        raise ValueError(f"candidates {wanted}: at least 2 are needed")
    return CandidateSet(wanted)


def _read_costs(config: TrainConfig, metadata: Metadata) -> StepCosts:
    place = join(config.sweep[0], COSTS_FILE)
    if not is_file(place):
        raise ValueError(
            f"sweep {config.sweep[0]}: no {COSTS_FILE} for objective 'throughput'; "
            "sweep with --cost-rows, or train with --objective tau"
        )
    costs = read_costs(place)
    if costs.pair != metadata.pair or costs.dtype != metadata.dtype:
        raise ValueError(
            f"{place}: costs of {costs.pair}, {costs.dtype}; the rows are of {metadata.pair}, {metadata.dtype}"
        )
    return costs


def plan(config: TrainConfig, data: Dataset) -> Job:
    """What a worker is given."""
    settings = FitSettings(**{name: getattr(config, name) for name in FitSettings.__dataclass_fields__})
    task = Task(config.head, config.reads, config.objective, tuple(data.candidates), torch.tensor(data.step_costs))
    split = Split(config.validation, config.seed, config.num_prompts)
    return Job(data.folder, data.metadata.vocab_size, split, task, settings, config.checkpoint_every)


def _run_name(config: TrainConfig, data: Dataset, job: Job) -> str:
    """Ray Train goes on with a run of the same name, so the name holds all that the result depends on."""
    key = repr(
        (job.settings, job.split, job.task, config.num_workers, data.id, tuple(data.candidates), config.leave_out)
    )
    return f"policy-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


# --- training ---


class Trial(NamedTuple):
    """What a draw of settings came to."""

    settings: FitSettings
    loss: float
    epoch: int


def search(config: TrainConfig, job: Job, file: Path) -> list[Trial]:
    """Fit with the given settings and `config.search` draws of others; finished ones are kept in `file`."""
    draw = random.Random(config.seed)
    settings = [job.settings]
    while len(settings) <= config.search:
        settings.append(dataclasses.replace(job.settings, **{k: draw.choice(v) for k, v in SEARCHED.items()}))
    settings = list(dict.fromkeys(settings))
    known: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    task: Any = ray.remote(num_cpus=config.num_cpus)(_try)
    running = {task.remote(job._replace(settings=each)): repr(each) for each in settings if repr(each) not in known}
    while running:
        (done,), _ = ray.wait(list(running))
        known[running.pop(done)] = found = ray.get(done)
        write_text(file, json.dumps(known))
        print(f"train: tried {len(known)} of {len(settings)} settings, the last: {found}", flush=True)
    return [Trial(each, **known[repr(each)]) for each in settings]


class Fitted(NamedTuple):
    """What a fit in one process came to."""

    loss: float
    epoch: int
    report: LookupReport


def fit(job: Job) -> Fitted:
    """Fit once, here; the report is of the held-back examples that it may have stopped early by."""
    torch.set_num_threads(1)
    training, validation = split_examples(job.folder, *job.split)
    network = new_network(training, job.vocab_size, job.settings)
    fitted = Fit(network, training, validation, job.settings, job.task)
    while not fitted.done:
        fitted.run_epoch()
    network = fitted_network(network, fitted.best, training, job.settings, job.task)
    return Fitted(fitted.best_loss, fitted.best_epoch, lookup_report(network, job.task, training, validation))


def _try(job: Job) -> dict[str, float]:
    fitted = fit(job)
    return {"loss": fitted.loss, "epoch": fitted.epoch}


def _work(job: Job) -> None:
    """What every Ray Train worker does."""
    saved = saved_state()
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    training, validation = split_examples(job.folder, *job.split)
    network = new_network(training, job.vocab_size, job.settings)
    wrapped = ray.train.torch.prepare_model(network)
    reduce = _all_reduce if world_size > 1 else _same
    fit = Fit(wrapped, training, validation, job.settings, job.task, rank=rank, world_size=world_size, reduce=reduce)
    if saved is not None:
        fit.load_state_dict(saved)
    while not fit.done:
        metrics = fit.run_epoch().metrics
        if fit.done or fit.epoch % job.checkpoint_every == 0:
            report(metrics | {"epoch": fit.epoch}, fit.state_dict() if rank == 0 else None)


def _all_reduce(sums: Tensor) -> Tensor:
    torch.distributed.all_reduce(sums)
    return sums


def _same(sums: Tensor) -> Tensor:
    return sums


# --- after it ---


def _save(config: TrainConfig, data: Dataset, job: Job, trials: Sequence[Trial], state: dict[str, Any]) -> None:
    """Write the policy of the best epoch, what the held-back rows say of it, and all that MLflow is to know."""
    training, validation = split_examples(data.folder, *job.split)
    network = new_network(training, job.vocab_size, job.settings)
    network = fitted_network(network, state["best"], training, job.settings, job.task)
    found = lookup_report(network, job.task, training, validation)
    fell_back = config.fall_back and config.head == "tau" and not found.claims_gain
    if fell_back:
        shrink(network, training, job.task, 1.0)
    provenance = {
        "sweep_id": data.id,
        "num_train_examples": len(training),
        "num_validation_examples": len(validation),
        "best_epoch": state["progress"]["best_epoch"],
        "best_fixed_block_size": found.best_fixed_block_size,
        "dtype": data.metadata.dtype,
        "git_commit": data.metadata.git_commit,
        "rows": config.rows,
        **{k: v for k, v in dataclasses.asdict(job.settings).items() if isinstance(v, str | int | float | None)},
    }
    info = PolicyInfo(
        data.metadata.pair,
        data.candidates,
        config.head,
        config.objective,
        config.reads,
        network.shape,
        MIN_PROB,
        provenance,
    )
    policy = LearnedPolicy(info, network, data.costs)
    save_policy(policy, config.output)
    LearnedFrom(frozenset(data.rows.prompts), data.taus).write(config.output)
    labels = Counter(job.task.labels(training.taus).tolist())
    content = {
        "params": config.model_dump(mode="json") | dataclasses.asdict(job.settings) | {"sweep_id": data.id},
        "tags": _tags(info, data, found),
        "report": {name: value if value == value else None for name, value in found._asdict().items()},
        "history": state["history"],
        "num_epochs": state["progress"]["epoch"],
        "fell_back": fell_back,
        "num_examples": [len(training), len(validation)],
        "balance": {size: labels[i] for i, size in enumerate(data.candidates)},
        "trials": [
            {"loss": t.loss, "epochs": t.epoch, **{k: getattr(t.settings, k) for k in SEARCHED}} for t in trials
        ],
        "sample": _sample(data, job, policy, validation),
    }
    write_text(config.output / TRAINING_FILE, json.dumps(content) + "\n")


def _tags(info: PolicyInfo, data: Dataset, found: LookupReport) -> dict[str, object]:
    lookup = {f"lookup.{name}": value for name, value in found._asdict().items() if value == value}
    candidates, inputs = ",".join(map(str, info.candidates)), ",".join(info.shape.inputs)
    kind = {"format": FORMAT, "objective": info.objective, "head": info.head, "reads": info.reads, "input": inputs}
    return {**info.pair._asdict(), **kind, "candidates": candidates, "sweep_id": data.id, **lookup}


def _sample(data: Dataset, job: Job, policy: LearnedPolicy, validation: Examples) -> dict[str, Any]:
    """Predicted and measured tokens of a step for some held-back examples; of a head `tau` only."""
    if job.task.head != "tau":
        return {}
    some = validation.take(torch.randperm(len(validation), generator=torch.Generator().manual_seed(0))[:NUM_SAMPLES])
    predicted = job.task.taus(predict(policy.network, some))
    return {
        "sets": [data.rows.sets[row] for row in some.rows[some.index].tolist()],
        "predicted": [[round(tau, 4) for tau in taus] for taus in predicted.tolist()],
        "measured": [[round(tau, 4) for tau in taus] for taus in some.taus.tolist()],
    }


def _log(output: Path, registry: Registry) -> TrainResult:
    """Tell MLflow of the training that `output` holds, and register its policy."""
    if not (output / TRAINING_FILE).exists():
        raise ValueError(f"output {output}: no {TRAINING_FILE}, nothing to log")
    found = json.loads((output / TRAINING_FILE).read_text(encoding="utf-8"))
    params = found["params"]
    known: dict[str, Any] = {name: math.nan if value is None else value for name, value in found["report"].items()}
    lookup = LookupReport(**known)
    version = None
    with kept_for_later(registry.uri, output), registry.log_run("train") as record:
        record.log_params(params)
        record.log_tags({"sweep_id": params["sweep_id"]})
        for epoch, metrics in enumerate(found["history"], start=1):
            record.log_metrics(metrics, step=epoch)
        record.log_metrics({f"lookup_{key}": value for key, value in lookup._asdict().items() if value == value})
        record.log_metrics({f"best_for_{size}": count for size, count in found["balance"].items()})
        record.log_artifact(output / TRAINING_FILE)
        if found["trials"]:
            record.log_table(found["trials"], "trials.json")
        if params["register_version"]:
            target = load_policy(output).info.pair.target
            version = registry.register_policy(output, target=target, run_id=record.id, tags=found["tags"])
    result = TrainResult(output, version, lookup, found["num_epochs"], record.id)
    print(describe(result, found))
    return result


def describe(result: TrainResult, found: dict[str, Any]) -> str:
    """The short report on screen."""
    lookup, version = result.report, result.version
    where = f", registered as {version.name} version {version.number}" if version else ""
    verdict = "a gain" if lookup.claims_gain else "no gain that the rows can show"
    if found["fell_back"]:
        verdict += "; so the policy expects the same of every request, and takes the best fixed size at each load"
    training, validation = found["num_examples"]
    total = sum(found["balance"].values())
    balance = ", ".join(f"B={size} {count / total:.0%}" for size, count in found["balance"].items())
    r2 = "" if lookup.r2 != lookup.r2 else f" R2 of taus {lookup.r2:.2f};"
    return (
        f"train: {training} examples, {validation} held back; {result.num_epochs} epochs; "
        f"policy in {result.policy}{where}\n"
        f"train: best block size of the examples: {balance}\n"
        f"train: held-back examples, looked up (a diagnostic, not a result):{r2} accuracy {lookup.accuracy:.2f} "
        f"(best fixed B={lookup.best_fixed_block_size}: {lookup.accuracy_best_fixed:.2f}); "
        f"{_rate(found)} {lookup.policy:.3f} (best fixed {lookup.best_fixed:.3f}, random {lookup.random:.3f}, "
        f"oracle {lookup.oracle:.3f}); gain {lookup.gain_low:+.1%} to {lookup.gain_high:+.1%}: {verdict}"
    )


def _rate(found: dict[str, Any]) -> str:
    return "tau" if found["params"]["objective"] == "tau" else "times plain decoding"


if __name__ == "__main__":
    main(TrainConfig, run)
