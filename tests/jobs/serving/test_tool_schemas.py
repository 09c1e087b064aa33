"""Schemas of tool arguments: the reader returns what the grammar accepts, in every format, whole or cut."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers import grammars
from jobs.serving.constraints.coder import END_OF_VALUE, FORMATS, search, text_of
from jobs.serving.constraints.tools import CallDelta, CallReader, Family, Tool, fitted, grammar_of, whole_calls

JsonObject = dict[str, Any]
FAMILIES: tuple[Family, ...] = ("hermes", "llama", "coder")
CLOSED = {"additionalProperties": False}
PLACE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]} | CLOSED
TEXTS = st.text('ab<>/\n"\\{}é😀 ' + "paramet", max_size=12) | st.sampled_from(
    ["</parameter>", "</function>", "x\n</tool_call>\n", "\n</function>\n</tool_call>", "<tool_call>\n<function=f>\n"]
)
STRING: JsonObject = {"type": "string"}
KINDS: list[tuple[JsonObject, st.SearchStrategy[Any]]] = [
    (STRING, TEXTS),
    (STRING | {"enum": ["", "a", 'b"', "two words", "é😀"]}, st.sampled_from(["", "a", 'b"', "two words", "é😀"])),
    ({"const": "A"}, st.just("A")),
    (STRING | {"minLength": 2, "maxLength": 9}, TEXTS.filter(lambda text: 2 <= len(text) <= 9)),
    (STRING | {"pattern": "^[a-c]{2}|x$", "maxLength": 4}, st.sampled_from(["ab", "abzz", "x", "\n/x"])),
    (STRING | {"format": "date"}, st.dates().map(str)),
    (STRING | {"format": "uuid"}, st.uuids().map(str)),
    ({"type": ["string", "null"]}, st.none() | TEXTS.filter(lambda text: text != "null")),
    ({"anyOf": [STRING | {"enum": ["x", "y"]}, {"type": "null"}]}, st.sampled_from(["x", "y", None])),
    ({"anyOf": [STRING, {"type": "integer"}]}, TEXTS | st.integers(-9, 9)),
    ({"type": "integer", "minimum": -5, "maximum": 700}, st.integers(-5, 700)),
    ({"enum": [1, 2.5, True, None, "a"]}, st.sampled_from([1, 2.5, True, None, "a"])),
    ({"type": "array", "items": STRING, "maxItems": 3}, st.lists(TEXTS, max_size=3)),
    ({"$ref": "#/$defs/P"}, st.integers(-99, 99).map(lambda a: {"a": a})),
    ({"$ref": "#/definitions/a~1b%20~0"}, TEXTS),
    ({"$ref": "#/properties/first"}, st.booleans()),
    ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, st.none() | st.booleans().map(lambda value: {"first": value})),
]
SHARED = {
    "$defs": {"P": PLACE},
    "definitions": {"a/b ~": STRING},
    "$schema": "http://json-schema.org/draft-07/schema#",
}


@st.composite
def calls(draw: st.DrawFn) -> tuple[Tool, JsonObject]:
    """A tool, and arguments that its schema allows."""
    kinds = draw(st.lists(st.sampled_from(KINDS), max_size=4))
    names = ["first", "a>b", "c d", "$ref", "é"]
    properties: JsonObject = {"first": {"type": "boolean"}} | {
        name: schema for name, (schema, _) in zip(names[1:], kinds, strict=False)
    }
    schema_id = draw(st.sampled_from([{}, {"$id": "https://example.com/tool.json"}, {"$id": "not a URI"}]))
    schema = {"type": "object", "properties": properties, "required": ["first"]} | CLOSED | SHARED | schema_id
    values = {"first": draw(st.booleans())}
    for name, (_, strategy) in zip(names[1:], kinds, strict=False):
        if draw(st.booleans()):
            values[name] = draw(strategy)
            text = f"{values[name]}{END_OF_VALUE}"
            assume(text.index(END_OF_VALUE) + len(END_OF_VALUE) == len(text))  # it can be written without quotes
    return Tool("f", schema), values


def tool_of(schema: JsonObject) -> Tool:
    """A tool with one argument."""
    return Tool("f", {"type": "object", "properties": {"x": schema}, "required": ["x"]} | CLOSED)


def written(family: Family, tool: Tool, arguments: JsonObject) -> str:
    """The call as a model writes it."""
    shown = json.dumps(arguments, ensure_ascii=False)
    if family == "hermes":
        return f'<tool_call>\n{{"name": "f", "arguments": {shown}}}\n</tool_call>'
    if family == "llama":
        return f'{{"name": "f", "parameters": {shown}}}'
    parts = ""
    for name, value in arguments.items():
        is_text = isinstance(value, str) and text_of(tool.parameters, tool.parameters["properties"][name])
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        parts += f"<parameter={name}>\n{text}{END_OF_VALUE}"
    return f"<tool_call>\n<function=f>\n{parts}</function>\n</tool_call>"


def takes(family: Family, tool: Tool, text: str) -> bool:
    return grammars.takes(grammar_of(family, [tool], must_call=True, parallel=False), text)


def read(family: Family, tool: Tool, pieces: list[str]) -> tuple[CallReader, list[CallDelta]]:
    reader = CallReader(family, [tool])
    deltas = [delta for piece in pieces for delta in reader.push(piece)]
    return reader, deltas + reader.push("", is_last=True)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(ends)]


@given(calls(), st.lists(st.integers(0, 10**6), max_size=8))
@settings(max_examples=150, deadline=None)
def test_what_the_grammar_takes_is_what_is_read(call: tuple[Tool, JsonObject], cuts: list[int]) -> None:
    """Arguments of a call accepted by the grammar and read back: 150 schemas in three formats."""
    tool, arguments = call
    jsonschema.validate(arguments, {**tool.parameters, "$id": "https://example.com/x"})
    for family in FAMILIES:
        text = written(family, tool, arguments)
        assert takes(family, tool, text), (family, text)
        reader, deltas = read(family, tool, pieces_of(text, cuts))
        (read_call,) = whole_calls(deltas)
        assert read_call["function"]["name"] == "f"
        assert json.loads(read_call["function"]["arguments"]) == arguments
        assert reader.is_whole
        assert not "".join(delta.content for delta in deltas)


@given(calls(), st.integers(0, 10**6), st.lists(st.integers(0, 10**6), max_size=8))
@settings(max_examples=300, deadline=None)
def test_a_cut_call_keeps_every_character(call: tuple[Tool, JsonObject], end: int, cuts: list[int]) -> None:
    """Characters of a cut call are all kept: 300 calls in three formats, each cut anywhere and streamed in pieces."""
    tool, arguments = call
    for family in FAMILIES:
        whole = written(family, tool, arguments)
        text = whole[: end % len(whole)]
        reader, deltas = read(family, tool, pieces_of(text, cuts))
        content = "".join(delta.content for delta in deltas)
        assert not reader.is_whole
        if not (calls_read := whole_calls(deltas)):
            assert content == text
            continue
        head = whole.index("{", whole.index("arguments" if family == "hermes" else "parameters"))
        assert calls_read[0]["function"]["name"] == "f"
        assert calls_read[0]["function"]["arguments"] == text[head:][: len(json.dumps(arguments, ensure_ascii=False))]
        assert not content


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        (STRING | {"const": "A"}, "B"),
        (STRING | {"enum": ["A"]}, "B"),
        (STRING | {"minLength": 2}, "x"),
        (STRING | {"maxLength": 2}, "xyz"),
        (STRING | {"pattern": "^[0-9]+$"}, "1a"),
        ({"$ref": "#/$defs/P"}, {"a": "x"}),
        ({"$ref": "#/$defs/T"}, "B"),
        ({"type": "object", "properties": {"deep": {"$ref": "#"}}, "required": ["deep"]}, {"deep": {"y": 1}}),
        ({"anyOf": [STRING | {"maxLength": 1}, {"type": "null"}]}, "xy"),
        ({"enum": [1, 2]}, 3),
    ],
)
def test_arguments_that_the_schema_forbids_are_not_taken(family: Family, schema: JsonObject, wrong: Any) -> None:
    tool = Tool("f", tool_of(schema).parameters | {"$defs": {"P": PLACE, "T": STRING | {"enum": ["A"]}}})
    assert not takes(family, tool, written(family, tool, {"x": wrong}))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "parameters", [{}, {"properties": {}}, {"type": ["object", "null"]}, {"required": None, "properties": None}]
)
def test_parameters_without_a_type_are_an_object(family: Family, parameters: JsonObject) -> None:
    tool = Tool("f", parameters)
    assert takes(family, tool, written(family, tool, {}))
    assert family == "coder" or not takes(family, tool, written(family, tool, {}).replace("{}", "[]"))


def test_a_string_may_not_end_before_its_least_length() -> None:
    """End tag refused before minLength: the reader would take it for the end of a value that is too short."""
    tool = tool_of(STRING | {"minLength": 3, "maxLength": 99})
    early = written("coder", tool, {"x": "ab"}).replace("</function>", "cd\n</parameter>\n</function>")
    assert not takes("coder", tool, early)


UNFOLLOWED: list[tuple[JsonObject, str]] = [
    ({"type": "array", "items": STRING, "uniqueItems": True}, "uniqueItems"),
    ({"type": "object", "propertyNames": {"format": "uuid"}}, "propertyNames"),
    (STRING | {"format": "url"}, "format"),
    ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
    (STRING | {"pattern": "^(?!x).+$"}, "pattern"),
    ({"type": "object", "properties": {"a": STRING}, "minProperties": 1}, "minProperties"),
    ({"not": STRING}, "not"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"$ref": "https://example.com/other.json"}, "$ref"),
    ({"$ref": "#/$defs/nowhere"}, "$ref"),
    ({"type": "STRING"}, "type"),
    ({"type": "array", "items": "string"}, "items"),
    ({"enum": [2**53 + 1]}, "enum"),
    ({"type": "integer", "minimum": 2**53 + 1}, "minimum"),
    ({"type": "integer", "exclusiveMaximum": 2**60}, "exclusiveMaximum"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("schema", "keyword"), UNFOLLOWED)
def test_a_keyword_that_no_grammar_enforces_is_refused_or_dropped(
    family: Family, schema: JsonObject, keyword: str
) -> None:
    properties = {"x": schema, "y": {"type": "integer"}}
    tool = Tool("f", {"type": "object", "properties": properties, "required": ["y"]} | CLOSED)
    with pytest.raises(ValueError, match=r"tool 'f'.*" + re.escape(keyword)):
        fitted(family, tool, exact=True)
    looser = fitted(family, tool, exact=False)
    assert f"properties.x.{keyword}" in looser.dropped
    assert takes(family, looser.tool, written(family, looser.tool, {"y": 3}))
    assert not takes(family, looser.tool, written(family, looser.tool, {"y": "z"}))  # the rest is enforced


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": STRING, "uniqueItems": False},
        {"type": "object", "propertyNames": STRING, "additionalProperties": {"type": "number"}},
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "number"}},
        {"type": "integer", "format": "int64"},
        {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "discriminator": {"propertyName": "kind"}},
        {"oneOf": [{"const": 1, "title": "one"}, {"const": 2}]},
        {"type": "number", "minimum": 1, "exclusiveMinimum": True},
        STRING | {"description": None, "default": None, "examples": [1], "x-order": 3, "nullable": True},
    ],
)
def test_what_forbids_nothing_or_can_be_said_otherwise_is_no_hindrance(family: Family, schema: JsonObject) -> None:
    kinds = {name: {"kind": STRING | {"const": name}} for name in ("Cat", "Dog")}
    shapes = {name: {"type": "object", "properties": kind, "required": ["kind"]} for name, kind in kinds.items()}
    tool = Tool("f", {"type": "object", "properties": {"x": schema}, "$defs": shapes, "$schema": "urn:unknown"})
    assert fitted(family, tool, exact=True) == (tool, ())


def test_alternatives_of_all_parameters_are_merged_in_qwens_words() -> None:
    first = {"properties": {"a": STRING, "c": {"type": "integer"}}, "required": ["a"]}
    tool = Tool("f", {"type": "object", "anyOf": [first, {"properties": {"b": STRING}, "required": ["b"]}]})
    with pytest.raises(ValueError, match="anyOf"):
        fitted("coder", tool, exact=True)
    looser = fitted("coder", tool, exact=False).tool
    assert takes("coder", looser, written("coder", looser, {"a": "x", "c": 1}))
    assert takes("coder", looser, written("coder", looser, {"b": "x"}))


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("^ab$", ["ab"], ["xab", "abx"]),
        ("b", ["abc", "\nb\n"], ["ac"]),
        ("^a|b$", ["ax", "xb"], ["xax", "bx"]),
        (r"^[$^|]\$\|/$", ["$$|/", "^$|/"], ["a$|/"]),
        (r"^\\$", ["\\"], ["\\\\"]),
    ],
)
def test_patterns_are_searched_for_without_quotes(pattern: str, matching: list[str], others: list[str]) -> None:
    tool = tool_of(STRING | {"pattern": pattern})
    for text in matching + others:
        assert takes("coder", tool, written("coder", tool, {"x": text})) == (text in matching)
    assert search("(^a)b") is None


EXAMPLES = {
    "date": ("2024-02-29", "2023-02-30"), "time": ("23:59:59Z", "24:00:00Z"), "ipv4": ("10.0.0.255", "10.0.0.256"),
    "date-time": ("2024-12-31T00:00:00+01:00", "2024-12-31"), "duration": ("P3DT4H", "3D"),
    "email": ("a.b@c-d.org", "a@b@c.org"), "hostname": ("a-b.example", "-a.example"),
    "ipv6": ("2001:db8:0:0:0:0:0:1", "2001:db8:1"), "uuid": ("123e4567-e89b-12d3-a456-426614174000", "123e4567"),
    "uri": ("https://example.com/a?b=c", "example"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_those_of_the_specification(name: str) -> None:
    right, wrong = EXAMPLES[name]
    tool = tool_of(STRING | {"format": name})
    for family in FAMILIES:
        assert takes(family, tool, written(family, tool, {"x": right})), family
        assert not takes(family, tool, written(family, tool, {"x": wrong})), family


JUNK = [None, True, 0, -1, 2**70, 1.5, "", "object", ["a"], [1, {}], [], {}, {"a": None}, {"a": {"type": "string"}}]
JUNK += ["#", "#/properties/a", "http://x", "(", "^(?!a)"]
KEYWORDS = (
    "type properties required items enum const anyOf oneOf allOf $ref $defs pattern format minLength maximum not if"
    " then else additionalProperties patternProperties propertyNames minProperties prefixItems $id multipleOf"
)


def odd_schemas() -> st.SearchStrategy[JsonObject]:
    keys = st.sampled_from(KEYWORDS.split())
    inside: Callable[[Any], Any] = lambda nodes: st.dictionaries(  # noqa: E731
        keys,
        st.sampled_from(JUNK) | nodes | st.lists(nodes, max_size=2) | st.dictionaries(st.sampled_from("ab"), nodes),
        max_size=4,
    )
    return st.recursive(st.dictionaries(keys, st.sampled_from(JUNK), max_size=3), inside, max_leaves=6)


@given(odd_schemas())
@settings(max_examples=200, deadline=None)
def test_no_schema_of_one_tool_refuses_a_request_that_is_not_strict(schema: JsonObject) -> None:
    """Grammar for each of 200 schemas of any shape, in two formats; a strict tool raises nothing but ValueError."""
    for family in FAMILIES[::2]:
        tool = Tool("f", schema)
        looser = fitted(family, tool, exact=False).tool
        grammars.COMPILER.compile(grammar_of(family, [looser], must_call=True, parallel=False))
        with suppress(ValueError):
            fitted(family, tool, exact=True)
