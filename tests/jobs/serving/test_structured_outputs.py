"""Structured outputs over the API: answers follow the grammar, and a bad grammar fails only its own request."""

import asyncio
import gc
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from blockpilot.constraints.automaton import GrammarError
from blockpilot.constraints.grammar import Grammar
from blockpilot.pairs.loading import Pair
from helpers.api import ApiClient, app_of, neighbour, over_http, replica_of
from helpers.bodies import CHAT, COMPLETIONS, QUESTION, JsonObject, shown, text_of
from jobs.serving.constraints import grammars as module
from jobs.serving.constraints.grammars import Calls, Grammars, Kept
from jobs.serving.constraints.tools import Tool
from jobs.serving.fields import ApiError
from jobs.serving.replica import Replica

SCHEMA: JsonObject = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["kind", "ages"],
    "additionalProperties": False,
}
STALLING = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (97, 101, 103, 107)]}
CHAT_BODY: JsonObject = {"messages": QUESTION, "max_tokens": 200, "seed": 7, "temperature": 1.5}
PROMPT_BODY: JsonObject = {"prompt": "Once", "max_tokens": 200, "seed": 7}


@pytest.fixture(scope="module")
def replica(tiny_pair: Pair) -> Iterator[Replica]:
    with replica_of(tiny_pair, num_slots=4, max_length=512) as replica:
        replica.reconfigure({"policy": "untrained"})
        yield replica


def schema_format(schema: JsonObject) -> JsonObject:
    return {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema, "strict": True}}


def structured(client: ApiClient, **structure: Any) -> str:
    return text_of(client.ask(COMPLETIONS, PROMPT_BODY | {"structured_outputs": structure}))


def test_a_schema_is_followed_streamed_or_not_at_every_block_size(client: ApiClient) -> None:
    body = CHAT_BODY | {"response_format": schema_format(SCHEMA)}
    whole = client.ask(CHAT, body)
    jsonschema.validate(json.loads(text_of(whole)), SCHEMA)
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert shown(client.streamed(CHAT, body)[0]) == text_of(whole)
    for settings in ({"block_size": 1}, {"block_size": 4, "layout": "tree"}):
        assert text_of(client.ask(CHAT, body | settings)) == text_of(whole)


def test_every_kind_of_structure_is_followed(client: ApiClient) -> None:
    choices = ["yes", "no", "perhaps"]
    assert structured(client, choice=choices) in choices
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", structured(client, regex="[a-c]{3}-[0-9]{2}"))
    for grammar in ('start: "<" /[a-z]{1,5}/ ">"', 'root ::= "<" [a-z] ">"'):
        assert re.fullmatch("<[a-z]{1,5}>", structured(client, grammar=grammar))
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        jsonschema.validate(json.loads(structured(client, json=schema)), SCHEMA)
    assert "   " in structured(client, json=SCHEMA, whitespace_pattern=" {3}")


def test_an_object_is_an_object_unless_it_is_cut(client: ApiClient) -> None:
    for structure in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        answer = client.ask(CHAT, CHAT_BODY | structure | {"max_tokens": 400, "top_p": 0.9, "top_k": 40})
        assert text_of(answer).startswith("{")
        if answer["choices"][0]["finish_reason"] == "stop":
            assert isinstance(json.loads(text_of(answer)), dict)
        cut = client.ask(CHAT, CHAT_BODY | structure | {"max_tokens": 2})
        assert cut["choices"][0]["finish_reason"] == "length"


def test_log_probabilities_stay_the_targets_own(client: ApiClient) -> None:
    body = PROMPT_BODY | {"structured_outputs": {"regex": "[qx]{4}"}, "logprobs": 2}
    logprobs = client.ask(COMPLETIONS, body)["choices"][0]["logprobs"]
    assert set(logprobs["tokens"]) <= set("qx")
    tokens = zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    assert any(token not in likeliest for token, likeliest in tokens)


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"response_format": schema_format({"type": "nothing"})}, "nothing"),
        ({"response_format": schema_format({"type": "string", "pattern": "(?=a)b"})}, "grammar: "),
        ({"response_format": schema_format({"enum": []})}, "grammar: "),
        ({"response_format": schema_format({"properties": {"x" * 2**17: {}}})}, "at most 131072 are compiled"),
        ({"response_format": schema_format({"enum": [175928847299117063]})}, "enum: [175928847299117063] "),
        ({"response_format": schema_format({"items": {"minimum": 2**53 + 1}})}, f"items.minimum: {2**53 + 1} "),
        ({"structured_outputs": {"json": json.dumps({"maximum": 2**64})}}, f"maximum: {2**64} "),
        ({"structured_outputs": {"json": '{"const": ' + "[" * 600 + "]" * 600 + "}"}}, "is nested too deeply"),
        ({"structured_outputs": {"json": "{"}}, "grammar: "),
        ({"structured_outputs": {"regex": "(a"}}, "grammar: "),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "nothing"),
        ({"structured_outputs": {}}, "one of json"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "one of json"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag: this field is not supported"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "one of them"),
        ({"response_format": {"type": "xml"}}, "type"),
    ],
)
def test_a_bad_grammar_is_400_in_words(client: ApiClient, structure: JsonObject, message: str) -> None:
    assert message in client.refusal(CHAT, CHAT_BODY | structure)["message"]


