"""Request bodies of OpenAI's chat and completions endpoints.

Fields of the API that this server does not support are refused by name, never ignored; null, and the value that
changes nothing (such as best_of=1), are accepted. Extensions: `block_size` (or llama.cpp's `speculative.n_max`),
`layout`, `top_k`, `timeout_s`, `cache_salt` and `structured_outputs` in a request, `stream_options.include_steps` in
a stream's.
"""

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BeforeValidator,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from blockpilot.constraints.grammar import Grammar
from blockpilot.types import MAX_BLOCK_SIZE, Layout
from jobs.serving.errors import ApiError, short
from jobs.serving.messages import ChatMessage
from jobs.serving.structured import JsonBody, ResponseFormat, StructuredOutputs, structured
from jobs.serving.tool_calls import Tool
from jobs.serving.tools import MAX_TOOLS, ToolBody, ToolChoiceBody

MAX_STOPS = 4
MAX_MESSAGES = 4096  # of a conversation: bounds what a bad body makes us build
MAX_CHOICES = 8
MAX_SALT = 256  # characters
MAX_TOP_LOGPROBS, MAX_COMPLETION_LOGPROBS = 20, 5  # of chat and of completions, as OpenAI documents them
DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as OpenAI documents it

# Fields of OpenAI's and vLLM's API that are not supported, and the value with which each changes nothing.
NEUTRAL: Mapping[str, object] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "ignore_eos": False,
    "logit_bias": {},
    "logprobs": False,
    "min_p": 0,
    "min_tokens": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "store": False,
}


def _block_size(value: Any) -> Any:
    if value == "auto":
        return None
    if type(value) is not int or value < 1:
        raise ValueError('must be "auto" or an integer of at least 1')
    return value


def _prompt(value: Any) -> Any:
    is_ids = isinstance(value, list) and all(type(item) is int for item in value)
    if not (isinstance(value, str) or is_ids):
        raise ValueError("must be one string or one list of token ids")
    return value


class StreamOptions(JsonBody):
    """Extra contents of a stream."""

    include_usage: bool = False
    include_steps: bool = False
    """Every chunk has its step: block size, drafted tokens and their parents (0 is the token before, i the i-th), the
    path that was accepted, and the text of every token."""


class GenerateRequest(JsonBody):
    """Fields that both endpoints share."""

    path: ClassVar[str]
    prompt_field: ClassVar[str]

    model: str
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(0, ge=0)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        FailFast(),
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        Field(max_length=MAX_STOPS),
    ] = Field(default_factory=list)
    block_size: Annotated[int | None, BeforeValidator(_block_size)] = None
    n_max: int | None = Field(None, ge=0, lt=MAX_BLOCK_SIZE, alias="speculative.n_max")
    """Drafted tokens of a step, as llama.cpp counts them: block_size without the anchor."""
    layout: Layout = "auto"
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    user: str | None = None
    cache_salt: str = Field("", max_length=MAX_SALT)
    """Only requests with the same one share kept prefixes; as vLLM names it."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if not _neutral(k, v)} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _check_n_max(self) -> Self:
        if self.n_max is not None and self.block_size is not None:
            raise ValueError("speculative.n_max: block_size says the same; one of them is needed")
        return self

    @model_validator(mode="after")
    def _check_structure(self) -> Self:
        structured(self.response_format, self.structured_outputs)
        return self

    @property
    def size(self) -> int | None:
        """Tokens that a step verifies; None lets the policy choose."""
        return self.block_size if self.n_max is None else self.n_max + 1

    @property
    def grammar(self) -> Grammar | None:
        """What the text must match."""
        return structured(self.response_format, self.structured_outputs)

    @property
    def grammar_field(self) -> str:
        """The field that says so."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"


class ChatRequest(GenerateRequest):
    """POST /v1/chat/completions."""

    path: ClassVar[str] = "/v1/chat/completions"
    prompt_field: ClassVar[str] = "messages"

    messages: Annotated[list[ChatMessage], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Annotated[list[ToolBody], FailFast()] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceBody = "auto"
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [each.function.name for each in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("tools: each must have a name of its own")
        if isinstance(self.tool_choice, ToolChoiceBody) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: {short(self.tool_choice.function.name)} is none of the tools")
        if self.must_call and not self.tools:
            raise ValueError("tool_choice: there are no tools")
        if self.callable_tools and self.grammar is not None:
            raise ValueError("tools: response_format or structured_outputs ask for a structure, too; one is needed")
        return self

    @property
    def must_call(self) -> bool:
        """True if the answer is to be a call."""
        return self.tool_choice not in ("none", "auto")

    @property
    def callable_tools(self) -> list[Tool]:
        """Those that the answer may call."""
        if isinstance(self.tool_choice, ToolChoiceBody):
            return [each.tool for each in self.tools if each.function.name == self.tool_choice.function.name]
        return [] if self.tool_choice == "none" else [each.tool for each in self.tools]

    @field_validator("top_logprobs")
    @classmethod
    def _check_top_logprobs(cls, value: int | None, found: ValidationInfo) -> int | None:
        if value is not None and not found.data.get("logprobs"):
            raise ValueError("needs logprobs: true")
        return value

    @property
    def num_tokens_asked(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def prompt_text(self) -> str:
        """The prompt as text, for a log."""
        return "\n".join(f"{message.role}: {message.content}" for message in self.messages)

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens reported with every token; None for no log probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerateRequest):
    """POST /v1/completions."""

    path: ClassVar[str] = "/v1/completions"
    prompt_field: ClassVar[str] = "prompt"

    prompt: Annotated[str | list[int], BeforeValidator(_prompt)]
    logprobs: int | None = Field(None, ge=0, le=MAX_COMPLETION_LOGPROBS)

    @property
    def num_tokens_asked(self) -> int:
        return self.max_tokens if self.max_tokens is not None else DEFAULT_COMPLETION_TOKENS

    @property
    def prompt_text(self) -> str:
        return str(self.prompt)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


def _neutral(name: str, value: object) -> bool:
    known = NEUTRAL.get(name)  # never None; a bool differs from the number that it equals
    return known is not None and value == known and isinstance(value, bool) == isinstance(known, bool)


Body = ChatRequest | CompletionRequest
Objects = AsyncGenerator[dict[str, Any] | ApiError, None]
"""The objects of a response: one, or the chunks of a stream. An ApiError, the last one, is why there are no more."""
BodyT = TypeVar("BodyT", bound=GenerateRequest)


def parse(kind: type[BodyT], raw: bytes) -> BodyT:
    """Read a request body; raises ApiError 400 that names the first field that is wrong."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(map(str, first["loc"])) or None
        raise ApiError(400, _complaint(path, first), path, str(first["type"])) from None


def _complaint(path: str | None, error: Mapping[str, Any]) -> str:
    message = error["msg"].removeprefix("Value error, ")
    if path is None:
        return f"request body: {message}"
    if error["type"] == "missing":
        return f"{path}: this field is required"
    if error["type"] != "extra_forbidden":
        return f"{path}: {message} (got {short(error['input'])})"
    if path in NEUTRAL:
        return f"{path}: {short(error['input'])} is not supported; allowed: {json.dumps(NEUTRAL[path])}"
    return f"{path}: this field is not supported"
