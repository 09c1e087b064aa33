"""Tool-call arguments in Qwen3-Coder's format: strings unquoted between tags, other values as JSON.

A value ends at the first line `</parameter>`, in the grammar and in the reader, so it may contain any other tag.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from blockpilot.constraints.grammar import SEPARATORS
from blockpilot.constraints.schemas import (
    REFERENCES,
    JsonObject,
    Loosened,
    constants_of,
    moved,
    pointer,
    properties_of,
    required_of,
    resolved,
    types_of,
)

END_OF_VALUE, END_OF_CALL = "\n</parameter>\n", "</function>\n</tool_call>"
ROOT = ("$defs", "arguments")  # path of a tool's parameters in the schema of a value
TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)  # of a regular expression
ANY = r"(.|\n)*"
ANYTHING, SOMETHING = r"/(.|\n)*/", r"/(.|\n)+/"
COMBINED = ("allOf", "anyOf", "oneOf")
UNSUPPORTED = ("minProperties", "maxProperties", "patternProperties", "enum", "const", "not")  # of the whole object
LONG, SHORT = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])", "(0[469]|11)-(0[1-9]|[12][0-9]|30)"
LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
DATE = f"([0-9]{{4}}-({LONG}|{SHORT}|02-(0[1-9]|1[0-9]|2[0-8]))|{LEAP}-02-29)"
TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
FORMATS: Mapping[str, str] = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}[tT]{TIME}",
    "duration": r"P([0-9]{1,9}W|[0-9]{1,9}D(T[0-9]{1,9}[HMS])?|T[0-9]{1,9}[HMS])",
    "email": rf"[a-zA-Z0-9_+-]{{1,16}}(\.[a-zA-Z0-9_+-]{{1,16}}){{0,2}}@{LABEL}(\.{LABEL}){{1,3}}",
    "hostname": rf"{LABEL}(\.{LABEL}){{0,3}}",
    "ipv4": rf"{BYTE}(\.{BYTE}){{3}}",
    "ipv6": "[0-9a-fA-F]{1,4}(:[0-9a-fA-F]{1,4}){7}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": "[a-zA-Z][a-zA-Z0-9+.-]{0,15}://[a-zA-Z0-9.-]{1,253}(:[0-9]{1,5})?(/[a-zA-Z0-9._~/?=&+-]*)?",
}


class RawString(NamedTuple):
    """A string value of one of these schemas, or null if `may_be_null`; written without quotes."""

    schemas: tuple[JsonObject, ...]
    may_be_null: bool = False


class Called(NamedTuple):
    """A complete call at the beginning of a text: name, arguments as JSON, and end offset."""

    name: str
    arguments: str
    end: int


# --- schemas ---


def text_of(root: JsonObject, schema: Any) -> RawString | None:
    """Schemas of a value that is an unquoted string; None if it is written as JSON. `root` resolves references."""
    schema = resolved(root, schema)
    if not isinstance(schema, dict):
        return None
    for key in COMBINED:
        if options := schema.get(key):
            return _options_coder(root, options) if isinstance(options, list) and _is_only(schema, key) else None
    constants = constants_of(schema)
    types = set(types_of(schema))
    if not types and constants is not None:
        types = {{str: "string", type(None): "null"}.get(type(value), "other") for value in constants}
    if not types <= {"string", "null"} or "string" not in types:
        return None
    may_be_null = "null" in types and (constants is None or None in constants)
    return None if may_be_null and "null" in (constants or ()) else RawString((schema,), may_be_null)


def _options_coder(root: JsonObject, options: list[Any]) -> RawString | None:
    raw_strings = [text_of(root, option) for option in options if not _is_null(resolved(root, option))]
    strings = [text for text in raw_strings if text is not None]
    if not strings or len(strings) < len(raw_strings):
        return None
    schemas = tuple(schema for text in strings for schema in text.schemas)
    return RawString(schemas, len(raw_strings) < len(options) or any(text.may_be_null for text in strings))


def _is_only(schema: JsonObject, key: str) -> bool:
    return schema.keys() - REFERENCES == {key} and (key != "allOf" or len(schema[key]) == 1)


def _is_null(schema: Any) -> bool:
    return isinstance(schema, dict) and (
        schema.get("type") == "null" or ("const" in schema and schema["const"] is None)
    )


def flat(root: JsonObject) -> Loosened:
    """Parameters as one flat object: alternatives are merged, keywords that the format cannot enforce are dropped."""
    schema, dropped = resolved(root, root), list[str]()
    schema = schema if isinstance(schema, dict) else {}
    dropped += [key for key in (*UNSUPPORTED, "anyOf", "oneOf") if key in schema]
    options = {key: _options(root, schema, key) for key in COMBINED}
    properties, required = JsonObject(), set(required_of(schema))
    for shape in (schema, *(option for key in COMBINED for option in options[key])):
        for name, value in properties_of(shape).items():
            if name in properties and value != properties[name]:
                dropped.append(f"properties.{name}")
                value = {}
            properties[name] = value
    for key, shapes in options.items():
        names = [set(required_of(shape)) for shape in shapes]
        required |= (set.union(*names) if key == "allOf" else set.intersection(*names)) if names else set()
    additional = schema.get("additionalProperties", True)
    if additional is False and required - properties.keys():
        dropped.append("required")
    properties |= {name: additional or {} for name in sorted(required - properties.keys())}
    for name, value in properties.items():
        properties[name], lost = _followed(root, value)
        dropped += [f"properties.{name}.{key}" for key in lost]
    kept = {key: root[key] for key in REFERENCES & root.keys() if key != "$ref"}
    declared = {"properties": properties} if properties or "properties" in schema or additional is False else {}
    kept |= {"type": "object", "required": sorted(required), "additionalProperties": additional}
    return Loosened(kept | declared, tuple(dropped))


def _options(root: JsonObject, schema: JsonObject, key: str) -> list[JsonObject]:
    options = schema.get(key)
    schemas = [resolved(root, option) for option in options] if isinstance(options, list) else []
    return [option for option in schemas if isinstance(option, dict)]


def _followed(root: JsonObject, schema: Any) -> tuple[Any, list[str]]:
    """Schema of a value without the string keywords that have no rule (`_has_rule`), and the dropped keywords."""
    text = text_of(root, schema)
    if text is None:
        return schema, []
    lost = [key for option in text.schemas for key in option if not _has_rule(key, option[key])]
    if not lost:
        return schema, []
    options: list[JsonObject] = [{k: v for k, v in option.items() if _has_rule(k, v)} for option in text.schemas]
    return {"anyOf": options + [{"type": "null"}] * text.may_be_null}, lost


def _has_rule(key: str, value: Any) -> bool:
    if key == "pattern":
        return search(value) is not None
    if key == "format":
        return isinstance(value, str) and value in FORMATS
    return key not in ("not", "anyOf", "oneOf", "allOf", "if")


# --- the grammar ---


def rules_of(number: int, name: str, parameters: JsonObject) -> str:
    """Rules of the call `call_<number>`; raises ValueError for parameters that they cannot enforce."""
    root, dropped = flat(parameters)
    if dropped:
        raise ValueError(f"{dropped[0]} cannot be followed in the format of this model")
    parts, rules = [_quoted(f"<function={name}>\n")], list[str]()
    for i, (key, schema) in enumerate(properties_of(root).items()):
        if schema is False and key not in root["required"]:
            continue  # it can never occur
        if ">\n" in key:
            raise ValueError(f"properties: {key!r} cannot be written in the format of this model")
        value = f"value_{number}_{i}"
        parts.append(f"({_quoted(f'<parameter={key}>' + chr(10))} {value}){'' if key in root['required'] else '?'}")
        rules += _value_rules(value, root, key, schema)
    if "properties" not in root:
        extra_value = f"more_{number}"
        parts.append(f'("<parameter=" /[^>\\n]+/ ">\\n" {extra_value})*')
        rules.append(
            _json_rule(extra_value, _self_contained(root, ("additionalProperties",), root["additionalProperties"]))
        )
    parts.append(_quoted(END_OF_CALL))
    return "\n".join([f"call_{number}: {' '.join(parts)}", *rules])


def _value_rules(rule: str, root: JsonObject, name: str, schema: Any) -> list[str]:
    if (text := text_of(root, schema)) is None:
        return [_json_rule(rule, _self_contained(root, ("properties", name), schema))]
    alternatives = [_string_rule(option) for option in text.schemas]
    alternatives += [f'("null" {_quoted(END_OF_VALUE)})'] * text.may_be_null
    return [f"{rule}[lazy]: {rule.upper()}", f"{rule.upper()}: {' | '.join(alternatives)}"]


def _json_rule(rule: str, schema: Any) -> str:
    schema = {} if schema is True else schema  # llguidance's options need an object
    if not isinstance(schema, dict):
        raise ValueError(f"{json.dumps(schema)[:80]} is not a schema of a value")
    return f"{rule}: %json {json.dumps(schema | {'x-guidance': SEPARATORS})} {_quoted(END_OF_VALUE)}"


def _self_contained(root: JsonObject, path: tuple[str, ...], schema: Any) -> Any:
    """Self-contained schema: includes the tool's parameters if it refers to them."""
    if '"$ref"' not in json.dumps(schema):
        return schema
    parameters = moved(root, ROOT)
    return {"$ref": "#" + pointer((*ROOT, *path)), "$defs": {"arguments": parameters}}


