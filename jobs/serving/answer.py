"""Text of one choice of a response, from the engine's steps.

Text is emitted when no later token can change it (detokenize.py), so it may lag behind the tokens. For a request with
stop strings the engine detokenizes, and its steps include their text. Tokens with log probabilities are those of the
prompt, if it is echoed, and then those of the answer; only a prompt's first token has no log probability.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from blockpilot.engine.detokenize import TextStream, utf8_decoder
from blockpilot.engine.token_bytes import Speller
from blockpilot.pairs.loading import Pair
from blockpilot.types import Layout, Request, Step, TokenLogprobs


class ScoredToken(NamedTuple):
    """A candidate token of a position, with its log probability.

    `data` are the bytes that it adds to the text, or the name of a special token, which adds nothing.
    """

    token: int
    data: bytes
    logprob: float | None

    @property
    def text(self) -> str:
        """Text with U+FFFD for partial characters."""
        return self.data.decode(errors="replace")


class TokenText(NamedTuple):
    """A token of a text, the offset of its first byte in characters, and the most likely tokens of its position."""

    scored: ScoredToken
    offset: int
    likeliest: tuple[ScoredToken, ...]


class TokenReader:
    """Reader of the tokens of one text, in order."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._speller, self._utf8 = Speller(tokenizer), utf8_decoder()
        self._num_characters = 0  # complete characters so far

    def read(self, token: int, logprobs: TokenLogprobs | None) -> TokenText:
        """Read the next token, with its log probabilities if they were requested."""
        logprob, likeliest = (None, ()) if logprobs is None else logprobs
        alternatives = tuple(ScoredToken(t, self._speller.peek(t), value) for t, value in likeliest)
        scored = ScoredToken(token, self._speller.peek(token), logprob)
        return TokenText(scored, self._offset(self._speller.push(token)), alternatives)

    def _offset(self, added: bytes) -> int:
        """Add bytes; returns the offset of the character that contains the first of them."""
        self._num_characters += len(self._utf8.decode(added[:1]))
        waiting = self._utf8.getstate()[0].decode(errors="replace")  # a partial surrogate counts as two characters
        offset = self._num_characters + (len(waiting) - 1 if added else 0)
        self._num_characters += len(self._utf8.decode(added[1:]))
        return offset


def unique_names(tokens: Iterable[ScoredToken]) -> dict[str, float | None]:
    """Log probabilities by the text of the token, with unique names.

    A partial character is named by its bytes, as in OpenAI's API (`bytes:\\xf0\\x9f`); a second token with the same
    text by its id, as in vLLM (`token_id:7`).
    """
    logprobs: dict[str, float | None] = {}
    for token in tokens:
        name = _name(token.data)
        logprobs[f"token_id:{token.token}" if name in logprobs else name] = token.logprob
    return logprobs


