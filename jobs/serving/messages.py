"""Parts of a request's schema: structured outputs, tools and messages, with the names of OpenAI and vLLM.

Clients send earlier answers back, with fields that other servers and libraries have added. Fields that do not concern
the model are accepted and dropped; reasoning, names and ids are passed to the chat template.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from blockpilot.constraints.grammar import ANY_OBJECT, Grammar, choice_grammar, schema_grammar
from blockpilot.constraints.schemas import JsonObject
from jobs.serving.constraints.tools import Tool

MAX_FIELDS = 64  # of an object: limits the work for a bad body
MAX_CHOICES_OF_TEXT = 1024


class JsonBody(BaseModel):
    """A JSON object; null means absent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    ignored: ClassVar[tuple[str, ...]] = ()
    """Fields that do not concern the model, which are dropped."""

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_FIELDS:
            raise ValueError(f"{len(value)} fields; at most {MAX_FIELDS} are read")
        return {k: v for k, v in value.items() if v is not None and k not in cls.ignored}


class NamedSchema(JsonBody):
    """OpenAI's json_schema; the schema is enforced with and without `strict`."""

    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=lambda: dict(ANY_OBJECT), alias="schema")
    strict: bool = True


class ResponseFormat(JsonBody):
    """OpenAI's response_format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('json_schema: required with type "json_schema", and only then')
        return self

    @property
    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        return schema_grammar(ANY_OBJECT if self.json_schema is None else self.json_schema.schema_)


def _schema(value: Any) -> Any:
    if not isinstance(value, dict | str):
        raise ValueError("must be a JSON Schema: an object, or its text")
    return value


class StructuredOutputs(JsonBody):
    """vLLM's structured_outputs: exactly one of the constraints."""

    json_: Annotated[dict[str, Any] | str | None, BeforeValidator(_schema)] = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES_OF_TEXT)
    grammar_: str | None = Field(None, alias="grammar")
    """Grammar in Lark's or GBNF's notation."""
    whitespace_pattern: str | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "StructuredOutputs":
        constraints = (self.json_, self.json_object, self.regex, self.choice, self.grammar_)
        if sum(constraint is not None for constraint in constraints) != 1:
            raise ValueError("exactly one of json, json_object, regex, choice and grammar is needed")
        return self

    @property
    def grammar(self) -> Grammar:
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.choice is not None:
            return choice_grammar(self.choice)
        if self.grammar_ is not None:
            return Grammar("grammar", self.grammar_)
        schema = ANY_OBJECT if self.json_ is None else _parsed(self.json_)
        if not isinstance(schema, Mapping):  # its compilation raises the error
            return Grammar("json", str(self.json_), self.whitespace_pattern)
        return schema_grammar(schema, self.whitespace_pattern)


def _parsed(schema: Any) -> Any:
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError):
        return None


def structured(response_format: ResponseFormat | None, outputs: StructuredOutputs | None) -> Grammar | None:
    """Grammar that the text must match; raises ValueError if both fields set one."""
    format_grammar = None if response_format is None else response_format.grammar
    if format_grammar is not None and outputs is not None:
        raise ValueError("structured_outputs: response_format asks for a structure, too; one of them is needed")
    return format_grammar if outputs is None else outputs.grammar


MAX_TOOLS = 128
MAX_CALLED = 256  # characters of the function name in an earlier call
NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionBody(JsonBody):
    """A function that may be called.

    Its schema is enforced with and without `strict`; without it, keywords that no grammar can enforce are dropped.
    """

    ignored = ("cache_control",)
    name: Name
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: dict(NO_PARAMETERS))
    strict: bool = False


class ToolBody(JsonBody):
    """Element of `tools`."""

    ignored = ("cache_control",)
    type: Literal["function"]
    function: FunctionBody

    @property
    def tool(self) -> Tool:
        return Tool(self.function.name, self.function.parameters, self.function.strict)

    @property
    def shown(self) -> JsonObject:
        """Definition for the chat template."""
        return {"type": "function", "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


class NamedFunctionBody(JsonBody):
    """The name of a function."""

    name: Name


class ToolChoiceBody(JsonBody):
    """`tool_choice` that requires one function."""

    type: Literal["function"]
    function: NamedFunctionBody


class CalledFunctionBody(JsonBody):
    """Name and arguments of a call; arguments are JSON in a string, possibly truncated or invalid."""

    ignored = ("parsed_arguments",)
    name: str = Field(min_length=1, max_length=MAX_CALLED)
    arguments: Annotated[
        str, BeforeValidator(lambda value: value if isinstance(value, str) else json.dumps(value))
    ] = ""


class CallBody(JsonBody):
    """A call that the assistant made in an earlier turn."""

    ignored = ("index", "cache_control", "provider_specific_fields", "extra_content")
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunctionBody


TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
IGNORED = (
    *("annotations", "cache_control", "id", "index", "parsed", "provider_specific_fields", "reasoning_details"),
    *("refusal", "thinking_blocks"),
)


def _content_text(value: Any) -> Any:
    """Text of OpenAI's content, a string or a list of parts, which are joined by newlines."""
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
    """Name in DeepSeek's API and many templates; vLLM's name is `reasoning`."""

    @model_validator(mode="before")
    @classmethod
    def _as_sent_back(cls, body: Any) -> Any:
        """Drop ignored fields; in assistant and tool messages, missing content becomes the refusal or ""."""
        if not isinstance(body, dict):
            return body
        message = {key: value for key, value in body.items() if key not in IGNORED}
        if (reasoning := message.pop("reasoning", None)) is not None:
            message.setdefault("reasoning_content", reasoning)
        if message.get("content") is None and body.get("role") in ("assistant", "tool"):
            message["content"] = body.get("refusal") or ""
        return message

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls: only messages of the assistant may have tool calls")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id: required in messages of a tool")
        return self


def shown(messages: Sequence[ChatMessage], *, plain: bool = False) -> list[JsonObject]:
    """Messages for the chat template, with arguments as objects.

    Arguments that are not a JSON object, such as those of an interrupted call, stay text; with `plain` the text is
    wrapped in an object, for templates that need one.
    """
    names = {call.id: call.function.name for message in messages for call in message.tool_calls if call.id}
    return [_shown(message, names, plain) for message in messages]


def _shown(message: ChatMessage, names: dict[str, str], plain: bool) -> JsonObject:
    name = message.name or (names.get(message.tool_call_id or "") if message.role == "tool" else None)
    fields: JsonObject = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.content,
        "reasoning_content": message.reasoning_content,
        "reasoning": message.reasoning_content,
        "name": name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": [_shown_call(call, plain) for call in message.tool_calls],
    }
    return {key: value for key, value in fields.items() if key in ("role", "content") or value}


def _shown_call(call: CallBody, plain: bool) -> JsonObject:
    arguments = _object(call.function.arguments)
    if plain and isinstance(arguments, str):
        arguments = {"arguments": arguments}
    shown_call = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return shown_call | ({"id": call.id} if call.id else {})


def _object(text: str) -> JsonObject | str:
    """The JSON object in a string; the string itself if it is not one."""
    try:
        value = json.loads(text or "{}")
        json.dumps(value, ensure_ascii=False).encode()  # raises for lone surrogates and deep nesting
    except (ValueError, RecursionError):
        return text
    return {} if value is None else value if isinstance(value, dict) else text