def _string_rule(schema: JsonObject) -> str:
    """Rule of a string of this schema and the first END_OF_VALUE, which ends it."""
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength", "")
    if (
        type(shortest) is not int
        or shortest < 0
        or (longest != "" and (type(longest) is not int or longest < shortest))
    ):
        raise ValueError(f"minLength {shortest!r}, maxLength {longest!r}: no text has that length")
    end, conditions = _quoted(END_OF_VALUE), list(_conditions(schema))
    length = f"/(.|\\n){{{shortest},{longest}}}/" if shortest or longest != "" else ANYTHING
    if conditions:
        conditions += [length] * (length != ANYTHING)
        return f"(((({') & ('.join(conditions)})) {end}) & ~({ANYTHING} {end} {SOMETHING}))"
    if not shortest:
        return f"({length} {end})"  # the rule is lazy, so it stops at the first end
    # Cheaper than the expression above for long texts
    return f"((/(.|\\n){{0,{longest}}}/ {end}) & ~(/(.|\\n){{0,{shortest - 1}}}/ {end} {ANYTHING}))"


def _conditions(schema: JsonObject) -> Iterator[str]:
    if (constants := constants_of(schema)) is not None:
        texts = [_quoted(value) for value in constants if isinstance(value, str)]
        if not texts:
            raise ValueError("enum: no string is allowed")
        yield " | ".join(texts)
    if "pattern" in schema:
        yield f"/{search(schema['pattern'])}/"
    if "format" in schema:
        yield f"/{_in_slashes(FORMATS[schema['format']])}/"


