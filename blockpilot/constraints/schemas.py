"""Conversion of clients' JSON Schemas to the form that llguidance compiles.

`prepared` keeps a schema's meaning: it drops annotations and keywords that forbid nothing, and rewrites others for
llguidance. `loosened` drops the keywords that llguidance refuses, so that the rest still constrains the text;
`complaint_of` finds them by compiling one subschema at a time.
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
STRUCTURE = ("type", "properties", "items", "enum", "const", "anyOf", "required")  # dropped last by `loosened`
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
    """Schema without unsupported keywords, and the paths of the dropped ones, such as `properties.x.uniqueItems`."""

    schema: JsonObject
    dropped: tuple[str, ...] = ()


# --- walking ---


def subschemas(schema: Any, path: Path = ()) -> Iterator[tuple[Path, JsonObject]]:
    """A schema and all its subschemas, with their paths. Constants that look like schemas do not count."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    children = list[tuple[Path, Any]]()
    _with_children(schema, lambda step, child: children.append((step, child)))
    for step, child in children:
        yield from subschemas(child, (*path, *step))


def rebuilt(schema: Any, change: Callable[[Path, JsonObject], JsonObject], path: Path = ()) -> Any:
    """The schema with `change` applied to each subschema, innermost first; anything but an object is unchanged."""
    if not isinstance(schema, dict):
        return schema
    return change(path, _with_children(schema, lambda step, child: rebuilt(child, change, (*path, *step))))


def _with_children(schema: JsonObject, change: Callable[[Path, Any], Any]) -> JsonObject:
    """The schema with `change` applied to each direct subschema and its relative path."""
    new = dict(schema)
    for key, value in schema.items():
        if key in MAPS and isinstance(value, dict):
            new[key] = {name: change((key, name), child) for name, child in value.items()}
        elif key in LISTS and isinstance(value, list):
            new[key] = [change((key, str(i)), child) for i, child in enumerate(value)]
        elif key in SINGLES:
            new[key] = change((key,), value)
    return new


