"""Automaton of a grammar: which tokens may follow, which one must, and the mask of all of them.

llguidance (an Earley parser over derivatives of regular expressions) does the work. Where its mask has one token
only, the token is forced: no model has to be asked.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from blockpilot.constraints.grammar import Grammar, complaint, limits


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or followed within its limits."""


class GrammarCompiler:
    """Compiler of grammars over a tokenizer's vocabulary; made once, since its own tables take a second.

    vocab_size is the target's: no token beyond it is allowed. Stop tokens may follow where a text is complete, and
    nowhere else.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        stop_token_ids: frozenset[int],
        bounds: LLParserLimits | None = None,
    ) -> None:
        self.vocab_size, self._bounds = vocab_size, bounds or limits()
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise GrammarError(f"tokenizer {type(tokenizer).__name__}: grammars need one of the tokenizers library")
        self.tokenizer = tokenizer_json(tokenizer, vocab_size)
        self._tokenizer = LLTokenizer(self.tokenizer, vocab_size, sorted(stop_token_ids))

    def compile(self, grammar: Grammar) -> "CompiledGrammar":
        """Raises GrammarError, saying what is wrong with it. Lets other threads run meanwhile."""
        try:
            matcher = LLMatcher(self._tokenizer, grammar.compiled_from(), log_level=0, limits=self._bounds)
        except ValueError as error:
            raise GrammarError(f"grammar: {error}") from None
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            raise GrammarError(f"grammar: {complaint(matcher)}")
        return CompiledGrammar(grammar, matcher, self.vocab_size)


def tokenizer_json(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> str:
    """A tokenizer as JSON, less the tokens that the target's embedding has no row for."""
    found: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    found |= {"padding": None, "truncation": None}
    if len(tokenizer) > vocab_size:
        model = found["model"]
        found["added_tokens"] = [token for token in found["added_tokens"] if token["id"] < vocab_size]
        if isinstance(model["vocab"], list):  # Unigram
            model["vocab"] = model["vocab"][:vocab_size]
        else:
            model["vocab"] = known = {text: i for text, i in model["vocab"].items() if i < vocab_size}
            if "merges" in model:  # BPE
                model["merges"] = [merge for merge in model["merges"] if _makes_one_of(known, merge)]
    return json.dumps(found)


def _makes_one_of(known: dict[str, int], merge: str | Sequence[str]) -> bool:
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first in known and second in known and first + second in known


class CompiledGrammar:
    """Grammar that any number of requests may follow; `grammar` is its source."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher, vocab_size: int) -> None:
        self.grammar, self._matcher, self._vocab_size = grammar, matcher, vocab_size

    def start(self) -> "GrammarAutomaton":
        """Its state before the first token."""
        return GrammarAutomaton(self._matcher.deep_copy(), self._vocab_size)


class GrammarAutomaton:
    """State of a grammar after the final tokens of a request. `path` are tokens that may follow them."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._ahead: list[int] = []  # tokens of the matcher that are not final

    @property
    def error(self) -> GrammarError | None:
        """Why the grammar can be followed no further."""
        return GrammarError(f"grammar: {complaint(self._matcher)}") if self._matcher.is_error() else None

    def take(self, token: int) -> None:
        """Make a token final; raises GrammarError for one that may not follow."""
        self._follow(())
        if not self._matcher.consume_token(token):
            raise GrammarError(f"grammar: {complaint(self._matcher)}")

    def ends(self, path: Sequence[int] = ()) -> bool:
        """True where nothing can follow."""
        self._follow(path)
        return self._matcher.is_stopped()

    def allowed(self, path: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """Which of some tokens may come after the path."""
        self._follow(path)
        return [self._matcher.validate_tokens([token]) == 1 for token in tokens]

    def forced(self, path: Sequence[int] = ()) -> list[int]:
        """Tokens each of which is the only one that may come next, as many as there are."""
        self._follow(path)
        return self._matcher.compute_ff_tokens()

    def mask(self, path: Sequence[int] = ()) -> Tensor:
        """Tokens that may come after the path, [vocab] bool; none where the grammar's limits are reached."""
        self._follow(path)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits, count=self._vocab_size, bitorder="little")).bool()
        return torch.zeros_like(allowed) if self._matcher.is_error() else allowed

    def _follow(self, path: Sequence[int]) -> None:
        """Move from one path to another, by way of what they share."""
        if self._matcher.is_error():
            return
        shared = 0
        while shared < min(len(path), len(self._ahead)) and path[shared] == self._ahead[shared]:
            shared += 1
        if len(self._ahead) > shared:
            self._matcher.rollback(len(self._ahead) - shared)
        if path[shared:]:
            self._matcher.consume_tokens(list(path[shared:]))
        self._ahead[shared:] = path[shared:]
