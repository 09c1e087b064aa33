"""JSON Schemas as clients send them, in the form that llguidance compiles.

`prepared` keeps what a schema means: it drops annotations and keywords that forbid nothing, and writes others as
llguidance reads them. `loosened` drops the keywords that it refuses, so that the rest can still be followed.
llguidance itself is asked which they are (`complaint_of`), one subschema at a time.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from llguidance import LLMatcher

JsonObject = dict[str, Any]
Path = tuple[str, ...]
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems", "items"})
SINGLES = frozenset({"items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not"}) | {
    *("if", "then", "else", "unevaluatedItems", "unevaluatedProperties")
}
ANNOTATIONS = frozenset({"title", "description", "default", "example", "examples", "deprecated", "discriminator"}) | {
    *("readOnly", "writeOnly", "$comment", "$schema")
}
REFERENCES = frozenset({"$ref", "$defs", "definitions", "$id", "$anchor"})
STRUCTURE = ("type", "properties", "items", "enum", "const", "anyOf", "required")  # dropped last
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
FORBIDS_NOTHING: Mapping[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "additionalItems": (True, {}),
    "minProperties": (0,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "patternProperties": ({},),
    "allOf": ([],),
}
NEEDS = {"minContains": "contains", "maxContains": "contains", "then": "if", "else": "if"}


class Loosened(NamedTuple):
    """A schema without the keywords that cannot be followed; their places, such as `properties.x.uniqueItems`."""

    schema: JsonObject
    dropped: tuple[str, ...] = ()


# --- walking ---


def subschemas(schema: Any, path: Path = ()) -> Iterator[tuple[Path, JsonObject]]:
    """A schema and all schemas inside it, with their paths. What looks like one in `enum` or `properties` is none."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for key, value in schema.items():
        for step, child in _children(key, value):
            yield from subschemas(child, (*path, key, *step))


def rebuilt(schema: Any, change: Callable[[Path, JsonObject], JsonObject], path: Path = ()) -> Any:
    """The schema with each subschema changed, innermost first; anything but an object stays as it is."""
    if not isinstance(schema, dict):
        return schema
    return change(path, _with_children(schema, lambda step, child: rebuilt(child, change, (*path, *step))))


def _with_children(schema: JsonObject, change: Callable[[Path, Any], Any]) -> JsonObject:
    """The schema with each subschema right below it changed, by its path from here."""
    new = dict(schema)
    for key, value in schema.items():
        if key in MAPS and isinstance(value, dict):
            new[key] = {name: change((key, name), child) for name, child in value.items()}
        elif key in LISTS and isinstance(value, list):
            new[key] = [change((key, str(i)), child) for i, child in enumerate(value)]
        elif key in SINGLES:
            new[key] = change((key,), value)
    return new


def _children(key: str, value: Any) -> Iterator[tuple[Path, Any]]:
    if key in MAPS and isinstance(value, dict):
        yield from (((name,), child) for name, child in value.items())
    elif key in LISTS and isinstance(value, list):
        yield from (((str(i),), child) for i, child in enumerate(value))
    elif key in SINGLES:
        yield (), value


def properties_of(schema: Any) -> JsonObject:
    """Its properties by name; none where there is something else."""
    found = schema.get("properties") if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


def required_of(schema: Any) -> list[str]:
    """Names of the properties that it demands."""
    found = schema.get("required") if isinstance(schema, dict) else None
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def types_of(schema: JsonObject) -> list[str]:
    """Names of its types; none where it has any."""
    types = schema.get("type")
    return [str(each) for each in types] if isinstance(types, list) else [types] if isinstance(types, str) else []


