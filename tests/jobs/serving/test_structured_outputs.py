"""Structured outputs over the API: what is asked for is what comes, and a bad grammar costs its own request only."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from blockpilot.pairs.loading import Pair
from helpers.api import ApiClient, app_of, neighbour, over_http, replica_of
from helpers.bodies import CHAT, COMPLETIONS, QUESTION, JsonObject, shown, text_of
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


def of_schema(schema: JsonObject) -> JsonObject:
    return {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema, "strict": True}}


def structured(client: ApiClient, **structure: Any) -> str:
    return text_of(client.ask(COMPLETIONS, PROMPT_BODY | {"structured_outputs": structure}))


def test_a_schema_is_followed_streamed_or_not_at_every_block_size(client: ApiClient) -> None:
    body = CHAT_BODY | {"response_format": of_schema(SCHEMA)}
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
        ({"response_format": of_schema({"type": "nothing"})}, "nothing"),
        ({"response_format": of_schema({"type": "string", "pattern": "(?=a)b"})}, "grammar: "),
        ({"response_format": of_schema({"enum": []})}, "grammar: "),
        ({"response_format": of_schema({"properties": {"x" * 2**17: {}}})}, "at most 131072 are compiled"),
        ({"response_format": of_schema({"enum": [175928847299117063]})}, "enum: [175928847299117063] "),
        ({"response_format": of_schema({"items": {"minimum": 2**53 + 1}})}, f"items.minimum: {2**53 + 1} "),
        ({"structured_outputs": {"json": json.dumps({"maximum": 2**64})}}, f"maximum: {2**64} "),
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
    """Compiling the least common multiple of these takes minutes."""
    beside = PROMPT_BODY | {"max_tokens": 300, "temperature": 0}
    seconds = list[float]()
    with neighbour(client, beside):
        for _ in range(2):
            started = time.monotonic()
            refused = client.refusal(CHAT, CHAT_BODY | {"response_format": of_schema(STALLING)}, "response_format")
            seconds.append(time.monotonic() - started)
            assert "to compile" in refused["message"]
    assert seconds[1] < seconds[0] / 2  # it is known
    jsonschema.validate(json.loads(structured(client, json=SCHEMA)), SCHEMA)


class Pet(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=30)


def test_the_openai_client_parses_into_its_own_classes(replica: Replica) -> None:
    with over_http(app_of(replica)) as root, openai.OpenAI(base_url=f"{root}/v1", api_key="none") as client:
        asked: Any = {"model": "target", "messages": QUESTION, "max_tokens": 200, "seed": 3}
        parsed = client.chat.completions.parse(response_format=Pet, **asked)
        assert isinstance(parsed.choices[0].message.parsed, Pet)
        with client.chat.completions.stream(response_format=Pet, **asked) as stream:
            again = stream.get_final_completion()
        assert again.choices[0].message.parsed == parsed.choices[0].message.parsed
