"""Grammars of requests: each is first compiled in a separate process that can be killed.

Some grammars take minutes and gigabytes to compile, and the library cannot be interrupted. The process has a few CPU
seconds and limited memory for each. A grammar that compiles there is compiled again here, while other threads run.
"""

import asyncio
import json
import logging
import os
import select
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, NamedTuple

from blockpilot.constraints.automaton import CompiledGrammar, GrammarCompiler, GrammarError
from blockpilot.constraints.grammar import Grammar
from blockpilot.pairs.loading import Pair
from jobs.serving.constraints.tools import Family, Tool, grammar_of, opened
from jobs.serving.fields import ApiError

CPU_S = 2  # per grammar
PATIENCE_S = 60.0  # wall time on a busy machine; the CPU limit ends the process itself
START_S = 60.0
MAX_WAITING, MAX_KEPT, MAX_KEPT_BYTES = 8, 64, 2**28
MAX_STALLS = 2  # tools of a request that may exceed the limits; later ones are loosened without a trial
log = logging.getLogger("ray.serve.blockpilot")


class Calls(NamedTuple):
    """Tool calls that a request requires or allows."""

    family: Family
    tools: tuple[Tool, ...]
    must_call: bool
    parallel: bool
    otherwise: Grammar | None = None
    """Grammar of a JSON text that may replace the calls; None for free text."""

    @property
    def source(self) -> str:
        return json.dumps(self)


class CompiledStructure(NamedTuple):
    """Compiled grammar of a text, and the tools with the parameters that it enforces."""

    compiled: CompiledGrammar
    tools: tuple[Tool, ...] = ()


