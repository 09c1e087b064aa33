"""Grammars of structured outputs, in the form that llguidance compiles.

JSON has the spacing of Python's json.dumps, one space after a comma and a colon, unless a pattern allows other white
space. Most of a schema's own characters are then forced, and a model cannot fill its answer with blanks. JSON without
any spaces is unlike a small model's training data, and fewer drafted tokens are accepted.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from llguidance import LLMatcher, LLParserLimits, grammar_from

from blockpilot.constraints.schemas import check_exact, prepared

MAX_BYTES = 2**17  # of a grammar's source
SEPARATORS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class Grammar(NamedTuple):
    """Source of a grammar. white_space: a regular expression of the white space between tokens of a JSON text."""

    kind: Literal["json", "regex", "choice", "grammar", "lark"]
    source: str
    """A JSON Schema, a regular expression, a JSON list of texts, a Lark or GBNF grammar."""
    white_space: str | None = None

    def compiled_from(self) -> str:
        """The grammar in llguidance's format; raises ValueError if the source is too long or invalid."""
        _check_size(len(self.source.encode()))
        if self.kind != "json":
            return grammar_from(self.kind, self.source)
        return LLMatcher.grammar_from_json_schema(self.source, overrides=self.spacing)

    @property
    def spacing(self) -> Any:
        """llguidance's options for the white space of a JSON text."""
        return SEPARATORS if self.white_space is None else {"whitespace_pattern": self.white_space}


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        raise ValueError(f"grammar of {num_bytes} bytes: at most {MAX_BYTES} are compiled")


def schema_grammar(schema: Mapping[str, Any], white_space: str | None = None) -> Grammar:
    """Grammar of JSON texts valid under a schema; raises ValueError for integers that llguidance would round, and for
    a schema that is too long or nested too deeply.
    """
    try:
        _check_size(len(json.dumps(schema)))  # before work that grows with it
        prepared_schema = prepared(dict(schema))
        check_exact(prepared_schema)
        return Grammar("json", json.dumps(prepared_schema), white_space)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def choice_grammar(texts: Sequence[str]) -> Grammar:
    """Grammar of exactly one of these texts."""
    return Grammar("choice", json.dumps(texts))


def limits(max_lexer_states: int = 50_000, step_max_items: int = 10_000) -> LLParserLimits:
    """Limits for compiling a grammar and for every step: about 20 ms per step and 100 MB.

    step_max_items: parser items for one mask; in an ambiguous grammar they grow with the square of the text's length.
    """
    return LLParserLimits(max_lexer_states=max_lexer_states, step_max_items=step_max_items, verbose_errors=False)


def complaint(matcher: LLMatcher) -> str:
    """First line of a matcher's error message."""
    return next(iter(matcher.get_error().strip().splitlines()), "no text matches it")
