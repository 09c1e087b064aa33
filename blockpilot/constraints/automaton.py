"""Automaton of a grammar: allowed tokens, forced tokens and token masks.

llguidance (an Earley parser over derivatives of regular expressions) does the work. A token is forced if it is the
only allowed one, so no model has to run for it.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from blockpilot.constraints.grammar import Grammar, complaint, limits

ALLOWANCE_S = 1.0
ALLOWANCE_PER_TOKEN_S = 0.01  # ordinary grammars take 0.3 ms


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or that exceeds its limits during decoding."""


class GrammarCompiler:
    """Compiler of grammars over a tokenizer's vocabulary; build it once, since its tables take a second.

    vocab_size is the target's; tokens beyond it are never allowed. Stop tokens are allowed exactly where a text is
    complete.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        stop_token_ids: frozenset[int],
        bounds: LLParserLimits | None = None,
        allowance_s: float = ALLOWANCE_S,
    ) -> None:
        self.vocab_size, self._bounds, self._allowance_s = vocab_size, bounds or limits(), allowance_s
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise GrammarError(f"tokenizer {type(tokenizer).__name__}: grammars need one of the tokenizers library")
        self.tokenizer = tokenizer_json(tokenizer, vocab_size)
        self._tokenizer = LLTokenizer(self.tokenizer, vocab_size, sorted(stop_token_ids))

    def compile(self, grammar: Grammar) -> "CompiledGrammar":
        """Compile a grammar; raises GrammarError with the reason if that fails. Releases the GIL."""
        try:
            matcher = LLMatcher(self._tokenizer, grammar.compiled_from(), log_level=0, limits=self._bounds)
        except ValueError as error:
            raise GrammarError(f"grammar: {error}") from None
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            raise GrammarError(f"grammar: {complaint(matcher)}")
        return CompiledGrammar(grammar, matcher, self.vocab_size, self._allowance_s)


def tokenizer_json(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> str:
    """A tokenizer as JSON, without the tokens beyond the target's embedding."""
    fields: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    fields |= {"padding": None, "truncation": None}
    if len(tokenizer) > vocab_size:
        model = fields["model"]
        fields["added_tokens"] = [token for token in fields["added_tokens"] if token["id"] < vocab_size]
        if isinstance(model["vocab"], list):  # Unigram
            model["vocab"] = model["vocab"][:vocab_size]
        else:
            model["vocab"] = vocab = {text: i for text, i in model["vocab"].items() if i < vocab_size}
            if "merges" in model:  # BPE
                model["merges"] = [merge for merge in model["merges"] if _is_known_merge(vocab, merge)]
    return json.dumps(fields)


def _is_known_merge(vocab: dict[str, int], merge: str | Sequence[str]) -> bool:
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first in vocab and second in vocab and first + second in vocab


class CompiledGrammar:
    """Compiled grammar for any number of requests; `grammar` is its source.

    allowance_s: CPU seconds that a request may spend in its automaton, plus ALLOWANCE_PER_TOKEN_S for every token.
    """

    def __init__(self, grammar: Grammar, matcher: LLMatcher, vocab_size: int, allowance_s: float) -> None:
        self.grammar, self._matcher, self._vocab_size = grammar, matcher, vocab_size
        self._allowance_s = allowance_s

    def start(self) -> "GrammarAutomaton":
        """Automaton before the first token."""
        return GrammarAutomaton(self._matcher, self._vocab_size, self._allowance_s)


class GrammarAutomaton:
    """State of a grammar after the accepted tokens of a request. A `path` holds tokens proposed after them.

    A path that exceeds the grammar's limits fails without the request, since a draft may propose texts that the
    target never writes. The state is then rebuilt from the accepted tokens. The request fails if its own text exceeds
    the limits, or if its CPU allowance is spent.
    """

    def __init__(self, start: LLMatcher, vocab_size: int, allowance_s: float) -> None:
        self._start, self._matcher, self._vocab_size = start, start.deep_copy(), vocab_size
        self._final: list[int] = []
        self._ahead: list[int] = []  # tokens of the current path that the matcher has consumed
        self._failed: tuple[tuple[int, ...], str] | None = None  # a path that exceeded the limits, and the reason
        self._left_s = allowance_s

    @property
    def error(self) -> GrammarError | None:
        """Error if the request can no longer follow the grammar, else None."""
        if self._left_s < 0:
            return GrammarError("grammar: following it takes too much of the machine's time")
        if self._matcher.is_error():
            return GrammarError(f"grammar: {complaint(self._matcher)}")
        return None

    def take(self, token: int) -> None:
        """Accept a token; raises GrammarError if it is not allowed."""
        with self._charged():
            self._follow(())
            if not self._matcher.consume_token(token):
                raise GrammarError(f"grammar: {complaint(self._matcher)}")
        self._final.append(token)
        self._failed, self._left_s = None, self._left_s + ALLOWANCE_PER_TOKEN_S

    def ends(self, path: Sequence[int] = ()) -> bool:
        """True if no token can follow the path."""
        with self._charged():
            return self._follow(path) and self._matcher.is_stopped()

    def allowed(self, path: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """For each token, whether it is allowed after the path; all False if the path exceeds the limits."""
        with self._charged():
            flags = [self._follow(path) and self._matcher.validate_tokens([token]) == 1 for token in tokens]
            return flags if self._holds(path) else [False] * len(flags)

    def forced(self, path: Sequence[int] = ()) -> list[int]:
        """The longest sequence of forced tokens after the path."""
        with self._charged():
            forced_tokens = self._matcher.compute_ff_tokens() if self._follow(path) else []
            return forced_tokens if self._holds(path) else []

    def mask(self, path: Sequence[int] = ()) -> Tensor:
        """Tokens allowed after the path, [vocab] bool; raises GrammarError if the path exceeds the limits."""
        with self._charged():
            bits = self._matcher.compute_bitmask() if self._follow(path) else b""
            if not self._holds(path):
                reason = self._failed[1] if self._failed else complaint(self._matcher)
                raise GrammarError(f"grammar: {reason}")
        array = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=self._vocab_size, bitorder="little")
        return torch.from_numpy(array).bool()

    @contextmanager
    def _charged(self) -> Iterator[None]:
        """Charge the CPU seconds of the block to the request."""
        started_s = time.thread_time()
        try:
            yield
        finally:
            self._left_s -= time.thread_time() - started_s

    def _follow(self, path: Sequence[int]) -> bool:
        """Roll back to the common prefix and consume the rest of `path`; False if it exceeds the grammar's limits."""
        if not self._holds(path):
            return False
        shared = 0
        while shared < min(len(path), len(self._ahead)) and path[shared] == self._ahead[shared]:
            shared += 1
        if len(self._ahead) > shared:
            self._matcher.rollback(len(self._ahead) - shared)
        if path[shared:]:
            self._matcher.consume_tokens(list(path[shared:]))
        self._ahead[shared:] = path[shared:]
        return self._holds(path)

    def _holds(self, path: Sequence[int]) -> bool:
        """True unless the path exceeds the limits. A failed matcher is replaced by one at the accepted tokens."""
        if self._failed is not None and tuple(path[: len(self._failed[0])]) == self._failed[0]:
            return False
        if not self._matcher.is_error():
            return True
        if path:
            self._failed = tuple(path), complaint(self._matcher)
            self._matcher, self._ahead = self._start.deep_copy(), []
            self._matcher.consume_tokens(self._final)
        return False
