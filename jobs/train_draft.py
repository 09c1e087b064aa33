"""Train a DFlash or EAGLE-3 draft for a target: answers -> features -> draft, logged to MLflow.

Ray actors generate the target's answers (jobs/answers.py) and store the target's features of the answers; Ray Train
workers fit the draft to the features. The same command continues an interrupted run: it reuses finished files of
answers and features, and the last checkpoint. With `--only-edges` the actors store the draft's outputs instead of
features. Validation measures tau on held-out answers; jobs/sweep.py measures it by prompt set.
"""

import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray.train
import ray.train.torch
import torch
from transformers.utils.logging import disable_progress_bar

from blockpilot.device import best_device
from blockpilot.draft_training.answers import answer_source, read_answers
from blockpilot.draft_training.edges import DraftedSlots, EdgeFit, joined, read_slots, slots_of, write_slots
from blockpilot.draft_training.features import (
    Corpus,
    FeatureShard,
    FeatureSource,
    StoredCorpus,
    StreamedCorpus,
    feature_source,
    target_features,
    write_features,
)
from blockpilot.draft_training.loss import frequent_tokens
from blockpilot.draft_training.training import DraftFit, TrainingFit, Validation
from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.eagle3 import Eagle3Model
from blockpilot.models.decoder import soft_cap
from blockpilot.models.target import Target, embedding_table
from blockpilot.pairs.checkpoints import find_draft, find_target
from blockpilot.pairs.loading import load_target
from jobs import answers
from jobs.answers import AnswerShards
from jobs.common.cluster import num_threads, pooled
from jobs.common.config import absolute_in_submitted_job, main
from jobs.common.lease import Lease
from jobs.common.progress import show_progress
from jobs.common.ray_train import MetricLog, State, recorded, report, saved_state, scaling_config, train
from jobs.common.registry import Registry
from jobs.training.draft import (
    TrainDraftConfig,
    check_draft,
    draft_loss,
    draft_with_edges,
    edge_loss,
    export,
    fresh_draft,
    layer_ids_of,
    mask_token_id,
    use_vocabulary,
)

SLOT_DOCUMENTS = 8  # answers whose slots are computed together


class TrainDraftResult(NamedTuple):
    """Exported draft, metrics of its last validation, and the MLflow run."""

    draft: Path
    metrics: dict[str, float]
    run_id: str


class DraftShards(NamedTuple):
    """Training shards and held-out shards, with features."""

    train: tuple[FeatureShard, ...]
    held_out: tuple[FeatureShard, ...]


def run(config: TrainDraftConfig) -> TrainDraftResult:
    """Answer, train and export; raises ValueError for bad input before any training."""
    absolute_in_submitted_job(config.output, "output")
    config.fit.check()
    check_draft(config)
    registry = Registry.open()
    written = answers.run(config)
    check_answers(config, written)
    with Lease(config.output) as lease:
        data = write_shard_slots(config, written) if config.only_edges else write_shard_features(config, written)
        scaling = scaling_config(config.num_workers, config.resources.accelerator_type, config.resources.num_cpus)
        storage, name = config.output.absolute() / "train", _run_name(config, written)
        with recorded(registry, "train_draft", storage, name) as record:
            record.log_params(config.recorded(exclude={"fit"}) | asdict(config.fit))
            work = functools.partial(_work, config.for_training(), data, registry.uri, record.id)
            state, metrics = train(work, scaling, storage, name, config.max_failures)
            MetricLog(registry.uri, record.id, state["unlogged"]).flush()
            draft = trained_draft(config, state, written)
            directory = config.output / "draft"
            lease.check()
            export(draft, directory)
            record.log_artifact(directory, "draft")
    return TrainDraftResult(directory, metrics, record.id)


# --- before any training ---


def check_answers(config: TrainDraftConfig, written: AnswerShards) -> None:
    """Raise ValueError for answers of several targets or of another one, for answers with the mask token, and if no
    training answer or no held-out answer has 2 tokens or more.
    """
    revisions, folders = set[str](), set[str]()
    mask = mask_token_id(config) if config.kind == "dflash" else None
    for path in [shard.path for shards in written for shard in shards]:
        revisions.add(answer_source(path).target_revision)
        for answer in read_answers(path):
            if answer.has_anchor:
                folders.add(path.parent.name)
            if mask in answer.tokens:
                raise ValueError(f"mask_token {config.mask_token!r}: in use in {path}")
    if len(revisions) > 1:
        raise ValueError(f"{config.answers}: answers of several targets, revisions {', '.join(sorted(revisions))}")
    if missing := sorted({*AnswerShards._fields} - folders):
        place = config.answers / missing[0]
        raise ValueError(f"{place}: no answer of 2 tokens or more; max_prompt_tokens {config.max_prompt_tokens}")
    if (current := find_target(config.target).revision) not in revisions:
        raise ValueError(f"{config.answers}: answers of revision {revisions.pop()}, the target is {current} now")


# --- features, or slots of a frozen draft ---


