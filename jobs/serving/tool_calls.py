"""Tool calls in the words of each family of chat templates: the grammar of a call, and the calls in a text.

Hermes (Qwen3, and templates that know no tools): <tool_call> around {"name": ..., "arguments": ...}. Llama 3.1: the
answer is {"name": ..., "parameters": ...}. Qwen3-Coder: <function=...> and <parameter=...> inside <tool_call>.
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from blockpilot.constraints.grammar import SEPARATORS, Grammar

Family = Literal["hermes", "llama", "coder"]
JsonObject = dict[str, Any]
WRITTEN = {"x-guidance": SEPARATORS}
ARGUMENTS = {"hermes": "arguments", "llama": "parameters"}
OPEN, CLOSE = "<tool_call>\n", "\n</tool_call>"
HEAD = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "(?:arguments|parameters)": ')
CODER = re.compile(r"<function=([^>]+)>\n(.*?)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>]+)>\n(.*?)\n</parameter>\n", re.DOTALL)
PREAMBLE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query. Their signatures are within"
    " <tools></tools>:\n<tools>\n{tools}\n</tools>\n\nFor each call, return a json object with its name and arguments"
    ' within <tool_call></tool_call>:\n<tool_call>\n{{"name": <name>, "arguments": <arguments>}}\n</tool_call>'
)


class Tool(NamedTuple):
    """A function that a model may call, and the JSON Schema of its arguments."""

    name: str
    parameters: JsonObject


class CallDelta(NamedTuple):
    """What a piece of text adds: to the content, or to call `number`, whose first delta has its name and id."""

    content: str = ""
    number: int = -1
    name: str | None = None
    arguments: str = ""

    def as_json(self) -> JsonObject:
        """A call's part of OpenAI's delta."""
        function: JsonObject = {"arguments": self.arguments}
        if self.name is None:
            return {"index": self.number, "function": function}
        head = {"index": self.number, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        return head | {"function": {"name": self.name} | function}


def whole_calls(deltas: Sequence[CallDelta]) -> list[JsonObject]:
    """OpenAI's tool_calls of a whole message."""
    calls = [delta.as_json() for delta in deltas if delta.name is not None]
    for call in calls:
        arguments = (delta.arguments for delta in deltas if delta.number == call["index"])
        call["function"]["arguments"] = "".join(arguments)
        del call["index"]
    return calls


def family_of(chat_template: str | None) -> Family:
    """By what its template writes."""
    template = chat_template or ""
    if "<function=" in template:
        return "coder"
    return "llama" if "ipython" in template and "<tool_call>" not in template else "hermes"


def knows_tools(chat_template: str | None) -> bool:
    return "tools" in (chat_template or "")


# --- grammars ---


def grammar_of(family: Family, tools: Sequence[Tool], *, must_call: bool, parallel: bool) -> Grammar:
    """Texts with calls of these tools; with free text before and after them unless one must be called."""
    rules = [_call_rule(family, i, tool) for i, tool in enumerate(tools)]
    calls = " | ".join(f"call_{i}" for i in range(len(tools)))
    more = "(" + _text("\n") + " call)*" if parallel and family != "llama" else ""
    if must_call:
        start = f"start: {'' if family == 'llama' else _text(OPEN)} body {more}\ncall: {_text(OPEN)} body"
    elif family == "llama":
        start = "start: body | FREE\nFREE: /[^{](.|\\n)*/"
    else:
        many = "*" if parallel else "?"
        start = f"start: begun{many} TEXT\nbegun: opened body\nopened[lazy]: TEXT {_text(OPEN)}\nTEXT: /(.|\\n)*/"
    return Grammar("lark", "\n".join(["%llguidance {}", start, f"body: {calls}", *rules]))