def test_a_stalling_grammar_is_refused_and_disturbs_no_neighbour(client: ApiClient) -> None:
    """Grammar for a least common multiple, whose compilation takes minutes: refused while other requests go on."""
    neighbour_body = PROMPT_BODY | {"max_tokens": 300, "temperature": 0}
    seconds = list[float]()
    with neighbour(client, neighbour_body):
        for _ in range(2):
            started = time.monotonic()
            refused = client.refusal(
                CHAT, CHAT_BODY | {"response_format": schema_format(STALLING)}, "response_format"
            )
            seconds.append(time.monotonic() - started)
            assert "to compile" in refused["message"]
    assert seconds[1] < seconds[0] / 2  # the refusal is cached
    jsonschema.validate(json.loads(structured(client, json=SCHEMA)), SCHEMA)


class Pet(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=30)


def test_the_openai_client_parses_into_its_own_classes(replica: Replica) -> None:
    with over_http(app_of(replica)) as root, openai.OpenAI(base_url=f"{root}/v1", api_key="none") as client:
        request: Any = {"model": "target", "messages": QUESTION, "max_tokens": 200, "seed": 3}
        parsed = client.chat.completions.parse(response_format=Pet, **request)
        assert isinstance(parsed.choices[0].message.parsed, Pet)
        with client.chat.completions.stream(response_format=Pet, **request) as stream:
            streamed = stream.get_final_completion()
        assert streamed.choices[0].message.parsed == parsed.choices[0].message.parsed


# --- cache of compiled grammars: its entries, their eviction, and what an error keeps alive of its request ---

WRONG = Grammar("lark", "start: nowhere")


@pytest.fixture(scope="module")
def grammars(tiny_pair: Pair) -> Iterator[Grammars]:
    grammars = Grammars(tiny_pair)
    yield grammars
    grammars.close()


class Held:
    """Object that a request holds while its grammar is compiled."""


async def refused(grammars: Grammars, grammar: Grammar | Calls) -> tuple[Exception, "weakref.ref[Held]"]:
    held = Held()
    with pytest.raises((GrammarError, ApiError)) as caught:
        await grammars.compile(grammar)
    return caught.value, weakref.ref(held)


def test_a_wrong_grammar_raises_a_new_error_each_time_that_keeps_nothing(grammars: Grammars) -> None:
    first_error, _ = asyncio.run(refused(grammars, WRONG))
    second_error, held = asyncio.run(refused(grammars, WRONG))
    assert str(first_error) == str(second_error)
    assert first_error is not second_error
    del first_error, second_error
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

    with monkeypatch.context() as patch:
        patch.setattr(module, "_answer", ended)
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
    """LRU eviction by bytes and by number; a compiled grammar counts for more bytes than its source."""
    names = {f"property_{i}": {"type": "string", "pattern": f"^[a-z]{{{i}}}$"} for i in range(300)}
    schema, before = json.dumps({"type": "object", "properties": names}), grammars._kept.num_bytes
    asyncio.run(grammars.compile(Grammar("json", schema)))
    assert grammars._kept.num_bytes - before > len(schema)
    cache = Kept(max_bytes=100)
    keys = [("Grammar", str(i), None, None) for i in range(4)]
    for key in keys[:2]:
        cache.put(key, "wrong", 50)
    assert cache.get(keys[0]) == "wrong"  # is now the latest
    cache.put(keys[2], "wrong", 50)
    assert [cache.get(key) for key in keys[:3]] == ["wrong", None, "wrong"]
    cache.put(keys[3], "wrong", 1000)  # one is kept, however large
    assert [cache.get(key) for key in keys] == [None, None, None, "wrong"]
    assert cache.num_bytes == 1000
    for i in range(200):
        cache.put(("Grammar", f"{i}", "regex", None), "wrong", 0)
    assert len(cache._results) == module.MAX_KEPT


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
    """Deepest chain that the trial process compiles also compiles in the replica (the compiler recurses), even if the
    default stack of a thread is 1 MiB, less than that of an unlimited process (2 MiB)."""
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", DEEPEST, *map(str, tiny_pair_dirs)],
        env=environment, capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (2**20, hard)),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    *_, taken, _, after = result.stdout.split()
    assert int(taken) >= 500
    assert after == "True"
