"""Fields of a chat request that have to do with tools, as OpenAI names them."""

from typing import Annotated, Any, Literal

from pydantic import Field

from jobs.serving.structured import JsonBody
from jobs.serving.tool_calls import JsonObject, Tool

MAX_TOOLS = 128
NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionBody(JsonBody):
    """A function that may be called; its schema is followed whether `strict` or not."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: dict(NO_PARAMETERS))
    strict: bool = True


class ToolBody(JsonBody):
    """One of `tools`."""

    type: Literal["function"]
    function: FunctionBody

    @property
    def tool(self) -> Tool:
        return Tool(self.function.name, self.function.parameters)

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
    """Name and arguments of a call; the latter are JSON in a string."""

    name: Name
    arguments: str


class CallBody(JsonBody):
    """A call that the assistant made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunctionBody
