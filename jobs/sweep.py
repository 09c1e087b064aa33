"""Sweep: measure every candidate block size on every prompt and write one Parquet row a prompt.

Prompts are cut into shards, shards go to Ray actors that hold a pair each, and every finished shard becomes a part
file of `<output>/rows` (sweep_folder.py). Only the driver writes. The same command continues an interrupted sweep:
prompts that have a row are skipped. What cannot be swept is set aside in `<output>/rejects.jsonl` and tried again by
the next run.
"""

import os
import platform
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ray
import torch
from pydantic import Field, field_validator
from ray.exceptions import RayError, RayTaskError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from blockpilot.control.price import COSTS_FILE, StepCosts
from blockpilot.evaluation.step_costs import measure_costs
from blockpilot.models.device import dtype_name
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Prompt, load_prompts
from blockpilot.storage import is_file, join, write_bytes, write_text
from blockpilot.sweep.rows import Metadata, mismatch, prompt_ids
from blockpilot.sweep.summary import Summary
from blockpilot.sweep.sweep import (
    MAX_BLOCK_SIZE,
    Outcome,
    Reject,
    candidates_around,
    check_candidates,
    decode,
    replay,
)
from jobs.common import figures
from jobs.common.cluster import actor_options, connect, num_threads
from jobs.common.config import Config, PairConfig, Place, Resources, absolute_in_submitted_job, main
from jobs.sweeping.folder import REJECTS_FILE, Shard, SweepFolder, digest

PATIENCE_S = 30  # without a loaded pair, before saying what the job waits for
LINE_INTERVAL_S = 5  # between progress lines when nobody watches a terminal


