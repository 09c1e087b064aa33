"""Conversion of GGUF files to checkpoints of transformers: Llama with a byte-level tokenizer, and Gemma 3."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # kinds of tokens
_SPACE = "\u2581"

Fields = Mapping[str, Any]


class GgufFamily(NamedTuple):
    """Conversion of the files of an architecture."""

    config: Callable[[Fields], dict[str, Any]]
    names: Mapping[str, str]
    """Names of a layer's weights in transformers, by their names in GGUF."""
    weight: Callable[[str, "Tensor", Fields], "Tensor"]
    """Converts a weight to transformers' layout, given its name in GGUF and the config."""
    tokenizer: Callable[[Fields], Any]
    """A `Tokenizer` of the tokenizers library."""


def convert_gguf(gguf_file: Path, directory: Path) -> None:
    """Write a GGUF file as a transformers checkpoint: fp32 safetensors, config and tokenizer.

    Raises ValueError for an architecture that is not converted.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import PreTrainedTokenizerFast

    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields["general.architecture"]
    if architecture not in FAMILIES:
        raise ValueError(f"GGUF architecture {architecture!r}: converted are {', '.join(FAMILIES)}")
    family = FAMILIES[architecture]
    config = family.config(fields) | _config_of_tokens(fields)
    save_file(dict(_weights(reader, family, config)), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    eos = {"eos_token_id": config["eos_token_id"], "bos_token_id": config["bos_token_id"]}
    (directory / "generation_config.json").write_text(json.dumps(eos))
    tokens, keys = fields["tokenizer.ggml.tokens"], {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    names = {f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in keys.items()}
    template = fields.get("tokenizer.chat_template")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=family.tokenizer(fields), chat_template=template, **names)
    tokenizer.save_pretrained(directory)


def _config_of_tokens(fields: Fields) -> dict[str, Any]:
    return {
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


def _weights(reader: Any, family: GgufFamily, config: Fields) -> Iterator[tuple[str, "Tensor"]]:
    """Names and fp32 tensors of a transformers model, dequantised from GGUF."""
    import torch
    from gguf.quants import dequantize

    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        *layer, part = tensor.name.removesuffix(".weight").split(".")
        name = f"layers.{layer[1]}.{family.names[part]}" if layer else TOP_NAMES[part]
        yield f"model.{name}.weight", family.weight(part, weight, config).contiguous()


TOP_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}
_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}


def _shape(fields: Fields) -> dict[str, Any]:
    """Sizes under the names that llama and gemma3 share."""
    architecture = fields["general.architecture"]
    keys = {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "max_position_embeddings": "context_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    }
    return {name: fields[f"{architecture}.{key}"] for name, key in keys.items()}


# --- Llama ---


def _llama_config(fields: Fields) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]}
    return _shape(fields) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_parameters": rope,
    }


def _llama_weight(part: str, weight: "Tensor", config: Fields) -> "Tensor":
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if part not in heads:
        return weight
    # GGUF interleaves the halves that rotary embeddings rotate.
    rows, columns = weight.shape
    return weight.view(heads[part], -1, 2, columns).transpose(1, 2).reshape(rows, columns)


def _byte_level_tokenizer(fields: Fields) -> Any:
    """SmolLM2's tokenizer with its control tokens: byte-level BPE that splits digits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return backend


# --- Gemma 3 ---


def _gemma3_config(fields: Fields) -> dict[str, Any]:
    """Config of Gemma 3: full attention in every sixth layer, a sliding window and a separate rotary base in the
    others (arXiv 2503.19786, section 2).
    """
    if "gemma3.rope.scaling.type" in fields:
        raise ValueError("GGUF gemma3.rope.scaling.type: Gemma 3 is converted without rotary scaling only")
    num_layers, size = fields["gemma3.block_count"], fields["gemma3.attention.key_length"]
    return _shape(fields) | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": size,
        "query_pre_attn_scalar": size,  # 27B has another value, and another shape, too
        "sliding_window": fields["gemma3.attention.sliding_window"],
        "layer_types": ["sliding_attention" if i % 6 else "full_attention" for i in range(1, num_layers + 1)],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": fields["gemma3.rope.freq_base"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }


def _gemma3_weight(part: str, weight: "Tensor", config: Fields) -> "Tensor":
    return weight - 1 if part.endswith("norm") else weight  # GGUF includes the 1 that transformers adds


def _scored_tokenizer(fields: Fields) -> Any:
    """SentencePiece's BPE: the merge with the best score first, and byte fallback for characters without a token.

    User-defined tokens (runs of spaces and line breaks, tags) are matched before any merge.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    kinds = fields["tokenizer.ggml.token_type"]
    tokens = [token.replace(" ", _SPACE) for token in fields["tokenizer.ggml.tokens"]]  # runs have plain spaces
    bos, unknown = (fields[f"tokenizer.ggml.{key}_token_id"] for key in ("bos", "unknown"))
    merges = scored_merges(tokens, kinds, fields["tokenizer.ggml.scores"])
    vocabulary = {token: i for i, token in enumerate(tokens)}
    options: dict[str, Any] = {"unk_token": tokens[unknown], "fuse_unk": True, "byte_fallback": True}
    backend = Tokenizer(models.BPE(vocabulary, merges, **options))
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokens_by_kind = {
        kind: [token for token, token_kind in zip(tokens, kinds, strict=True) if token_kind == kind]
        for kind in (CONTROL, USER_DEFINED)
    }
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in tokens_by_kind[CONTROL]]
    )
    backend.add_tokens([AddedToken(token, normalized=True) for token in tokens_by_kind[USER_DEFINED]])
    if fields["tokenizer.ggml.add_bos_token"]:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A {tokens[bos]} $B", special_tokens=[(tokens[bos], bos)]
        )
    return backend


def scored_merges(tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs of normal tokens that form a normal token, sorted by its score, best first."""
    normal = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == NORMAL}
    ranked = list[tuple[float, int, int, int]]()
    for token, i in normal.items():
        for cut in range(1, len(token)):
            first, second = normal.get(token[:cut]), normal.get(token[cut:])
            if first is not None and second is not None:
                ranked.append((-scores[i], i, first, second))
    return [(tokens[first], tokens[second]) for _, _, first, second in sorted(ranked)]


FAMILIES = {
    "llama": GgufFamily(
        _llama_config, _NAMES | {"ffn_norm": "post_attention_layernorm"}, _llama_weight, _byte_level_tokenizer
    ),
    "gemma3": GgufFamily(
        _gemma3_config,
        _NAMES
        | {
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        _gemma3_weight,
        _scored_tokenizer,
    ),
}
