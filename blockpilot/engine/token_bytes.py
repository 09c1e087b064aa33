"""Bytes that tokens add to a text, for the tokenizers of every family.

Byte-level tokenizers (GPT-2, Qwen, Llama 3) write every byte as one of 256 characters. Byte-fallback tokenizers
(Llama 2, Mistral, Gemma) have pieces of text, and a piece `<0xNN>` for each byte; apart from that, the decoder
changes a piece (the space before a word) depending at most on whether it is the first. For any other tokenizer, the
bytes of a token are the text that `decode` adds for it after the previous tokens.
"""

import json
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_MAX_WAITING = 16  # tokens that `decode` shows as U+FFFD before they count as invalid
_MAX_BYTES = 4  # of a character in UTF-8
_UNDECODED = "\ufffd"
_UNDECODED_BYTES = _UNDECODED.encode()
_TOKENWISE = {"Replace", "ByteFallback", "Metaspace", "WordPiece", "Strip", "Fuse"}
"""Decoder steps that change each piece independently, except that the first one may differ."""
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = sorted(set(range(256)) - _PRINTABLE)
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""The alphabet of byte-level tokenizers."""


class Speller:
    """Bytes of the tokens of one text, in order."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokens = _token_bytes(tokenizer)
        # Tokens that the next token's bytes may depend on: num_shown of complete characters, then waiting tokens of
        # an incomplete character.
        self._before: tuple[int, ...] = ()
        self._num_shown = 0
        self._num_early = 0  # bytes of U+FFFD of the waiting tokens that were shown early

    def push(self, token: int) -> bytes:
        """Bytes that the next token adds; empty for a special token and for an unknown id."""
        added = self._tokens.added(token, self._before)
        if added is None:
            return b""
        before = (*self._before, token)
        waiting = self._tokens.unfinished(before)
        num_early, self._before = self._num_early, before
        if added:  # begins with the bytes that were shown early
            self._num_early = 0
        if added and not waiting:
            self._before, self._num_shown = before[self._num_shown :], len(before) - self._num_shown
        elif len(before) - self._num_shown > _MAX_WAITING:
            # Only the last U+FFFD can be a character's beginning; its bytes are in the last three tokens.
            added = (added + waiting)[: -len(_UNDECODED_BYTES)] if waiting else added
            self._before, self._num_shown = before[-_MAX_BYTES:], 0
            self._num_early = max(len(self._tokens.unfinished(self._before)) - len(_UNDECODED_BYTES), 0)
        return added[num_early:]

    def peek(self, token: int) -> bytes:
        """Bytes that a token would add if it were the next; for a special token its name."""
        added = self._tokens.added(token, self._before)
        return self._tokens.special.get(token, b"") if added is None else added[self._num_early :]

    def finish(self) -> bytes:
        """Bytes of the U+FFFD for an incomplete character at the end of the text."""
        return self._tokens.unfinished(self._before)[self._num_early :]


@lru_cache(maxsize=8)
def _token_bytes(tokenizer: PreTrainedTokenizerBase) -> "_TokenBytes":
    """Cache shared by all texts of a tokenizer; special tokens added to the tokenizer later are not recognised."""
    return _TokenBytes(tokenizer)


class _TokenBytes:
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special = {token: added[token].content.encode() for token in added if added[token].special}
        self._added = {token: added[token].content.encode() for token in added if not added[token].special}
        self._ids: frozenset[int] | None = None  # None: the tokenizers library checks ids
        steps = list[dict[str, Any]]()
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            steps = _steps(tokenizer.backend_tokenizer.decoder)
        else:
            self._ids = frozenset(tokenizer.get_vocab().values())
        kinds = {step["type"] for step in steps}
        self._is_byte_level = kinds - {"Fuse"} == {"ByteLevel"}
        self._falls_back = "ByteFallback" in kinds
        self._is_tokenwise = _is_tokenwise(steps)
        # Other tokenizers give text only: U+FFFD at its end may be an incomplete character.
        self._is_text_only = not (self._is_byte_level or self._is_tokenwise or self._falls_back)
        self._first, self._later = dict[int, bytes](), dict[int, bytes]()

    def added(self, token: int, before: tuple[int, ...]) -> bytes | None:
        """Bytes that a token adds after the tokens before; None if it has no text."""
        cached = self._later if before else self._first
        if (added := cached.get(token)) is not None:
            return added
        if token in self.special or (piece := self._piece(token)) is None:
            return None
        # The bytes of the piece, if it defines them; otherwise the text that `decode` adds for the token.
        if self._is_byte_level:
            added = self._added.get(token) or _byte_level(piece)
        elif self._falls_back and (byte := _fallback_byte(piece)) is not None and (before or byte >= 0x80):
            added = bytes([byte])
        else:
            shown, text = self._decode(before), self._decode((*before, token))
            added = text[len(shown) :].encode()
            if not self._is_tokenwise:
                return added
        cached[token] = added
        return added

    def unfinished(self, before: tuple[int, ...]) -> bytes:
        """Bytes of the U+FFFD that `decode` writes for an incomplete character, if a tokenizer gives text only."""
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
        """Text of the tokens, without a possibly incomplete character at its end."""
        text = self._decode_all(tokens)
        return text.rstrip(_UNDECODED) if self._is_text_only else text

    def _decode_all(self, tokens: tuple[int, ...]) -> str:
        # Cleaning up spaces would change text that was already shown.
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """Steps of a decoder of the tokenizers library, in order, with sequences flattened."""

    def flat(spec: dict[str, Any]) -> list[dict[str, Any]]:
        if spec["type"] != "Sequence":
            return [spec]
        return [step for nested in spec["decoders"] for step in flat(nested)]

    return [] if decoder is None else flat(json.loads(decoder.__getstate__()))  # the tokenizer's to_str() takes 0.1 s


def _is_tokenwise(steps: list[dict[str, Any]]) -> bool:
    """True if a token's text depends at most on whether the token is the first."""
    kinds = [step["type"] for step in steps]
    fused = steps[kinds.index("Fuse") :] if "Fuse" in kinds else []  # steps on the joined text
    strips = [step for step in fused if step["type"] != "Fuse"]
    only_first_space = all(step["type"] == "Strip" and step["start"] <= 1 and not step["stop"] for step in strips)
    return bool(kinds) and set(kinds) <= _TOKENWISE and only_first_space


def _byte_level(piece: str) -> bytes:
    """Bytes of a byte-level piece; a piece with other characters is plain text."""
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
