"""Messages of a conversation, as OpenAI has them, and as chat templates take them.

Clients send back what they were given, with fields that other servers and libraries have added to it. Those that say
nothing to a model are accepted and left out; reasoning, names and ids are given to the template.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from blockpilot.constraints.schemas import JsonObject
from jobs.serving.structured import JsonBody
from jobs.serving.tools import MAX_TOOLS, CallBody, without

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
IGNORED = (
    *("annotations", "cache_control", "id", "index", "parsed", "provider_specific_fields", "reasoning_details"),
    *("refusal", "thinking_blocks"),
)


def _content_text(value: Any) -> Any:
    """OpenAI's content is a string or a list of parts; text parts are joined by newlines."""
    return "\n".join(map(_part_text, value)) if isinstance(value, list) else value


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
    if not isinstance(text, str):
        raise ValueError('must be a string or a list of {"type": "text", "text": ...} parts')
    return text


class ChatMessage(JsonBody):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_content_text)]
    tool_calls: list[CallBody] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """As DeepSeek's API and many templates name it; vLLM's name is `reasoning`."""

    @model_validator(mode="before")
    @classmethod
    def _as_sent_back(cls, given: Any) -> Any:
        """Without what says nothing; content may be absent where there is a refusal, or in an answer or a result."""
        if not isinstance(given, dict):
            return given
        found = without(given, IGNORED)
        if (reasoning := found.pop("reasoning", None)) is not None:
            found.setdefault("reasoning_content", reasoning)
        if found.get("content") is None and given.get("role") in ("assistant", "tool"):
            found["content"] = given.get("refusal") or ""
        return found

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls: only the assistant's messages have some")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id: a message of a tool names the call that it answers")
        return self


def shown(messages: Sequence[ChatMessage], *, plain: bool = False) -> list[JsonObject]:
    """Messages as a chat template takes them, arguments as objects.

    Arguments that are no JSON object, such as those of a call that was cut, stay the text that they are; with `plain`
    they are an object that holds it, for templates that need one.
    """
    names = {call.id: call.function.name for message in messages for call in message.tool_calls if call.id}
    return [_shown(message, names, plain) for message in messages]


def _shown(message: ChatMessage, names: dict[str, str], plain: bool) -> JsonObject:
    name = message.name or (names.get(message.tool_call_id or "") if message.role == "tool" else None)
    found: JsonObject = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.content,
        "reasoning_content": message.reasoning_content,
        "reasoning": message.reasoning_content,
        "name": name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": [_shown_call(call, plain) for call in message.tool_calls],
    }
    return {key: value for key, value in found.items() if key in ("role", "content") or value}


def _shown_call(call: CallBody, plain: bool) -> JsonObject:
    arguments = _object(call.function.arguments)
    if plain and isinstance(arguments, str):
        arguments = {"arguments": arguments}
    shown_call = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return shown_call | ({"id": call.id} if call.id else {})


def _object(text: str) -> JsonObject | str:
    """The object that a string of JSON holds; the string itself where it holds none."""
    try:
        found = json.loads(text or "{}")
        json.dumps(found, ensure_ascii=False).encode()  # no half of a surrogate pair, and not nested too deeply
    except (ValueError, RecursionError):
        return text
    return {} if found is None else found if isinstance(found, dict) else text
