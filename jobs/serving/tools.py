"""Fields of a chat request that have to do with tools, as OpenAI names them."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from blockpilot.constraints.schemas import JsonObject
from jobs.serving.structured import JsonBody
from jobs.serving.tool_calls import Tool

MAX_TOOLS = 128
MAX_CALLED = 256  # characters of the name of a call that was made
NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


def without(given: Any, ignored: tuple[str, ...]) -> Any:
    """A JSON object without the fields that say nothing to a model."""
    return {key: value for key, value in given.items() if key not in ignored} if isinstance(given, dict) else given


class FunctionBody(JsonBody):
    """A function that may be called.

    Its schema is followed whether `strict` or not; of one that is not, what no grammar can enforce is dropped.
    """

    name: Name
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: dict(NO_PARAMETERS))
    strict: bool = False

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, given: Any) -> Any:
        return without(given, ("cache_control",))


class ToolBody(JsonBody):
    """One of `tools`."""

    type: Literal["function"]
    function: FunctionBody

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, given: Any) -> Any:
        return without(given, ("cache_control",))

    @property
    def tool(self) -> Tool:
        return Tool(self.function.name, self.function.parameters, self.function.strict)

    @property
    def shown(self) -> JsonObject:
        """As a chat template takes it."""
        return {"type": "function", "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


class NamedFunctionBody(JsonBody):
    """The name of a function."""

    name: Name


class ToolChoiceBody(JsonBody):
    """`tool_choice` of one function."""

    type: Literal["function"]
    function: NamedFunctionBody


class CalledFunctionBody(JsonBody):
    """Name and arguments of a call; the latter are JSON in a string, or what a model made of it."""

    name: str = Field(min_length=1, max_length=MAX_CALLED)
    arguments: Annotated[
        str, BeforeValidator(lambda value: value if isinstance(value, str) else json.dumps(value))
    ] = ""

    @model_validator(mode="before")
    @classmethod
    def _as_sent_back(cls, given: Any) -> Any:
        return without(given, ("parsed_arguments",))


class CallBody(JsonBody):
    """A call that the assistant made in an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunctionBody

    @model_validator(mode="before")
    @classmethod
    def _as_sent_back(cls, given: Any) -> Any:
        return without(given, ("index", "cache_control", "provider_specific_fields", "extra_content"))
