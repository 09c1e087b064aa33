"""Fields of a request that ask for structured outputs, as OpenAI (`response_format`) and vLLM name them."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from blockpilot.constraints.grammar import ANY_OBJECT, Grammar, of_choices, of_schema

MAX_FIELDS = 64  # of an object: bounds what a bad body makes us build
MAX_CHOICES_OF_TEXT = 1024


class JsonBody(BaseModel):
    """A JSON object; null means absent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"{len(value)} fields; at most {MAX_FIELDS} are read")
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class NamedSchema(JsonBody):
    """OpenAI's json_schema; the schema is followed whether `strict` or not."""

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
            raise ValueError('json_schema: stands where type is "json_schema", and nowhere else')
        return self

    @property
    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        return of_schema(ANY_OBJECT if self.json_schema is None else self.json_schema.schema_)


class StructuredOutputs(JsonBody):
    """vLLM's structured_outputs: one of them."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES_OF_TEXT)
    grammar_: str | None = Field(None, alias="grammar")
    """In Lark's or GBNF's notation."""
    whitespace_pattern: str | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "StructuredOutputs":
        asked = (self.json_, self.json_object, self.regex, self.choice, self.grammar_)
        if sum(each is not None for each in asked) != 1:
            raise ValueError("one of json, json_object, regex, choice and grammar is needed, and no more")
        return self

    @property
    def grammar(self) -> Grammar:
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.choice is not None:
            return of_choices(self.choice)
        if self.grammar_ is not None:
            return Grammar("grammar", self.grammar_)
        schema = ANY_OBJECT if self.json_ is None else _parsed(self.json_)
        if not isinstance(schema, Mapping):  # what is wrong with it is said when it is compiled
            return Grammar("json", str(self.json_), self.whitespace_pattern)
        return of_schema(schema, self.whitespace_pattern)


def _parsed(schema: Any) -> Any:
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError):
        return None


def structured(response_format: ResponseFormat | None, outputs: StructuredOutputs | None) -> Grammar | None:
    """What a request's text must match; raises ValueError where both fields say something."""
    of_format = None if response_format is None else response_format.grammar
    if of_format is not None and outputs is not None:
        raise ValueError("structured_outputs: response_format asks for a structure, too; one of them is needed")
    return of_format if outputs is None else outputs.grammar