def properties_of(schema: Any) -> JsonObject:
    """Properties of a schema by name; empty if it has none or `properties` is invalid."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def required_of(schema: Any) -> list[str]:
    """Names of a schema's required properties."""
    names = schema.get("required") if isinstance(schema, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def types_of(schema: JsonObject) -> list[str]:
    """Names of a schema's types; empty if it allows any."""
    types = schema.get("type")
    return [str(name) for name in types] if isinstance(types, list) else [types] if isinstance(types, str) else []


def constants_of(schema: JsonObject) -> list[Any] | None:
    """The only values that a schema allows, by `const` or `enum`; None if it has neither."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


# --- references ---


def pointer(path: Path) -> str:
    """JSON pointer of a path, as the fragment of a `$ref`."""
    return "".join("/" + quote(step.replace("~", "~0").replace("/", "~1"), safe="~$") for step in path)


def target_path(root: JsonObject, ref: Any) -> Path | None:
    """Path inside the root that a `$ref` points to; None if it points outside or nowhere."""
    if not isinstance(ref, str):
        return None
    document, _, fragment = ref.partition("#")
    base: Path | None = ()
    if document and document != _base(root):
        base = next((path for path, schema in subschemas(root) if path and _base(schema) == document), None)
    if base is None:
        return None
    base_schema = at(root, base)
    if fragment and not fragment.startswith("/"):
        anchors = (path for path, schema in subschemas(base_schema) if schema.get("$anchor") == fragment)
        inside = next(anchors, None)
    else:
        inside = tuple(unquote(step).replace("~1", "/").replace("~0", "~") for step in fragment.split("/")[1:])
    return None if inside is None or at(base_schema, inside) is None else (*base, *inside)


def at(root: Any, path: Path) -> Any:
    """The value at a path, or None."""
    for step in path:
        if isinstance(root, list) and step.isdecimal() and int(step) < len(root):
            root = root[int(step)]
        elif isinstance(root, dict) and step in root:
            root = root[step]
        else:
            return None
    return root


def resolved(root: JsonObject, schema: Any) -> Any:
    """The schema that a chain of `$ref`s without other keywords leads to."""
    seen = set[Path]()
    while isinstance(schema, dict) and "$ref" in schema and schema.keys() <= REFERENCES:
        path = target_path(root, schema["$ref"])
        if path is None or path in seen:
            return schema
        seen.add(path)
        schema = at(root, path)
    return schema


def moved(root: JsonObject, path_to_root: Path) -> JsonObject:
    """The schema with its references rewritten, to be embedded at a path of another schema.

    Raises ValueError for a reference that points outside the schema.
    """

    def change(path: Path, schema: JsonObject) -> JsonObject:
        new = {key: value for key, value in schema.items() if key not in ("$id", "$anchor", "id")}
        if "$ref" in schema:
            if (referenced := target_path(root, schema["$ref"])) is None:
                raise ValueError(f"{'.'.join((*path, '$ref'))}: {schema['$ref']!r} is not inside the schema")
            new["$ref"] = "#" + pointer((*path_to_root, *referenced))
        return new

    return dict(rebuilt(root, change))


def _base(schema: JsonObject) -> str | None:
    name = schema.get("$id", schema.get("id"))
    return name.partition("#")[0] if isinstance(name, str) else None


# --- equivalent schemas for llguidance ---


def prepared(schema: JsonObject) -> JsonObject:
    """An equivalent schema without annotations and keywords that forbid nothing.

    Raises ValueError for a schema that is nested too deeply.
    """
    try:
        return dict(rebuilt(schema, lambda path, node: _prepared(schema, node)))
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def _prepared(root: JsonObject, schema: JsonObject) -> JsonObject:
    new = {key: value for key, value in schema.items() if not _forbids_nothing(schema, key, value)}
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(new.get(exclusive), bool) and new.pop(exclusive) and bound in new:  # JSON Schema draft 4
            new[exclusive] = new.pop(bound)
    new = _named(root, new)
    if isinstance(properties := new.get("properties"), dict):
        new["properties"] = {name: {} if child is None else child for name, child in properties.items()}
    options = new.get("oneOf")
    if isinstance(options, list) and "anyOf" not in new and (disjoint := _disjoint(root, options)) is not None:
        new = {"anyOf" if key == "oneOf" else key: disjoint if key == "oneOf" else new[key] for key in new}
    return new


def _named(root: JsonObject, schema: JsonObject) -> JsonObject:
    """The schema with `propertyNames` (constants or a pattern) rewritten as `properties` or `patternProperties`."""
    names = resolved(root, schema.get("propertyNames"))
    if not isinstance(names, dict) or not schema.keys().isdisjoint({"properties", "patternProperties"}):
        return schema
    rest = {key: value for key, value in schema.items() if key not in ("propertyNames", "additionalProperties")}
    rest["additionalProperties"], value = False, schema.get("additionalProperties", True)
    keywords = names.keys() - ANNOTATIONS - {"type"}
    if names.get("type", "string") != "string":
        return schema
    if keywords == {"pattern"} and isinstance(names["pattern"], str):
        return rest | {"patternProperties": {names["pattern"]: value}}
    constants = [names.get("const")] if keywords == {"const"} else names.get("enum") if keywords == {"enum"} else None
    if isinstance(constants, list) and all(isinstance(name, str) for name in constants):
        return rest | {"properties": dict.fromkeys(constants, value)}
    return schema


def _forbids_nothing(schema: JsonObject, key: str, value: Any) -> bool:
    if key in ANNOTATIONS or (value is None and key != "const"):
        return True
    if key == "$id" and not (isinstance(value, str) and re.fullmatch("[!-~]+", value)):
        return True  # not a URI
    if key in NEEDS and NEEDS[key] not in schema:
        return True
    if key == "if" and schema.keys().isdisjoint({"then", "else"}):
        return True
    if key == "format" and "type" in schema and "string" not in types_of(schema):
        return True
    return any(type(value) is type(trivial) and value == trivial for trivial in FORBIDS_NOTHING.get(key, ()))


def _disjoint(root: JsonObject, options: list[Any]) -> list[Any] | None:
    """The options of a `oneOf` as those of an equivalent `anyOf`, if no value can match two of them; else None.

    Options are disjoint by type, by their constants, or by the constants of a property, which is then required.
    """
    full = [resolved(root, option) for option in options]
    if not all(isinstance(schema, dict) for schema in full):
        return None
    kinds = [_kinds(schema) for schema in full]
    if _are_disjoint(kinds) or _are_disjoint([_constants(schema) for schema in full]):
        return options
    if any(kind != {"object"} for kind in kinds):
        return None
    for name in properties_of(full[0]):
        if not _are_disjoint([_constants(resolved(root, properties_of(schema).get(name))) for schema in full]):
            continue
        return [
            option
            if name in schema.get("required", ())
            else option | {"required": [*schema.get("required", ()), name]}
            for option, schema in zip(options, full, strict=True)
        ]
    return None


def _are_disjoint(sets: list[set[str] | None]) -> bool:
    complete = [values for values in sets if values is not None]
    return len(complete) == len(sets) and sum(map(len, complete)) == len(set[str]().union(*complete))


def _kinds(schema: JsonObject) -> set[str] | None:
    types = types_of(schema)
    return {"number" if name == "integer" else name for name in types} if types else None


def _constants(schema: Any) -> set[str] | None:
    values = constants_of(schema) if isinstance(schema, dict) else None
    return None if values is None else {json.dumps(value, sort_keys=True) for value in values}


# --- keywords that llguidance does not support ---


def complaint_of(schema: Any) -> str:
    """First line of llguidance's error message for a schema; "" if it compiles."""
    try:
        message = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    except ValueError as error:
        message = str(error)
    return next(iter(message.strip().splitlines()), "")


def inexact(schema: JsonObject) -> list[str]:
    """Keywords of one subschema, not of nested ones, whose integers llguidance rounds to 53 bits."""
    is_integer = "integer" in types_of(schema)
    bounds = [key for key in BOUNDS if key in schema and _rounded(schema[key])]
    bounds += [
        key
        for key in ("exclusiveMinimum", "exclusiveMaximum")
        if is_integer and key not in bounds and type(schema.get(key)) is int and abs(schema[key]) >= 2**53
    ]
    return bounds + [key for key in ("const", "enum") if key in schema and _rounded(schema[key])]


def check_exact(schema: JsonObject) -> None:
    """Raise ValueError that names the first integer that llguidance would round."""
    for path, node in subschemas(schema):
        for key in inexact(node):
            keyword, value = ".".join((*path, key)), str(node[key])[:80]
            raise ValueError(f"{keyword}: {value} is an integer of more than 53 bits, which would be rounded")


def _rounded(value: Any) -> bool:
    """True if a value contains an integer that is not exact as float64, or not an int64."""
    if type(value) is int:
        return abs(value) >= 2**63 or int(float(value)) != value
    if isinstance(value, float):
        return not math.isfinite(value) or (value.is_integer() and abs(value) >= 2**63)
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_rounded, inside))


