"""Sweep: measure every candidate block size on every prompt, and write one Parquet row per prompt.

Prompts are cut into shards, Ray actors with a pair each decode the shards, and every finished shard becomes a part
file of `<output>/rows` (`jobs/sweeping/`). Only the driver writes. The same command continues an interrupted sweep:
prompts that have a row are skipped. Prompts that cannot be swept are listed in `<output>/rejects.jsonl` and tried
again by the next run. The step cost is measured at the end, when nothing else decodes.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple

import ray
from pydantic import Field, field_validator
from ray.exceptions import RayError

from blockpilot.control.cost import PRICE_FILE, StepPrice, read_price
from blockpilot.prompts.files import Prompt, load_prompts
from blockpilot.storage import is_file, join, without_secrets, write_bytes, write_text
from blockpilot.sweep.rows import (
    Metadata,
    Method,
    Outcome,
    Reject,
    candidates_around,
    check_candidates,
    prompt_ids,
    read_parts,
)
from blockpilot.sweep.summary import Summary
from jobs.common.build import git_commit
from jobs.common.cluster import connect, lone_actor, new_actor, num_threads, result
from jobs.common.config import Config, PairConfig, Place, Resources, absolute_in_submitted_job, main
from jobs.common.lease import Lease
from jobs.common.progress import Progress
from jobs.sweeping.folder import REJECTS_FILE, SweepFolder, SweepShard, digest, made_by
from jobs.sweeping.scheduler import Scheduler, SweepTask
from jobs.sweeping.screen import pictures, show
from jobs.sweeping.vllm_worker import VllmSweepOptions, VllmSweepWorker


class SweepConfig(Config):
    """Pair, prompts, candidates and output of a sweep."""

    pair: PairConfig = PairConfig()
    prompts: tuple[str, ...] = Field(default=("demo",), min_length=1)
    """Names of prompt sets, and prompt files (docs/your-own-pair.md)."""
    num_prompts: int | None = Field(default=None, ge=1)
    """Number of prompts of each set and file; by default all."""
    shuffle_seed: int = 0
    """Seed of the order in which the prompts of a set are taken."""
    candidates: tuple[int, ...] | None = None
    """Candidate block sizes, ascending; 1 is plain decoding. By default the block size that the draft was trained
    for, and two on each side of it."""
    engine: Literal["blockpilot", "vllm"] = "blockpilot"
    """Engine that decodes. vllm: for pairs that only vLLM can load; needs `--method decode` (docs/vllm.md)."""
    vllm: VllmSweepOptions = VllmSweepOptions()
    method: Method = "replay"
    """replay: decode each prompt once, and replay its text with every candidate. dense: also draft at the positions
    that a replay skips. decode: decode with every candidate, for comparison."""
    step_samples: int = Field(default=64, ge=0)
    """Consecutive positions of every answer, from a random start, that a dense sweep records. Policies of kind step
    are fitted to ranks, scores and log probabilities of the draft's choices there. Context vectors and embeddings of
    anchors, 2 bytes per number, are for studies."""
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: probability mass of the target's distribution that is kept; 1 keeps everything."""
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    """Seed of the sampler."""
    max_new_tokens: int = Field(default=128, ge=2)
    """Maximum tokens of an answer. The prefill emits the first one, so a single token would measure nothing."""
    prompts_per_shard: int = Field(default=16, ge=1)
    """Prompts decoded together and written as one part file; a lost worker loses at most this many."""
    output: Place = "runs/sweep"
    """Output directory, or a URI such as s3://bucket/sweep; must be absolute in a submitted job."""
    resources: Resources = Resources()
    slots: int = Field(default=16, ge=1)
    """Sequences that a worker decodes together."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts at a shard that fails or whose worker dies, before it is halved to isolate the failing prompt."""
    price_rows: int = Field(default=8, ge=0)
    """Maximum batch size of the timed steps that the step cost is fitted to; 0 measures no step cost."""
    price_context: int = Field(default=256, ge=1)
    """Tokens of context in the timed steps."""

    @field_validator("candidates")
    @classmethod
    def _check_candidates(cls, candidates: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if candidates is not None:
            check_candidates(candidates)
        return candidates


class SweepResult(NamedTuple):
    """Content of a sweep's output directory."""

    rows: str  # folder of the part files
    summary: Summary


def run(config: SweepConfig) -> SweepResult:
    """Run or continue a sweep; raises ValueError for bad input before Ray starts."""
    config.pair.need_draft("a sweep")
    absolute_in_submitted_job(config.output, "output")
    if config.engine == "vllm" and config.method != "decode":
        raise ValueError(
            f"method {config.method!r} with engine 'vllm': must be 'decode', since vLLM cannot replay a text"
        )
    shards, prompts = _cut(config)
    folder = SweepFolder(config.output, _identity(config, shards))
    folder.check(shards)
    with Lease(config.output) as lease:
        folder.open(shards, prompts)
        rejects = _sweep(config, shards, folder, lease)
        lease.check()
        folder.write_rejects(rejects)
        if _needs_price(config):  # a sweep that was interrupted between its rows and its step cost
            connect()
            worker_type, arguments, options = _worker(config)
            with lone_actor(worker_type, config.resources, *arguments, **options) as call:
                call("load", folder.identity, git_commit())
                _write_price(config, call("measure_price", config.price_rows, config.price_context))
        return _finish(config, folder, sum(len(shard.ids) for shard in shards), rejects)


def _cut(config: SweepConfig) -> tuple[list[SweepShard], list[Prompt]]:
    """The shards, and the prompts in the order of the shards, without duplicates.

    Conversations with the same first turn would share its row: the first one is kept.
    """
    prompts: dict[tuple[str, ...], Prompt] = {}
    ids_by_first_turn: dict[str, tuple[str, ...]] = {}
    left_out = set[tuple[str, ...]]()
    for name in config.prompts:
        for prompt in load_prompts(name, config.num_prompts, config.shuffle_seed):
            turn_ids = prompt_ids(prompt, config.seed, config.temperature)
            if ids_by_first_turn.setdefault(turn_ids[0], turn_ids) == turn_ids:
                prompts[turn_ids] = prompt
            else:
                left_out.add(turn_ids)
    if left_out:
        print(f"sweep: {len(left_out)} conversations left out: another one has the same first turn")
    ids = list(prompts)
    starts = range(0, len(ids), config.prompts_per_shard)
    shards = [SweepShard(i, tuple(ids[start : start + config.prompts_per_shard])) for i, start in enumerate(starts)]
    return shards, list(prompts.values())


def _identity(config: SweepConfig, shards: Sequence[SweepShard]) -> dict[str, Any]:
    """The settings that rows depend on, with a hash of the prompts and the revisions of the models."""
    excluded = {"output", "resources", "slots", "max_attempts", "price_rows", "price_context"}
    if config.engine == "blockpilot":  # older sweeps do not have these fields
        excluded |= {"engine", "vllm"}
    return config.model_dump(mode="json", exclude=excluded) | {
        "prompts_digest": digest(key for shard in shards for key in shard.ids),
        "revisions": config.pair.known_revisions(),
    }


def _sweep(config: SweepConfig, shards: Sequence[SweepShard], folder: SweepFolder, lease: Lease) -> list[Reject]:
    """Write the missing rows; returns the rejects in the order of the prompts."""
    tasks = [SweepTask(shard, missing) for shard in shards if (missing := folder.left(shard))]
    if not tasks:
        return []
    connect()
    num_prompts, num_left = sum(len(shard.prompts) for shard in shards), sum(len(task.places) for task in tasks)
    progress = Progress("sweep", num_prompts, "prompts", num_prompts - num_left)
    start = partial(_start_worker, config, folder)
    scheduler = Scheduler(folder, start, config.resources.num_actors, config.max_attempts)
    rejects: list[Reject] = []
    for task, outcome in scheduler.work(tasks):
        lease.check()
        assert scheduler.metadata is not None, "a worker loads before it sweeps"
        folder.write(task.shard, outcome.rows, scheduler.metadata)
        if outcome.rejects:  # a lost worker rejects all turns, also those with a row of an earlier run
            done = {row.prompt_id for row in folder.read(task.shard)}
            rejects += [reject for reject in outcome.rejects if reject.prompt_id not in done]
        progress.advance(len(task.places))
    if scheduler.last is not None:  # no other worker decodes now
        with suppress(RayError):  # a lost worker: `run` starts another one
            if _needs_price(config):
                size = config.price_rows, config.price_context
                _write_price(config, result(scheduler.last.measure_price.remote(*size)))
        ray.kill(scheduler.last)
    order = {key: i for i, key in enumerate(key for shard in shards for key in shard.ids)}
    return sorted(rejects, key=lambda reject: order[reject.prompt_id])


# The workers


class SweepWorker:
    """Ray actor that loads a pair once and sweeps shards with it.

    Only this actor imports torch and transformers, which takes seconds.
    """

    def __init__(self, config: SweepConfig) -> None:
        import torch

        torch.set_num_threads(num_threads(config.resources.num_cpus))
        self._config = config
        self._pair: Any = None  # blockpilot.Pair
        self._candidates: list[int] = []
        self._metadata: Metadata | None = None

    def load(self, identity: dict[str, Any], git_commit: str) -> Metadata:
        """Load the pair; returns the metadata of part files. Raises ValueError for candidates that do not fit it."""
        from blockpilot.device import dtype_name

        self._pair = pair = self._config.pair.load()
        self._candidates = candidates = identity["candidates"] or candidates_around(pair.block_size)
        check_candidates(candidates, pair.max_length)
        self._metadata = made_by(pair, dtype_name(pair.target.dtype), candidates, identity, git_commit)
        return self._metadata

    def sweep(self, prompts: list[Prompt]) -> Outcome:
        """Rows and rejects of these prompts."""
        from blockpilot.sweep.sweep import sweep_prompts

        assert self._pair is not None
        assert self._metadata is not None
        names = {"method", "max_new_tokens", "temperature", "top_p", "seed", "step_samples"}
        settings = self._config.model_dump(include=names) | {"num_slots": self._config.slots}
        return sweep_prompts(self._pair, prompts, self._candidates, **settings).checked(self._metadata)

    def measure_price(self, rows: int, context: int) -> StepPrice:
        """Step cost on this device, up to `rows` rows with `context` tokens each."""
        from jobs.common.prices import kept_price

        assert self._pair is not None
        return kept_price(self._pair, rows, context)


def _start_worker(config: SweepConfig, folder: SweepFolder) -> tuple[Any, Any]:
    """A new worker, and the Ray reference of its metadata."""
    worker_type, arguments, options = _worker(config)
    worker = new_actor(worker_type, config.resources, *arguments, **options)
    return worker, worker.load.remote(folder.identity, git_commit())


def _worker(config: SweepConfig) -> tuple[type[Any], tuple[Any, ...], dict[str, object]]:
    """Class of the workers, its arguments, and options of the actor; Ray must be running."""
    if config.engine == "blockpilot":
        return SweepWorker, (config,), {}
    settings = config.model_dump(include={"max_new_tokens", "temperature", "top_p", "seed"})
    options = config.vllm.actor_options(config.resources.accelerator_type)
    return VllmSweepWorker, (config.pair, config.vllm, config.slots, settings), options


def _needs_price(config: SweepConfig) -> bool:
    return config.price_rows > 0 and not is_file(join(config.output, PRICE_FILE))


def _write_price(config: SweepConfig, price: StepPrice) -> None:
    write_text(join(config.output, PRICE_FILE), price.to_json())


def _finish(config: SweepConfig, folder: SweepFolder, num_rows: int, rejects: Sequence[Reject]) -> SweepResult:
    """Read the rows back part by part, check their number, and print tables and write pictures."""
    if len(rejects) == num_rows:
        raise ValueError(f"none of the {num_rows} prompts could be swept; the first: {rejects[0].error}")
    by_set, metadata = defaultdict[str, Summary](Summary), folder.metadata
    for part in read_parts(folder.rows):
        for row in part.rows:
            by_set[row.prompt_set].add([row])
    summary = Summary.total(by_set.values())
    if summary.num_rows + len(rejects) != num_rows:
        raise RuntimeError(f"{summary.num_rows} rows and {len(rejects)} rejects for {num_rows} prompts")
    assert metadata is not None
    price_file = join(config.output, PRICE_FILE)
    price = read_price(price_file) if is_file(price_file) else None
    price = price if price and price.pair == metadata.pair else None
    show(summary, by_set, metadata, config.method, price)
    for name, picture in pictures(summary, by_set, metadata.block_size, price).items():
        write_bytes(join(config.output, name), picture)
    print(f"{summary.num_rows} rows in {without_secrets(folder.rows)}")
    if rejects:
        rejects_file = without_secrets(join(folder.place, REJECTS_FILE))
        print(f"{len(rejects)} prompts set aside in {rejects_file}; the first: {rejects[0].error}")
    return SweepResult(folder.rows, summary)


if __name__ == "__main__":
    main(SweepConfig, run)