def constants_of(schema: JsonObject) -> list[Any] | None:
    """The values that it has at most; None where they are not listed."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


# --- references ---


def pointer(path: Path) -> str:
    """JSON pointer of a path, as the fragment of a `$ref`."""
    return "".join("/" + quote(step.replace("~", "~0").replace("/", "~1"), safe="~$") for step in path)


def target_path(root: JsonObject, ref: Any) -> Path | None:
    """Path of what a `$ref` names inside the root; None for what is elsewhere, or nowhere."""
    if not isinstance(ref, str):
        return None
    document, _, fragment = ref.partition("#")
    base: Path | None = ()
    if document and document != _base(root):
        base = next((path for path, schema in subschemas(root) if path and _base(schema) == document), None)
    if base is None:
        return None
    place = at(root, base)
    if fragment and not fragment.startswith("/"):
        anchors = (path for path, schema in subschemas(place) if schema.get("$anchor") == fragment)
        inside = next(anchors, None)
    else:
        inside = tuple(unquote(step).replace("~1", "/").replace("~0", "~") for step in fragment.split("/")[1:])
    return None if inside is None or at(place, inside) is None else (*base, *inside)


def at(root: Any, path: Path) -> Any:
    """The value at a path; None where there is none."""
    for step in path:
        if isinstance(root, list) and step.isdecimal() and int(step) < len(root):
            root = root[int(step)]
        elif isinstance(root, dict) and step in root:
            root = root[step]
        else:
            return None
    return root


def resolved(root: JsonObject, schema: Any) -> Any:
    """The schema that a `$ref` without other keywords leads to, through any number of them."""
    seen = set[Path]()
    while isinstance(schema, dict) and "$ref" in schema and schema.keys() <= REFERENCES:
        path = target_path(root, schema["$ref"])
        if path is None or path in seen:
            return schema
        seen.add(path)
        schema = at(root, path)
    return schema


def moved(root: JsonObject, place: Path) -> JsonObject:
    """The schema for a place inside another one: its references lead to the same subschemas there.

    Raises ValueError for a reference that leads out of it.
    """

    def change(path: Path, schema: JsonObject) -> JsonObject:
        new = {key: value for key, value in schema.items() if key not in ("$id", "$anchor", "id")}
        if "$ref" in schema:
            if (found := target_path(root, schema["$ref"])) is None:
                raise ValueError(f"{'.'.join((*path, '$ref'))}: {schema['$ref']!r} is not inside the schema")
            new["$ref"] = "#" + pointer((*place, *found))
        return new

    return dict(rebuilt(root, change))


def _base(schema: JsonObject) -> str | None:
    name = schema.get("$id", schema.get("id"))
    return name.partition("#")[0] if isinstance(name, str) else None


# --- what a schema means, in llguidance's words ---


def prepared(schema: JsonObject) -> JsonObject:
    """The schema with the same valid values, without what llguidance has no need of.

    Raises ValueError for one that is nested too deeply.
    """
    try:
        return dict(rebuilt(schema, lambda path, node: _prepared(schema, node)))
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def _prepared(root: JsonObject, schema: JsonObject) -> JsonObject:
    new = {key: value for key, value in schema.items() if not _says_nothing(schema, key, value)}
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(new.get(exclusive), bool) and new.pop(exclusive) and bound in new:  # as draft 4 has it
            new[exclusive] = new.pop(bound)
    new = _named(root, new)
    if isinstance(properties := new.get("properties"), dict):
        new["properties"] = {name: {} if child is None else child for name, child in properties.items()}
    options = new.get("oneOf")
    if isinstance(options, list) and "anyOf" not in new and (disjoint := _disjoint(root, options)) is not None:
        new = {"anyOf" if key == "oneOf" else key: disjoint if key == "oneOf" else new[key] for key in new}
    return new


def _named(root: JsonObject, schema: JsonObject) -> JsonObject:
    """The schema with its propertyNames, constants or a pattern, as names of properties."""
    names = resolved(root, schema.get("propertyNames"))
    if not isinstance(names, dict) or not schema.keys().isdisjoint({"properties", "patternProperties"}):
        return schema
    others = {key: value for key, value in schema.items() if key not in ("propertyNames", "additionalProperties")}
    others["additionalProperties"], value = False, schema.get("additionalProperties", True)
    said = names.keys() - ANNOTATIONS - {"type"}
    if names.get("type", "string") != "string":
        return schema
    if said == {"pattern"} and isinstance(names["pattern"], str):
        return others | {"patternProperties": {names["pattern"]: value}}
    constants = [names.get("const")] if said == {"const"} else names.get("enum") if said == {"enum"} else None
    if isinstance(constants, list) and all(isinstance(name, str) for name in constants):
        return others | {"properties": dict.fromkeys(constants, value)}
    return schema


def _says_nothing(schema: JsonObject, key: str, value: Any) -> bool:
    if key in ANNOTATIONS or (value is None and key != "const"):
        return True
    if key == "$id" and not (isinstance(value, str) and re.fullmatch("[!-~]+", value)):
        return True  # no URI
    if key in NEEDS and NEEDS[key] not in schema:
        return True
    if key == "if" and schema.keys().isdisjoint({"then", "else"}):
        return True
    if key == "format" and "type" in schema and "string" not in types_of(schema):
        return True
    return any(type(value) is type(each) and value == each for each in FORBIDS_NOTHING.get(key, ()))


def _disjoint(root: JsonObject, options: list[Any]) -> list[Any] | None:
    """Options of which no value matches two, as alternatives; None where that is not certain.

    By type, by their constants, or by the constants of a property, which each option then demands.
    """
    full = [resolved(root, option) for option in options]
    if not all(isinstance(schema, dict) for schema in full):
        return None
    kinds = [_kinds(schema) for schema in full]
    if _apart(kinds) or _apart([_constants(schema) for schema in full]):
        return options
    if any(kind != {"object"} for kind in kinds):
        return None
    for name in properties_of(full[0]):
        if not _apart([_constants(resolved(root, properties_of(schema).get(name))) for schema in full]):
            continue
        return [
            option
            if name in schema.get("required", ())
            else option | {"required": [*schema.get("required", ()), name]}
            for option, schema in zip(options, full, strict=True)
        ]
    return None


def _apart(sets: list[set[str] | None]) -> bool:
    known = [each for each in sets if each is not None]
    return len(known) == len(sets) and sum(map(len, known)) == len(set[str]().union(*known))


def _kinds(schema: JsonObject) -> set[str] | None:
    types = types_of(schema)
    return {"number" if each == "integer" else each for each in types} if types else None


def _constants(schema: Any) -> set[str] | None:
    values = constants_of(schema) if isinstance(schema, dict) else None
    return None if values is None else {json.dumps(value, sort_keys=True) for value in values}


# --- what llguidance cannot follow ---


def complaint_of(schema: Any) -> str:
    """The first line of what llguidance has against a schema; "" for nothing."""
    try:
        wrong = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    except ValueError as error:
        wrong = str(error)
    return next(iter(wrong.strip().splitlines()), "")


def inexact(schema: JsonObject) -> list[str]:
    """Keywords of one subschema, without those inside it, whose integers llguidance rounds to 53 bits."""
    is_integer = "integer" in types_of(schema)
    bounds = [key for key in BOUNDS if key in schema and _rounded(schema[key])]
    bounds += [
        key
        for key in ("exclusiveMinimum", "exclusiveMaximum")
        if is_integer and key not in bounds and type(schema.get(key)) is int and abs(schema[key]) >= 2**53
    ]
    return bounds + [key for key in ("const", "enum") if key in schema and _rounded(schema[key])]


def check_exact(schema: JsonObject) -> None:
    """Raise ValueError, naming it, for the first integer that llguidance would round."""
    for path, node in subschemas(schema):
        for key in inexact(node):
            place, value = ".".join((*path, key)), str(node[key])[:80]
            raise ValueError(f"{place}: {value} is an integer of more than 53 bits, which would be rounded")


def _rounded(value: Any) -> bool:
    """True for an integer that no float64 is, or no int64, wherever it stands in the value."""
    if type(value) is int:
        return abs(value) >= 2**63 or int(float(value)) != value
    if isinstance(value, float):
        return not math.isfinite(value) or (value.is_integer() and abs(value) >= 2**63)
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_rounded, inside))


def loosened(schema: JsonObject) -> Loosened:
    """A prepared schema without the keywords that llguidance refuses or rounds.

    Only what a subschema's keywords say by themselves and together is looked at: it may still be refused as a whole.
    """
    dropped, known = list[str](), dict[str, str]()

    def complains(node: JsonObject) -> str:
        shown = json.dumps(_shallow(node))
        if shown not in known:
            known[shown] = complaint_of(json.loads(shown))
        return known[shown]

    def change(path: Path, node: JsonObject) -> JsonObject:
        new = dict(node)
        lost = inexact(new)
        if "$ref" in new and target_path(schema, new["$ref"]) is None:
            lost.append("$ref")
        for key in lost:
            del new[key]
        for key in [key for key in MAPS if isinstance(new.get(key), dict)]:
            odd = [name for name, child in new[key].items() if not isinstance(child, dict | bool)]
            new[key] = new[key] | dict.fromkeys(odd, True)
            lost += [f"{key}.{name}" for name in odd]
        if "oneOf" in new and complains({"oneOf": new["oneOf"]}):
            lost.append("oneOf")
            options = new.pop("oneOf")
            new |= {} if "anyOf" in new or not options else {"anyOf": options}
        while complains(new):
            key = _culprit(new, complains)
            lost.append(key)
            del new[key]
        dropped.extend(".".join((*path, key)) for key in lost)
        return new

    return Loosened(dict(rebuilt(schema, change)), tuple(dropped))


def _culprit(node: JsonObject, complains: Callable[[JsonObject], str]) -> str:
    """The keyword to drop: one that is refused alone, or without which the others are not, or any."""
    keys = sorted((key for key in node if key not in REFERENCES), key=lambda key: key in STRUCTURE)
    alone = next((key for key in keys if complains({key: node[key]})), None)
    others = (key for key in keys if not complains({name: node[name] for name in node if name != key}))
    return alone or next(others, keys[0])


def _shallow(node: JsonObject) -> JsonObject:
    """The node's own keywords: subschemas are replaced by ones that allow everything."""
    own = {key: value for key, value in node.items() if key not in REFERENCES}
    return _with_children(own, lambda _, child: True if isinstance(child, dict) else child)
