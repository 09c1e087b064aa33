"""Grammars of requests, compiled beside the engine: each is tried first in a process that can be killed.

Some take minutes and gigabytes to compile, and no library can be told to stop. The process has seconds of a CPU and a
bound of memory for each; what outlives it is compiled again here, in as many seconds, while other threads run.
"""

import asyncio
import json
import os
import select
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from blockpilot.constraints.automaton import CompiledGrammar, GrammarCompiler, GrammarError
from blockpilot.constraints.grammar import Grammar
from jobs.serving.backends import PairFacts
from jobs.serving.errors import ApiError

CPU_S = 2  # of compiling one grammar
PATIENCE_S = 10.0  # on a busy machine
START_S = 60.0
MAX_WAITING, MAX_KEPT = 8, 64


class Grammars:
    """Compiled grammars of a pair, the latest ones kept; `cpu_s` bounds the compilation of each."""

    def __init__(self, pair: PairFacts, cpu_s: int = CPU_S, patience_s: float = PATIENCE_S) -> None:
        self._pair, self._cpu_s, self._patience_s = pair, cpu_s, patience_s
        self._thread = ThreadPoolExecutor(1, "grammars")  # one at a time
        self._kept: OrderedDict[Grammar, CompiledGrammar | GrammarError] = OrderedDict()
        self._num_waiting = 0
        self._compiler: GrammarCompiler | None = None  # a second's work, made when it is first asked for
        self._trial: subprocess.Popen[bytes] | None = None

    async def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises GrammarError for one that is wrong or takes too long, ApiError 429 where too many wait."""
        if grammar not in self._kept:
            if self._num_waiting >= MAX_WAITING:
                raise ApiError(429, f"{MAX_WAITING} grammars are being compiled; try again", code="queue_full")
            self._num_waiting += 1
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._keep, grammar)
            finally:
                self._num_waiting -= 1
        found = self._kept[grammar]
        if isinstance(found, GrammarError):
            raise found
        return found

    def close(self) -> None:
        """End the process, and what is being compiled in it."""
        self._end_trial()
        self._thread.shutdown(wait=False)

    # --- on the thread ---

    def _keep(self, grammar: Grammar) -> None:
        """Compile a grammar, or find out why not."""
        found: CompiledGrammar | GrammarError
        try:
            if grammar in self._kept:  # by whoever waited before
                return
            pair = self._pair
            self._compiler = self._compiler or GrammarCompiler(pair.tokenizer, pair.vocab_size, pair.stop_token_ids)
            self._try(grammar)
            found = self._compiler.compile(grammar)
        except GrammarError as error:
            found = error
        self._kept[grammar] = found
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def _try(self, grammar: Grammar) -> None:
        """Raise GrammarError for a grammar that the process refuses, or that it does not survive."""
        if self._trial is None or self._trial.poll() is not None:
            self._trial = self._start_trial()
        answer = _ask(self._trial, list(grammar), self._patience_s)
        if answer is None:
            self._end_trial()
            raise GrammarError(f"grammar: it takes more than {self._cpu_s} s, or too much memory, to compile")
        if answer:
            raise GrammarError(answer)

    def _start_trial(self) -> "subprocess.Popen[bytes]":
        assert self._compiler is not None
        trial = subprocess.Popen(
            [sys.executable, "-m", "jobs.serving.grammar_trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        vocab_size, stops = self._pair.vocab_size, sorted(self._pair.stop_token_ids)
        if _ask(trial, [self._compiler.tokenizer, vocab_size, stops, self._cpu_s], START_S) is None:
            trial.kill()
            raise ApiError(503, "the process that tries grammars did not start", code="unavailable")
        return trial

    def _end_trial(self) -> None:
        if self._trial is not None:
            self._trial.kill()
            self._trial.communicate()
            self._trial = None


def _ask(process: "subprocess.Popen[bytes]", question: list[object], patience_s: float) -> str | None:
    """The answer to one line of JSON; None where there is none in time."""
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
    return str(json.loads(line)) if line else None
