"""Placeholder for a target without a draft: it proposes nothing, caches nothing and takes no memory.

Such a target verifies tokens of prompt lookup in each row's text (engine/lookup.py), or forced by a constraint.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockpilot.drafts.base import Choose, Draft, DraftRequest, Embed, PreparedDraft
from blockpilot.drafts.blocks import Blocks, KnownContext
from blockpilot.drafts.choices import ConditionalCandidates
from blockpilot.models.cache import SlotCache
from blockpilot.models.packing import Packing
from blockpilot.types import Candidates


class NoDraft(Draft):
    """Draft without weights: block size 1, and no layers of the target are read."""

    is_sequential = False
    block_size = 1
    context_size = 0
    dtype = torch.float32
    decoder_layers = ()

    def layer_ids(self, num_target_layers: int) -> tuple[int, ...]:
        return ()

    def check_fit(self, config: object) -> None:
        """Fits every target."""

    def at_anchors(self, blocks: Blocks, context: KnownContext, embed: Embed) -> Tensor:
        """Raise ValueError: there is nothing to run."""
        raise ValueError("the pair has no draft: it has no hidden states of blocks")


@dataclass(frozen=True)
class _NoLayers:
    """Shape of a cache without layers."""

    num_hidden_layers: int = 0
    num_attention_heads: int = 1
    num_key_value_heads: int = 1
    head_dim: int = 2


class PreparedNoDraft(PreparedDraft):
    """`NoDraft` prepared for the engine: its cache has 0 bytes, and it is never run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_cache(self, num_slots: int, length: int) -> SlotCache:
        return SlotCache(_NoLayers(), num_slots, length, NoDraft.dtype, self._device)

    def update_cache(
        self, features: Tensor, following: Sequence[int], slots: Sequence[int], packing: Packing, cache: SlotCache
    ) -> Tensor:
        raise AssertionError("a pair without a draft keeps no features")

    def propose(self, request: DraftRequest, cache: SlotCache, choose: Choose) -> Candidates | ConditionalCandidates:
        raise AssertionError("a pair without a draft has no draft pass")
