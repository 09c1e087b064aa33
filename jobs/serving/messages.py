"""Messages of a conversation, as OpenAI has them, and as chat templates take them."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from jobs.serving.errors import short
from jobs.serving.structured import JsonBody
from jobs.serving.tool_calls import JsonObject
from jobs.serving.tools import MAX_TOOLS, CallBody


def _content_text(value: Any) -> Any:
    """OpenAI's content is a string or a list of parts; text parts are joined by newlines."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('must be a string or a list of {"type": "text", "text": ...} parts')
    return "\n".join(part["text"] for part in value)


def _object(text: str) -> Any:
    """The object that a string of JSON holds; raises ValueError, naming it, for anything else."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"tool_calls: arguments {short(text)} are no JSON object")
    return found


class ChatMessage(JsonBody):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_content_text)]
    tool_calls: list[CallBody] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _calls_are_content(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("tool_calls") and given.get("content") is None:
            return given | {"content": ""}
        return given

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls: only the assistant's messages have some")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id: a message of a tool names the call that it answers")
        return self

    @property
    def shown(self) -> JsonObject:
        """As a chat template takes it: arguments are objects there."""
        found: JsonObject = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        calls = [
            {"name": call.function.name, "arguments": _object(call.function.arguments)} for call in self.tool_calls
        ]
        return found | ({"tool_calls": [{"type": "function", "function": call} for call in calls]} if calls else {})
