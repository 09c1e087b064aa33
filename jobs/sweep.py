"""Sweep: measure every candidate block size on every prompt and write one Parquet row a prompt.

Prompts are cut into shards, shards go to Ray actors that hold a pair each, and every finished shard becomes a part
file of `<output>/rows` (`jobs/sweeping/`). Only the driver writes. The same command continues an interrupted sweep:
prompts that have a row are skipped. What cannot be swept is set aside in `<output>/rejects.jsonl` and tried again by
the next run. The seconds of a step are measured at the end, when nothing decodes.
"""

import platform
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ray
from pydantic import Field, field_validator
from ray.exceptions import RayError

from blockpilot.control.cost import PRICE_FILE, StepPrice, read_price
from blockpilot.prompts.files import Prompt, load_prompts
from blockpilot.storage import is_file, join, without_secrets, write_bytes, write_text
from blockpilot.sweep.candidates import Method, candidates_around, check_candidates
from blockpilot.sweep.rows import Metadata, Outcome, Reject, prompt_ids, read_parts
from blockpilot.sweep.summary import Summary
from jobs.common.cluster import connect, lone_actor, new_actor, num_threads, result
from jobs.common.config import Config, PairConfig, Place, Resources, absolute_in_submitted_job, main
from jobs.common.lease import Lease
from jobs.common.progress import Progress
from jobs.sweeping.folder import REJECTS_FILE, SweepFolder, SweepShard, digest
from jobs.sweeping.scheduler import Scheduler, SweepTask
from jobs.sweeping.screen import pictures, show
from jobs.sweeping.vllm_worker import VllmSweepOptions, VllmSweepWorker


