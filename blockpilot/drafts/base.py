"""Interface of all draft families, used by engine, sweeps, policies and servers.

A `Draft` is the network of a checkpoint. Prepared for a target it becomes a `PreparedDraft`, which runs over a
separate cache: the cache takes every accepted token, and the draft proposes choices for the positions after an
anchor. families.py lists all families.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from blockpilot.drafts.blocks import Blocks, KnownContext
from blockpilot.drafts.choices import ConditionalCandidates
from blockpilot.drafts.head import DraftHead
from blockpilot.models.cache import SlotCache
from blockpilot.models.packing import Packing
from blockpilot.types import Candidates, Sampling

Embed = Callable[[Tensor], Tensor]
"""Token ids [...] -> embeddings [..., hidden] as the target's layers read them (Gemma scales them)."""


class DraftRequest(NamedTuple):
    """Rows [R] to draft for, depths[r] (1 or more) positions after the anchor of row r."""

    slots: Sequence[int]
    """Slots of the draft's cache, ascending."""
    starts: Sequence[int]
    """Positions of the anchors."""
    anchors: Sequence[int]
    """Tokens at these positions."""
    depths: Sequence[int]
    sampling: Sequence[Sampling]
    num: int
    """Choices per position."""
    width: int
    """Maximum number of prefixes per position that have separate choices; 1 for chains."""


Choose = Callable[[Tensor, Sequence[int], Sequence[int]], Candidates]
"""Keyed sampler over a draft's LM head: hidden states [M, hidden], rows [M] and positions [M] -> choices."""


class PreparedDraft(ABC):
    """A draft prepared for a target, whose embeddings it may read."""

    head: DraftHead

    @abstractmethod
    def new_cache(self, num_slots: int, length: int) -> SlotCache:
        """An empty cache of the draft, for `num_slots` rows of at most `length` accepted tokens."""

    @abstractmethod
    def update_cache(
        self, features: Tensor, following: Sequence[int], slots: Sequence[int], packing: Packing, cache: SlotCache
    ) -> Tensor:
        """Cache the target's features [N, F] of packed accepted tokens, of rows in `slots` [R].

        following [N]: the token after each; after a row's last one its new anchor, negative if the row failed.
        Returns their context vectors [N, hidden].
        """

    @abstractmethod
    def propose(self, request: DraftRequest, cache: SlotCache, choose: Choose) -> Candidates | ConditionalCandidates:
        """Choices for every requested position [N], row by row: independent, or conditional on the one before."""


class Draft(nn.Module, ABC):
    """The network of a checkpoint; `options` hold what its configuration does not."""

    config: Any
    options: Any
    norm: Any

    @property
    def block_size(self) -> int:
        """Block size that the draft was trained for: the anchor and the drafted positions."""
        return int(self.options.block_size)

    @property
    @abstractmethod
    def is_sequential(self) -> bool:
        """True if it proposes token by token, one pass per depth; False if one pass proposes all tokens."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its weights."""
        dtype: torch.dtype = self.norm.weight.dtype
        return dtype

    @property
    def context_size(self) -> int:
        """Size of a context vector."""
        return int(self.config.hidden_size)

    @property
    @abstractmethod
    def decoder_layers(self) -> Sequence[nn.Module]:
        """Its layers."""

    @abstractmethod
    def layer_ids(self, num_target_layers: int) -> tuple[int, ...]:
        """Layers of a target whose outputs are the draft's features, 0 is the first."""

    def check_fit(self, config: PretrainedConfig) -> None:
        """Raise ValueError, naming both values, for a draft that was not made for a target of this configuration."""
        check_same("hidden size", self.config.hidden_size, config.hidden_size)
        check_same("vocabulary", self.config.vocab_size, config.vocab_size)

    @abstractmethod
    def at_anchors(self, blocks: Blocks, context: KnownContext, embed: Embed) -> Tensor:
        """Hidden states [R, sum(widths), hidden], for the LM head, of blocks on known texts.

        Those for a position depend on the text up to the token before it, or less. `embed` is the target's.
        """


def check_same(what: str, draft_value: object, target_value: object) -> None:
    """Raise ValueError, naming both values, if they differ."""
    if draft_value != target_value:
        raise ValueError(f"draft does not fit target: {what} {draft_value}, the target's is {target_value}")


def check_layers(ids: Sequence[int], num_target_layers: int) -> None:
    """Raise ValueError for the first layer that a target does not have."""
    if wrong := [i for i in ids if not 0 <= i < num_target_layers]:
        raise ValueError(f"draft reads target layer {wrong[0]}: must be 0 to {num_target_layers - 1}")