class FeatureWorker:
    """Ray actor with the target in bf16."""

    def __init__(self, config: TrainDraftConfig) -> None:
        torch.set_num_threads(num_threads(config.resources.num_cpus))
        self.target, self.revision = feature_target(config)

    def write(self, shard: FeatureShard) -> int:
        """Write the features of a shard; returns the number of its tokens."""
        self.check(shard)
        features = target_features(self.target, read_answers(shard.answers))
        write_features(shard.features, features, FeatureSource(self.revision, self.target.layer_ids))
        return len(features.hidden)

    def check(self, shard: FeatureShard) -> None:
        """Raise ValueError for answers of another target."""
        revision = answer_source(shard.answers).target_revision
        if revision != self.revision:
            raise ValueError(f"{shard.answers}: answers of revision {revision}, the target is {self.revision} now")


def feature_target(config: TrainDraftConfig) -> tuple[Target, str]:
    """The target in bf16 with the layers that the draft reads, and its revision."""
    disable_progress_bar()
    model, _, revision = load_target(config.target, torch.bfloat16)
    model.to(best_device())  # type: ignore[arg-type]
    return Target(model, layer_ids_of(config)), revision


def write_shard_features(config: TrainDraftConfig, written: AnswerShards) -> DraftShards:
    """Write the missing features of all shards, unless they are streamed; each set of layers has a folder.

    Raises ValueError for features of another revision or of other layers.
    """
    layer_ids = layer_ids_of(config)
    folder = config.answers.absolute() / f"features-{'-'.join(map(str, layer_ids))}"
    data = DraftShards(*(tuple(_with_features(shard.path, folder) for shard in side) for side in written))
    if config.stream_features:
        return data
    shards = [shard for side in data for shard in side]
    missing = [shard for shard in shards if not shard.features.exists()]
    show_progress("features", pooled(FeatureWorker, config, missing, "write", config.resources), len(missing))
    for shard in shards:
        source, revision = feature_source(shard.features), answer_source(shard.answers).target_revision
        if source != FeatureSource(revision, layer_ids):
            raise ValueError(f"{shard.features}: of {source}, expected revision {revision} and layers {layer_ids}")
    return data


class SlotWorker(FeatureWorker):
    """Ray actor with the target and the draft whose edges are trained, in bf16."""

    def __init__(self, config: TrainDraftConfig) -> None:
        super().__init__(config)
        self._config = config
        draft, _ = draft_with_edges(config)
        self._draft: DraftModel = draft.to(best_device(), torch.bfloat16)

    def write_slots(self, shard: FeatureShard) -> int:
        """Write the slots of a shard; returns their number."""
        self.check(shard)
        model: Any = self.target.model
        embedding, head = embedding_table(model), model.lm_head.weight.detach()
        answers = [answer for answer in read_answers(shard.answers) if answer.has_anchor]
        answers.sort(key=lambda answer: len(answer.tokens))  # less padding
        corpus, parts = StreamedCorpus(answers, self.target), list[DraftedSlots]()
        for start in range(0, len(answers), SLOT_DOCUMENTS):
            index = range(start, min(start + SLOT_DOCUMENTS, len(answers)))
            documents, temperatures = corpus.read(index), [answers[i].temperature for i in index]
            fit, seed = self._config.fit, self._config.seed + start
            drawn = fit.num_anchors, seed, soft_cap(model.config)
            parts.append(slots_of(self._draft, embedding, head, documents, temperatures, *drawn))
        slots = joined(parts)
        write_slots(shard.features, slots)
        return len(slots.labels)


def write_shard_slots(config: TrainDraftConfig, written: AnswerShards) -> DraftShards:
    """Write the missing slots of all shards, in a folder named by a hash of everything that they depend on.

    Shards without a usable answer are left out.
    """
    edges, revision = draft_with_edges(config)[1], answer_source(written.train[0].path).target_revision
    key: tuple[object, ...] = revision, find_draft(config.start).revision
    key += edges.width, config.fit.num_anchors, config.seed, *(("causal",) if config.causal else ())
    folder = config.answers.absolute() / f"slots-{hashlib.sha256(repr(key).encode()).hexdigest()[:12]}"
    usable = [[s.path for s in side if any(answer.has_anchor for answer in read_answers(s.path))] for side in written]
    data = DraftShards(*(tuple(_with_features(path, folder) for path in paths) for paths in usable))
    missing = [shard for side in data for shard in side if not shard.features.exists()]
    show_progress("slots", pooled(SlotWorker, config, missing, "write_slots", config.resources), len(missing))
    return data


def _with_features(answers_path: Path, folder: Path) -> FeatureShard:
    return FeatureShard(answers_path, folder / answers_path.parent.name / f"{answers_path.stem}.safetensors")


# --- training ---


