"""Tokens with their log probabilities as bytes and places in the text, for the fields of a response.

The tokens of a prompt and of an answer go through one reader, in order; only a prompt's first token has no log
probability.
"""

from collections.abc import Iterable
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from blockpilot.engine.detokenize import utf8_decoder
from blockpilot.engine.token_bytes import Speller
from blockpilot.types import TokenLogprobs


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
