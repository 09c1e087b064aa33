"""Tools as a grammar can follow them: of strict ones nothing is dropped, others are left looser."""

from typing import NamedTuple

from llguidance import LLMatcher

from blockpilot.constraints.schemas import JsonObject, check_exact, loosened
from jobs.serving.coder_calls import flat
from jobs.serving.tool_calls import Family, Tool, arguments_schema, grammar_of


class FittedTool(NamedTuple):
    """A tool that a grammar follows, and the places of the keywords that it lacks therefore."""

    tool: Tool
    dropped: tuple[str, ...] = ()


def fitted(family: Family, tool: Tool, exact: bool) -> FittedTool:
    """The tool as a grammar can follow it; raises ValueError, naming it, for a keyword that has to be dropped.

    exact: nothing may be dropped.
    """
    wrong = _wrong_with(family, tool)
    if not wrong:
        return FittedTool(tool)
    looser, dropped = _looser(family, tool)
    if exact:
        named = f": no grammar can enforce {', '.join(dropped[:3])}" if dropped else ""
        reason = wrong.removeprefix(f"tool {tool.name!r}: ").partition("\n")[0]  # then the grammar's own lines
        raise ValueError(f"tool {tool.name!r}{named} ({reason})")
    return FittedTool(looser, dropped)


def opened(tool: Tool) -> Tool:
    """The tool with any object of parameters; those that it names may be given."""
    properties = tool.parameters.get("properties")
    names = dict.fromkeys(properties, JsonObject()) if isinstance(properties, dict) else {}
    return tool._replace(parameters={"type": "object"} | ({"properties": names} if names else {}))


def _wrong_with(family: Family, tool: Tool) -> str:
    """What no grammar follows in a tool; "" for nothing."""
    try:
        schema = arguments_schema(tool.parameters)
        check_exact(schema)
        return LLMatcher.validate_grammar(grammar_of(family, [tool], must_call=True, parallel=False).compiled_from())
    except (ValueError, RecursionError) as error:
        return str(error)


def _looser(family: Family, tool: Tool) -> FittedTool:
    try:
        schema, dropped = _of_object(tool.parameters)
        looser = loosened(schema)
        schema, dropped = looser.schema, dropped + looser.dropped
        if family == "coder":
            merged = flat(schema)
            schema, dropped = merged.schema, dropped + merged.dropped
    except (ValueError, RecursionError):
        return FittedTool(opened(tool), ("parameters",))
    looser_tool = tool._replace(parameters=schema)
    if _wrong_with(family, looser_tool):
        return FittedTool(opened(tool), ("parameters",))
    return FittedTool(looser_tool, dropped)


def _of_object(parameters: JsonObject) -> tuple[JsonObject, tuple[str, ...]]:
    try:
        return arguments_schema(parameters), ()
    except ValueError:
        others = {key: value for key, value in parameters.items() if key != "type"}
        return arguments_schema(others), ("type",)
