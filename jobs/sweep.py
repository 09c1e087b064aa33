"""Sweep: decode prompts with every candidate block size and write what each gave, one Parquet row a prompt.

Prompts are cut into shards, shards go to Ray actors that hold a pair each, and every finished shard becomes
a part file of `<output>/rows`. Only the driver writes. The same command continues an interrupted sweep:
prompts that have a row are skipped. What cannot be swept is set aside in `<output>/rejects.jsonl` and tried
again by the next run.
"""

import hashlib
import json
import os
import platform
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from pydantic import Field, field_validator
from ray.exceptions import RayError, RayTaskError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from blockpilot.files import remove_unfinished, write_text
from blockpilot.pairs import Pair
from blockpilot.prompts import Prompt, load_prompts
from blockpilot.records import (
    Metadata,
    SweepRow,
    difference,
    mismatch,
    prompt_id,
    read_file,
    read_sweep,
    write_rows,
)
from blockpilot.sweep import (
    Outcome,
    Reject,
    best_counts,
    candidates_around,
    check_candidates,
    decode,
    tau_curve,
)
from jobs.cluster import actor_options, connect, num_threads
from jobs.config import Config, PairConfig, Resources, absolute_in_submitted_job, main

CONFIG_FILE = "config.json"
REJECTS_FILE = "rejects.jsonl"
ROWS_FOLDER = "rows"
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
    output: Path = Path("runs/sweep")
    """Directory of the result; an absolute path in a submitted job."""
    resources: Resources = Resources()
    slots: int = Field(default=16, ge=1)
    """Sequences in a worker's batch."""
    max_attempts: int = Field(default=3, ge=1)
    """Tries of a shard whose worker dies, before it is set aside."""

    @field_validator("candidates")
    @classmethod
    def _check_candidates(cls, candidates: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if candidates is not None:
            check_candidates(candidates)
        return candidates

    @property
    def sampling(self) -> dict[str, Any]:
        """Keyword arguments of `decode` that the rows depend on."""
        return self.model_dump(include={"max_new_tokens", "temperature", "top_p", "seed"})


class SweepResult(NamedTuple):
    """What a sweep left in its output directory."""

    rows: Path  # folder of the part files
    num_rows: int
    num_rejects: int
    tau_curve: dict[int, float]
    best_counts: dict[int, int]


class Shard(NamedTuple):
    """Prompts whose rows share a part file, which is named by them."""

    number: int
    prompts: tuple[Prompt, ...]
    ids: tuple[str, ...]

    @property
    def part(self) -> str:
        return f"part-{self.number:05d}-{_digest(self.ids)[:12]}.parquet"


class Task(NamedTuple):
    """What is still to be decoded of a shard, and the rows it already has."""

    shard: Shard
    prompts: list[Prompt]
    rows: list[SweepRow]


def run(config: SweepConfig) -> SweepResult:
    """Sweep, or continue to; raises ValueError for bad input before Ray starts."""
    config.pair.names()
    absolute_in_submitted_job(config.output, "output")
    shards = _shards(config)
    folder = SweepFolder(config.output, _identity(config, shards))
    tasks = folder.open(shards)
    num_prompts = sum(len(shard.ids) for shard in shards)
    rejects: list[Reject] = []
    if tasks:
        connect()
        with _progress(num_prompts, num_prompts - sum(len(task.prompts) for task in tasks)) as advance:
            for task, outcome, metadata in _Pool(config, folder.identity).work(tasks):
                folder.write(task, outcome.rows, metadata)
                rejects += outcome.rejects
                advance(len(task.prompts))
    order = [key for shard in shards for key in shard.ids]
    rejects.sort(key=lambda reject: order.index(reject.prompt_id))
    folder.write_rejects(rejects)
    return _finish(folder, num_prompts, rejects)


def _shards(config: SweepConfig) -> list[Shard]:
    """All prompts in order, each once."""
    prompts = {
        prompt_id(prompt, config.seed, config.temperature): prompt
        for name in config.prompts
        for prompt in load_prompts(name, config.num_prompts, config.shuffle_seed)
    }
    items = list(prompts.items())
    starts = range(0, len(items), config.prompts_per_shard)
    cuts = [items[start : start + config.prompts_per_shard] for start in starts]
    return [Shard(i, tuple(p for _, p in cut), tuple(k for k, _ in cut)) for i, cut in enumerate(cuts)]


def _identity(config: SweepConfig, shards: Sequence[Shard]) -> dict[str, Any]:
    """The settings that rows depend on, and the prompts behind the names of sets and files."""
    elsewhere = {"output", "resources", "slots", "max_attempts"}
    digest = _digest([key for shard in shards for key in shard.ids])
    return config.model_dump(mode="json", exclude=elsewhere) | {"prompts_digest": digest}


def _digest(ids: Sequence[str]) -> str:
    return hashlib.sha256("".join(ids).encode()).hexdigest()


# The output directory


class SweepFolder:
    """`config.json`, written first; `rows/`, a part file a shard; `rejects.jsonl`."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path, self.rows, self.identity = path, path / ROWS_FOLDER, identity
        self._swept_with: Metadata | None = None

    def open(self, shards: Sequence[Shard]) -> list[Task]:
        """What is left to do. Raises ValueError, naming the difference, for a directory of another sweep."""
        found = {file.name for file in self.rows.glob("*.parquet")}
        if found:
            self._check_config()
        if foreign := found - {shard.part for shard in shards}:
            raise ValueError(f"output {self.path}: {ROWS_FOLDER}/{min(foreign)} is no part of this sweep")
        self.rows.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self.path)
        write_text(self.path / CONFIG_FILE, json.dumps(self.identity, indent=2) + "\n")
        tasks = [self._task(shard) for shard in shards]
        return [task for task in tasks if task.prompts]

    def write(self, task: Task, rows: Sequence[SweepRow], metadata: Metadata) -> None:
        """Write the part of a shard anew: the rows it had and the new ones, in the order of the prompts."""
        if self._swept_with and (found := mismatch(self._swept_with, metadata)):
            raise ValueError(f"output {self.path}: its rows are of another pair or precision ({found})")
        by_id = {row.prompt_id: row for row in (*task.rows, *rows)}
        if rows:
            ordered = [by_id[key] for key in task.shard.ids if key in by_id]
            write_rows(self.rows / task.shard.part, ordered, metadata)

    def write_rejects(self, rejects: Sequence[Reject]) -> None:
        """Replace the rejects; no file when there are none."""
        if rejects:
            lines = (json.dumps(reject._asdict(), ensure_ascii=False) + "\n" for reject in rejects)
            write_text(self.path / REJECTS_FILE, "".join(lines))
        else:
            (self.path / REJECTS_FILE).unlink(missing_ok=True)

    def _check_config(self) -> None:
        file = self.path / CONFIG_FILE
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"output {self.path}: holds rows, but {CONFIG_FILE} is not readable ({error})") from None
        if found := difference(stored, self.identity):
            raise ValueError(f"output {self.path}: holds another sweep (there and here: {found})")

    def _task(self, shard: Shard) -> Task:
        rows = self._read(self.rows / shard.part, shard)
        done = {row.prompt_id for row in rows}
        left = [prompt for key, prompt in zip(shard.ids, shard.prompts, strict=True) if key not in done]
        return Task(shard, left, rows)

    def _read(self, part: Path, shard: Shard) -> list[SweepRow]:
        """Rows of a part file; none if it is missing or damaged, for then it is decoded again."""
        if not part.exists():
            return []
        try:
            sweep = read_file(part)
        except ValueError as error:
            print(f"sweep: decoding again what was in {error}")
            return []
        self._swept_with = self._swept_with or sweep.metadata
        return [row for row in sweep.rows if row.prompt_id in shard.ids]


# The workers


class SweepWorker:
    """An actor that loads a pair once and decodes shards with it."""

    def __init__(self, pair: PairConfig, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._config = pair
        self._pair: Pair | None = None

    def load(self, identity: dict[str, Any], git_commit: str) -> Metadata:
        """Load the pair; returns what goes into every part file."""
        self._pair = pair = self._config.load()
        return Metadata(
            config=identity,
            pair=pair.id,
            dtype=str(pair.target.dtype).removeprefix("torch."),
            vocab_size=pair.vocab_size,
            block_size=pair.block_size,
            candidates=identity["candidates"] or candidates_around(pair.block_size),
            versions={
                "python": platform.python_version(),
                **{package: version(package) for package in ("torch", "transformers")},
            },
            git_commit=git_commit,
        )

    def decode(self, prompts: list[Prompt], candidates: list[int], settings: dict[str, Any]) -> Outcome:
        """Rows and rejects of some prompts."""
        assert self._pair is not None
        return decode(self._pair, prompts, candidates, **settings)


class _Pool:
    """Workers that take tasks one at a time. A worker that dies is replaced and its task is tried again."""

    def __init__(self, config: SweepConfig, identity: dict[str, Any]) -> None:
        resources, num_cpus = config.resources, ray.cluster_resources().get("CPU", 0)
        if resources.num_cpus > num_cpus and not os.environ.get("RAY_ADDRESS"):
            raise ValueError(f"resources.num_cpus {resources.num_cpus:g}: this machine has {num_cpus:g}")
        self._config, self._identity = config, identity
        self._options = actor_options(resources.accelerator_type, resources.num_cpus)
        self._git_commit = _git_commit()
        self._metadata: Metadata | None = None
        self._waiting: deque[Task] = deque()
        self._running: dict[Any, tuple[Any, Task | None]] = {}  # reference -> (worker, its task; None: loading)
        self._attempts: Counter[int] = Counter()
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
                    print(f"sweep: no worker is ready yet; each needs {self._options}")
                for reference in ready:
                    yield from self._collect(reference)
        finally:
            for worker, _ in self._running.values():
                ray.kill(worker)

    def _start(self) -> None:
        threads = num_threads(self._config.resources.num_cpus)
        remote: Any = ray.remote(SweepWorker)
        worker = remote.options(**self._options).remote(self._config.pair, threads)
        self._running[worker.load.remote(self._identity, self._git_commit)] = worker, None

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
        self._assign(worker)

    def _assign(self, worker: Any) -> None:
        """Give a worker the next task, or let it go."""
        if not self._waiting:
            ray.kill(worker)
            return
        task = self._waiting.popleft()
        settings = self._config.sampling | {"num_slots": self._config.slots}
        reference = worker.decode.remote(task.prompts, self._known().candidates, settings)
        self._running[reference] = worker, task

    def _loaded(self, metadata: Metadata) -> None:
        self._num_failed_loads = 0
        if self._metadata and (found := mismatch(self._metadata, metadata)):
            raise ValueError(f"workers loaded different pairs ({found}): give both a fixed revision and dtype")
        self._metadata = metadata

    def _known(self) -> Metadata:
        assert self._metadata is not None, "a worker loads before it decodes"
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
        """Try a task again after the others, or give it up."""
        self._attempts[task.shard.number] += 1
        if self._attempts[task.shard.number] < self._config.max_attempts:
            print(f"sweep: trying {task.shard.part} again, {reason}")
            self._waiting.append(task)
            return
        error = f"given up after {self._config.max_attempts} attempts: {reason}"
        ids = (prompt_id(prompt, self._config.seed, self._config.temperature) for prompt in task.prompts)
        rejects = [Reject(key, p.set, p.text, error) for key, p in zip(ids, task.prompts, strict=True)]
        yield task, Outcome([], rejects), self._known()


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


def _finish(folder: SweepFolder, num_prompts: int, rejects: Sequence[Reject]) -> SweepResult:
    """Count, read back and show everything the directory holds now."""
    if len(rejects) == num_prompts:
        raise ValueError(f"none of the {num_prompts} prompts could be swept; the first: {rejects[0].error}")
    sweep = read_sweep(folder.rows)
    if len(sweep.rows) + len(rejects) != num_prompts:
        raise RuntimeError(f"{len(sweep.rows)} rows and {len(rejects)} rejects for {num_prompts} prompts")
    result = SweepResult(folder.rows, len(sweep.rows), len(rejects), tau_curve(sweep.rows), best_counts(sweep.rows))
    _print_result(result, sweep.metadata, num_disagreements=sum(not row.texts_agree for row in sweep.rows))
    if rejects:
        print(f"{len(rejects)} prompts set aside in {folder.path / REJECTS_FILE}; the first: {rejects[0].error}")
    return result


def _print_result(result: SweepResult, metadata: Metadata, num_disagreements: int) -> None:
    title = f"{metadata.pair.target} with {metadata.pair.draft}, {metadata.dtype}"
    table = Table("block size", "tau", "best for", "share", title=title)
    for size, tau in result.tau_curve.items():
        best = result.best_counts[size]
        trained = " (trained)" if size == metadata.block_size else ""
        table.add_row(f"{size}{trained}", f"{tau:.3f}", f"{best}", f"{best / result.num_rows:.0%}")
    Console().print(table)
    if num_disagreements:
        print(f"{num_disagreements} prompts: texts differ between block sizes ({metadata.dtype} rounding)")
    print(f"{result.num_rows} rows in {result.rows}")


if __name__ == "__main__":
    main(SweepConfig, run)
