"""Request bodies of OpenAI's chat and completions endpoints.

Unsupported fields are refused by name, never ignored; null, and values that change nothing (fields.py), are accepted.
Sampling options beyond OpenAI's have vLLM's names. Extensions: `block_size` (or llama.cpp's `speculative.n_max`),
`layout`, `lookup`, `timeout_s`, `cache_salt` and `structured_outputs`, and `stream_options.include_steps` in a
stream.
"""

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
from blockpilot.types import MAX_BLOCK_SIZE, Layout, Sampling
from jobs.serving.constraints.tools import Tool
from jobs.serving.fields import NEUTRAL, ApiError, Biases, Flag, Metadata, Whole, allowed, is_neutral, short, whole
from jobs.serving.messages import (
    MAX_TOOLS,
    ChatMessage,
    JsonBody,
    ResponseFormat,
    StructuredOutputs,
    ToolBody,
    ToolChoiceBody,
    structured,
)

MAX_STOPS = 16  # OpenAI accepts 4; evaluations send more
MAX_STOP_LENGTH = 4096  # characters; a partial match is held back up to this length
MAX_STOP_TOKENS = 256
MAX_MESSAGES = 4096  # of a conversation: limits the work for a bad body
MAX_CHOICES = 8
MAX_SALT = 256  # characters
MAX_TOP_LOGPROBS, MAX_COMPLETION_LOGPROBS = 20, 5  # of chat and of completions, as OpenAI documents them
DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as OpenAI documents it
# Arguments of `apply_chat_template` that only the server sets.
TEMPLATE_FIELDS = {"conversation", "messages", "tools", "documents", "chat_template", "tokenize", "tokenizer_kwargs"}
TEMPLATE_FIELDS |= {"add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length"}
TEMPLATE_FIELDS |= {"return_tensors", "return_dict", "return_assistant_tokens_mask"}


Prompt = str | list[int]
"""Prompt of a completion: text, or token ids."""


def _block_size(value: Any) -> Any:
    if value == "auto":
        return None
    if type(size := whole(value)) is not int or size < 1:
        raise ValueError('must be "auto" or an integer of at least 1')
    return size


def _is_prompt(value: Any) -> bool:
    is_ids = isinstance(value, list) and all(type(token) is int for token in value)
    return value != "" and value != [] and (isinstance(value, str) or is_ids)


def _prompts(value: Any) -> list[Prompt]:
    prompts = [value] if _is_prompt(value) else value
    if not isinstance(prompts, list) or not prompts or not all(map(_is_prompt, prompts)):
        raise ValueError("must be a string, a list of token ids, or a list of such prompts; none of them empty")
    return prompts


def _tool_choice(value: Any) -> Any:
    if isinstance(value, dict):
        return ToolChoiceBody.model_validate(value)
    if value not in ("none", "auto", "required"):
        raise ValueError('must be "none", "auto", "required", or an object that names a function')
    return value


class StreamOptions(JsonBody):
    """Additional contents of a stream."""

    include_usage: Flag = False
    continuous_usage_stats: Flag = False
    """Every chunk has the usage so far; vLLM's name."""
    include_obfuscation: Literal[False] = False
    include_steps: Flag = False
    """Every chunk has its step: block size, proposed tokens (`drafted`), their parents (0 is the anchor, i the i-th
    proposed token) and sources (SOURCE_NAMES), the accepted path, and the text of every token."""


