"""Scheduler of a sweep's shards over Ray actors: a failing shard is retried, then halved to isolate the prompt."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from blockpilot.sweep.rows import Metadata, Outcome, Reject, mismatch
from jobs.sweeping.folder import SweepFolder, SweepShard

PATIENCE_S = 30  # without a loaded pair, before a message about waiting


class SweepTask(NamedTuple):
    """Prompts of one shard to sweep together, by index."""

    shard: SweepShard
    places: tuple[int, ...]


class Scheduler:
    """Ray actors that run one task at a time. A worker that dies, or fails by another error than a ValueError, is
    replaced, and its task is tried again.

    All actors are requested together. Those that the cluster cannot place yet stay pending, which triggers its
    autoscaler. An actor without a task ends.
    """

    def __init__(
        self, folder: SweepFolder, start: Callable[[], tuple[Any, Any]], num_actors: int, max_attempts: int
    ) -> None:
        """start: returns a new worker, and the reference of its metadata."""
        self._folder, self._start_worker = folder, start
        self._num_actors, self._max_attempts = num_actors, max_attempts
        self.metadata: Metadata | None = None  # of the pair, once a worker has loaded it
        self._waiting: deque[SweepTask] = deque()
        self._running: dict[Any, tuple[Any, SweepTask | None]] = {}  # reference -> (worker, its task; None: loading)
        self._attempts: Counter[tuple[int, tuple[int, ...]]] = Counter()  # by shard and indices
        self._num_failed_loads = 0
        self.last: Any = None
        """The worker of the last task, with its pair loaded; the caller of `work` must end it."""

    def work(self, tasks: Sequence[SweepTask]) -> Iterator[tuple[SweepTask, Outcome]]:
        """Yield every finished task with its outcome.

        Raises the ValueError of a worker that cannot load the pair, and RuntimeError after `max_attempts` other
        failures to load it in a row.
        """
        self._waiting.extend(tasks)
        try:
            for _ in range(min(self._num_actors, len(tasks))):
                self._start()
            while self._waiting or any(task for _, task in self._running.values()):
                ready, _ = ray.wait(list(self._running), timeout=PATIENCE_S)
                if not ready and self.metadata is None:
                    print("sweep: no worker is ready yet: waiting for resources, or for the pair to load")
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
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else None
            reason = f"{type(cause).__name__}: {cause}" if cause else f"its worker died ({type(error).__name__})"
            if not isinstance(cause, ValueError):  # after an error of CUDA every later task of the process fails
                ray.kill(worker)
                yield from self._lost(task, reason)
                return
            if task is None:
                raise cause from None
            yield from self._failed(task, reason)
        else:
            if task is not None:
                yield task, result
            elif self.metadata and (mismatched := mismatch(self.metadata, result)):
                raise ValueError(f"workers loaded different pairs ({mismatched}): set a fixed revision and dtype")
            else:
                self._folder.take(result)  # raises before decoding rows that could not be written
                self.metadata, self._num_failed_loads = result, 0
        self._assign(worker)

    def _assign(self, worker: Any) -> None:
        """Give a worker the next task; if there is none, end the worker, unless it is the last."""
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
                num = self._num_failed_loads
                raise RuntimeError(f"{num} workers in a row could not load the pair; the last: {reason}")
        if self._waiting:
            self._start()

    def _failed(self, task: SweepTask, reason: str) -> Iterator[tuple[SweepTask, Outcome]]:
        """Retry a task after the others, then its halves; finally reject a single prompt."""
        number, indices = task.shard.number, task.places
        self._attempts[number, indices] += 1
        if self._attempts[number, indices] < self._max_attempts:
            print(f"sweep: trying {task.shard.part} again, {reason}")
            self._waiting.append(task)
        elif len(indices) > 1:
            print(f"sweep: looking for what fails in {task.shard.part}, {reason}")
            for half in (indices[: len(indices) // 2], indices[len(indices) // 2 :]):
                self._attempts[number, half] = self._max_attempts - 1
                self._waiting.append(SweepTask(task.shard, half))
        else:
            (prompt,) = self._folder.prompts(task.shard, indices)
            ids = task.shard.prompts[indices[0]]
            yield task, Outcome([], [Reject(key, prompt.set, prompt.text, reason) for key in ids])
