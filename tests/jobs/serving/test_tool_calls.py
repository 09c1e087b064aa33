"""Tool calls in the format of every template family: constrained, parsed, streamed, and continued."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jsonschema
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import encode_messages
from helpers.api import ApiClient, app_of, over_http, replica_of, served
from helpers.bodies import CHAT, QUESTION, JsonObject, shown
from helpers.grammars import takes
from helpers.tiny import CHAT_TEMPLATE, byte_tokenizer
from jobs.serving import messages
from jobs.serving.constraints.tools import CallReader, Family, Tool, family_of, grammar_of, knows_tools
from jobs.serving.replica import Replica

MESSAGES = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
)
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
TEMPLATES: dict[Family, str] = {
    "hermes": f"{{# <tool_call> #}}{MESSAGES}{CALLS}",
    "llama": f"{{# ipython #}}{MESSAGES}{CALLS}",
    "coder": f"{{# <function= #}}{MESSAGES}{CALLS}",
}
CITY, DAYS = {"type": "string", "enum": ["Rome", "Oslo", "Lima"]}, {"type": "integer", "minimum": 1, "maximum": 9}
CLOSED = {"additionalProperties": False}
PARAMETERS: JsonObject = {"type": "object", "properties": {"city": CITY, "days": DAYS}, "required": ["city", "days"]}
PARAMETERS |= CLOSED
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": PARAMETERS}}
NOTHING = {"type": "function", "function": {"name": "nothing"}}
TOOLS = [Tool("weather", PARAMETERS), Tool("nothing", {"type": "object", "properties": {}})]
CALL_WEATHER = {"type": "function", "function": {"name": "weather"}}
ARGUMENTS = '{"city": "Rome", "days": 3}'
TEXTS: dict[Family, str] = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama": f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "coder": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
}
BODY: JsonObject = {"messages": QUESTION, "max_tokens": 200, "tools": [WEATHER, NOTHING]}
one_family = pytest.mark.parametrize("replica", ["hermes"], indirect=True)
all_families = pytest.mark.parametrize("replica", [*TEMPLATES], indirect=True)


def unknown_type(**more: Any) -> JsonObject:
    parameters = {"properties": {"a": {"type": "y"}}}
    return {"type": "function", "function": {"name": "x", "parameters": parameters} | more}


@pytest.fixture(scope="module", params=[*TEMPLATES, "none"])
def replica(request: pytest.FixtureRequest, tiny_pair: Pair) -> Iterator[Replica]:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES.get(request.param, CHAT_TEMPLATE)
    with replica_of(replace(tiny_pair, tokenizer=tokenizer), num_slots=2, max_length=1000) as replica:
        yield replica


def family_here(replica: Replica) -> Family:
    return family_of(replica.pair.tokenizer.chat_template)


def streamed_calls(choices: list[JsonObject]) -> list[JsonObject]:
    """`function` objects of the tool-call deltas of a stream."""
    return [call["function"] for choice in choices for call in choice["delta"].get("tool_calls", [])]


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("must_call", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_grammar_takes_calls_in_the_familys_words_and_no_others(
    family: Family, must_call: bool, parallel: bool
) -> None:
    is_taken = partial(takes, grammar_of(family, TOOLS, must_call=must_call, parallel=parallel))
    call, free = TEXTS[family], "Sure.\n" * (family != "llama")
    assert is_taken(call)
    assert is_taken("Hello <tool") == (not must_call)
    assert is_taken(free + call) == (not must_call or family == "llama")
    assert not is_taken(call.replace("Rome", "Bonn"))
    assert not is_taken(call.replace("weather", "whether"))
    assert is_taken(f"{call}\n{call}") == (parallel and family != "llama")
    assert is_taken(f"{call}\nMore <tool> text.\n{call}") == (parallel and not must_call and family != "llama")
    assert is_taken(f"{call}\nMore <tool> text.\n") == (not must_call and family != "llama")


@pytest.mark.parametrize("family", TEMPLATES)
def test_calls_are_read_however_the_text_comes(family: Family) -> None:
    several = family != "llama"
    text = f"Sure <b>.\n{TEXTS[family]}\n{TEXTS[family]}" if several else TEXTS[family]
    for size in (1, 3, 7, 1000):
        reader = CallReader(family, TOOLS)
        deltas = [delta for i in range(0, len(text), size) for delta in reader.push(text[i : i + size])]
        deltas += reader.push("", is_last=True)
        assert "".join(delta.content for delta in deltas) == ("Sure <b>.\n" if several else "")
        assert [delta.name for delta in deltas if delta.name] == ["weather"] * (1 + several)
        for number in range(1 + several):
            assert "".join(delta.arguments for delta in deltas if delta.number == number) == ARGUMENTS
    plain = CallReader(family, TOOLS)
    deltas = [*plain.push("No <tool_call, {no} call"), *plain.push("", is_last=True)]
    assert "".join(delta.content for delta in deltas) == "No <tool_call, {no} call"


@pytest.mark.parametrize("family", ["hermes", "coder"])
def test_a_whole_call_stays_where_a_later_one_has_just_begun(family: Family) -> None:
    first, begun = TEXTS[family], '\n<tool_call>\n{"na'
    reader = CallReader(family, TOOLS)
    deltas = reader.push(first + begun, is_last=True)
    assert [(delta.name, delta.number) for delta in deltas if delta.name] == [("weather", 0)]
    assert "".join(delta.content for delta in deltas) == begun.strip()
    assert reader.is_whole


@pytest.mark.parametrize("choice", ["required", CALL_WEATHER])
def test_a_demanded_call_is_made_streamed_or_not(client: ApiClient, choice: Any) -> None:
    body = BODY | {"tool_choice": choice, "parallel_tool_calls": False, "seed": 5}
    answer = client.ask(CHAT, body)["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    assert answer["message"]["content"] is None
    if choice != "required" or call["function"]["name"] == "weather":
        jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)
    chunks, _ = client.streamed(CHAT, body)
    pieces = streamed_calls(chunks)
    assert pieces[0]["name"] == call["function"]["name"]
    assert "".join(piece["arguments"] for piece in pieces) == call["function"]["arguments"]
    assert chunks[-1]["finish_reason"] == "tool_calls"


def test_none_calls_nothing_and_a_conversation_goes_on_after_a_call(client: ApiClient) -> None:
    first = client.ask(CHAT, BODY | {"tool_choice": "none", "max_tokens": 10})
    assert first["choices"][0]["message"]["content"]
    assert "tool_calls" not in first["choices"][0]["message"]
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "mild"},
    ]
    second = client.ask(CHAT, BODY | {"messages": turns, "max_tokens": 10})
    num_more = second["usage"]["prompt_tokens"] - first["usage"]["prompt_tokens"]
    assert num_more > len(ARGUMENTS) + len("mild")


@one_family
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tools": [WEATHER, WEATHER]}, "names must be unique"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "'other' is not one of the tools"),
        ({"tools": [], "tool_choice": "required"}, "there are no tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"structured_outputs": {"regex": "a+"}}, "choose one"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "y"}}}}, "response_format"),
        ({"tools": [unknown_type(strict=True)]}, "tools: tool 'x': no grammar can enforce properties.a.type"),
        ({"tools": [unknown_type()], "tool_choice": "required"}, "tools: tool 'x'"),
    ],
)
def test_what_is_wrong_with_tools_is_400_in_words(client: ApiClient, wrong: JsonObject, message: str) -> None:
    assert message in client.refusal(CHAT, BODY | wrong)["message"]


@one_family
def test_an_odd_tool_that_is_not_strict_is_left_looser_and_logged_once(
    client: ApiClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="ray.serve.blockpilot"):
        for _ in range(2):
            client.ask(CHAT, BODY | {"tools": [WEATHER, unknown_type()], "max_tokens": 4})
    message = "tool 'x': calls need not follow its properties.a.type"
    assert [record.getMessage() for record in caplog.records] == [message]


@all_families
def test_an_answer_with_tools_and_a_structure_is_calls_or_matches(client: ApiClient, replica: Replica) -> None:
    """Tools together with a response format, as agents use them for a typed answer after the calls."""
    schema = {"type": "object", "properties": {"answer": {"enum": ["yes", "no"]}}, "required": ["answer"]} | CLOSED
    body = BODY | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    is_llama = family_here(replica) == "llama"
    for char, seed in [("<", 1), ("{", 1), ("{", 2), ("{", 3)]:
        (token,) = byte_tokenizer()(char)["input_ids"]
        sampling = {"seed": seed, "temperature": 2.0, "logit_bias": {str(token): 90}, "min_tokens": 1}
        choice = client.ask(CHAT, body | sampling)["choices"][0]
        message = choice["message"]
        if choice["finish_reason"] == "tool_calls":
            assert char == "<" or is_llama
            assert all(call["function"]["name"] in ("weather", "nothing") for call in message["tool_calls"])
            assert not message["content"]
        elif choice["finish_reason"] == "stop":
            assert char == "{" or is_llama
            jsonschema.validate(json.loads(message["content"]), schema)
    demanded = client.ask(CHAT, body | {"tool_choice": "required", "seed": 1})["choices"][0]
    assert demanded["message"]["tool_calls"] or demanded["finish_reason"] == "length"


@all_families
@pytest.mark.parametrize(
    "end", [{"stop": ['"days": ']}, {"stop": ["</tool_call>"]}, {"stop": ["days"]}, {"max_tokens": 30}]
)
def test_what_ends_inside_a_call_keeps_its_text(client: ApiClient, replica: Replica, end: JsonObject) -> None:
    body = BODY | {"tool_choice": CALL_WEATHER, "seed": 3} | end
    whole = client.ask(CHAT, body)["choices"][0]
    chunks, _ = client.streamed(CHAT, body)
    calls = whole["message"].get("tool_calls", [])
    whole_text = (whole["message"]["content"] or "") + "".join(call["function"]["arguments"] for call in calls)
    content, arguments = shown(chunks), "".join(call["arguments"] for call in streamed_calls(chunks))
    if whole["finish_reason"] == "stop":  # a cut call is text, so that no client takes it for a whole one
        assert all(json.loads(call["function"]["arguments"]) for call in calls)
        assert whole_text.startswith(content)
        assert arguments in whole_text
    else:
        assert content + arguments == whole_text
    assert whole["finish_reason"] == chunks[-1]["finish_reason"]
    cut = "max_tokens" in end
    if cut or end["stop"][0] in TEXTS[family_here(replica)]:
        assert whole["finish_reason"] == ("length" if cut else "stop")
        assert whole_text


class Place(BaseModel):
    """A place."""

    city: Literal["Rome", "Oslo"]


@all_families
def test_the_openai_clients_own_helpers_parse_calls(replica: Replica) -> None:
    request: Any = {"model": "target", "messages": QUESTION, "max_tokens": 200, "seed": 2, "tool_choice": "required"}
    request |= {"tools": [openai.pydantic_function_tool(Place)], "parallel_tool_calls": False}
    with over_http(app_of(replica)) as root, openai.OpenAI(base_url=f"{root}/v1", api_key="none") as client:
        parsed = client.chat.completions.parse(**request).choices[0].message.tool_calls
        assert parsed is not None
        assert isinstance(parsed[0].function.parsed_arguments, Place)
        with client.chat.completions.stream(**request) as stream:
            streamed = stream.get_final_completion().choices[0].message.tool_calls
        assert streamed is not None
        assert streamed[0].function.parsed_arguments == parsed[0].function.parsed_arguments


def test_families_are_told_by_their_templates() -> None:
    templates = (*TEMPLATES.values(), CHAT_TEMPLATE, None)
    assert [family_of(template) for template in templates] == [*TEMPLATES, "hermes", "hermes"]


def test_tools_are_shown_in_words_where_the_template_has_another_format() -> None:
    mistral = "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]"
    templates = (*TEMPLATES.values(), CHAT_TEMPLATE, None, mistral)
    assert [knows_tools(template) for template in templates] == [True] * len(TEMPLATES) + [False] * 3


# --- turns as clients send them back: cut calls, parts, reasoning, names and ids, for templates that read them ---

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
TOOLS_BY_ITEM = (
    "{%- for t in tools or [] -%}{%- for name, field in t.function.parameters.properties | items -%}{{ name }}"
    "{{ field.type }}{{ field.enum | join(',') }}{%- endfor -%}{{ t.function.parameters.required | join(',') }}"
    "{%- endfor -%}"
)
CALL: JsonObject = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.fixture(scope="module")
def reader(tiny_pair: Pair) -> Iterator[ApiClient]:
    """Client of a pair whose template reads all items of turns and tools."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = BY_ITEM + TOOLS_BY_ITEM
    with served(replace(tiny_pair, tokenizer=tokenizer), num_slots=1, max_length=1000) as client:
        yield client


