"""Bytes that tokens add to a text, for the tokenizers of every family.

Byte-level tokenizers (GPT-2, Qwen, Llama 3) write every byte as one of 256 characters. Byte-fallback ones (Llama 2,
Mistral, Gemma) have pieces of text and a piece `<0xNN>` for each byte; what else a decoder does to a piece (the space
before a word, none before the first) depends at most on whether it is the first. Of any other tokenizer the bytes are
what `decode` adds for the token after the ones before it.
"""

import json
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_MAX_WAITING = 16  # tokens whose bytes `decode` shows as U+FFFD, until no later token is expected to mend them
_UNDECODED = "\ufffd"
_TOKENWISE = {"Replace", "ByteFallback", "Metaspace", "WordPiece", "Strip", "Fuse"}
"""Steps of a decoder that change each piece by itself, and may treat the first one differently."""
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = sorted(set(range(256)) - _PRINTABLE)
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""The alphabet of byte-level tokenizers."""


class Speller:
    """Bytes of the tokens of one text, in order."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokens = _token_bytes(tokenizer)
        self._before: tuple[int, ...] = ()  # what the next token's bytes may depend on: the last tokens with text,
        self._num_shown = 0  # so many that make whole characters, and then those that wait

    def push(self, token: int) -> bytes:
        """Bytes that the next token adds; none for a special one, nor for an id that is no token."""
        added = self._tokens.added(token, self._before)
        if added is None:
            return b""
        before = (*self._before, token)
        waiting = self._tokens.unfinished(before)
        if added and not waiting:
            self._before, self._num_shown = before[self._num_shown :], len(before) - self._num_shown
        elif len(before) - self._num_shown > _MAX_WAITING:
            added += waiting
            self._before = () if waiting else (token,)
            self._num_shown = len(self._before)
        else:
            self._before = before
        return added

    def peek(self, token: int) -> bytes:
        """Bytes of a token, were it the next: those that it would add, or a special token's name."""
        added = self._tokens.added(token, self._before)
        return self._tokens.special.get(token, b"") if added is None else added

    def finish(self) -> bytes:
        """Bytes in place of those that `decode` has not written as a character yet."""
        return self._tokens.unfinished(self._before)


@lru_cache(maxsize=8)
def _token_bytes(tokenizer: PreTrainedTokenizerBase) -> "_TokenBytes":
    """One for all texts of a tokenizer; tokens that are added to it later may not be known as special."""
    return _TokenBytes(tokenizer)


class _TokenBytes:
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special = {token: added[token].content.encode() for token in added if added[token].special}
        self._added = {token: added[token].content.encode() for token in added if not added[token].special}
        self._ids: frozenset[int] | None = None  # None: the library says which ids are tokens
        steps = list[dict[str, Any]]()
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            steps = _steps(tokenizer.backend_tokenizer.decoder)
        else:
            self._ids = frozenset(tokenizer.get_vocab().values())
        kinds = {step["type"] for step in steps}
        self._is_byte_level = kinds - {"Fuse"} == {"ByteLevel"}
        self._falls_back = "ByteFallback" in kinds
        self._is_tokenwise = _is_tokenwise(steps)
        # Of other tokenizers only the text is known: U+FFFD at its end may be the beginning of a character.
        self._is_text_only = not (self._is_byte_level or self._is_tokenwise or self._falls_back)
        self._first, self._later = dict[int, bytes](), dict[int, bytes]()

    def added(self, token: int, before: tuple[int, ...]) -> bytes | None:
        """Bytes that a token adds after others; None where it has no text."""
        known = self._later if before else self._first
        if (found := known.get(token)) is not None:
            return found
        if token in self.special or (piece := self._piece(token)) is None:
            return None
        # From the piece itself where its bytes are known; else the text with it less the text without.
        if self._is_byte_level:
            found = self._added.get(token) or _byte_level(piece)
        elif self._falls_back and (byte := _fallback_byte(piece)) is not None and (before or byte >= 0x80):
            found = bytes([byte])
        else:
            shown, text = self._decode(before), self._decode((*before, token))
            found = text[len(shown) :].encode()
            if not self._is_tokenwise:
                return found
        known[token] = found
        return found

    def unfinished(self, before: tuple[int, ...]) -> bytes:
        """Bytes of the U+FFFD that `decode` writes for an incomplete character, where only its text is known."""
        if not self._is_text_only:
            return b""
        return self._decode_all(before)[len(self._decode(before)) :].encode()

    def _piece(self, token: int) -> str | None:
        if self._ids is not None and token not in self._ids:
            return None
        piece = self._tokenizer.convert_ids_to_tokens(token)
        assert piece is None or isinstance(piece, str)
        return piece

    def _decode(self, tokens: tuple[int, ...]) -> str:
        """Their text, up to what may be the beginning of a character."""
        text = self._decode_all(tokens)
        return text.rstrip(_UNDECODED) if self._is_text_only else text

    def _decode_all(self, tokens: tuple[int, ...]) -> str:
        # Cleaning up spaces would alter the text after the fact.
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """Steps of a decoder of the tokenizers library, in order; sequences flattened."""

    def flat(spec: dict[str, Any]) -> list[dict[str, Any]]:
        return [step for each in spec["decoders"] for step in flat(each)] if spec["type"] == "Sequence" else [spec]

    return [] if decoder is None else flat(json.loads(decoder.__getstate__()))  # to_str() of the whole takes 0.1 s


def _is_tokenwise(steps: list[dict[str, Any]]) -> bool:
    """True if the text of a token depends at most on whether it is the first."""
    kinds = [step["type"] for step in steps]
    fused = steps[kinds.index("Fuse") :] if "Fuse" in kinds else []  # these change the whole text
    strips = [step for step in fused if step["type"] != "Fuse"]
    only_first_space = all(step["type"] == "Strip" and step["start"] <= 1 and not step["stop"] for step in strips)
    return bool(kinds) and set(kinds) <= _TOKENWISE and only_first_space


def _byte_level(piece: str) -> bytes:
    """Bytes of a byte-level piece; one with other characters is text as it stands."""
    try:
        return bytes([_BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()


def _fallback_byte(piece: str) -> int | None:
    """The byte of a piece `<0xNN>`."""
    if len(piece) != 6 or not (piece.startswith("<0x") and piece.endswith(">")):
        return None
    try:
        return int(piece[3:5], 16)
    except ValueError:
        return None