class SweepConfig(Config):
    """What to sweep, with which pair, and where to."""

    pair: PairConfig = PairConfig()
    prompts: tuple[str, ...] = Field(default=("demo",), min_length=1)
    """Prompt sets by name, and files (docs/your-own-pair.md)."""
    num_prompts: int | None = Field(default=None, ge=1)
    """Prompts of each set and file; all of them by default."""
    shuffle_seed: int = 0
    """Draws which prompts of a set come first."""
    candidates: tuple[int, ...] | None = None
    """Block sizes, ascending; 1 is plain decoding. Default: the draft's trained one and two to each side."""
    engine: Literal["blockpilot", "vllm"] = "blockpilot"
    """vllm: the answers are vLLM's, for pairs that only it can hold; by `--method decode` (docs/vllm.md)."""
    vllm: VllmSweepOptions = VllmSweepOptions()
    method: Method = "replay"
    """replay: decode each prompt once, and walk its text with every candidate. dense: also at every position that a
    walk passes over. decode: really decode with every candidate, for comparison."""
    step_samples: int = Field(default=64, ge=0)
    """Places in a row, from a random one on, whose context vector and anchor a dense sweep records of every answer,
    for policies that choose at every step; 2 bytes for each of their numbers."""
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of the target's distribution; 1 is all of it."""
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    """Seed of the sampler."""
    max_new_tokens: int = Field(default=128, ge=2)
    """Tokens of an answer at most. The first one comes from the prefill, so one alone measures nothing."""
    prompts_per_shard: int = Field(default=16, ge=1)
    """Prompts decoded together; also the prompts of a part file, and what a lost worker loses."""
    output: Place = "runs/sweep"
    """Directory of the result, or a URI such as s3://bucket/sweep; an absolute path in a submitted job."""
    resources: Resources = Resources()
    slots: int = Field(default=16, ge=1)
    """Sequences in a worker's batch."""
    max_attempts: int = Field(default=3, ge=1)
    """Tries of a shard that fails or whose worker dies, before it is halved to find the prompt that does it."""
    price_rows: int = Field(default=8, ge=0)
    """The price of a step is fitted to timed steps of so many active rows and fewer; 0: not."""
    price_context: int = Field(default=256, ge=1)
    """Tokens of context of those rows."""

    @field_validator("candidates")
    @classmethod
    def _check_candidates(cls, candidates: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if candidates is not None:
            check_candidates(candidates)
        return candidates


class SweepResult(NamedTuple):
    """What a sweep left in its output directory."""

    rows: str  # folder of the part files
    summary: Summary


def run(config: SweepConfig) -> SweepResult:
    """Sweep, or continue to; raises ValueError for bad input before Ray starts."""
    config.pair.need_draft("a sweep")
    absolute_in_submitted_job(config.output, "output")
    if config.engine == "vllm" and config.method != "decode":
        raise ValueError(f"method {config.method!r} with engine 'vllm': must be 'decode', vLLM walks no known text")
    shards, prompts = _cut(config)
    folder = SweepFolder(config.output, _identity(config, shards))
    folder.check(shards)
    with Lease(config.output) as lease:
        folder.open(shards, prompts)
        rejects = _sweep(config, shards, folder, lease)
        lease.check()
        folder.write_rejects(rejects)
        if _needs_price(config):  # a sweep that was cut between its rows and its price
            connect()
            kind, arguments, options = _worker(config)
            with lone_actor(kind, config.resources, *arguments, **options) as call:
                call("load", folder.identity, _git_commit())
                _write_price(config, call("measure_price", config.price_rows, config.price_context))
        return _finish(config, folder, sum(len(shard.ids) for shard in shards), rejects)


def _cut(config: SweepConfig) -> tuple[list[SweepShard], list[Prompt]]:
    """The shards of all prompts, each prompt once and in order, and the prompts."""
    prompts = {
        prompt_ids(prompt, config.seed, config.temperature): prompt
        for name in config.prompts
        for prompt in load_prompts(name, config.num_prompts, config.shuffle_seed)
    }
    ids = list(prompts)
    starts = range(0, len(ids), config.prompts_per_shard)
    shards = [SweepShard(i, tuple(ids[start : start + config.prompts_per_shard])) for i, start in enumerate(starts)]
    return shards, list(prompts.values())


def _identity(config: SweepConfig, shards: Sequence[SweepShard]) -> dict[str, Any]:
    """The settings that rows depend on, and what the names of models, sets and files stand for today."""
    elsewhere = {"output", "resources", "slots", "max_attempts", "price_rows", "price_context"}
    if config.engine == "blockpilot":  # whose older sweeps do not say so
        elsewhere |= {"engine", "vllm"}
    return config.model_dump(mode="json", exclude=elsewhere) | {
        "prompts_digest": digest(key for shard in shards for key in shard.ids),
        "revisions": config.pair.known_revisions(),
    }


def _sweep(config: SweepConfig, shards: Sequence[SweepShard], folder: SweepFolder, lease: Lease) -> list[Reject]:
    """Write the rows that are missing; returns the rejects in the order of the prompts."""
    tasks = [SweepTask(shard, left) for shard in shards if (left := folder.left(shard))]
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
        rejects += outcome.rejects
        progress.advance(len(task.places))
    if scheduler.last is not None:  # it has the machine to itself as far as this job goes: nothing decodes now
        with suppress(RayError):  # it is lost: another worker will do
            if _needs_price(config):
                size = config.price_rows, config.price_context
                _write_price(config, result(scheduler.last.measure_price.remote(*size)))
        ray.kill(scheduler.last)
    order = {key: i for i, key in enumerate(key for shard in shards for key in shard.ids)}
    return sorted(rejects, key=lambda reject: order[reject.prompt_id])


# The workers


class SweepWorker:
    """An actor that loads a pair once and sweeps shards with it.

    It alone imports torch and transformers, which take seconds.
    """

    def __init__(self, config: SweepConfig) -> None:
        import torch

        torch.set_num_threads(num_threads(config.resources.num_cpus))
        self._config = config
        self._pair: Any = None  # blockpilot.Pair
        self._candidates: list[int] = []

    def load(self, identity: dict[str, Any], git_commit: str) -> Metadata:
        """Load the pair; returns what goes into every part file. ValueError for candidates that do not fit it."""
        from blockpilot.device import dtype_name

        self._pair = pair = self._config.pair.load()
        self._candidates = candidates = identity["candidates"] or candidates_around(pair.block_size)
        check_candidates(candidates, pair.max_length)
        return Metadata(
            config=identity,
            pair=pair.id,
            dtype=dtype_name(pair.target.dtype),
            vocab_size=pair.vocab_size,
            block_size=pair.block_size,
            candidates=candidates,
            versions={"python": platform.python_version()}
            | {name: version(name) for name in ("torch", "transformers")},
            git_commit=git_commit,
        )

    def sweep(self, prompts: list[Prompt]) -> Outcome:
        """Rows and rejects of some prompts."""
        from blockpilot.sweep.sweep import sweep_prompts

        assert self._pair is not None
        names = {"method", "max_new_tokens", "temperature", "top_p", "seed", "step_samples"}
        settings = self._config.model_dump(include=names) | {"num_slots": self._config.slots}
        return sweep_prompts(self._pair, prompts, self._candidates, **settings)

    def measure_price(self, rows: int, context: int) -> StepPrice:
        """What a step costs on this device."""
        from blockpilot.evaluation.pricing import measure_price

        assert self._pair is not None
        return measure_price(self._pair, rows, context)


def _start_worker(config: SweepConfig, folder: SweepFolder) -> tuple[Any, Any]:
    """A worker, and the reference of what its loading will return."""
    kind, arguments, options = _worker(config)
    worker = new_actor(kind, config.resources, *arguments, **options)
    return worker, worker.load.remote(folder.identity, _git_commit())


def _worker(config: SweepConfig) -> tuple[type[Any], tuple[Any, ...], dict[str, object]]:
    """Class of the workers, the arguments that make one, and options of its actor; Ray runs."""
    if config.engine == "blockpilot":
        return SweepWorker, (config,), {}
    settings = config.model_dump(include={"max_new_tokens", "temperature", "top_p", "seed"})
    return VllmSweepWorker, (config.pair, config.vllm, config.slots, settings), config.vllm.actor_options


def _needs_price(config: SweepConfig) -> bool:
    return config.price_rows > 0 and not is_file(join(config.output, PRICE_FILE))


def _write_price(config: SweepConfig, price: StepPrice) -> None:
    write_text(join(config.output, PRICE_FILE), price.to_json())


@cache
def _git_commit() -> str:
    """Commit of the code that runs, with -dirty if it was changed; "unknown" outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _finish(config: SweepConfig, folder: SweepFolder, num_turns: int, rejects: Sequence[Reject]) -> SweepResult:
    """Count, read back part by part and show everything the directory holds now."""
    if len(rejects) == num_turns:
        raise ValueError(f"none of the {num_turns} prompts could be swept; the first: {rejects[0].error}")
    summary, by_set, metadata = Summary(), defaultdict[str, Summary](Summary), folder.metadata
    for part in read_parts(folder.rows):
        summary.add(part.rows)
        for row in part.rows:
            by_set[row.prompt_set].add([row])
    if summary.num_rows + len(rejects) != num_turns:
        raise RuntimeError(f"{summary.num_rows} rows and {len(rejects)} rejects for {num_turns} prompts")
    assert metadata is not None
    place = join(config.output, PRICE_FILE)
    price = read_price(place) if is_file(place) else None
    price = price if price and price.pair == metadata.pair else None
    show(summary, by_set, metadata, config.method, price)
    for name, picture in pictures(summary, by_set, metadata.block_size, price).items():
        write_bytes(join(config.output, name), picture)
    print(f"{summary.num_rows} rows in {without_secrets(folder.rows)}")
    if rejects:
        where = without_secrets(join(folder.place, REJECTS_FILE))
        print(f"{len(rejects)} prompts set aside in {where}; the first: {rejects[0].error}")
    return SweepResult(folder.rows, summary)


if __name__ == "__main__":
    main(SweepConfig, run)