class Grammars:
    """Compiler of grammars for a pair, with a cache of `max_bytes`; `cpu_s` limits each compilation."""

    def __init__(
        self, pair: Pair, cpu_s: int = CPU_S, patience_s: float = PATIENCE_S, max_bytes: int = MAX_KEPT_BYTES
    ) -> None:
        self._pair, self._cpu_s, self._patience_s = pair, cpu_s, patience_s
        self._thread = ThreadPoolExecutor(1, "grammars")  # one at a time
        self._kept = Kept(max_bytes)
        self._num_waiting = 0
        self._compiler: GrammarCompiler | None = None  # built at the first use, since it takes a second
        self._trial: subprocess.Popen[bytes] | None = None

    async def compile(self, structure: Grammar | Calls) -> CompiledStructure:
        """Compile a grammar or tool calls; raises GrammarError if it is invalid or exceeds the limits.

        Raises ApiError 429 if too many grammars wait, 503 if the machine is too busy.
        """
        key = (
            type(structure).__name__,
            structure.source,
            getattr(structure, "kind", None),
            getattr(structure, "white_space", None),
        )
        if (result := self._kept.get(key)) is None:
            if self._num_waiting >= MAX_WAITING:
                raise ApiError(429, f"{MAX_WAITING} grammars are being compiled; try again", code="queue_full")
            self._num_waiting += 1
            try:
                result = await asyncio.get_running_loop().run_in_executor(self._thread, self._make, key, structure)
            finally:
                self._num_waiting -= 1
        if isinstance(result, str):
            raise GrammarError(result)  # a new error each time: a raised one keeps its traceback alive
        return result

    def close(self) -> None:
        """End the trial process and the thread."""
        self._end_trial()
        self._thread.shutdown(wait=False)

    # --- on the thread ---

    def _make(self, key: "Key", structure: Grammar | Calls) -> CompiledStructure | str:
        """Compile a grammar; returns the reason as a string if it fails."""
        if (result := self._kept.get(key)) is not None:  # compiled while this one waited
            return result
        num_bytes = 0
        try:
            pair = self._pair
            self._compiler = self._compiler or GrammarCompiler(pair.tokenizer, pair.vocab_size, pair.stop_token_ids)
            if isinstance(structure, Calls):
                grammar, tools, num_bytes = self._fit(structure)
            else:
                grammar, tools, num_bytes = structure, (), self._try(structure)
            result = CompiledStructure(self._compiler.compile(grammar), tools)
        except GrammarError as error:
            result = str(error)
        self._kept.put(key, result, num_bytes + len(structure.source))
        return result

    def _fit(self, calls: Calls) -> tuple[Grammar, tuple[Tool, ...], int]:
        """Grammar of calls, its tools with the parameters that it enforces, and its bytes.

        A keyword that no grammar can enforce is an error in a strict tool or with must_call, and dropped otherwise.
        """
        tools, num_stalls = list[Tool](), 0
        for tool in calls.tools:
            exact = tool.strict or calls.must_call
            answer = self._ask(["tool", calls.family, *tool, exact]) if num_stalls < MAX_STALLS or exact else None
            num_stalls += answer is None
            if answer is None and exact:
                raise GrammarError(f"tool {tool.name!r}: {self._too_much}")
            if answer is not None and answer["wrong"]:
                raise GrammarError(answer["wrong"])
            dropped = ["parameters"] if answer is None else answer["dropped"]
            tools.append(opened(tool) if answer is None else tool._replace(parameters=answer["parameters"]))
            if dropped:
                log.warning("tool %r: calls need not follow its %s", tool.name, ", ".join(dropped))
        try:
            return self._grammar(calls, tools)
        except GrammarError:
            loose = [tool.name for tool in tools if not (tool.strict or calls.must_call)]
            if not loose:
                raise
        log.warning("tools %s: calls need not follow their parameters", ", ".join(loose))
        return self._grammar(calls, [opened(tool) if tool.name in loose else tool for tool in tools])

    def _grammar(self, calls: Calls, tools: Sequence[Tool]) -> tuple[Grammar, tuple[Tool, ...], int]:
        grammar = grammar_of(
            calls.family, tools, must_call=calls.must_call, parallel=calls.parallel, otherwise=calls.otherwise
        )
        return grammar, tuple(tools), self._try(grammar)

    def _try(self, grammar: Grammar) -> int:
        """Bytes of a compiled grammar; raises GrammarError if it is invalid or exceeds the limits."""
        answer = self._ask(["grammar", *grammar])
        if answer is None:
            raise GrammarError(f"grammar: {self._too_much}")
        if answer["wrong"]:
            raise GrammarError(answer["wrong"])
        return int(answer["num_bytes"])

    @property
    def _too_much(self) -> str:
        return f"it takes more than {self._cpu_s} s, or too much memory, to compile"

    def _ask(self, question: list[object]) -> dict[str, Any] | None:
        """Answer of the trial process; None if the question exceeded the limits.

        Raises ApiError 503, which is not cached, if the machine was too busy.
        """
        if self._trial is None or self._trial.poll() is not None:
            self._trial = self._start_trial()
        trial = self._trial
        answer = _answer(trial, question, self._patience_s)
        if answer is not None:
            return answer
        status = _status(trial)
        self._end_trial()
        if status is None or status == -signal.SIGKILL:  # too slow, or killed from outside
            raise ApiError(503, "the machine is too busy to compile a grammar; try again", code="unavailable")
        return None

    def _start_trial(self) -> "subprocess.Popen[bytes]":
        assert self._compiler is not None
        trial = subprocess.Popen(
            [sys.executable, "-m", "jobs.serving.constraints.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        vocab_size, stops = self._pair.vocab_size, sorted(self._pair.stop_token_ids)
        if _answer(trial, [self._compiler.tokenizer, vocab_size, stops, self._cpu_s], START_S) is None:
            trial.kill()
            raise ApiError(503, "the process that tries grammars did not start", code="unavailable")
        return trial

    def _end_trial(self) -> None:
        if self._trial is not None:
            self._trial.kill()
            self._trial.communicate()
            self._trial = None


Key = tuple[str, str, str | None, str | None]


class Kept:
    """Thread-safe LRU cache of results, at most MAX_KEPT and `max_bytes`. A string is the error of a grammar."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._results: OrderedDict[Key, tuple[CompiledStructure | str, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Key) -> CompiledStructure | str | None:
        with self._lock:
            if key not in self._results:
                return None
            self._results.move_to_end(key)
            return self._results[key][0]

    def put(self, key: Key, result: CompiledStructure | str, num_bytes: int) -> None:
        with self._lock:
            self._results[key] = (result, num_bytes)
            self.num_bytes += num_bytes
            while len(self._results) > MAX_KEPT or (self.num_bytes > self._max_bytes and len(self._results) > 1):
                self.num_bytes -= self._results.popitem(last=False)[1][1]


def _answer(process: "subprocess.Popen[bytes]", question: list[object], patience_s: float) -> dict[str, Any] | None:
    """Answer to one question; None if the process ends or takes longer than `patience_s`."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    if not select.select([process.stdout], [], [], patience_s)[0]:
        return None
    line = process.stdout.readline()
    return dict(json.loads(line)) if line else None


def _status(process: "subprocess.Popen[bytes]") -> int | None:
    """Exit status of a process whose output has ended; None if it still runs."""
    try:
        return process.wait(1.0)
    except subprocess.TimeoutExpired:
        return None
