"""Process that tries to compile grammars (grammars.py), within seconds of a CPU and a bound of memory.

Reads lines of JSON: first the tokenizer, its vocabulary's size, its stop tokens and the seconds; then questions, each
a grammar, or a tool whose parameters one is to follow. Answers each by a line of JSON, an object whose `wrong` is ""
or what is wrong. It imports no torch, and ends with its input.
"""

import ctypes
import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from blockpilot.constraints.grammar import Grammar, complaint, limits
from jobs.serving.constraints.tools import Tool, fitted, grammar_of, opened

MEMORY_BYTES = 4 * 2**30  # of addresses
STACK_BYTES = 2**22  # a quarter of what the replica's threads have, on which the same is compiled again


def main() -> None:
    """Answer on a thread whose stack is of that size, whatever the shell's limit is."""
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=answer_all)
    thread.start()
    thread.join()


def answer_all() -> None:
    """Answer until there are no more questions."""
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    text, vocab_size, stops, cpu_s = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(text, vocab_size, stops)
    print(json.dumps({"wrong": ""}), flush=True)
    for line in sys.stdin:
        until = int(time.process_time()) + cpu_s + 1
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))  # the system ends it then
        kind, *question = json.loads(line)
        answer = tried(Grammar(*question), tokenizer) if kind == "grammar" else tool_answer(tokenizer, *question)
        print(json.dumps(answer), flush=True)


def tool_answer(
    tokenizer: LLTokenizer, family: Any, name: str, parameters: dict[str, Any], strict: bool, exact: bool
) -> dict[str, Any]:
    """The parameters that a grammar can follow, and what is dropped of them; exact: nothing may be."""
    tool = Tool(name, parameters, strict)
    try:
        found, dropped = fitted(family, tool, exact)
        wrong = tried(grammar_of(family, [found], must_call=True, parallel=False), tokenizer)["wrong"]
    except ValueError as error:
        return {"wrong": str(error)}
    if wrong and exact:
        return {"wrong": f"tool {name!r}: {wrong}"}
    found, dropped = (opened(tool), ("parameters",)) if wrong else (found, dropped)
    return {"wrong": "", "parameters": found.parameters, "dropped": dropped}


def tried(grammar: Grammar, tokenizer: LLTokenizer) -> dict[str, Any]:
    """The first line of what is wrong with a grammar, and its bytes when compiled; also computes its first mask."""
    before = _num_bytes()
    try:
        matcher = LLMatcher(tokenizer, grammar.compiled_from(), log_level=0, limits=limits())
        num_bytes = max(0, _num_bytes() - before)
        matcher.compute_bitmask()
    except ValueError as error:
        return {"wrong": f"grammar: {error}"}
    wrong = f"grammar: {complaint(matcher)}" if matcher.is_error() else ""
    return {"wrong": wrong, "num_bytes": num_bytes}


def _num_bytes() -> int:
    """Memory of this process that is in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's: gives back what is free
    if trim is not None:
        trim(0)
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") if statm.exists() else 0


if __name__ == "__main__":
    main()