def search(pattern: Any) -> str | None:
    """Regular expression of whole texts that contain a match of the pattern; None if an anchor is not at an end."""
    if not isinstance(pattern, str):
        return None
    branches, depth = [list[str]()], 0
    for token in TOKEN.findall(pattern):
        depth += (token == "(") - (token == ")")
        if token == "|" and depth == 0:
            branches.append([])
        else:
            branches[-1].append(token)
    expressions = list[str]()
    for branch in branches:
        before, after = ("" if branch[:1] == ["^"] else ANY), ("" if branch[-1:] == ["$"] else ANY)
        inside = branch[not before : len(branch) - (not after)]
        if "^" in inside or "$" in inside:
            return None
        expressions.append(f"{before}({''.join(inside)}){after}")
    return _in_slashes("|".join(expressions))


def _in_slashes(expression: str) -> str:
    """Escape an expression for Lark's slashes, in one line."""
    return re.sub(r"\\(.)|/|\n", _escaped, expression, flags=re.DOTALL)


def _escaped(match: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(match[0], match[0])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# --- calls in a text ---


def read_call(text: str, tools: Mapping[str, JsonObject]) -> Called | None:
    """The call at the beginning of the text; None if it is incomplete. Raises ValueError for other text."""
    if not (text.startswith("<function=") and (position := text.find(">\n")) >= 0):
        raise ValueError("no name of a function")
    name, position = text[len("<function=") : position], position + 2
    root, values = tools.get(name, {}), dict[str, str]()
    schemas = properties_of(root)
    while not text.startswith(END_OF_CALL, position):
        name_end = text.find(">\n", position)
        if not text.startswith("<parameter=", position) or name_end < 0:
            raise ValueError("no parameter")
        if (end := text.find(END_OF_VALUE, name_end + 2)) < 0:
            return None
        key = text[position + len("<parameter=") : name_end]
        values[key] = _as_json(text[name_end + 2 : end], text_of(root, schemas.get(key)))
        position = end + len(END_OF_VALUE)
    arguments = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in values.items())
    return Called(name, "{" + arguments + "}", position + len(END_OF_CALL))


def _as_json(text: str, kind: RawString | None) -> str:
    if kind is not None and kind.may_be_null and text == "null":
        return text
    if kind is None:
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)
        return text
    return json.dumps(text, ensure_ascii=False)
