"""Small tokenizers with every kind of decoder, and reference rules for the bytes of their tokens."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

CORPUS = [
    "the cat sat on the mat, the end",
    "naïve café 你好。世界 🙂🙃👩‍👩‍👧",
    "    def f(x):\n\n\treturn x  # the",
]
END, TOOL = "<|end|>", "<tool use>"
BYTE_OF = {letter: byte for byte, letter in bytes_to_unicode().items()}
LETTERS = sorted(BYTE_OF, key=BYTE_OF.__getitem__)
"""The alphabet of byte-level tokenizers, in the order of bytes; by transformers' own table."""
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁▁", "▁the", "▁a", "a", "b", "e", "t", "th", "he", "▁é", "é", "。", "你好", ".", "▁b▁"]


def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level: all 256 bytes, merges inside and across words, a special token and an added one with spaces."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return _with_added(core)


def byte_fallback(*, strips: bool = True) -> PreTrainedTokenizerFast:
    """SentencePiece style: word pieces with a leading mark, single bytes for all other text.

    strips: removes the space before the first word, as in Llama 2; Gemma keeps it.
    """
    pieces = ["<unk>", *BYTE_PIECES, *WORDS]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    core.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    return _with_added(core)


def of_pieces(decoder: decoders.Decoder | None, pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    """Tokenizer of any pieces with any decoder; for decoding only."""
    core = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[0]))
    if decoder is not None:
        core.decoder = decoder
    return _with_added(core)


def _with_added(core: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.add_special_tokens({"eos_token": END})
    tokenizer.add_tokens([AddedToken(TOOL, special=False)])
    return tokenizer


def byte_level_bytes(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int]) -> bytes:
    """Bytes of byte-level tokens."""
    pieces = [tokenizer.convert_ids_to_tokens(token) for token in tokens]
    return b"".join(
        piece.encode() if piece == TOOL else bytes(BYTE_OF[c] for c in piece)
        for piece in pieces
        if piece not in (None, END)
    )


def byte_fallback_bytes(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int], *, strips: bool = True) -> bytes:
    """Bytes of byte-fallback tokens: the byte of `<0xNN>`, the text of other pieces with spaces."""
    pieces = [tokenizer.convert_ids_to_tokens(token) for token in tokens]
    spelled = b"".join(
        bytes.fromhex(piece[3:5]) if piece.startswith("<0x") else piece.replace("▁", " ").encode()
        for piece in pieces
        if piece not in (None, END)
    )
    return spelled.removeprefix(b" ") if strips else spelled
