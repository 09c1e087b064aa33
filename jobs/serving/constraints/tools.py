"""Tool calls in the format of each family of chat templates: grammars, and a parser of calls in a text.

Hermes (Qwen3, and templates without tools): <tool_call> around {"name": ..., "arguments": ...}. Llama 3.1: the answer
is {"name": ..., "parameters": ...}. Qwen3-Coder: <function=...> and <parameter=...> inside <tool_call>.
"""

import json
import re
import uuid
from collections.abc import Sequence
from typing import Literal, NamedTuple

from llguidance import LLMatcher

from blockpilot.constraints.grammar import SEPARATORS, Grammar
from blockpilot.constraints.schemas import JsonObject, check_exact, loosened, moved, pointer, prepared, resolved
from jobs.serving.constraints.coder import END_OF_CALL, ROOT, flat, read_call, rules_of

Family = Literal["hermes", "llama", "coder"]
ARGUMENTS = {"hermes": "arguments", "llama": "parameters"}
OPEN, CLOSE = "<tool_call>\n", "\n</tool_call>"
HEAD = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "(?:arguments|parameters)": ')
MAX_HEAD = 256  # characters; names have at most 64
PREAMBLE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query. Their signatures are within"
    " <tools></tools>:\n<tools>\n{tools}\n</tools>\n\nFor each call, return a json object with its name and arguments"
    ' within <tool_call></tool_call>:\n<tool_call>\n{{"name": <name>, "arguments": <arguments>}}\n</tool_call>'
)


class Tool(NamedTuple):
    """A function that a model may call, and the JSON Schema of its arguments.

    A strict tool is refused if its schema has keywords that no grammar can enforce; otherwise they are dropped.
    """

    name: str
    parameters: JsonObject
    strict: bool = False