class GenerateRequest(JsonBody):
    """Fields of both endpoints."""

    path: ClassVar[str]
    prompt_field: ClassVar[str]

    model: str
    n: Whole = Field(1, ge=1, le=MAX_CHOICES)
    best_of: Whole | None = None
    """Must be 1 or n: all choices are returned."""
    max_tokens: Whole | None = Field(None, ge=1)
    max_completion_tokens: Whole | None = Field(None, ge=1)
    """Newer name of max_tokens; takes precedence."""
    min_tokens: Whole = Field(0, ge=0)
    """Minimum tokens of the answer before a stop token or stop string may end it."""
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: Whole = Field(0, ge=-1)
    """0 and -1 keep all tokens."""
    min_p: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100, allow_inf_nan=False)
    logit_bias: Biases = Field(default_factory=dict)
    seed: Whole | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
        FailFast(),
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        Field(max_length=MAX_STOPS),
    ] = Field(default_factory=list)
    stop_token_ids: Annotated[list[Whole], FailFast(), Field(max_length=MAX_STOP_TOKENS)] = Field(
        default_factory=list
    )
    """Stop tokens in addition to the model's."""
    ignore_eos: Flag = False
    """Ignore the model's stop tokens."""
    block_size: Annotated[int | None, BeforeValidator(_block_size)] = None
    n_max: Whole | None = Field(None, ge=0, lt=MAX_BLOCK_SIZE, alias="speculative.n_max")
    """llama.cpp's maximum of drafted tokens per step: block_size without the anchor."""
    layout: Layout = "auto"
    lookup: Flag | None = None
    """Prompt lookup: also verify continuations found in the text; null lets the controller decide at each step."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: Flag = False
    stream_options: StreamOptions = StreamOptions()
    prompt_logprobs: Whole | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """Log probabilities of the prompt's tokens, with this many of the most likely ones, as in vLLM."""
    timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    cache_salt: str = Field("", max_length=MAX_SALT)
    """Only requests with the same salt share cached prefixes; vLLM's name."""
    # Accepted without any effect on the answer.
    metadata: Metadata | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    request_id: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if not is_neutral(k, v)} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _check_n_max(self) -> Self:
        if self.n_max is not None and self.block_size is not None:
            raise ValueError("speculative.n_max: block_size says the same; one of them is needed")
        return self

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        if self.num_tokens_asked is not None and self.min_tokens > self.num_tokens_asked:
            raise ValueError(f"min_tokens: {self.min_tokens} are more than max_tokens, {self.num_tokens_asked}")
        if self.best_of not in (None, 1, self.n):
            raise ValueError(f"best_of: {self.best_of} is not supported; allowed: 1 or n, {self.n}")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: not supported in streams")
        return self

    @model_validator(mode="after")
    def _check_structure(self) -> Self:
        structured(self.response_format, self.structured_outputs)
        return self

    @property
    def num_tokens_asked(self) -> int | None:
        """Maximum tokens of an answer; None if only the context limits them."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_choices(self) -> int:
        """Number of choices of the response."""
        return self.n

    def sampling(self, seed: int) -> Sampling:
        """Sampling parameters with this seed."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            seed=seed,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple(self.logit_bias.items()),
        )

    @property
    def num_echo_logprobs(self) -> int | None:
        """Number of most likely tokens reported with every token of an echoed prompt; None without logprobs."""
        return None

    @property
    def size(self) -> int | None:
        """Block size; None lets the policy choose."""
        return self.block_size if self.n_max is None else self.n_max + 1

    @property
    def grammar(self) -> Grammar | None:
        """Grammar that the text must match."""
        return structured(self.response_format, self.structured_outputs)

    @property
    def grammar_field(self) -> str:
        """Name of the field that sets the grammar."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"


class ChatRequest(GenerateRequest):
    """POST /v1/chat/completions."""

    path: ClassVar[str] = "/v1/chat/completions"
    prompt_field: ClassVar[str] = "messages"

    messages: Annotated[list[ChatMessage], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: Flag = False
    top_logprobs: Whole | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Annotated[list[ToolBody], FailFast()] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Annotated[Literal["none", "auto", "required"] | ToolChoiceBody, BeforeValidator(_tool_choice)] = (
        "auto"
    )
    parallel_tool_calls: Flag = True
    add_special_tokens: Literal[False] = False
    """Must be false: the chat template writes special tokens."""
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    """The answer continues the last message."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Additional variables of the chat template."""
    reasoning_effort: str = "none"
    """Variable of the chat template, if the template uses it; none for no reasoning."""

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        if reserved := sorted(TEMPLATE_FIELDS & self.chat_template_kwargs.keys()):
            raise ValueError(f"chat_template_kwargs: {reserved[0]} is set by the server")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message: needs add_generation_prompt: false")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("tools: names must be unique")
        if isinstance(self.tool_choice, ToolChoiceBody) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: {short(self.tool_choice.function.name)} is not one of the tools")
        if self.must_call and not self.tools:
            raise ValueError("tool_choice: there are no tools")
        if self.callable_tools and self.grammar is not None and self.grammar.kind != "json":
            raise ValueError("tools: structured_outputs also asks for a text that is not JSON; choose one")
        return self

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template other than messages and tools."""
        effort = {} if self.reasoning_effort == "none" else {"reasoning_effort": self.reasoning_effort}
        ends = {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }
        return self.chat_template_kwargs | effort | ends

    @property
    def must_call(self) -> bool:
        """True if the answer must be a tool call."""
        return self.tool_choice not in ("none", "auto")

    @property
    def callable_tools(self) -> list[Tool]:
        """Tools that the answer may call."""
        if isinstance(self.tool_choice, ToolChoiceBody):
            return [tool.tool for tool in self.tools if tool.function.name == self.tool_choice.function.name]
        return [] if self.tool_choice == "none" else [tool.tool for tool in self.tools]

    @field_validator("top_logprobs")
    @classmethod
    def _check_top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("needs logprobs: true")
        return value

    @property
    def prompt_text(self) -> str:
        """The prompt as text, for logs."""
        return "\n".join(f"{message.role}: {message.content}" for message in self.messages)

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens reported with every token; None for no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerateRequest):
    """POST /v1/completions."""

    path: ClassVar[str] = "/v1/completions"
    prompt_field: ClassVar[str] = "prompt"

    prompt: Annotated[list[Prompt], BeforeValidator(_prompts)]
    """List of prompts; the client may send a single one."""
    max_tokens: Whole | None = Field(None, ge=0)
    logprobs: Whole | None = Field(None, ge=0, le=MAX_COMPLETION_LOGPROBS)
    echo: Flag = False
    """Text and log probabilities begin with those of the prompt."""
    add_special_tokens: Flag = True
    """Add the tokenizer's special tokens to text prompts."""

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 needs echo: true")
        return self

    @property
    def num_tokens_asked(self) -> int:
        num_tokens = super().num_tokens_asked
        return DEFAULT_COMPLETION_TOKENS if num_tokens is None else num_tokens

    @property
    def num_choices(self) -> int:
        return len(self.prompt) * self.n

    @property
    def num_echo_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    @property
    def prompt_text(self) -> str:
        return "\n".join(map(str, self.prompt))

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