def _name(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + data.decode(errors="backslashreplace")


class Piece(NamedTuple):
    """Text and tokens of one step, or of several steps that are sent together."""

    text: str
    tokens: tuple[TokenText, ...] = ()
    """Tokens with log probabilities, if requested."""
    step: Step | None = None
    """The step, if steps are shown."""
    step_texts: tuple[str, ...] = ()
    """Text emitted with each token of the step."""
    drafted_texts: tuple[str, ...] = ()
    """Text of each proposed token of the step."""


class Shown(NamedTuple):
    """Contents of a choice."""

    echo: str | None = None
    """Text of the prompt if the choice starts with it; the prompt's tokens are then included, too."""
    answer: bool = True
    stop_token: bool = False
    """True to include the stop token in the tokens with log probabilities."""
    steps: bool = False
    """True to send every step as a separate piece."""


class ChoiceText:
    """One choice: its text and tokens so far, and the counts of its steps.

    A piece contains the steps of `interval()` seconds, or a single step if steps are shown.
    """

    def __init__(self, request: Request, pair: Pair, index: int, interval: Callable[[], float], shown: Shown) -> None:
        self.index = index
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self.texts: list[str] = []
        self.tokens: list[TokenText] = []
        self.finish_reason: str | None = None
        self.first_token_at: float | None = None
        self.num_reused = 0
        """Cached prompt tokens, read from the prefix cache."""
        self.num_tokens = self.num_steps = self.num_emitted = self.block_size = 0
        self.num_drafted = 0
        self.accepted: Counter[int] = Counter()
        """Number of steps by number of accepted tokens."""
        self.sources: Counter[int] = Counter()
        """Number of accepted tokens by source (`Tree.sources`)."""
        self.layout: Layout | None = None
        """Layout of the blocks so far: tree if any of them is not a chain."""
        self._request, self._tokenizer = request, pair.tokenizer
        self._interval, self._shows = interval, shown
        self._steps: list[Step] = []  # waiting to be sent together
        self._due = 0.0  # time of the next piece; the first step is sent immediately
        self._has_texts = bool(request.stop_strings)
        self._text = TextStream(pair.tokenizer)  # for requests without stop strings
        self._reader = TokenReader(pair.tokenizer)  # of tokens with log probabilities

    def take(self, step: Step) -> list[Piece]:
        """Pieces that are due after this step; the last step adds a piece with the remaining text."""
        step = step if self._shows.answer else _without_answer(step)
        self._count(step)
        self._steps.append(step)
        now = time.monotonic()
        if now < self._due and step.finish_reason is None:
            return []
        steps, self._steps = self._steps, []
        self._due = now + (0.0 if self._shows.steps else self._interval())
        pieces = [self._piece(steps)]
        return pieces if step.finish_reason is None else [*pieces, Piece(self._text.finish())]

    def keep(self, piece: Piece) -> None:
        """Append a piece to the text and the tokens so far."""
        self.texts.append(piece.text)
        self.tokens += piece.tokens

    def _piece(self, steps: Sequence[Step]) -> Piece:
        if self._shows.echo is None or steps[0].block_size:
            return self._answer_piece(steps)
        prompt = tuple(self._prompt_tokens(steps[0])) if self._request.num_logprobs is not None else ()
        piece = self._answer_piece(steps)
        return piece._replace(text=self._shows.echo + piece.text, tokens=prompt + piece.tokens)

    def _answer_piece(self, steps: Sequence[Step]) -> Piece:
        tokens = tuple(token for step in steps for token in self._tokens(step))
        if self._shows.steps:
            (step,) = steps
            texts = step.texts if self._has_texts else tuple(self._text.push([t]) for t in self._shown(step))
            return Piece("".join(texts), tokens, step, texts, self._drafted_texts(step))
        if self._has_texts:
            return Piece("".join(text for step in steps for text in step.texts), tokens)
        return Piece(self._text.push(token for step in steps for token in self._shown(step)), tokens)

    def _shown(self, step: Step) -> list[int]:
        return [token for token in step.tokens if token not in self._request.stop_token_ids]

    def _tokens(self, step: Step) -> Iterator[TokenText]:
        for token, logprobs in zip(step.tokens, step.logprobs, strict=bool(step.logprobs)):
            if self._shows.stop_token or token not in self._request.stop_token_ids:
                yield self._reader.read(token, logprobs)

    def _prompt_tokens(self, step: Step) -> Iterator[TokenText]:
        """Tokens of the prompt, with as many of the most likely tokens as the answer's tokens have."""
        request = self._request
        for token, logprobs in zip(request.prompt_ids, step.prompt_logprobs, strict=bool(step.prompt_logprobs)):
            if logprobs is not None:
                logprobs = logprobs._replace(likeliest=logprobs.likeliest[: request.num_logprobs])
            yield self._reader.read(token, logprobs)

    def _drafted_texts(self, step: Step) -> tuple[str, ...]:
        speller = Speller(self._tokenizer)
        speller.push(step.tokens[0])  # any token, since a drafted token is never the first of the text
        return tuple(speller.peek(token).decode(errors="replace") for token in step.tree.tokens)

    def _count(self, step: Step) -> None:
        self.first_token_at = self.first_token_at or time.monotonic()
        self.finish_reason = step.finish_reason
        self.num_tokens += len(step.tokens)
        self.num_reused += step.num_reused
        self.prompt_logprobs += step.prompt_logprobs
        if step.block_size:  # not the prefill
            self.num_steps += 1
            self.num_emitted += len(step.tokens)
            self.num_drafted += len(step.tree.tokens)
            self.accepted[step.num_accepted] += 1
            self.sources.update(step.accepted_sources)
            self.block_size = max(self.block_size, step.block_size)  # steps near the limit have smaller blocks
            if step.tree.tokens and self.layout != "tree":
                self.layout = "chain" if step.tree.is_chain else "tree"


def _without_answer(step: Step) -> Step:
    """Prefill step of a request with max_tokens 0, without the token that the engine emits."""
    return replace(step, tokens=(), logprobs=(), texts=(), finish_reason="length")
