"""Arguments in Qwen3-Coder's words: a string stands as it is between its tags, any other value as JSON.

A value ends at the first line `</parameter>`, in the grammar as in the reader, so it may hold every other tag.
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
ROOT = ("$defs", "arguments")  # of a tool's parameters in the schema of a value
TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)  # of a regular expression
ANY = r"(.|\n)*"
ANYTHING, SOMETHING = r"/(.|\n)*/", r"/(.|\n)+/"
COMBINED = ("allOf", "anyOf", "oneOf")
UNFOLLOWED = ("minProperties", "maxProperties", "patternProperties", "enum", "const", "not")  # of all parameters
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
    """A value that is a string, of one of these schemas, or null where `may_be_null`; written without quotes."""

    schemas: tuple[JsonObject, ...]
    may_be_null: bool = False


class Called(NamedTuple):
    """A whole call at the beginning of a text: its name, its arguments as JSON, and where it ends."""

    name: str
    arguments: str
    end: int


# --- schemas ---


def text_of(root: JsonObject, schema: Any) -> RawString | None:
    """The value as text; None for one that is written as JSON. `root` is where references lead."""
    schema = resolved(root, schema)
    if not isinstance(schema, dict):
        return None
    for key in COMBINED:
        if options := schema.get(key):
            return _of_options(root, options) if isinstance(options, list) and _is_only(schema, key) else None
    constants = constants_of(schema)
    types = set(types_of(schema))
    if not types and constants is not None:
        types = {{str: "string", type(None): "null"}.get(type(value), "other") for value in constants}
    if not types <= {"string", "null"} or "string" not in types:
        return None
    may_be_null = "null" in types and (constants is None or None in constants)
    return None if may_be_null and "null" in (constants or ()) else RawString((schema,), may_be_null)


def _of_options(root: JsonObject, options: list[Any]) -> RawString | None:
    texts = [text_of(root, option) for option in options if not _is_null(resolved(root, option))]
    found = [text for text in texts if text is not None]
    if not found or len(found) < len(texts):
        return None
    schemas = tuple(schema for text in found for schema in text.schemas)
    return RawString(schemas, len(texts) < len(options) or any(text.may_be_null for text in found))


def _is_only(schema: JsonObject, key: str) -> bool:
    return schema.keys() - REFERENCES == {key} and (key != "allOf" or len(schema[key]) == 1)


def _is_null(schema: Any) -> bool:
    return isinstance(schema, dict) and (
        schema.get("type") == "null" or ("const" in schema and schema["const"] is None)
    )


def flat(root: JsonObject) -> Loosened:
    """Parameters by name, as this wording has them: alternatives are merged, what it cannot follow is dropped."""
    schema, dropped = resolved(root, root), list[str]()
    schema = schema if isinstance(schema, dict) else {}
    dropped += [key for key in (*UNFOLLOWED, "anyOf", "oneOf") if key in schema]
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
    others = schema.get("additionalProperties", True)
    if others is False and required - properties.keys():
        dropped.append("required")
    properties |= {name: others or {} for name in sorted(required - properties.keys())}
    for name, value in properties.items():
        properties[name], lost = _followed(root, value)
        dropped += [f"properties.{name}.{key}" for key in lost]
    kept = {key: root[key] for key in REFERENCES & root.keys() if key != "$ref"}
    declared = {"properties": properties} if properties or "properties" in schema or others is False else {}
    kept |= {"type": "object", "required": sorted(required), "additionalProperties": others}
    return Loosened(kept | declared, tuple(dropped))


def _options(root: JsonObject, schema: JsonObject, key: str) -> list[JsonObject]:
    options = schema.get(key)
    found = [resolved(root, option) for option in options] if isinstance(options, list) else []
    return [option for option in found if isinstance(option, dict)]


def _followed(root: JsonObject, schema: Any) -> tuple[Any, list[str]]:
    """The schema of a value without the keywords of a text that have no regular expression here, and those."""
    text = text_of(root, schema)
    if text is None:
        return schema, []
    lost = [key for each in text.schemas for key in each if not _has_rule(key, each[key])]
    if not lost:
        return schema, []
    left: list[JsonObject] = [{k: v for k, v in each.items() if _has_rule(k, v)} for each in text.schemas]
    return {"anyOf": left + [{"type": "null"}] * text.may_be_null}, lost


def _has_rule(key: str, value: Any) -> bool:
    if key == "pattern":
        return search(value) is not None
    if key == "format":
        return isinstance(value, str) and value in FORMATS
    return key not in ("not", "anyOf", "oneOf", "allOf", "if")


# --- the grammar ---


def rules_of(number: int, name: str, parameters: JsonObject) -> str:
    """Rules of a call, `call_number`; raises ValueError for parameters that they cannot follow."""
    root, dropped = flat(parameters)
    if dropped:
        raise ValueError(f"{dropped[0]} cannot be followed in the words of this model")
    parts, rules = [_quoted(f"<function={name}>\n")], list[str]()
    for i, (key, schema) in enumerate(properties_of(root).items()):
        if schema is False and key not in root["required"]:
            continue  # it is never given
        if ">\n" in key:
            raise ValueError(f"properties: {key!r} cannot be written in the words of this model")
        value = f"value_{number}_{i}"
        parts.append(f"({_quoted(f'<parameter={key}>' + chr(10))} {value}){'' if key in root['required'] else '?'}")
        rules += _value_rules(value, root, key, schema)
    if "properties" not in root:
        more = f"more_{number}"
        parts.append(f'("<parameter=" /[^>\\n]+/ ">\\n" {more})*')
        rules.append(_json_rule(more, _standing(root, ("additionalProperties",), root["additionalProperties"])))
    parts.append(_quoted(END_OF_CALL))
    return "\n".join([f"call_{number}: {' '.join(parts)}", *rules])


def _value_rules(rule: str, root: JsonObject, name: str, schema: Any) -> list[str]:
    if (text := text_of(root, schema)) is None:
        return [_json_rule(rule, _standing(root, ("properties", name), schema))]
    ways = [_way(each) for each in text.schemas]
    ways += [f'("null" {_quoted(END_OF_VALUE)})'] * text.may_be_null
    return [f"{rule}[lazy]: {rule.upper()}", f"{rule.upper()}: {' | '.join(ways)}"]


def _json_rule(rule: str, schema: Any) -> str:
    schema = {} if schema is True else schema  # llguidance's own options need an object
    if not isinstance(schema, dict):
        raise ValueError(f"{json.dumps(schema)[:80]} is no schema of a value")
    return f"{rule}: %json {json.dumps(schema | {'x-guidance': SEPARATORS})} {_quoted(END_OF_VALUE)}"


def _standing(root: JsonObject, path: tuple[str, ...], schema: Any) -> Any:
    """The schema as one by itself: with the tool's parameters beside it where it refers to them."""
    if '"$ref"' not in json.dumps(schema):
        return schema
    inside = moved(root, ROOT)
    return {"$ref": "#" + pointer((*ROOT, *path)), "$defs": {"arguments": inside}}


