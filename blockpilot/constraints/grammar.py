"""Grammars of structured outputs, in the form that llguidance compiles.

JSON is written as Python's json.dumps writes it, one space after a comma and a colon, unless a pattern allows other
white space: then most of a schema's own characters are forced, and no model can fill its answer with blanks. Without
any space a small model leaves what it has seen in training, and a step of its draft emits a fifth fewer tokens (see
LOG.md).
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
    """Source of a grammar. white_space: a regular expression of what may stand between the tokens of a JSON text."""

    kind: Literal["json", "regex", "choice", "grammar", "lark"]
    source: str
    """A JSON Schema, a regular expression, a JSON list of texts, a Lark or GBNF grammar."""
    white_space: str | None = None

    def compiled_from(self) -> str:
        """The grammar as llguidance reads it; raises ValueError for a source that is too long, or no grammar."""
        if (size := len(self.source.encode())) > MAX_BYTES:
            raise ValueError(f"grammar of {size} bytes: at most {MAX_BYTES} are compiled")
        if self.kind != "json":
            return grammar_from(self.kind, self.source)
        return LLMatcher.grammar_from_json_schema(self.source, overrides=self.spacing)

    @property
    def spacing(self) -> Any:
        """Options of llguidance for the white space of a JSON text."""
        return SEPARATORS if self.white_space is None else {"whitespace_pattern": self.white_space}


def of_schema(schema: Mapping[str, Any], white_space: str | None = None) -> Grammar:
    """JSON texts that validate; raises ValueError for integers in the schema that would be rounded."""
    ready = prepared(dict(schema))
    check_exact(ready)
    return Grammar("json", json.dumps(ready), white_space)


def of_choices(texts: Sequence[str]) -> Grammar:
    """One of these texts."""
    return Grammar("choice", json.dumps(texts))


def limits(max_lexer_states: int = 50_000, step_max_items: int = 10_000) -> LLParserLimits:
    """Bounds of what compiling a grammar, and every later step, may cost: about 20 ms a step, 100 MB.

    step_max_items: of the parser, for one mask; an ambiguous grammar's grow with the square of its text.
    """
    return LLParserLimits(max_lexer_states=max_lexer_states, step_max_items=step_max_items, verbose_errors=False)


def complaint(matcher: LLMatcher) -> str:
    """The first line of what is wrong with a matcher's grammar."""
    return next(iter(matcher.get_error().strip().splitlines()), "no text matches it")