class CallDelta(NamedTuple):
    """Addition to the content, or to call `number`, whose first delta has its name and id."""

    content: str = ""
    number: int = -1
    name: str | None = None
    arguments: str = ""

    def as_json(self) -> JsonObject:
        """Entry of `tool_calls` in OpenAI's delta."""
        function: JsonObject = {"arguments": self.arguments}
        if self.name is None:
            return {"index": self.number, "function": function}
        head = {"index": self.number, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        return head | {"function": {"name": self.name} | function}


def whole_calls(deltas: Sequence[CallDelta]) -> list[JsonObject]:
    """`tool_calls` of OpenAI's complete message."""
    calls = [delta.as_json() for delta in deltas if delta.name is not None]
    for call in calls:
        arguments = (delta.arguments for delta in deltas if delta.number == call["index"])
        call["function"]["arguments"] = "".join(arguments)
        del call["index"]
    return calls


def family_of(chat_template: str | None) -> Family:
    """Family of a chat template, by the tags that it writes."""
    template = chat_template or ""
    if "<function=" in template:
        return "coder"
    return "llama" if "ipython" in template and "<tool_call>" not in template else "hermes"


def knows_tools(chat_template: str | None) -> bool:
    """True if a chat template shows tools in the format of a `Family`; Mistral's formats differ by version."""
    template = chat_template or ""
    return "tools" in template and "[TOOL_CALLS]" not in template


# --- grammars ---


def grammar_of(
    family: Family, tools: Sequence[Tool], *, must_call: bool, parallel: bool, otherwise: Grammar | None = None
) -> Grammar:
    """Grammar of texts with calls of these tools.

    Without must_call, free text may surround the calls, or, with `otherwise`, the text is calls or that JSON text.
    Raises ValueError, naming the tool, for unsupported parameters.
    """
    rules = [_call_rules(family, i, tool) for i, tool in enumerate(tools)]
    calls = " | ".join(f"call_{i}" for i in range(len(tools)))
    further_calls = "(" + _text("\n") + " call)*" if parallel and family != "llama" else ""
    only_calls = f"{'' if family == 'llama' else _text(OPEN)} body {further_calls}\ncall: {_text(OPEN)} body"
    if must_call:
        start = f"start: {only_calls}"
    elif otherwise is not None:
        schema = json.loads(otherwise.source)
        schema = (schema if isinstance(schema, dict) else {"allOf": [schema]}) | {"x-guidance": otherwise.spacing}
        start = f"start: calls | otherwise\ncalls: {only_calls}\notherwise: %json {json.dumps(schema)}"
    elif family == "llama":
        start = "start: body | FREE\nFREE: /[^{](.|\\n)*/"
    else:
        start = "start: begun* TEXT" if parallel else "start: TEXT | begun REST"
        start += f"\nbegun: opened body\nopened[lazy]: TEXT {_text(OPEN)}\nTEXT: /(.|\\n)*/"
        start += f"\nREST: TEXT & ~(TEXT {_text(OPEN.strip())} TEXT)" * (not parallel)  # no further call
    return Grammar("lark", "\n".join(["%llguidance {}", start, f"body: {calls}", *rules]))


def arguments_schema(parameters: JsonObject) -> JsonObject:
    """Schema of a call's arguments, an object; raises ValueError for parameters of another type."""
    schema = prepared(parameters)
    target = resolved(schema, schema)
    types = target.get("type", "object") if isinstance(target, dict) else "object"
    if types != "object" and "object" not in (types if isinstance(types, list) else ()):
        raise ValueError(f'type: {json.dumps(types)}; parameters are an "object"')
    # No other keyword next to a `$ref`: llguidance refuses that for circular references
    return schema if target is not schema and "type" in target else schema | {"type": "object"}


def _call_rules(family: Family, number: int, tool: Tool) -> str:
    try:
        parameters = arguments_schema(tool.parameters)
        if family == "coder":
            return rules_of(number, tool.name, parameters)
        return _json_rule(family, number, tool.name, moved(parameters, ROOT))
    except ValueError as error:
        raise ValueError(f"tool {tool.name!r}: {error}") from None


def _json_rule(family: Family, number: int, name: str, arguments: JsonObject) -> str:
    named = {"name": {"const": name}, ARGUMENTS[family]: {"$ref": "#" + pointer(ROOT)}}
    schema: JsonObject = {
        "type": "object",
        "properties": named,
        "required": list(named),
        "additionalProperties": False,
        "$defs": {"arguments": arguments},
        "x-guidance": SEPARATORS,
    }
    return f"call_{number}: %json {json.dumps(schema)} {'' if family == 'llama' else _text(CLOSE)}"


def _text(text: str) -> str:
    return json.dumps(text)


# --- calls in a text ---


class CallReader:
    """Streaming parser of content and tool calls; arguments in JSON are streamed.

    An interrupted call loses no text: it has partial arguments, or is returned as content if its name is incomplete
    or its format is Qwen3-Coder's.
    """

    def __init__(self, family: Family, tools: Sequence[Tool]) -> None:
        self._family, self._tools = family, {tool.name: tool.parameters for tool in tools}
        self._opening = '{"name": ' if family == "llama" else OPEN
        self._closing = "}" if family == "llama" else "}" + CLOSE
        self._held, self._state = "", "content"
        self._begun = False
        self._searched = 0  # characters of the held text in which no Qwen3-Coder call ends
        self._value = JsonEnd()
        self.num_calls = 0
        self.last_begins = 0
        """Offset of the last call in the whole text, if there is one."""
        self._num_characters = 0  # of the text so far

    @property
    def is_whole(self) -> bool:
        """True if there are calls and the last one is complete."""
        return self.num_calls > 0 and self._state == "content"

    def push(self, text: str, *, is_last: bool = False) -> list[CallDelta]:
        """Parse more text; with is_last also the text that was held back."""
        self._held += text
        self._num_characters += len(text)
        deltas = list[CallDelta]()
        while (delta := self._next(is_last)) is not None:
            deltas.append(delta)
        if is_last and self._state == "head":
            deltas.append(CallDelta(("" if self._family == "llama" else OPEN) + self._held))
            self._held, self._state = "", "content"
        return [delta for delta in deltas if delta != CallDelta()]

    def _next(self, is_last: bool) -> CallDelta | None:
        """The next delta; None if more text is needed."""
        if self._state == "content":
            return self._content(is_last)
        if self._state == "head":
            return self._coder_call() if self._family == "coder" else self._head()
        return self._arguments() if self._state == "arguments" else self._close()

    def _content(self, is_last: bool) -> CallDelta | None:
        start = self._held.find(self._opening)
        if self._family == "llama" and (self._begun or start > 0):
            start = -1  # only a whole answer is a call
        if start >= 0:
            self.last_begins = self._num_characters - len(self._held) + start
            content, self._held = self._held[:start], self._held[start:]
            self._held = self._held if self._family == "llama" else self._held.removeprefix(OPEN)
            self._state, self._searched = "head", 0
            return CallDelta(content.rstrip("\n") if self.num_calls else content)
        num_held = 0 if is_last else _overlap(self._held, self._opening)
        content, self._held = self._held[: len(self._held) - num_held], self._held[len(self._held) - num_held :]
        self._begun |= bool(content)
        return CallDelta("" if self.num_calls and not content.strip() else content) if content else None

    def _head(self) -> CallDelta | None:
        if (head := HEAD.match(self._held)) is None:
            return self._no_call() if len(self._held) > MAX_HEAD else None
        self._held, self._state, self._value = self._held[head.end() :], "arguments", JsonEnd()
        self.num_calls += 1
        return CallDelta(number=self.num_calls - 1, name=str(json.loads(head[1])))

    def _arguments(self) -> CallDelta | None:
        if not self._held:
            return None
        end = self._value.find(self._held)
        arguments, self._held = self._held[:end], self._held[end:]
        self._state = "closing" if self._value.is_over else "arguments"
        return CallDelta(number=self.num_calls - 1, arguments=arguments)

    def _close(self) -> CallDelta | None:
        if not self._held.startswith(self._closing) and self._closing.startswith(self._held):
            return None
        self._held = self._held.removeprefix(self._closing)
        self._state, self._begun = "content", True
        return CallDelta()

    def _coder_call(self) -> CallDelta | None:
        while (end := self._held.find(END_OF_CALL, self._searched)) >= 0:
            try:
                call = read_call(self._held[: end + len(END_OF_CALL)], self._tools)
            except ValueError:
                return self._no_call()
            if call is not None:
                self._held, self._state = self._held[call.end :], "content"
                self.num_calls += 1
                return CallDelta(number=self.num_calls - 1, name=call.name, arguments=call.arguments)
            self._searched = end + 1  # this end is inside a value
        self._searched = max(self._searched, len(self._held) - len(END_OF_CALL) + 1)
        return None

    def _no_call(self) -> CallDelta:
        self._state = "content"
        opening = self._held[:1] if self._family == "llama" else OPEN
        self._held = self._held.removeprefix(opening) if self._family == "llama" else self._held
        self._begun = True
        return CallDelta(opening)


class JsonEnd:
    """Incremental search for the end of a JSON object or list."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self.is_over = False

    def find(self, text: str) -> int:
        """Length of the beginning of `text` that belongs to the value."""
        for i, char in enumerate(text):
            if self._in_string:
                self._in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._in_string = True
            elif char in "{}[]":
                self._depth += 1 if char in "{[" else -1
                if self._depth == 0:
                    self.is_over = True
                    return i + 1
        return len(text)


def _overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


# --- messages ---


def in_words(messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> list[JsonObject]:
    """Messages for a template without tools: definitions, calls and results as text in the Hermes format.

    A result joins the turn of the user before or after it, since many templates demand alternating roles.
    """
    text_messages, is_result = list[JsonObject](), False
    if tools:
        text_messages.append({"role": "system", "content": PREAMBLE.format(tools="\n".join(map(json.dumps, tools)))})
    for message in messages:
        content, role = message.get("content") or "", message["role"]
        was_result, is_result = is_result, role == "tool"
        if role == "system" and text_messages and text_messages[0]["role"] == "system":
            text_messages[0]["content"] = f"{content}\n\n{text_messages[0]['content']}"
            continue
        if is_result:
            content, role = f"<tool_response>\n{content}\n</tool_response>", "user"
        else:
            calls = [OPEN + json.dumps(call["function"]) + CLOSE for call in message.get("tool_calls", ())]
            content = "\n".join([content] * bool(content or not calls) + calls)
        last_role = text_messages[-1]["role"] if text_messages else None
        if role == last_role == "user" and (is_result or was_result):
            text_messages[-1]["content"] += f"\n{content}"
        else:
            text_messages.append({"role": role, "content": content})
    return text_messages


def without_system(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Messages for a template without system turns: the first one stands before the first user turn."""
    first, *turns = messages
    index = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), None)
    if first["role"] != "system" or index is None:
        return list(messages)
    user = turns[index] | {"content": f"{first['content']}\n\n{turns[index]['content']}"}
    return [*turns[:index], user, *turns[index + 1 :]]


