"""Structured outputs over the API: what is asked for is what comes, and a bad grammar costs its own request only."""

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel, Field

from blockpilot.pairs.loading import Pair
from helpers.api import (
    CHAT,
    COMPLETIONS,
    QUESTION,
    app_of,
    ask,
    check_error,
    client_of,
    events,
    over_http,
    replica_of,
    text_of,
)
from jobs.serving.replica import Replica

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["kind", "ages"],
    "additionalProperties": False,
}
STALLING = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (97, 101, 103, 107)]}
CHATTED: dict[str, Any] = {"model": "target", "messages": QUESTION, "max_tokens": 200, "seed": 7, "temperature": 1.5}
PROMPTED: dict[str, Any] = {"model": "target", "prompt": "Once", "max_tokens": 200, "seed": 7}


@pytest.fixture(scope="module")
def replica(tiny_pair: Pair) -> Iterator[Replica]:
    with replica_of(tiny_pair, num_slots=4, max_length=512) as replica:
        replica.reconfigure({"policy": "untrained"})
        yield replica


@pytest.fixture
def client(replica: Replica) -> Iterator[TestClient]:
    with client_of(replica) as client:
        yield client


def of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema, "strict": True}}


def test_a_schema_is_followed_streamed_or_not_at_every_block_size(client: TestClient) -> None:
    body = CHATTED | {"response_format": of_schema(SCHEMA)}
    whole = ask(client, CHAT, body)
    jsonschema.validate(json.loads(text_of(whole)), SCHEMA)
    assert whole["choices"][0]["finish_reason"] == "stop"
    streamed = events(client.post(CHAT, json=body | {"stream": True}).text)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in streamed) == text_of(whole)
    assert text_of(ask(client, CHAT, body | {"block_size": 1})) == text_of(whole)
    assert text_of(ask(client, CHAT, body | {"block_size": 4, "layout": "tree"})) == text_of(whole)


def test_every_kind_of_structure_is_followed(client: TestClient) -> None:
    choices = ["yes", "no", "perhaps"]
    assert text_of(ask(client, COMPLETIONS, PROMPTED | {"structured_outputs": {"choice": choices}})) in choices
    found = text_of(ask(client, COMPLETIONS, PROMPTED | {"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}))
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", found)
    for grammar in ('start: "<" /[a-z]{1,5}/ ">"', 'root ::= "<" [a-z] ">"'):
        found = text_of(ask(client, COMPLETIONS, PROMPTED | {"structured_outputs": {"grammar": grammar}}))
        assert re.fullmatch("<[a-z]{1,5}>", found)
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        found = text_of(ask(client, COMPLETIONS, PROMPTED | {"structured_outputs": {"json": schema}}))
        jsonschema.validate(json.loads(found), SCHEMA)
    spaced = {"json": SCHEMA, "whitespace_pattern": " {3}"}
    assert "   " in text_of(ask(client, COMPLETIONS, PROMPTED | {"structured_outputs": spaced}))


def test_an_object_is_an_object_unless_it_is_cut(client: TestClient) -> None:
    for asked in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        answer = ask(client, CHAT, CHATTED | asked | {"max_tokens": 400, "top_p": 0.9, "top_k": 40})
        assert text_of(answer).startswith("{")
        if answer["choices"][0]["finish_reason"] == "stop":
            assert isinstance(json.loads(text_of(answer)), dict)
        assert ask(client, CHAT, CHATTED | asked | {"max_tokens": 2})["choices"][0]["finish_reason"] == "length"
    free = ask(client, CHAT, CHATTED | {"response_format": {"type": "text"}, "max_tokens": 20})
    assert text_of(free) == text_of(ask(client, CHAT, CHATTED | {"max_tokens": 20}))


def test_log_probabilities_stay_the_targets_own(client: TestClient) -> None:
    body = PROMPTED | {"structured_outputs": {"regex": "[qx]{4}"}, "logprobs": 2}
    found = ask(client, COMPLETIONS, body)["choices"][0]["logprobs"]
    assert set(found["tokens"]) <= set("qx")
    assert any(
        token not in likeliest for token, likeliest in zip(found["tokens"], found["top_logprobs"], strict=True)
    )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"response_format": of_schema({"type": "nothing"})}, "nothing"),
        ({"response_format": of_schema({"type": "string", "pattern": "(?=a)b"})}, "grammar: "),
        ({"response_format": of_schema({"enum": []})}, "grammar: "),
        ({"response_format": of_schema({"properties": {"x" * 2**17: {}}})}, "at most 131072 are compiled"),
        ({"response_format": of_schema({"enum": [175928847299117063]})}, "enum: [175928847299117063] "),
        ({"response_format": of_schema({"items": {"minimum": 2**53 + 1}})}, f"items.minimum: {2**53 + 1} "),
        ({"structured_outputs": {"json": json.dumps({"maximum": 2**64})}}, f"maximum: {2**64} "),
        ({"structured_outputs": {"regex": "(a"}}, "grammar: "),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "nothing"),
        ({"structured_outputs": {"json": "{"}}, "grammar: "),
        ({"structured_outputs": {}}, "one of json"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "one of json"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag: this field is not supported"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "one of them"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "xml"}}, "type"),
    ],
)
def test_a_bad_grammar_is_400_in_words(client: TestClient, asked: dict[str, Any], message: str) -> None:
    response = client.post(CHAT, json=CHATTED | asked)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


def test_a_stalling_grammar_is_refused_and_disturbs_no_neighbour(client: TestClient) -> None:
    """Compiling the least common multiple of these takes minutes."""
    beside = PROMPTED | {"max_tokens": 300, "temperature": 0}
    expected, texts = text_of(ask(client, COMPLETIONS, beside)), list[str]()
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            texts.append(text_of(ask(client, COMPLETIONS, beside)))

    neighbour = threading.Thread(target=go_on)
    neighbour.start()
    started = time.monotonic()
    refused = client.post(CHAT, json=CHATTED | {"response_format": of_schema(STALLING)})
    first_s = time.monotonic() - started
    again = client.post(CHAT, json=CHATTED | {"response_format": of_schema(STALLING)})
    again_s = time.monotonic() - started - first_s
    stop.set()
    neighbour.join()
    assert refused.status_code == again.status_code == 400
    check_error(refused.json(), "response_format")
    assert "to compile" in refused.json()["error"]["message"]
    assert again_s < first_s / 2  # it is known
    assert texts
    assert set(texts) == {expected}
    jsonschema.validate(
        json.loads(text_of(ask(client, CHAT, CHATTED | {"response_format": of_schema(SCHEMA)}))), SCHEMA
    )


class Pet(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=30)


def test_the_openai_client_parses_into_its_own_classes(replica: Replica) -> None:
    with over_http(app_of(replica)) as root, openai.OpenAI(base_url=f"{root}/v1", api_key="none") as client:
        asked: Any = {"model": "target", "messages": QUESTION, "max_tokens": 200, "seed": 3}
        parsed = client.chat.completions.parse(response_format=Pet, **asked)
        assert isinstance(parsed.choices[0].message.parsed, Pet)
        with client.chat.completions.stream(response_format=Pet, **asked) as stream:
            streamed = stream.get_final_completion()
        assert streamed.choices[0].message.parsed == parsed.choices[0].message.parsed