Body = ChatRequest | CompletionRequest
Objects = AsyncGenerator[dict[str, Any] | ApiError, None]
"""Objects of a response: one, or the chunks of a stream. After an error the last object is an ApiError."""
BodyT = TypeVar("BodyT", bound=GenerateRequest)


def parse(kind: type[BodyT], raw: bytes) -> BodyT:
    """Parse a request body; raises ApiError 400 that names the first invalid field."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(map(_shown, first["loc"])) or _named(kind, first)
        raise ApiError(400, _complaint(path, first), path, str(first["type"])) from None


def _shown(part: str | int) -> str:
    """Part of a field's path; `repr` of an unprintable name, since a client may send any name."""
    return part if isinstance(part, str) and part.isprintable() else repr(part)


def _named(kind: type[GenerateRequest], error: Mapping[str, Any]) -> str | None:
    """The field at the beginning of an error message about several fields."""
    name = _message(error).partition(":")[0]
    return name if name in {field.alias or field_name for field_name, field in kind.model_fields.items()} else None


def _message(error: Mapping[str, Any]) -> str:
    return str(error["msg"]).removeprefix("Value error, ")


def _complaint(path: str | None, error: Mapping[str, Any]) -> str:
    message = _message(error)
    if not error["loc"]:
        return message if path else f"request body: {message}"
    if error["type"] == "missing":
        return f"{path}: this field is required"
    if error["type"] != "extra_forbidden":
        return f"{path}: {message} (got {short(error['input'])})"
    if path and path in NEUTRAL:
        return f"{path}: {short(error['input'])} is not supported; allowed: {allowed(path)}"
    return f"{path}: this field is not supported"
