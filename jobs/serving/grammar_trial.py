"""Process that tries to compile grammars (grammars.py), within seconds of a CPU and a bound of memory.

Reads lines of JSON: first the tokenizer, its vocabulary's size, its stop tokens and the seconds; then a grammar each.
Answers each by a line of JSON, "" or what is wrong. It imports no torch, and ends with its input.
"""

import json
import os
import resource
import sys
import time

from llguidance import LLMatcher, LLTokenizer

from blockpilot.constraints.grammar import Grammar, complaint, limits

MEMORY_BYTES = 4 * 2**30  # of addresses


def main() -> None:
    """Answer until there are no more questions."""
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    text, vocab_size, stops, cpu_s = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(text, vocab_size, stops)
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        until = int(time.process_time()) + cpu_s + 1
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))  # the system ends it then
        print(json.dumps(wrong_with(Grammar(*json.loads(line)), tokenizer)), flush=True)


def wrong_with(grammar: Grammar, tokenizer: LLTokenizer) -> str:
    """The first line of what is wrong with a grammar, "" for nothing; also computes its first mask."""
    try:
        matcher = LLMatcher(tokenizer, grammar.compiled_from(), log_level=0, limits=limits())
        matcher.compute_bitmask()
    except ValueError as error:
        return f"grammar: {error}"
    return f"grammar: {complaint(matcher)}" if matcher.is_error() else ""


if __name__ == "__main__":
    main()
