"""Pair as those know it who leave its weights to vLLM."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from blockpilot.device import best_device
from blockpilot.drafts.families import family, load_any_draft
from blockpilot.pairs.checkpoints import NOT_FOUND, find_draft, find_target, not_found
from blockpilot.pairs.loading import load_tokenizer
from blockpilot.pairs.table import split_revision
from blockpilot.types import PairId
from jobs.common.config import PairConfig, pick_dtype


@dataclass(frozen=True)
class VllmPair:
    """Names, directories and tokenizer of a target and its DFlash draft, and the dtype to load them in."""

    id: PairId
    target: Path
    draft: Path
    tokenizer: PreTrainedTokenizerBase
    block_size: int
    """That the draft was trained for."""
    dtype: str

    @classmethod
    def of(cls, config: PairConfig) -> Self:
        """Raises ValueError for models that cannot be had, and for a draft of another family."""
        names = config.models
        target, draft = (find(name) for find, name in zip((find_target, find_draft), names, strict=True))
        network = load_any_draft(draft.directory)
        if (kind := family(network)) != "dflash":
            raise ValueError(f"draft {names[1]}: {kind}; by vLLM only DFlash drafts are swept and served")
        try:
            tokenizer = load_tokenizer(target.directory)
        except NOT_FOUND as error:
            raise ValueError(not_found("target", names[0], error)) from None
        target_name, draft_name = (split_revision(name)[0] for name in names)
        return cls(
            PairId(target_name, target.revision, draft_name, draft.revision),
            target.directory,
            draft.directory,
            tokenizer,
            network.block_size,
            pick_dtype(config.dtype, best_device()),
        )

    @property
    def vocab_size(self) -> int:
        return int(self._config.vocab_size)

    @property
    def max_length(self) -> int:
        """The target's context, in tokens."""
        return int(self._config.max_position_embeddings)

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """End-of-sequence tokens of the target's generation config, or its own, and of the tokenizer."""
        try:
            eos = GenerationConfig.from_pretrained(self.target).eos_token_id
        except OSError:  # it has none
            eos = self._config.eos_token_id
        ids = eos if isinstance(eos, list) else [eos]
        return frozenset(i for i in [*ids, self.tokenizer.eos_token_id] if i is not None)

    @cached_property
    def _config(self) -> PretrainedConfig:
        found: PretrainedConfig = AutoConfig.from_pretrained(self.target).get_text_config()
        return found
