"""Scheduling of a sweep's shards over Ray actors: what fails is tried again, then halved to find the prompt."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from blockpilot.sweep.rows import Metadata, Outcome, Reject, mismatch
from jobs.common.cluster import cause_of
from jobs.sweeping.folder import SweepFolder, SweepShard

PATIENCE_S = 30  # without a loaded pair, before saying what the job waits for


class SweepTask(NamedTuple):
    """Prompts of one shard to sweep together, by place."""

    shard: SweepShard
    places: tuple[int, ...]


class Scheduler:
    """Actors that take tasks one at a time. A worker that dies is replaced and its task is tried again.

    All actors are asked for at once: those that the cluster cannot place yet wait, which is what its autoscaler acts
    on, and an actor that finds nothing left to do ends.
    """

    def __init__(
        self, folder: SweepFolder, start: Callable[[], tuple[Any, Any]], num_actors: int, max_attempts: int
    ) -> None:
        """start: a new worker, and the reference of what its loading will return."""
        self._folder, self._start_worker = folder, start
        self._num_actors, self._max_attempts = num_actors, max_attempts
        self.metadata: Metadata | None = None  # of the pair, once a worker has loaded it
        self._waiting: deque[SweepTask] = deque()
        self._running: dict[Any, tuple[Any, SweepTask | None]] = {}  # reference -> (worker, its task; None: loading)
        self._attempts: Counter[tuple[int, tuple[int, ...]]] = Counter()  # by shard and places
        self._num_failed_loads = 0
        self.last: Any = None
        """The worker that had the last task, with its pair; whoever asked for the work ends it."""

    def work(self, tasks: Sequence[SweepTask]) -> Iterator[tuple[SweepTask, Outcome]]:
        """Yield every task as it ends. Raises what a worker raises when it cannot load the pair."""
        self._waiting.extend(tasks)
        try:
            for _ in range(min(self._num_actors, len(tasks))):
                self._start()
            while self._waiting or any(task for _, task in self._running.values()):
                ready, _ = ray.wait(list(self._running), timeout=PATIENCE_S)
                if not ready and self.metadata is None:
                    print("sweep: no worker is ready yet: waiting for the resources of one, or for the pair to load")
                for reference in ready:
                    yield from self._collect(reference)
        finally:
            for worker, _ in self._running.values():
                ray.kill(worker)
            self._running.clear()

    def _start(self) -> None:
        worker, loaded = self._start_worker()
        self._running[loaded] = worker, None

    def _collect(self, reference: Any) -> Iterator[tuple[SweepTask, Outcome]]:
        worker, task = self._running.pop(reference)
        try:
            result = ray.get(reference)
        except RayTaskError as error:
            if task is None:
                raise cause_of(error) from None
            yield from self._failed(task, f"{type(error.cause).__name__}: {error.cause}")
        except RayError as error:
            ray.kill(worker)
            yield from self._lost(task, f"its worker died ({type(error).__name__})")
            return
        else:
            if task is not None:
                yield task, result
            elif self.metadata and (found := mismatch(self.metadata, result)):
                raise ValueError(f"workers loaded different pairs ({found}): give both a fixed revision and dtype")
            else:
                self._folder.take(result)  # before anything is decoded that could not be written
                self.metadata, self._num_failed_loads = result, 0
        self._assign(worker)

    def _assign(self, worker: Any) -> None:
        """Give a worker the next task, or let it go but for the last one."""
        if not self._waiting:
            if self._running:
                ray.kill(worker)
            else:
                self.last = worker
            return
        task = self._waiting.popleft()
        prompts = self._folder.prompts(task.shard, task.places)
        self._running[worker.sweep.remote(prompts)] = worker, task

    def _lost(self, task: SweepTask | None, reason: str) -> Iterator[tuple[SweepTask, Outcome]]:
        if task is not None:
            yield from self._failed(task, reason)
        else:
            self._num_failed_loads += 1
            if self._num_failed_loads >= self._max_attempts:
                raise RuntimeError(f"{self._num_failed_loads} workers in a row died while loading the pair")
        if self._waiting:
            self._start()

    def _failed(self, task: SweepTask, reason: str) -> Iterator[tuple[SweepTask, Outcome]]:
        """Try a task again after the others; then its halves; then give a single prompt up."""
        number, places = task.shard.number, task.places
        self._attempts[number, places] += 1
        if self._attempts[number, places] < self._max_attempts:
            print(f"sweep: trying {task.shard.part} again, {reason}")
            self._waiting.append(task)
        elif len(places) > 1:
            print(f"sweep: looking for what fails in {task.shard.part}, {reason}")
            for half in (places[: len(places) // 2], places[len(places) // 2 :]):
                self._attempts[number, half] = self._max_attempts - 1
                self._waiting.append(SweepTask(task.shard, half))
        else:
            (prompt,) = self._folder.prompts(task.shard, places)
            ids = task.shard.prompts[places[0]]
            yield task, Outcome([], [Reject(key, prompt.set, prompt.text, reason) for key in ids])
