"""The text of one choice of a response, as its steps come from the engine.

Text is handed out once no later token can change it (detokenize.py), so it may lag behind the tokens. Of a request
with stop strings the engine has looked for them, and its steps come with their text. Tokens with log probabilities go
through one reader, the prompt's before the answer's; only a prompt's first token has no log probability.
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
    """A token that might stand in a place. `data` are the bytes that it would add to the text; of a special token,
    which adds nothing, those of its name.
    """

    token: int
    data: bytes
    logprob: float | None

    @property
    def text(self) -> str:
        """With U+FFFD for parts of characters."""
        return self.data.decode(errors="replace")


class TokenText(NamedTuple):
    """A token of a text, where in the text its first byte is or would be (in characters), and the likeliest ones."""

    scored: ScoredToken
    offset: int
    likeliest: tuple[ScoredToken, ...]


class TokenReader:
    """Reads the tokens of one text in order."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._speller, self._utf8 = Speller(tokenizer), utf8_decoder()
        self._num_characters = 0  # without one that waits for more bytes

    def read(self, token: int, logprobs: TokenLogprobs | None) -> TokenText:
        """The next token, with the log probabilities that were asked for."""
        logprob, likeliest = (None, ()) if logprobs is None else logprobs
        others = tuple(ScoredToken(each, self._speller.peek(each), value) for each, value in likeliest)
        scored = ScoredToken(token, self._speller.peek(token), logprob)
        return TokenText(scored, self._offset(self._speller.push(token)), others)

    def _offset(self, added: bytes) -> int:
        """Take in bytes; the place of the character that the first of them begins or is a part of."""
        self._num_characters += len(self._utf8.decode(added[:1]))
        waiting = self._utf8.getstate()[0].decode(errors="replace")  # half a surrogate waits as two characters
        offset = self._num_characters + (len(waiting) - 1 if added else 0)
        self._num_characters += len(self._utf8.decode(added[1:]))
        return offset


def unique_names(tokens: Iterable[ScoredToken]) -> dict[str, float | None]:
    """Log probabilities by the text of each token, none lost.

    A token that is a part of a character is named by its bytes, as OpenAI does (`bytes:\\xf0\\x9f`); a second one of
    the same text by its id, as vLLM does (`token_id:7`).
    """
    found: dict[str, float | None] = {}
    for token in tokens:
        name = _name(token.data)
        found[f"token_id:{token.token}" if name in found else name] = token.logprob
    return found


def _name(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + data.decode(errors="backslashreplace")


class Piece(NamedTuple):
    """What one step, or several that are sent together, add to a choice."""

    text: str
    tokens: tuple[TokenText, ...] = ()
    """Those with log probabilities, where they were asked for."""
    step: Step | None = None
    """The step, where steps are shown."""
    step_texts: tuple[str, ...] = ()
    """The text that each token of the step made final."""
    drafted_texts: tuple[str, ...] = ()
    """Of the tokens that the step verified."""


class Shown(NamedTuple):
    """What a choice shows."""

    echo: str | None = None
    """The prompt, which its text begins with, and the prompt's tokens."""
    answer: bool = True
    stop_token: bool = False
    """The model's or the request's, among the tokens with log probabilities."""
    steps: bool = False
    """Every step, in a piece of its own."""


class ChoiceText:
    """One choice: the text and tokens that it has so far, and the counts of its steps.

    A piece holds the steps of `interval()` seconds, or one that is shown.
    """

    def __init__(self, request: Request, pair: Pair, index: int, interval: Callable[[], float], shown: Shown) -> None:
        self.index = index
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self.texts: list[str] = []
        self.tokens: list[TokenText] = []
        self.finish_reason: str | None = None
        self.first_token_at: float | None = None
        self.num_reused = 0
        """Prompt tokens that were kept of other requests."""
        self.num_tokens = self.num_steps = self.num_emitted = self.block_size = 0
        self.num_drafted = 0
        self.accepted: Counter[int] = Counter()
        """Steps by how many proposed tokens each accepted."""
        self.sources: Counter[int] = Counter()
        """Accepted tokens by what proposed them (`Tree.sources`)."""
        self.layout: Layout | None = None
        """Of the blocks so far: a tree as soon as one is no chain."""
        self._request, self._tokenizer = request, pair.tokenizer
        self._interval, self._shows = interval, shown
        self._steps: list[Step] = []  # that wait to be sent together
        self._due = 0.0  # when they are sent: the first step at once
        self._has_texts = bool(request.stop_strings)
        self._text = TextStream(pair.tokenizer)  # of the other requests
        self._reader = TokenReader(pair.tokenizer)  # of tokens with log probabilities

    def take(self, step: Step) -> list[Piece]:
        """The pieces that are due with this step: with the last one two, whose second is what was held back."""
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
        """Add a piece to the text and the tokens so far."""
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
        """Of the prompt, with as many of the likeliest as the answer's tokens have."""
        request = self._request
        for token, logprobs in zip(request.prompt_ids, step.prompt_logprobs, strict=bool(step.prompt_logprobs)):
            if logprobs is not None:
                logprobs = logprobs._replace(likeliest=logprobs.likeliest[: request.num_logprobs])
            yield self._reader.read(token, logprobs)

    def _drafted_texts(self, step: Step) -> tuple[str, ...]:
        speller = Speller(self._tokenizer)
        speller.push(step.tokens[0])  # any token: what was drafted is not the first of the text
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
            self.block_size = max(self.block_size, step.block_size)  # a step near the limit has a smaller one
            if step.tree.tokens and self.layout != "tree":
                self.layout = "chain" if step.tree.is_chain else "tree"


def _without_answer(step: Step) -> Step:
    """The prefill of a request that asks for no token: the engine emits one all the same."""
    return replace(step, tokens=(), logprobs=(), texts=(), finish_reason="length")