def _run_name(config: TrainDraftConfig, written: AnswerShards) -> str:
    """Name of the Ray Train run, by which Ray continues it: a hash of everything that the result depends on."""
    shape: tuple[object, ...] = config.block_size, config.num_layers, config.target_layer_ids, config.start
    shape += (find_draft(config.start).revision,) if config.start not in ("target", "random") else ()
    shape += (mask_token_id(config),) if config.kind == "dflash" else ()
    shape += (config.markov_rank,) if config.markov_rank else ()
    shape += (config.selector_rank, config.selector_top_k) if config.selector_rank else ()
    shape += ("edges",) if config.only_edges else ()
    shape += ("causal",) if config.causal else ()
    shape += (config.kind, config.draft_vocab_size) if config.kind != "dflash" or config.draft_vocab_size else ()
    data = [(shard.path, answer_source(shard.path)) for shard in written.train]
    key = repr((config.fit, config.seed, shape, config.num_workers, data))
    return f"draft-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _work(config: TrainDraftConfig, data: DraftShards, tracking_uri: str, run_id: str) -> None:
    """Fit the draft in a Ray Train worker, with a validation and a checkpoint every `checkpoint_every` steps."""
    context, saved = ray.train.get_context(), saved_state()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(num_threads(config.resources.num_cpus))
    fit, validate = (_edge_fit if config.only_edges else _draft_fit)(config, data, rank, world_size)
    if saved is not None:
        fit.load_state_dict(saved)
    unlogged = MetricLog(tracking_uri, run_id, saved["unlogged"] if saved is not None else ())
    started, first_step, total = time.monotonic(), fit.step, None
    for sums in fit.steps():
        total = sums if total is None else total + sums
        if fit.step % config.checkpoint_every and fit.step < fit.num_steps:
            continue
        speed = total.num_blocks * world_size / (time.monotonic() - started)
        metrics: dict[str, float] = {}
        if rank == 0:
            metrics = total.metrics("train") | validate().metrics()
            metrics |= {"learning_rate": fit.learning_rate, "epoch": fit.epoch, "blocks_per_s": speed}
            print(_describe(fit, first_step, metrics), flush=True)
            unlogged.add(fit.step, metrics)
        # The checkpoint first: an unreachable store must not lose training progress.
        report(metrics, fit.state_dict() | {"unlogged": unlogged.waiting} if rank == 0 else None)
        unlogged.flush()
        started, total = time.monotonic(), None


def _draft_fit(
    config: TrainDraftConfig, data: DraftShards, rank: int, world_size: int
) -> tuple[TrainingFit, Callable[[], Validation]]:
    """The fit of a worker at step 0, and its validation."""
    corpus, held_out = (corpus_of(config, shards) for shards in data)
    start = draft_loss(config, corpus.answers)
    # The buffers are the target's weights, which never change.
    loss = ray.train.torch.prepare_model(start, parallel_strategy_kwargs={"broadcast_buffers": False})
    frequent = frequent_tokens([answer.tokens for answer in corpus.answers])
    fit = DraftFit(loss, corpus, frequent, config.fit, seed=config.seed, rank=rank, world_size=world_size)
    validation = held_out.sample(config.num_validation, config.seed)
    return fit, lambda: fit.validate(held_out, validation)


def _edge_fit(
    config: TrainDraftConfig, data: DraftShards, rank: int, world_size: int
) -> tuple[TrainingFit, Callable[[], Validation]]:
    slots, held_out = (read_slots([shard.features for shard in shards]) for shards in data)
    torch.manual_seed(config.seed)
    loss = ray.train.torch.prepare_model(edge_loss(config), parallel_strategy_kwargs={"broadcast_buffers": False})
    fit = EdgeFit(loss, slots, config.block_size, config.fit, seed=config.seed, rank=rank, world_size=world_size)
    return fit, lambda: fit.validate(held_out)


def trained_draft(config: TrainDraftConfig, state: State, written: AnswerShards) -> DraftModel | Eagle3Model:
    """The draft with the weights of the last checkpoint."""
    if config.only_edges:
        edge_draft, edges = draft_with_edges(config)
        edges.load_state_dict(state["edges"])
        return edge_draft
    draft = fresh_draft(config)
    draft.load_state_dict(state["draft"])
    trained_on = (answer for shard in written.train for answer in read_answers(shard.path) if answer.has_anchor)
    use_vocabulary(config, draft, trained_on)
    return draft


def corpus_of(config: TrainDraftConfig, shards: Sequence[FeatureShard]) -> Corpus:
    """Documents of these shards, with stored or streamed features."""
    if not config.stream_features:
        return StoredCorpus(shards)
    answers = [answer for shard in shards for answer in read_answers(shard.answers)]
    return StreamedCorpus(answers, feature_target(config)[0])


def _describe(fit: TrainingFit, first_step: int, metrics: dict[str, float]) -> str:
    prefix = "validation_tau_T"
    tau = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
    taus = ", ".join(f"{value:.3f} at T={temperature}" for temperature, value in tau.items())
    return (
        f"step {fit.step}/{fit.num_steps} (from {first_step}): loss {metrics['train_loss']:.3f}, "
        f"held-out {metrics['validation_loss']:.3f}, tau {taus}, {metrics['blocks_per_s']:.0f} blocks/s"
    )


if __name__ == "__main__":
    main(TrainDraftConfig, run)
