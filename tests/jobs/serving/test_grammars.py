"""Compiled grammars that are kept: what is remembered, for how long, and what an error keeps of its request."""

import asyncio
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockpilot.constraints.automaton import GrammarError
from blockpilot.constraints.grammar import Grammar
from blockpilot.pairs.loading import Pair
from jobs.serving.constraints import grammars as module
from jobs.serving.constraints.grammars import Calls, Grammars, Kept
from jobs.serving.constraints.tools import Tool
from jobs.serving.fields import ApiError

WRONG = Grammar("lark", "start: nowhere")
STALLING = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (97, 101, 103, 107)]}


@pytest.fixture(scope="module")
def grammars(tiny_pair: Pair) -> Iterator[Grammars]:
    grammars = Grammars(tiny_pair)
    yield grammars
    grammars.close()


class Held:
    """What a request holds while its grammar is compiled."""


async def refused(grammars: Grammars, asked: Grammar | Calls) -> tuple[Exception, "weakref.ref[Held]"]:
    held = Held()
    with pytest.raises((GrammarError, ApiError)) as caught:
        await grammars.compile(asked)
    return caught.value, weakref.ref(held)


def test_a_wrong_grammar_raises_a_new_error_each_time_that_keeps_nothing(grammars: Grammars) -> None:
    first, _ = asyncio.run(refused(grammars, WRONG))
    again, held = asyncio.run(refused(grammars, WRONG))
    assert str(first) == str(again)
    assert first is not again
    del first, again
    gc.collect()
    assert held() is None


def test_a_process_that_somebody_else_ends_says_nothing_about_the_grammar(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(grammars.compile(Grammar("regex", "a")))
    answer = module._answer

    def ended(trial: "module.subprocess.Popen[bytes]", question: list[object], patience_s: float) -> object:
        os.kill(trial.pid, signal.SIGKILL)
        return answer(trial, question, patience_s)

    with monkeypatch.context() as killing:
        killing.setattr(module, "_answer", ended)
        error, _ = asyncio.run(refused(grammars, Grammar("regex", "b")))
    assert isinstance(error, ApiError)
    assert error.status == 503
    assert asyncio.run(grammars.compile(Grammar("regex", "b"))).compiled


def test_a_process_that_had_no_time_says_nothing_about_the_grammar(tiny_pair: Pair) -> None:
    grammars = Grammars(tiny_pair, cpu_s=600, patience_s=0.3)
    error, _ = asyncio.run(refused(grammars, Grammar("json", json.dumps(STALLING))))
    assert isinstance(error, ApiError)
    assert error.status == 503
    grammars._patience_s = 60.0
    assert asyncio.run(grammars.compile(Grammar("regex", "a"))).compiled
    grammars.close()


def test_a_tool_that_stalls_is_left_open_and_the_others_stay(grammars: Grammars) -> None:
    stalling = Tool("slow", {"type": "object", "properties": {"x": STALLING}, "required": ["x"]})
    other = Tool("quick", {"type": "object", "properties": {"y": {"type": "integer"}}, "required": ["y"]})
    tools = asyncio.run(grammars.compile(Calls("hermes", (stalling, other), False, True))).tools
    assert tools[0].parameters == {"type": "object", "properties": {"x": {}}}
    assert tools[1].parameters == other.parameters
    error, _ = asyncio.run(refused(grammars, Calls("hermes", (stalling, other), True, True)))
    assert "tool 'slow'" in str(error)


def test_results_are_kept_up_to_a_number_of_bytes_the_latest_ones(grammars: Grammars) -> None:
    """A compiled grammar counts for more than its source."""
    names = {f"property_{i}": {"type": "string", "pattern": f"^[a-z]{{{i}}}$"} for i in range(300)}
    schema, before = json.dumps({"type": "object", "properties": names}), grammars._kept.num_bytes
    asyncio.run(grammars.compile(Grammar("json", schema)))
    assert grammars._kept.num_bytes - before > len(schema)
    kept = Kept(max_bytes=100)
    keys = [("Grammar", str(i), None, None) for i in range(4)]
    for key in keys[:2]:
        kept.put(key, "wrong", 50)
    assert kept.get(keys[0]) == "wrong"  # is now the latest
    kept.put(keys[2], "wrong", 50)
    assert [kept.get(key) for key in keys[:3]] == ["wrong", None, "wrong"]
    kept.put(keys[3], "wrong", 1000)  # one is kept, however large
    assert [kept.get(key) for key in keys] == [None, None, None, "wrong"]
    assert kept.num_bytes == 1000
    for i in range(200):
        kept.put(("Grammar", f"{i}", "regex", None), "wrong", 0)
    assert len(kept._results) == module.MAX_KEPT


DEEPEST = """
import asyncio, sys
from blockpilot.pairs.loading import load_pair
from jobs.serving.replica import Replica
from jobs.serving.schema import CompletionRequest

async def takes(replica, length):
    chain = "".join(f"a{i}: a{i + 1}\\n" for i in range(length))
    grammar = {"grammar": f'start: a0\\n{chain}a{length}: "z"'}
    asked = {"model": "t", "prompt": "a", "max_tokens": 2, "structured_outputs": grammar}
    (answer,) = [part async for part in replica.answer(CompletionRequest.model_validate(asked))]
    return isinstance(answer, dict)

async def deepest(replica):
    taken, refused = 100, 8000
    while refused > taken + 250:
        half = (taken + refused) // 2
        taken, refused = (half, refused) if await takes(replica, half) else (taken, half)
    print("taken", taken, "then", await takes(replica, 100))

target, draft = sys.argv[1:]
replica = Replica(lambda: load_pair(target=target, draft=draft, dtype="float32"), max_length=200)
asyncio.run(deepest(replica))
replica.close()
"""


def test_a_chain_of_rules_that_is_taken_does_not_end_the_replica(tiny_pair_dirs: tuple[Path, Path]) -> None:
    """The compiler recurses; the deepest chain that the process survives is compiled here, too, even where a thread
    has by default a stack of 1 MiB, which is less than that of an unlimited process (2 MiB)."""
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", DEEPEST, *map(str, tiny_pair_dirs)],
        env=environment, capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (2**20, hard)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    *_, taken, _, after = done.stdout.split()
    assert int(taken) >= 500
    assert after == "True"
