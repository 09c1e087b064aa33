"""TextStream against the slow oracle: decode everything, cut at the first stop string."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from blockpilot.engine.detokenize import TextStream

CORPUS = [
    "the cat sat on the mat, the end",
    "naïve café 你好。世界 🙂🙃👩‍👩‍👧",
    "    def f(x):\n\n\treturn x  # the",
]
END = "<|end|>"


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """All 256 bytes, merges inside and across words, a special token and an added one with spaces."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.add_special_tokens({"eos_token": END})
    tokenizer.add_tokens([AddedToken("<tool use>", special=False)])
    return tokenizer


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """SentencePiece manner: word pieces with a leading mark, single bytes for what they cannot spell."""
    words = ["▁", "▁the", "▁a", "a", "b", "e", "t", "▁é", "。"]
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *words])}
    core = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core)


BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
IDS = st.integers(0, len(BYTE_LEVEL) - 1)
SENTENCES = st.text(st.sampled_from("the catsé你🙂👩‍.\n ab"), max_size=30)
TOKENS = st.lists(IDS, max_size=60) | SENTENCES.map(BYTE_LEVEL.encode)


def oracle(tokenizer: PreTrainedTokenizerFast, tokens: list[int], stops: list[str]) -> tuple[str, bool]:
    """Grow the decoded text a character at a time until it ends with a stop string."""
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    for end in range(len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def stream(
    tokenizer: PreTrainedTokenizerFast, tokens: list[int], stops: list[str], cuts: list[int]
) -> tuple[list[str], bool]:
    """The pieces shown when tokens come in blocks of the sizes `cuts` (and then one by one)."""
    out, pieces, at = TextStream(tokenizer, tuple(stops)), [], 0
    sizes = [*cuts, *[1] * len(tokens)]
    for size in sizes:
        pieces.append(out.push(tokens[at : at + size]))
        at += size
    pieces.append(out.finish())
    return pieces, out.stopped


CUTS = st.lists(st.integers(0, 9), max_size=20)


@given(TOKENS, CUTS)
def test_text_is_that_of_all_tokens_decoded_at_once(tokens: list[int], cuts: list[int]) -> None:
    pieces, stopped = stream(BYTE_LEVEL, tokens, [], cuts)
    assert ("".join(pieces), stopped) == oracle(BYTE_LEVEL, tokens, [])


@given(TOKENS, CUTS, st.data())
def test_text_ends_before_the_first_stop_string(tokens: list[int], cuts: list[int], data: st.DataObject) -> None:
    text, _ = oracle(BYTE_LEVEL, tokens, [])
    spans = st.tuples(st.integers(0, len(text)), st.integers(1, 6)).map(lambda s: text[s[0] : s[0] + s[1]])
    others = st.text("theab é\ufffd", min_size=1, max_size=4)
    stops = data.draw(st.lists(spans.filter(bool) | others, max_size=4))
    pieces, stopped = stream(BYTE_LEVEL, tokens, stops, cuts)
    assert ("".join(pieces), stopped) == oracle(BYTE_LEVEL, tokens, stops)


@given(SENTENCES, st.lists(st.text("the cas", min_size=1, max_size=5), max_size=4))
def test_text_is_shown_as_soon_as_it_is_safe(text: str, stops: list[str]) -> None:
    """Held back is at most what could still become a stop string, and half a character."""
    out, shown, seen = TextStream(BYTE_LEVEL, stops), "", []
    for token in BYTE_LEVEL.encode(text):
        shown += out.push([token])
        seen.append(token)
        if out.stopped:
            break
        whole = BYTE_LEVEL.decode(seen).rstrip("\ufffd")
        held = whole[len(shown) :]
        assert whole.startswith(shown)
        assert held == "" or any(s.startswith(held) for s in stops)


@given(st.lists(st.sampled_from([128, 200, 230, 240, 255]), max_size=200), CUTS)
def test_bytes_that_are_no_text_do_not_pile_up(values: list[int], cuts: list[int]) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [BYTE_LEVEL.convert_tokens_to_ids(alphabet[v]) for v in values]
    pieces, _ = stream(BYTE_LEVEL, tokens, [], cuts)
    assert "".join(pieces) == BYTE_LEVEL.decode(tokens)


def test_an_endless_run_of_half_characters_is_shown_and_forgotten() -> None:
    lead = BYTE_LEVEL.convert_tokens_to_ids("ð")  # 0xF0, the first of four bytes
    out = TextStream(BYTE_LEVEL)
    shown = sum(len(out.push([lead])) for _ in range(1000))
    assert shown >= 950
    assert len(out._window) < 50
    assert shown + len(out.finish()) == 1000


@given(st.text("the ab é你🙂。", max_size=30), CUTS)
def test_pieces_with_byte_fallback(text: str, cuts: list[int]) -> None:
    known = {" ": "▁", **{piece: piece for piece in BYTE_FALLBACK.get_vocab()}}
    pieces = [[known[c]] if c in known else [f"<0x{b:02X}>" for b in c.encode()] for c in text]
    tokens = [BYTE_FALLBACK.convert_tokens_to_ids(piece) for run in pieces for piece in run]
    shown, _ = stream(BYTE_FALLBACK, tokens, [], cuts)
    assert "".join(shown) == BYTE_FALLBACK.decode(tokens)


@given(st.text("ab你🙂", min_size=1, max_size=12))
@example("🙂")
def test_no_half_character_is_ever_shown(text: str) -> None:
    pieces, _ = stream(BYTE_LEVEL, BYTE_LEVEL.encode(text), [], [])
    assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_have_no_text_and_spaces_stay() -> None:
    end = BYTE_LEVEL.convert_tokens_to_ids(END)
    tokens = [*BYTE_LEVEL.encode(" the cat ."), end, *BYTE_LEVEL.encode("<tool use> the")]
    assert "".join(stream(BYTE_LEVEL, tokens, [], [])[0]) == " the cat .<tool use> the"


def test_stop_string_complete_first_wins_over_one_that_begins_first() -> None:
    """Otherwise the text would depend on how many tokens arrive at once."""
    tokens = BYTE_LEVEL.encode("xabc")
    for cuts in ([], [4]):
        assert "".join(stream(BYTE_LEVEL, tokens, ["abc", "b"], cuts)[0]) == "xa"


def test_nothing_after_a_stop_string() -> None:
    out = TextStream(BYTE_LEVEL, ("t",))
    assert out.push(BYTE_LEVEL.encode("cat sat")) == "ca"
    assert out.stopped
    assert (out.push(BYTE_LEVEL.encode("more")), out.finish()) == ("", "")


def test_a_prefix_that_comes_to_nothing_is_given_back() -> None:
    out = TextStream(BYTE_LEVEL, ("then",))
    assert out.push(BYTE_LEVEL.encode("on the")) == "on "
    assert out.finish() == "the"
    assert not out.stopped


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        TextStream(BYTE_LEVEL, ("a", ""))
