"""Places of tokens in the text, against a slow oracle, and names that lose no token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpilot.types import TokenLogprobs
from helpers.vocabularies import byte_fallback, byte_fallback_bytes, byte_level, byte_level_bytes
from jobs.serving.answer import ScoredToken, TokenReader, unique_names

BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
SPELLED = {id(BYTE_LEVEL): byte_level_bytes, id(BYTE_FALLBACK): byte_fallback_bytes}


def characters_of_bytes(data: bytes) -> list[int]:
    """Of every byte the character that it is in, U+FFFD for what is none."""
    characters: list[int] = []
    while len(characters) < len(data):
        rest = data[len(characters) :]
        try:
            width = len(rest.decode()[0].encode())
        except UnicodeDecodeError as error:
            width = len(rest[: error.start].decode()[0].encode()) if error.start else error.end
        characters += [characters[-1] + 1 if characters else 0] * width
    return characters


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_token_is_where_its_first_byte_is(tokenizer: object, data: st.DataObject) -> None:
    """Tokens of random bytes, special ones and ids that are no token among them."""
    bytes_of = SPELLED[id(tokenizer)]
    halves = [tokenizer.encode(char) for char in "é你🙂"]
    halves = [ids[:num] for ids in halves for num in range(1, len(ids) + 1)]
    parts = st.lists(st.sampled_from(halves) | st.integers(0, len(tokenizer) + 3).map(lambda token: [token]))
    tokens = [token for part in data.draw(parts) for token in part]
    reader, spelled, lengths = TokenReader(tokenizer), b"", []
    read = [reader.read(token, TokenLogprobs(-1.0, ((token, -1.0),))) for token in tokens]
    for token, token_read in zip(tokens, read, strict=True):
        lengths.append(len(bytes_of(tokenizer, tokens[: len(lengths) + 1])))
        added = token_read.scored.data if lengths[-1] > len(spelled) else b""
        assert token_read.likeliest == (ScoredToken(token, token_read.scored.data, -1.0),)
        spelled += added
    assert spelled == bytes_of(tokenizer, tokens)
    characters = characters_of_bytes(spelled)
    for first, length, token_read in zip([0, *lengths], lengths, read, strict=False):
        if length > first:
            assert token_read.offset == characters[first]


def test_special_tokens_have_a_name_and_no_characters() -> None:
    end, reader = BYTE_LEVEL.eos_token_id, TokenReader(BYTE_LEVEL)
    tokens = [*BYTE_LEVEL.encode("ab"), end, len(BYTE_LEVEL) + 7, *BYTE_LEVEL.encode("c")]
    read = [reader.read(token, None) for token in tokens]
    assert [token_read.scored.data for token_read in read] == [b"a", b"b", b"<|end|>", b"", b"c"]
    assert [token_read.offset for token_read in read] == [0, 1, 2, 2, 2]
    assert {token_read.scored.logprob for token_read in read} == {None}


def test_names_lose_no_token() -> None:
    tokens = [(1, b"a"), (2, b"\xf0\x9f"), (3, b"\xf0"), (4, b"a"), (5, b" \xe2"), (6, b"\xf0"), (7, b"")]
    names = unique_names(ScoredToken(token, data, -float(token)) for token, data in tokens)
    assert names == {
        "a": -1.0,
        "bytes:\\xf0\\x9f": -2.0,
        "bytes:\\xf0": -3.0,
        "token_id:4": -4.0,
        "bytes: \\xe2": -5.0,
        "token_id:6": -6.0,
        "": -7.0,
    }
