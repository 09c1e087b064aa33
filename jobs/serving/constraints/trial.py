"""Trial process that compiles grammars (grammars.py) with limits of CPU time and memory.

Reads lines of JSON: first the tokenizer, vocabulary size, stop tokens and CPU seconds; then questions, each a
grammar, or a tool whose parameters a grammar should enforce. Answers each with one line of JSON, an object whose
`wrong` is "" or the error. It does not import torch, and exits at the end of its input.
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

MEMORY_BYTES = 4 * 2**30  # of address space
STACK_BYTES = 2**22  # a quarter of the stack of the replica's threads, which compile the grammar again


def main() -> None:
    """Answer on a thread with a stack of STACK_BYTES, independent of the shell's limit."""
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
        # The system kills the process at this limit.
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
        kind, *question = json.loads(line)
        answer = tried(Grammar(*question), tokenizer) if kind == "grammar" else tool_answer(tokenizer, *question)
        print(json.dumps(answer), flush=True)


def tool_answer(
    tokenizer: LLTokenizer, family: Any, name: str, parameters: dict[str, Any], strict: bool, exact: bool
) -> dict[str, Any]:
    """Parameters that a grammar can enforce, and the dropped keywords; exact: nothing may be dropped."""
    tool = Tool(name, parameters, strict)
    try:
        fitted_tool, dropped = fitted(family, tool, exact)
        wrong = tried(grammar_of(family, [fitted_tool], must_call=True, parallel=False), tokenizer)["wrong"]
    except ValueError as error:
        return {"wrong": str(error)}
    if wrong and exact:
        return {"wrong": f"tool {name!r}: {wrong}"}
    fitted_tool, dropped = (opened(tool), ("parameters",)) if wrong else (fitted_tool, dropped)
    return {"wrong": "", "parameters": fitted_tool.parameters, "dropped": dropped}


def tried(grammar: Grammar, tokenizer: LLTokenizer) -> dict[str, Any]:
    """Error of a grammar (its first line, or ""), and its bytes when compiled; also computes its first mask."""
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
    """Resident memory of this process."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only: returns free memory to the system
    if trim is not None:
        trim(0)
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") if statm.exists() else 0


if __name__ == "__main__":
    main()
