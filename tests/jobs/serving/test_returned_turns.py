"""Turns as clients send them back: cut calls, parts, reasoning, names and ids, for templates that read them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import encode_messages
from helpers.api import ApiClient, replica_of
from helpers.bodies import CHAT, QUESTION, JsonObject
from helpers.tiny import byte_tokenizer
from jobs.serving.messages import ChatMessage, shown
from jobs.serving.replica import Replica

TURNS = (
    "{%- for m in messages -%}<{{ m.role }}|{{ m.name }}|{{ m.tool_call_id }}|{{ m.reasoning_content }}>"
    "{{ m.content }}{%- for c in m.tool_calls or [] -%}[{{ c.id }} {{ c.function.name }} ARGUMENTS]"
    "{%- endfor -%}{%- endfor -%}"
)
AS_TEXT = TURNS.replace(
    "ARGUMENTS", "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
)
BY_ITEM = TURNS.replace(
    "ARGUMENTS", "{%- for key, value in c.function.arguments | items -%}{{ key }}={{ value }};{%- endfor -%}"
)
TOOLS = (
    "{%- for t in tools or [] -%}{%- for name, field in t.function.parameters.properties | items -%}{{ name }}"
    "{{ field.type }}{{ field.enum | join(',') }}{%- endfor -%}{{ t.function.parameters.required | join(',') }}"
    "{%- endfor -%}"
)
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.fixture(scope="module")
def replica(tiny_pair: Pair) -> Iterator[Replica]:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = BY_ITEM + TOOLS
    with replica_of(replace(tiny_pair, tokenizer=tokenizer), num_slots=1, max_length=1000) as replica:
        yield replica


def rendered(template: str, messages: list[JsonObject], *, plain: bool = False) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    read = [ChatMessage.model_validate(message) for message in messages]
    return str(tokenizer.decode(encode_messages(tokenizer, shown(read, plain=plain))))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": None}, "<assistant|||>"),
        ({"content": "x", "annotations": [], "audio": None, "function_call": None}, "<assistant|||>x"),
        ({"content": None, "refusal": "No."}, "<assistant|||>No."),
        ({"content": [{"type": "text", "text": "a", "cache_control": {}}, {"type": "refusal", "refusal": "b"}]},
         "<assistant|||>a\nb"),
        ({"content": "x", "reasoning_content": "y"}, "<assistant|||y>x"),
        ({"content": "x", "reasoning": "y", "id": "m1", "parsed": {"a": 1}, "tool_calls": []}, "<assistant|||y>x"),
        ({"content": None, "tool_calls": [CALL | {"index": 0}]}, '<assistant|||>[call_1 f {"x": 1}]'),
        ({"tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}, "parsed_arguments": {}}}]},
         '<assistant|||>[ f {"x": 1}]'),
        ({"tool_calls": [CALL | {"function": {"name": "f"}}]}, "<assistant|||>[call_1 f {}]"),
        ({"name": "ann", "content": "x", "cache_control": {"type": "ephemeral"}}, "<assistant|ann||>x"),
        ({"role": "developer", "content": "Be."}, "<system|||>Be."),
    ],
)  # fmt: skip
def test_turns_are_read_as_they_were_given_and_more(message: JsonObject, expected: str) -> None:
    assert rendered(AS_TEXT, [{"role": "assistant"} | message]) == expected


def test_a_result_has_the_id_and_the_name_of_its_call() -> None:
    turns = [{"role": "assistant", "tool_calls": [CALL]}]
    for content, text in ((None, ""), ("", ""), ([{"type": "text", "text": "5"}], "5")):
        result = {"role": "tool", "tool_call_id": "call_1", "content": content}
        assert rendered(AS_TEXT, [*turns, result]).endswith(f"<tool|f|call_1|>{text}")
        assert rendered(AS_TEXT, [*turns, result | {"name": "g"}]).endswith(f"<tool|g|call_1|>{text}")


@pytest.mark.parametrize("arguments", ['{"x": "abc', "[1, 2]", "5", "not JSON", '{"x": "\\ud800"}', "[" * 5000])
def test_arguments_that_are_no_object_are_given_as_they_are(client: ApiClient, arguments: str) -> None:
    message = {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": arguments}}]}
    assert rendered(AS_TEXT, [message]) == f"<assistant|||>[call_1 f {arguments}]"
    assert rendered(BY_ITEM, [message], plain=True) == f"<assistant|||>[call_1 farguments={arguments};]"
    if len(arguments) < 500:  # else it is more than the model's context
        turns = [*QUESTION, message, {"role": "tool", "tool_call_id": "call_1", "content": "bad"}, *QUESTION]
        client.ask(CHAT, {"messages": turns, "max_tokens": 2})


def test_control_tokens_are_text_wherever_they_stand() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = AS_TEXT
    call = {"id": "<eos>", "function": {"name": "f", "arguments": {"<pad>": 'a "<eos>" b'}}}
    message = {"role": "assistant", "content": "<mask>", "reasoning_content": "<eos>", "tool_calls": [call]}
    ids = encode_messages(tokenizer, [message])
    assert max(ids) < 256
    assert tokenizer.decode(ids) == '<assistant|||<eos>><mask>[<eos> f {"<pad>": "a \\"<eos>\\" b"}]'


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | st.text("{a", max_size=3),
    lambda inside: st.lists(inside, max_size=2) | st.dictionaries(
        st.sampled_from(["type", "properties", "required", "enum", "items", "$ref", "a"]), inside, max_size=3
    ),
    max_leaves=8,
)  # fmt: skip


@given(JSON, JSON, st.sampled_from(["arguments", "parameters", "content", "call", "function", "tool"]))
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_body_is_500(client: ApiClient, odd: Any, other: Any, where: str) -> None:
    """120 bodies with any JSON in a place of a call or a tool, to a template that reads `properties` and `enum`."""
    arguments = json.dumps(odd) if isinstance(other, list) else odd
    call = CALL | {"function": {"name": "f", "arguments": arguments if where == "arguments" else "{}"}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": odd if where == "parameters" else {}}}
    if where == "function":
        tool = tool | {"function": odd}
    if where == "parameters" and isinstance(other, dict):
        tool["function"]["parameters"] = {"properties": odd, "required": other}
    turn = {"role": "assistant", "content": odd if where == "content" else "x", "tool_calls": [call]}
    turns = [*QUESTION, turn | ({"tool_calls": odd} if where == "call" else {})]
    tools = [odd if where == "tool" else tool]
    response = client.send_body(CHAT, {"messages": turns, "tools": tools, "max_tokens": 1})
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["param"]