def _way(schema: JsonObject) -> str:
    """A string of this schema and the end of its value, which stands nowhere before that."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if type(least) is not int or least < 0 or (most != "" and (type(most) is not int or most < least)):
        raise ValueError(f"minLength {least!r}, maxLength {most!r}: no text has that length")
    end, conditions = _quoted(END_OF_VALUE), list(_conditions(schema))
    length = f"/(.|\\n){{{least},{most}}}/" if least or most != "" else ANYTHING
    if conditions:
        conditions += [length] * (length != ANYTHING)
        return f"(((({') & ('.join(conditions)})) {end}) & ~({ANYTHING} {end} {SOMETHING}))"
    if not least:
        return f"({length} {end})"  # the first end is the last one, since the rule is lazy
    # Cheaper than the above where the text may be long
    return f"((/(.|\\n){{0,{most}}}/ {end}) & ~(/(.|\\n){{0,{least - 1}}}/ {end} {ANYTHING}))"


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
    """A regular expression of whole texts in which the pattern is found; None where an anchor is not at an end."""
    if not isinstance(pattern, str):
        return None
    branches, depth = [list[str]()], 0
    for token in TOKEN.findall(pattern):
        depth += (token == "(") - (token == ")")
        if token == "|" and depth == 0:
            branches.append([])
        else:
            branches[-1].append(token)
    whole = list[str]()
    for branch in branches:
        before, after = ("" if branch[:1] == ["^"] else ANY), ("" if branch[-1:] == ["$"] else ANY)
        inside = branch[not before : len(branch) - (not after)]
        if "^" in inside or "$" in inside:
            return None
        whole.append(f"{before}({''.join(inside)}){after}")
    return _in_slashes("|".join(whole))


def _in_slashes(expression: str) -> str:
    """As it stands between slashes in Lark: on one line."""
    return re.sub(r"\\(.)|/|\n", _escaped, expression, flags=re.DOTALL)


def _escaped(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# --- calls in a text ---


def read_call(text: str, tools: Mapping[str, JsonObject]) -> Called | None:
    """The call that the text begins with; None where it is not whole. Raises ValueError for what is no call."""
    if not (text.startswith("<function=") and (place := text.find(">\n")) >= 0):
        raise ValueError("no name of a function")
    name, place = text[len("<function=") : place], place + 2
    root, values = tools.get(name, {}), dict[str, str]()
    schemas = properties_of(root)
    while not text.startswith(END_OF_CALL, place):
        middle = text.find(">\n", place)
        if not text.startswith("<parameter=", place) or middle < 0:
            raise ValueError("no parameter")
        if (end := text.find(END_OF_VALUE, middle + 2)) < 0:
            return None
        key = text[place + len("<parameter=") : middle]
        values[key] = _as_json(text[middle + 2 : end], text_of(root, schemas.get(key)))
        place = end + len(END_OF_VALUE)
    shown = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in values.items())
    return Called(name, "{" + shown + "}", place + len(END_OF_CALL))


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