def rendered(template: str, chat: list[JsonObject], *, plain: bool = False) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    parsed = [messages.ChatMessage.model_validate(message) for message in chat]
    return str(tokenizer.decode(encode_messages(tokenizer, messages.shown(parsed, plain=plain))))


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
def test_arguments_that_are_no_object_are_given_as_they_are(reader: ApiClient, arguments: str) -> None:
    message = {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": arguments}}]}
    assert rendered(AS_TEXT, [message]) == f"<assistant|||>[call_1 f {arguments}]"
    assert rendered(BY_ITEM, [message], plain=True) == f"<assistant|||>[call_1 farguments={arguments};]"
    if len(arguments) < 500:  # else it is more than the model's context
        turns = [*QUESTION, message, {"role": "tool", "tool_call_id": "call_1", "content": "bad"}, *QUESTION]
        reader.ask(CHAT, {"messages": turns, "max_tokens": 2})


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
@settings(max_examples=120, deadline=None)
def test_no_body_is_500(reader: ApiClient, odd: Any, other: Any, where: str) -> None:
    """Status 200 or 400 for 120 bodies with any JSON in a call or a tool; the template reads `properties`, `enum`."""
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
    response = reader.send_body(CHAT, {"messages": turns, "tools": tools, "max_tokens": 1})
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["param"]
