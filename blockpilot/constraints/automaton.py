"""Automaton of a grammar: which tokens may follow, which one must, and the mask of all of them.

llguidance (an Earley parser over derivatives of regular expressions) does the work. Where its mask has one token
only, the token is forced: no model has to be asked.
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
        allowance_s: float = ALLOWANCE_S,
    ) -> None:
        self.vocab_size, self._bounds, self._allowance_s = vocab_size, bounds or limits(), allowance_s
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
        return CompiledGrammar(grammar, matcher, self.vocab_size, self._allowance_s)


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
    """Grammar that any number of requests may follow; `grammar` is its source.

    allowance_s: CPU seconds that a request may spend in its automaton, beside ALLOWANCE_PER_TOKEN_S for every token.
    """

    def __init__(self, grammar: Grammar, matcher: LLMatcher, vocab_size: int, allowance_s: float) -> None:
        self.grammar, self._matcher, self._vocab_size = grammar, matcher, vocab_size
        self._allowance_s = allowance_s

    def start(self) -> "GrammarAutomaton":
        """Its state before the first token."""
        return GrammarAutomaton(self._matcher, self._vocab_size, self._allowance_s)


class GrammarAutomaton:
    """State of a grammar after the final tokens of a request. `path` are tokens that may follow them.

    A path that outgrows the grammar's limits fails alone, for a draft may look where no text goes: the state is then
    made again from the final tokens. The request fails where its own text does, and where it has spent its seconds.
    """

    def __init__(self, start: LLMatcher, vocab_size: int, allowance_s: float) -> None:
        self._start, self._matcher, self._vocab_size = start, start.deep_copy(), vocab_size
        self._final: list[int] = []
        self._ahead: list[int] = []  # tokens of the matcher that are not final
        self._failed: tuple[tuple[int, ...], str] | None = None  # a path that nothing may follow, and why
        self._left_s = allowance_s

    @property
    def error(self) -> GrammarError | None:
        """Why the grammar can be followed no further."""
        if self._left_s < 0:
            return GrammarError("grammar: following it takes too much of the machine's time")
        if self._matcher.is_error():
            return GrammarError(f"grammar: {complaint(self._matcher)}")
        return None

    def take(self, token: int) -> None:
        """Make a token final; raises GrammarError for one that may not follow."""
        with self._charged():
            self._follow(())
            if not self._matcher.consume_token(token):
                raise GrammarError(f"grammar: {complaint(self._matcher)}")
        self._final.append(token)
        self._failed, self._left_s = None, self._left_s + ALLOWANCE_PER_TOKEN_S

    def ends(self, path: Sequence[int] = ()) -> bool:
        """True where nothing can follow."""
        with self._charged():
            return self._follow(path) and self._matcher.is_stopped()

    def allowed(self, path: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """Which of some tokens may come after the path; none where its limits are reached."""
        with self._charged():
            found = [self._follow(path) and self._matcher.validate_tokens([token]) == 1 for token in tokens]
            return found if self._holds(path) else [False] * len(found)

    def forced(self, path: Sequence[int] = ()) -> list[int]:
        """Tokens each of which is the only one that may come next, as many as there are."""
        with self._charged():
            found = self._matcher.compute_ff_tokens() if self._follow(path) else []
            return found if self._holds(path) else []

    def mask(self, path: Sequence[int] = ()) -> Tensor:
        """Tokens that may come after the path, [vocab] bool; raises GrammarError where its limits are reached."""
        with self._charged():
            bits = self._matcher.compute_bitmask() if self._follow(path) else b""
            if not self._holds(path):
                why = self._failed[1] if self._failed else complaint(self._matcher)
                raise GrammarError(f"grammar: {why}")
        array = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=self._vocab_size, bitorder="little")
        return torch.from_numpy(array).bool()

    @contextmanager
    def _charged(self) -> Iterator[None]:
        """Charge the CPU seconds of the block to the request."""
        begun = time.thread_time()
        try:
            yield
        finally:
            self._left_s -= time.thread_time() - begun

    def _follow(self, path: Sequence[int]) -> bool:
        """Move from one path to another, by way of what they share; False where it reaches the grammar's limits."""
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
        """True unless the path has failed, or fails now: then a new matcher replaces the old one."""
        if self._failed is not None and tuple(path[: len(self._failed[0])]) == self._failed[0]:
            return False
        if not self._matcher.is_error():
            return True
        if path:
            self._failed = tuple(path), complaint(self._matcher)
            self._matcher, self._ahead = self._start.deep_copy(), []
            self._matcher.consume_tokens(self._final)
        return False
