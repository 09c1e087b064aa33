"""Engine loop: one engine on a dedicated thread, shared by any number of asynchronous requests.

Only that thread uses the engine. Event loops queue work for it (add, cancel, change the policy), which it does
between two steps, and receive the steps of a response through one asyncio queue. Requests wait here for a slot;
clients get slots round robin.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Self, TypeVar

from blockpilot.constraints.automaton import GrammarError
from blockpilot.control.controller import Controller
from blockpilot.engine.engine import Engine
from blockpilot.types import Policy, Request, Step
from jobs.serving.clients import FairQueue, has_room
from jobs.serving.fields import ApiError, shutting_down

MAX_FAILURES = 3  # consecutive failed steps, after which the loop is unhealthy
STALL_S = 120.0  # a longer step makes the loop unhealthy until it ends
log = logging.getLogger(__name__)
Result = TypeVar("Result")


def on_passing_thread(work: Callable[[], Result]) -> Result:
    """Run torch work on a temporary thread; required for all torch work outside the engine's thread.

    A thread that has used OpenMP keeps its team of threads as long as it lives. If all teams together have more
    threads than there are CPUs, GNU OpenMP suspends waiting threads immediately instead of after 3 ms, and the
    engine's steps take a third longer.
    """
    with ThreadPoolExecutor(1, "passing") as pool:
        return pool.submit(work).result()


def _lost(error: Exception) -> ApiError:
    if isinstance(error, GrammarError):
        return ApiError(400, str(error), code="grammar_too_complex")
    message = f"{type(error).__name__} in the engine; the request is lost, others can be sent"
    return ApiError(500, message, code="engine_error")


class EngineLoop:
    """Thread that steps `engine` until `close`, with at most num_slots + max_queue requests in flight.

    `on_step` is called with the results and the seconds of every step, on the engine's thread.
    """

    def __init__(self, engine: Engine, *, max_queue: int = 64) -> None:
        if max_queue < 0:
            raise ValueError(f"max_queue {max_queue}: must be at least 0")
        self.engine = engine
        self.capacity = engine.num_slots + max_queue
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: set[Stream] = set()  # used by the event loops
        self._waiting: FairQueue[tuple[Stream, int]] = FairQueue()  # changed by the engine's thread, like _in_engine
        self._in_engine: dict[int, tuple[Stream, int]] = {}  # stream and number of a request by its id
        self.on_step: Callable[[Sequence[Step], float], None] = lambda steps, seconds: None
        self._num_failures = 0
        self._step_began: float | None = None
        self._closed = False
        engine.on_failure = self._fail
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_in_flight(self) -> int:
        """Number of submitted requests that are neither finished nor cancelled."""
        return sum(len(stream.left) for stream in tuple(self._open))  # a copy, since other threads call this

    @property
    def healthy(self) -> bool:
        return self._thread.is_alive() and self._num_failures < MAX_FAILURES and not self.stalled

    @property
    def stalled(self) -> bool:
        """True if the current step takes longer than STALL_S."""
        began = self._step_began
        return began is not None and time.perf_counter() - began > STALL_S

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._waiting) + self.engine.num_waiting

    @property
    def waiting_s(self) -> float:
        """Seconds that the oldest response without a first token has waited; 0 if there is none."""
        since = [stream.submitted for stream in tuple(self._open) if not stream.has_begun]
        return time.monotonic() - min(since) if since else 0.0

    def submit(self, requests: Sequence[Request], client: str = "") -> "Stream":
        """Queue all requests, or none; called on the event loop that reads their steps.

        client: name of the client, "" if clients are not distinguished. Raises ValueError for a request that the
        engine cannot serve, ApiError 429 if there is no free capacity (for this client), 503 after `close`.
        """
        for request in requests:
            self.engine.check(request)
        self.check_room(len(requests), client)
        stream = Stream(self, requests, client)
        self._open.add(stream)
        if self._closed:
            self._open.discard(stream)
            raise shutting_down()
        self._work.put(partial(self._add, stream))
        return stream

    def check_room(self, num_asked: int, client: str) -> None:
        """Raise ApiError 429 if there is no free capacity for this number of requests of a client."""
        num_open = self.num_in_flight
        num_held = sum(len(stream.left) for stream in tuple(self._open) if stream.client == client)
        if not has_room(num_held, num_asked, self.capacity - num_open, alone=not client):
            share = f", {num_held} of them yours" if client else ""
            message = f"{num_open} requests are in flight{share}; at most {self.capacity} are accepted; try again"
            raise ApiError(429, message, code="queue_full")

    def use(self, policy: Policy | None, controller: Controller) -> None:
        """Use this controller from the next step on; a policy fixes the block sizes of new rows."""

        def replace() -> None:
            self.engine.policy, self.engine.controller = policy, controller

        self._work.put(replace)

    def close(self) -> None:
        """Stop after the current step; requests in flight end with ApiError 503."""
        self._closed = True
        self._work.put(lambda: None)
        self._thread.join()

    # --- on the engine's thread ---

    def _run(self) -> None:
        try:
            while not self._closed:
                self._advance()
        finally:
            self._closed = True
            for stream in list(self._open):
                stream._put(shutting_down())

    def _advance(self) -> None:
        """Do the queued work, then one step; if the engine is idle, wait for work."""
        try:
            if self.engine.idle and not self._waiting:
                self._work.get()()
            while not self._work.empty():
                self._work.get()()
            self._fill()
            self._step_began = started = time.perf_counter()
            steps = self.engine.step()
            seconds = time.perf_counter() - started
        except Exception as error:
            log.exception("engine failed; %d requests are lost", len(self._in_engine))
            self._num_failures += 1
            for request_id, (stream, _) in self._in_engine.items():
                stream._put(_lost(error))
                self.engine.cancel(request_id)
            self._in_engine = {}
            return
        finally:
            self._step_began = None
        if steps:
            self._num_failures = 0
        for step in steps:
            self._deliver(step)
        if steps:
            self._report(steps, seconds)

    def _report(self, steps: Sequence[Step], seconds: float) -> None:
        try:
            self.on_step(steps, seconds)
        except Exception:  # failing metrics must not end requests
            log.exception("the results of a step are not reported")

    def _fail(self, request_id: int, error: Exception) -> None:
        """End only the response of the request that raised an exception in a step."""
        log.error("request failed", exc_info=error)
        if request_id in self._in_engine:
            stream, _ = self._in_engine.pop(request_id)
            stream._put(_lost(error))

    def _add(self, stream: "Stream") -> None:
        for number in range(len(stream.requests)):
            self._waiting.put(stream.client, (stream, number))

    def _fill(self) -> None:
        """Add waiting requests to the engine while it has free slots."""
        while self._waiting and self.engine.num_active + self.engine.num_waiting < self.engine.num_slots:
            stream, number = self._waiting.take()
            if not stream.closed:
                self._in_engine[self.engine.add(stream.requests[number])] = stream, number

    def _cancel(self, stream: "Stream") -> None:
        self._waiting.remove(stream.client, lambda waiting: waiting[0] is stream)
        for request_id in [i for i, (owner, _) in self._in_engine.items() if owner is stream]:
            del self._in_engine[request_id]
            self.engine.cancel(request_id)

    def _deliver(self, step: Step) -> None:
        if step.request_id not in self._in_engine:  # just cancelled
            return
        stream, number = self._in_engine[step.request_id]
        if step.finish_reason is not None:
            del self._in_engine[step.request_id]
        stream.has_begun = True
        if not stream._put((number, step)):
            self._cancel(stream)


class Stream:
    """Asynchronous iterator of the steps of a response's requests, each with the number of its request.

    Closing it before the last step cancels the remaining requests. Iterating raises ApiError 500 if the engine fails,
    and 503 if the loop is closed first.
    """

    def __init__(self, owner: EngineLoop, requests: Sequence[Request], client: str) -> None:
        self.requests, self.client = requests, client
        self.left = set(range(len(requests)))
        """Numbers of the unfinished requests."""
        self.submitted, self.has_begun = time.monotonic(), False
        self._owner = owner
        self._event_loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Step] | ApiError] = asyncio.Queue()

    @property
    def closed(self) -> bool:
        """True if all requests are finished, failed or cancelled."""
        return not self.left

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Step]:
        if self.closed:
            raise StopAsyncIteration
        event = await self._events.get()
        if isinstance(event, ApiError):
            self.close()
            raise event
        number, step = event
        if step.finish_reason is not None:
            self.left.discard(number)
            if self.closed:
                self._owner._open.discard(self)
        return number, step

    def close(self) -> None:
        """Cancel the remaining requests; their slots are free before the engine's next step."""
        if not self.closed:
            self.left.clear()
            self._owner._open.discard(self)
            self._owner._work.put(partial(self._owner._cancel, self))

    def _put(self, event: tuple[int, Step] | ApiError) -> bool:
        """Send an event from the engine's thread; False if the event loop is closed."""
        try:
            self._event_loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the event loop is closed
            return False
        return True