def _call_rule(family: Family, number: int, tool: Tool) -> str:
    if family == "coder":
        return _coder_rule(number, tool)
    named = {"name": {"const": tool.name}, ARGUMENTS[family]: tool.parameters}
    schema: JsonObject = {
        "type": "object",
        "properties": named,
        "required": list(named),
        "additionalProperties": False,
    } | WRITTEN
    schema |= {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    end = "" if family == "llama" else _text(CLOSE)
    return f"call_{number}: %json {json.dumps(schema)} {end}"


def _coder_rule(number: int, tool: Tool) -> str:
    parts, rules = [_text(f"<function={tool.name}>\n")], list[str]()
    for i, (name, schema) in enumerate(tool.parameters.get("properties", {}).items()):
        rule = f"value_{number}_{i}"
        optional = "" if name in tool.parameters.get("required", []) else "?"
        parts.append(f"({_text(f'<parameter={name}>' + chr(10))} {rule}){optional}")
        if schema.get("type") == "string" and "enum" not in schema:
            rules.append(f"{rule}[lazy]: /(.|\\n)*/ {_text(chr(10) + '</parameter>' + chr(10))}")
        elif schema.get("type") == "string":
            choices = " | ".join(_text(text) for text in schema["enum"])
            rules.append(f"{rule}: ({choices}) {_text(chr(10) + '</parameter>' + chr(10))}")
        else:
            rules.append(f"{rule}: %json {json.dumps(schema | WRITTEN)} {_text(chr(10) + '</parameter>' + chr(10))}")
    parts.append(_text("</function>" + CLOSE))
    return "\n".join([f"call_{number}: {' '.join(parts)}", *rules])


def _text(text: str) -> str:
    return json.dumps(text)


# --- calls in a text ---


class CallReader:
    """Content and calls of a text as it comes; arguments in JSON are handed on as they come."""

    def __init__(self, family: Family, tools: Sequence[Tool]) -> None:
        self._family, self._tools = family, {tool.name: tool.parameters for tool in tools}
        self._opening = '{"name": ' if family == "llama" else OPEN
        self._closing = {"hermes": "}" + CLOSE, "llama": "}", "coder": CLOSE}[family]
        self._held, self._state = "", "content"
        self._begun = self._ended = False
        self.num_calls = 0

    def push(self, text: str, *, is_last: bool = False) -> list[CallDelta]:
        """What the text adds; with is_last also what was held back."""
        self._held += text
        deltas = list[CallDelta]()
        while (delta := self._next(is_last)) is not None:
            deltas.append(delta)
        return [delta for delta in deltas if delta != CallDelta()]

    def _next(self, is_last: bool) -> CallDelta | None:
        """The next delta; None where more text is needed."""
        return {"content": self._content, "head": self._head, "arguments": self._arguments}[self._state](is_last)

    def _content(self, is_last: bool) -> CallDelta | None:
        place = self._held.find(self._opening)
        if self._family == "llama" and (self._begun or place > 0):
            place = -1  # only the whole answer is a call
        if place >= 0:
            shown, self._held = self._held[:place], self._held[place:]
            self._held = self._held if self._family == "llama" else self._held.removeprefix(OPEN)
            self._state = "head"
            return CallDelta(shown.rstrip("\n") if self.num_calls else shown)
        kept = 0 if is_last else _overlap(self._held, self._opening)
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        self._begun |= bool(shown)
        return CallDelta("" if self.num_calls and not shown.strip() else shown) if shown else None

    def _head(self, is_last: bool) -> CallDelta | None:
        if self._family == "coder":
            place = self._held.find(CLOSE)
            if place < 0:
                return None
            called, self._held = self._held[:place], self._held[place + len(CLOSE) :]
            self._state = "content"
            return self._of_coder(called)
        if (found := HEAD.match(self._held)) is None:
            return None
        self._held, self._state = self._held[found.end() :], "arguments"
        self.num_calls += 1
        return CallDelta(number=self.num_calls - 1, name=str(json.loads(found[1])))

    def _arguments(self, is_last: bool) -> CallDelta | None:
        number = self.num_calls - 1
        place = len(self._held) - 1 if self._family == "llama" and is_last else self._held.find(self._closing)
        if self._family == "llama" and not is_last:
            place = -1
        if place >= 0:
            shown, self._held = self._held[:place], self._held[place + len(self._closing) :]
            self._state, self._begun = "content", True
            return CallDelta(number=number, arguments=shown)
        kept = 1 if self._family == "llama" else _overlap(self._held, self._closing)
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return CallDelta(number=number, arguments=shown) if shown else None

    def _of_coder(self, called: str) -> CallDelta:
        found = CODER.search(called)
        if found is None:
            return CallDelta(OPEN + called + CLOSE)
        types = self._tools.get(found[1], {}).get("properties", {})
        values = {name: _typed(text, types.get(name, {})) for name, text in PARAMETER.findall(found[2])}
        self.num_calls += 1
        return CallDelta(number=self.num_calls - 1, name=found[1], arguments=json.dumps(values, ensure_ascii=False))


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


# --- messages ---


def in_words(messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> list[JsonObject]:
    """Messages for a template that knows no tools: definitions, calls and results as text, as Hermes has them."""
    found = list[JsonObject]()
    if tools:
        found.append({"role": "system", "content": PREAMBLE.format(tools="\n".join(map(json.dumps, tools)))})
    for message in messages:
        content = message.get("content") or ""
        if message["role"] == "system" and found and found[0]["role"] == "system":
            found[0]["content"] = f"{content}\n\n{found[0]['content']}"
        elif message["role"] == "tool":
            found.append({"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"})
        else:
            calls = [OPEN + json.dumps(call["function"]) + CLOSE for call in message.get("tool_calls", ())]
            content = "\n".join([content] * bool(content or not calls) + calls)
            found.append({"role": message["role"], "content": content})
    return found