class SweepConfig(Config):
    """What to sweep, with which pair, and where to."""

    pair: PairConfig = PairConfig()
    prompts: tuple[str, ...] = Field(default=("demo",), min_length=1)
    """Prompt sets by name, and files (.jsonl, .parquet, .txt)."""
    num_prompts: int | None = Field(default=None, ge=1)
    """Prompts of each set and file; all of them by default."""
    shuffle_seed: int = 0
    """Draws which prompts of a set come first."""
    candidates: tuple[int, ...] | None = None
    """Block sizes, ascending; 1 is plain decoding. Default: the draft's trained one and two to each side."""
    method: Literal["replay", "dense", "decode"] = "replay"
    """replay: decode each prompt once, and walk its text with every candidate. dense: also at every position that a
    walk passes over. decode: really decode with every candidate, for comparison."""
    step_samples: int = Field(default=64, ge=0)
    """Places in a row, from a random one on, whose context vector and anchor a dense sweep records of every answer,
    for policies that choose at every step; 2 bytes for each of their numbers."""
    text_block_size: int | None = Field(default=None, ge=1, le=MAX_BLOCK_SIZE)
    """What a replay decodes the text with; the text is the same. Default: 1 on a CPU, the trained one on a GPU."""
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
    cost_rows: tuple[int, ...] = (1, 8)
    """Active rows to measure the seconds of a step with, at every candidate; none by `--cost-rows` alone."""
    cost_context: int = Field(default=256, ge=1)
    """Tokens of context to measure them at."""

    @field_validator("candidates")
    @classmethod
    def _check_candidates(cls, candidates: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if candidates is not None:
            check_candidates(candidates)
        return candidates

    @property
    def sampling(self) -> dict[str, Any]:
        """Keyword arguments of `decode` and `replay` that the rows depend on."""
        return self.model_dump(include={"max_new_tokens", "temperature", "top_p", "seed"})


class SweepResult(NamedTuple):
    """What a sweep left in its output directory."""

    rows: str  # folder of the part files
    num_rejects: int
    summary: Summary


class Task(NamedTuple):
    """Prompts of one shard to sweep together, by place; `later` are more of the same shard, to follow one by one."""

    shard: Shard
    places: tuple[int, ...]
    later: tuple[tuple[int, ...], ...] = ()

    @property
    def next(self) -> "Task | None":
        return Task(self.shard, self.later[0], self.later[1:]) if self.later else None


def run(config: SweepConfig) -> SweepResult:
    """Sweep, or continue to; raises ValueError for bad input before Ray starts."""
    config.pair.names()
    absolute_in_submitted_job(config.output, "output")
    shards, folder = _open(config)
    tasks = [Task(shard, left) for shard in shards if (left := folder.left(shard))]
    num_prompts = sum(len(shard.prompts) for shard in shards)
    rejects: list[Reject] = []
    pool = _Pool(config, folder)
    if tasks:
        connect()
        with _progress(num_prompts, num_prompts - sum(len(task.places) for task in tasks)) as advance:
            for task, outcome, metadata in pool.work(tasks):
                folder.write(task.shard, outcome.rows, metadata)
                rejects += outcome.rejects
                advance(len(task.places))
    order = {key: i for i, key in enumerate(key for shard in shards for key in shard.ids)}
    rejects.sort(key=lambda reject: order[reject.prompt_id])
    folder.write_rejects(rejects)
    if config.cost_rows and not is_file(join(config.output, COSTS_FILE)):
        connect()
        write_text(join(config.output, COSTS_FILE), pool.measure_costs().to_json())
    return _finish(config, folder, len(order), rejects)


def _open(config: SweepConfig) -> tuple[list[Shard], SweepFolder]:
    """The shards of all prompts, each once and in order, and the directory with their texts in it."""
    prompts = {
        prompt_ids(prompt, config.seed, config.temperature): prompt
        for name in config.prompts
        for prompt in load_prompts(name, config.num_prompts, config.shuffle_seed)
    }
    ids = list(prompts)
    starts = range(0, len(ids), config.prompts_per_shard)
    shards = [Shard(i, tuple(ids[start : start + config.prompts_per_shard])) for i, start in enumerate(starts)]
    folder = SweepFolder(config.output, _identity(config, shards))
    folder.open(shards, list(prompts.values()))
    return shards, folder


def _identity(config: SweepConfig, shards: Sequence[Shard]) -> dict[str, Any]:
    """The settings that rows depend on, and the prompts behind the names of sets and files."""
    elsewhere = {
        *("output", "resources", "slots", "text_block_size", "max_attempts"),
        *("cost_rows", "cost_context"),
    }
    return config.model_dump(mode="json", exclude=elsewhere) | {
        "prompts_digest": digest(key for shard in shards for key in shard.ids)
    }


# The workers


class SweepWorker:
    """An actor that loads a pair once and sweeps shards with it."""

    def __init__(self, config: SweepConfig) -> None:
        torch.set_num_threads(num_threads(config.resources.num_cpus))
        self._config = config
        self._pair: Pair | None = None
        self._candidates: list[int] = []

    def load(self, identity: dict[str, Any], git_commit: str) -> Metadata:
        """Load the pair; returns what goes into every part file. ValueError for candidates that do not fit it."""
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
            versions={
                "python": platform.python_version(),
                **{package: version(package) for package in ("torch", "transformers")},
            },
            git_commit=git_commit,
        )

    def sweep(self, prompts: list[Prompt]) -> Outcome:
        """Rows and rejects of some prompts."""
        assert self._pair is not None
        config, candidates = self._config, self._candidates
        settings = config.sampling | {"num_slots": config.slots}
        if config.method == "decode":
            return decode(self._pair, prompts, candidates, **settings)
        settings |= {"dense": config.method == "dense", "step_samples": config.step_samples}
        return replay(self._pair, prompts, candidates, text_block_size=config.text_block_size, **settings)

    def measure_costs(self) -> StepCosts:
        """Seconds of a step for plain decoding and every candidate."""
        assert self._pair is not None
        block_sizes = sorted({1, *self._candidates})
        return measure_costs(self._pair, block_sizes, self._config.cost_rows, self._config.cost_context)