def loosened(schema: JsonObject) -> Loosened:
    """A prepared schema without the keywords that llguidance refuses or rounds.

    Each subschema is checked alone, without its nested ones, so llguidance may still refuse the whole schema.
    """
    dropped, complaints = list[str](), dict[str, str]()

    def complains(node: JsonObject) -> str:
        node_json = json.dumps(_shallow(node))
        if node_json not in complaints:
            complaints[node_json] = complaint_of(json.loads(node_json))
        return complaints[node_json]

    def change(path: Path, node: JsonObject) -> JsonObject:
        new = dict(node)
        removed = inexact(new)
        if "$ref" in new and target_path(schema, new["$ref"]) is None:
            removed.append("$ref")
        for key in removed:
            del new[key]
        for key in [key for key in MAPS if isinstance(new.get(key), dict)]:
            invalid = [name for name, child in new[key].items() if not isinstance(child, dict | bool)]
            new[key] = new[key] | dict.fromkeys(invalid, True)
            removed += [f"{key}.{name}" for name in invalid]
        if "oneOf" in new and complains({"oneOf": new["oneOf"]}):
            removed.append("oneOf")
            options = new.pop("oneOf")
            new |= {} if "anyOf" in new or not options else {"anyOf": options}
        while complains(new):
            key = _culprit(new, complains)
            removed.append(key)
            del new[key]
        dropped.extend(".".join((*path, key)) for key in removed)
        return new

    return Loosened(dict(rebuilt(schema, change)), tuple(dropped))


def _culprit(node: JsonObject, complains: Callable[[JsonObject], str]) -> str:
    """The keyword to drop: one that is refused alone, or whose removal helps, or the first, structure last."""
    keys = sorted((key for key in node if key not in REFERENCES), key=lambda key: key in STRUCTURE)
    alone = next((key for key in keys if complains({key: node[key]})), None)
    others = (key for key in keys if not complains({name: node[name] for name in node if name != key}))
    return alone or next(others, keys[0])


def _shallow(node: JsonObject) -> JsonObject:
    """The node's own keywords, with subschemas replaced by `true`."""
    keywords = {key: value for key, value in node.items() if key not in REFERENCES}
    return _with_children(keywords, lambda _, child: True if isinstance(child, dict) else child)
