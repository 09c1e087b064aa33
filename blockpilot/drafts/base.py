"""The interface of drafts: what engine, sweeps, policies and servers know of one, whatever its family.

A `Draft` is the network of a checkpoint. Prepared for a target it becomes a `PreparedDraft`, which runs over a cache
of its own: it is kept up with every token that becomes final, and proposes choices for the positions after an anchor.
families.py knows all families.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from blockpilot.drafts.blocks import Blocks, KnownContext
from blockpilot.drafts.choices import Linked
from blockpilot.drafts.head import DraftHead
from blockpilot.models.cache import SlotCache
from blockpilot.models.packing import Packing
from blockpilot.types import Candidates, Sampling

Embed = Callable[[Tensor], Tensor]
"""Token ids [...] -> embeddings [..., hidden] as the target's layers read them, which Gemma scales."""


class Asked(NamedTuple):
    """Rows [R] that proposals are wanted for: depths[r] (1 or more) positions after each one's anchor."""

    slots: Sequence[int]
    """Slots of the draft's cache, ascending."""
    starts: Sequence[int]
    """Positions of the anchors."""
    anchors: Sequence[int]
    """Tokens at these positions."""
    depths: Sequence[int]
    sampling: Sequence[Sampling]
    num: int
    """Choices wanted of every position."""
    width: int
    """Prefixes at most that a position's choices are wanted after, where these differ: 1 for chains."""


Choose = Callable[[Tensor, Sequence[int], Sequence[int]], Candidates]
"""The keyed sampler over a draft's LM head: choices by hidden states [M, hidden], rows [M] and positions [M]."""


class PreparedDraft(ABC):
    """A draft as it runs beside its target, whose embeddings it may read."""

    head: DraftHead

    @abstractmethod
    def new_cache(self, num_slots: int, length: int) -> SlotCache:
        """An empty cache of what the draft knows of `num_slots` rows of at most `length` final tokens."""

    @abstractmethod
    def keep_up(
        self, features: Tensor, following: Sequence[int], slots: Sequence[int], packing: Packing, cache: SlotCache
    ) -> Tensor:
        """Cache the target's features [N, F] of packed final tokens, whose rows lie in `slots` [R].

        following [N] are the tokens after them: a row's last one is followed by its new anchor, or by one below 0
        where the row failed. Returns their context vectors [N, hidden].
        """

    @abstractmethod
    def propose(self, asked: Asked, cache: SlotCache, choose: Choose) -> Candidates | Linked:
        """Choices for every position asked for, N in all, row by row: drawn apart, or after each other."""


class Draft(nn.Module, ABC):
    """The network of a checkpoint; `options` hold what its configuration does not."""

    config: Any
    options: Any
    norm: Any

    @property
    def block_size(self) -> int:
        """Tokens of a step that the draft was trained for: its anchor and the positions that it drafts."""
        return int(self.options.block_size)

    @property
    @abstractmethod
    def is_sequential(self) -> bool:
        """True if it proposes token by token, in a pass for each depth, rather than all in one."""

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

        The one for a position knows the text up to the token before it, or less. `embed` is the target's.
        """


def check_same(what: str, of_draft: object, of_target: object) -> None:
    """Raise ValueError, naming both values, where they differ."""
    if of_draft != of_target:
        raise ValueError(f"draft does not fit target: {what} {of_draft}, the target's is {of_target}")


def check_layers(ids: Sequence[int], num_target_layers: int) -> None:
    """Raise ValueError for the first layer that a target does not have."""
    if wrong := [i for i in ids if not 0 <= i < num_target_layers]:
        raise ValueError(f"draft reads target layer {wrong[0]}: must be 0 to {num_target_layers - 1}")