class _Pool:
    """Workers that take tasks one at a time. A worker that dies is replaced and its task is tried again.

    All actors are asked for at once: those that the cluster cannot place yet wait, which is what its autoscaler acts
    on, and an actor that finds nothing left to do ends.
    """

    def __init__(self, config: SweepConfig, folder: SweepFolder) -> None:
        self._config, self._folder = config, folder
        self._git_commit = _git_commit()
        self._metadata: Metadata | None = None
        self._waiting: deque[Task] = deque()
        self._running: dict[Any, tuple[Any, Task | None]] = {}  # reference -> (worker, its task; None: loading)
        self._attempts: Counter[tuple[int, tuple[int, ...]]] = Counter()  # by shard and places
        self._num_failed_loads = 0

    def work(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Outcome, Metadata]]:
        """Yield every task as it ends. Raises what a worker raises when it cannot load the pair."""
        self._waiting.extend(tasks)
        try:
            for _ in range(min(self._config.resources.num_actors, len(tasks))):
                self._start()
            while self._waiting or any(task for _, task in self._running.values()):
                ready, _ = ray.wait(list(self._running), timeout=PATIENCE_S)
                if not ready and self._metadata is None:
                    print(f"sweep: no worker is ready yet; each needs {self._options()}")
                for reference in ready:
                    yield from self._collect(reference)
        finally:
            for worker, _ in self._running.values():
                ray.kill(worker)
            self._running.clear()

    def measure_costs(self) -> StepCosts:
        """Seconds of a step, on a worker that has the machine to itself as far as this job goes."""
        worker = self._new_worker()
        try:
            ray.get(worker.load.remote(self._folder.identity, self._git_commit))
            costs: StepCosts = ray.get(worker.measure_costs.remote())
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, ValueError) else error) from None
        finally:
            ray.kill(worker)
        return costs

    def _options(self) -> dict[str, Any]:
        resources, num_cpus = self._config.resources, ray.cluster_resources().get("CPU", 0)
        if resources.num_cpus > num_cpus and not os.environ.get("RAY_ADDRESS"):
            raise ValueError(f"resources.num_cpus {resources.num_cpus:g}: this machine has {num_cpus:g}")
        return actor_options(resources.accelerator_type, resources.num_cpus)

    def _new_worker(self) -> Any:
        remote: Any = ray.remote(SweepWorker)
        return remote.options(**self._options()).remote(self._config)

    def _start(self) -> None:
        worker = self._new_worker()
        self._running[worker.load.remote(self._folder.identity, self._git_commit)] = worker, None

    def _collect(self, reference: Any) -> Iterator[tuple[Task, Outcome, Metadata]]:
        worker, task = self._running.pop(reference)
        try:
            result = ray.get(reference)
        except RayTaskError as error:
            if task is None:
                raise (error.cause if isinstance(error.cause, ValueError) else error) from None
            yield from self._failed(task, f"{type(error.cause).__name__}: {error.cause}")
        except RayError as error:
            ray.kill(worker)
            yield from self._lost(task, f"its worker died ({type(error).__name__})")
            return
        else:
            if task is None:
                self._loaded(result)
            else:
                yield task, result, self._known()
                self._follow(task)
        self._assign(worker)

    def _assign(self, worker: Any) -> None:
        """Give a worker the next task, or let it go."""
        if not self._waiting:
            ray.kill(worker)
            return
        task = self._waiting.popleft()
        prompts = self._folder.prompts(task.shard, task.places)
        self._running[worker.sweep.remote(prompts)] = worker, task

    def _follow(self, task: Task) -> None:
        if task.next:
            self._waiting.appendleft(task.next)

    def _loaded(self, metadata: Metadata) -> None:
        self._num_failed_loads = 0
        if self._metadata and (found := mismatch(self._metadata, metadata)):
            raise ValueError(f"workers loaded different pairs ({found}): give both a fixed revision and dtype")
        self._metadata = metadata

    def _known(self) -> Metadata:
        assert self._metadata is not None, "a worker loads before it sweeps"
        return self._metadata

    def _lost(self, task: Task | None, reason: str) -> Iterator[tuple[Task, Outcome, Metadata]]:
        if task is not None:
            yield from self._failed(task, reason)
        else:
            self._num_failed_loads += 1
            if self._num_failed_loads >= self._config.max_attempts:
                raise RuntimeError(f"{self._num_failed_loads} workers in a row died while loading the pair")
        if self._waiting:
            self._start()

    def _failed(self, task: Task, reason: str) -> Iterator[tuple[Task, Outcome, Metadata]]:
        """Try a task again after the others; then its halves, one after the other; then give a single prompt up."""
        number, places = task.shard.number, task.places
        self._attempts[number, places] += 1
        if self._attempts[number, places] < self._config.max_attempts:
            print(f"sweep: trying {task.shard.part} again, {reason}")
            self._waiting.append(task)
        elif len(places) > 1:
            print(f"sweep: looking for what fails in {task.shard.part}, {reason}")
            halves = places[: len(places) // 2], places[len(places) // 2 :]
            for half in halves:
                self._attempts[number, half] = self._config.max_attempts - 1
            self._waiting.append(Task(task.shard, halves[0], (halves[1], *task.later)))
        else:
            (prompt,) = self._folder.prompts(task.shard, places)
            ids = task.shard.prompts[places[0]]
            yield task, Outcome([], [Reject(key, prompt.set, prompt.text, reason) for key in ids]), self._known()
            self._follow(task)


def _git_commit() -> str:
    """Commit of the code that runs, with -dirty if it was changed; "unknown" outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


# What the user sees


@contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of prompts that have just ended."""
    console = Console()
    started, already, last_line = time.monotonic(), done, 0.0
    columns = TextColumn("sweep"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading the pair", total=total, completed=done)

        def advance(num_prompts: int) -> None:
            nonlocal done, last_line
            done += num_prompts
            now = time.monotonic()
            rate = (done - already) / (now - started)
            words = f"{rate:.2f} prompts/s, {(total - done) / rate:.0f} s left"
            bar.update(task, completed=done, description=words)
            if not console.is_terminal and (now - last_line >= LINE_INTERVAL_S or done == total):
                print(f"sweep: {done}/{total} prompts, {words}", flush=True)
                last_line = now

        yield advance


def _finish(config: SweepConfig, folder: SweepFolder, num_turns: int, rejects: Sequence[Reject]) -> SweepResult:
    """Count, read back part by part and show everything the directory holds now."""
    if len(rejects) == num_turns:
        raise ValueError(f"none of the {num_turns} prompts could be swept; the first: {rejects[0].error}")
    summary, metadata = Summary(), folder.metadata
    for rows in folder.parts():
        summary.add(rows)
    if summary.num_rows + len(rejects) != num_turns:
        raise RuntimeError(f"{summary.num_rows} rows and {len(rejects)} rejects for {num_turns} prompts")
    assert metadata is not None
    _print(summary, metadata, config.method, _costs(config, metadata))
    for name, picture in plots(summary, metadata.block_size).items():
        write_bytes(join(folder.place, name), picture)
    print(f"{summary.num_rows} rows in {folder.rows}")
    if rejects:
        where = join(folder.place, REJECTS_FILE)
        print(f"{len(rejects)} prompts set aside in {where}; the first: {rejects[0].error}")
    return SweepResult(folder.rows, len(rejects), summary)


def _costs(config: SweepConfig, metadata: Metadata) -> StepCosts | None:
    """The step costs beside the rows, if there are any and they are of this pair."""
    place = join(config.output, COSTS_FILE)
    costs = StepCosts.read(place) if is_file(place) else None
    return costs if costs and costs.pair == metadata.pair else None


def _print(summary: Summary, metadata: Metadata, method: str, costs: StepCosts | None) -> None:
    title = f"{metadata.pair.target} with {metadata.pair.draft}, {metadata.dtype}, {method}"
    loads = [f"times AR, rows={rows}" for rows in costs.rows] if costs else []
    table = Table("block size", "tau", "best for", "share", *loads, title=title)
    for size, tau in summary.tau_curve.items():
        best = summary.best_counts[size]
        trained = " (trained)" if size == metadata.block_size else ""
        gains = [costs.speed_up(size, tau, rows) for rows in costs.rows] if costs else []
        cells = f"{tau:.3f}", f"{best}", f"{best / summary.num_rows:.0%}", *(f"{gain:.2f}" for gain in gains)
        table.add_row(f"{size}{trained}", *cells)
    Console().print(table)
    if costs:
        print(f"times AR: tau over the measured cost of a step at {costs.context} tokens ({costs.device})")
    near = ", ".join(f"{summary.share_within(d, metadata.block_size):.0%} {words}" for d, words in DISTANCES.items())
    print(f"best block size: {near}")
    if summary.ceiling is not None:
        print(f"tau of a choice that knows the best candidate at every step: {summary.ceiling:.3f}")
    if summary.num_disagreements:
        print(f"{summary.num_disagreements} prompts: texts differ between block sizes ({metadata.dtype} rounding)")


DISTANCES = {0: "the trained one", 1: "within 1 of it", 2: "within 2"}


def plots(summary: Summary, block_size: int) -> dict[str, bytes]:
    """The tau curve and how often each candidate is the best, as PNG files by name."""
    return {
        "tau_curve.png": figures.tau_curves({"all": summary.tau_curve}, block_size, summary.ceiling),
        "best_block_sizes.png": figures.best_sizes({"by tau": summary.best_counts}, block_size),
    }


if __name__ == "__main__":
    main(SweepConfig, run)