class FittedTool(NamedTuple):
    """A tool whose parameters a grammar can enforce, and the paths of the dropped keywords."""

    tool: Tool
    dropped: tuple[str, ...] = ()


def fitted(family: Family, tool: Tool, exact: bool) -> FittedTool:
    """The tool without the keywords that no grammar can enforce.

    exact: raise ValueError, naming the tool, if a keyword would have to be dropped.
    """
    wrong = _wrong_with(family, tool)
    if not wrong:
        return FittedTool(tool)
    looser, dropped = _looser(family, tool)
    if exact:
        named = f": no grammar can enforce {', '.join(dropped[:3])}" if dropped else ""
        reason = wrong.removeprefix(f"tool {tool.name!r}: ").partition("\n")[0]  # without the lines of the grammar
        raise ValueError(f"tool {tool.name!r}{named} ({reason})")
    return FittedTool(looser, dropped)


def opened(tool: Tool) -> Tool:
    """The tool with any object as its arguments; only the names of its properties are kept."""
    properties = tool.parameters.get("properties")
    names = dict.fromkeys(properties, JsonObject()) if isinstance(properties, dict) else {}
    return tool._replace(parameters={"type": "object"} | ({"properties": names} if names else {}))


def _wrong_with(family: Family, tool: Tool) -> str:
    """Reason why no grammar can enforce the tool's parameters; "" if one can."""
    try:
        schema = arguments_schema(tool.parameters)
        check_exact(schema)
        return LLMatcher.validate_grammar(grammar_of(family, [tool], must_call=True, parallel=False).compiled_from())
    except (ValueError, RecursionError) as error:
        return str(error)


def _looser(family: Family, tool: Tool) -> FittedTool:
    try:
        schema, dropped = _object_schema(tool.parameters)
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


def _object_schema(parameters: JsonObject) -> tuple[JsonObject, tuple[str, ...]]:
    try:
        return arguments_schema(parameters), ()
    except ValueError:
        untyped = {key: value for key, value in parameters.items() if key != "type"}
        return arguments_schema(untyped), ("type",)
