"""Memory of a pair's KV caches: bytes per slot and token, and how many slots and tokens fit.

A pair runs on one device, whose memory holds the weights of target and draft, the caches, which an engine allocates
at its start, and the working memory of passes (WORKING_SHARE).
"""

from typing import NamedTuple, Self

import torch

from blockpilot.device import free_bytes, gib
from blockpilot.engine.prefixes import PAGE
from blockpilot.models.target import Target
from blockpilot.pairs.loading import Pair
from blockpilot.types import MAX_BLOCK_SIZE

WORKING_SHARE = 0.05  # of a GPU's memory: activations and logits of the widest pass, CUDA graphs, CUDA itself


class CacheSize(NamedTuple):
    """Bytes of a pair's caches, of target and draft together."""

    slot: int
    """Bytes of a slot in addition to its tokens: recurrent states, columns for drafted tokens."""
    token: int
    """Bytes of each token that a slot has room for."""
    kept_token: int
    """Bytes of each token of the prefix cache, which a target with recurrent states does not have."""

    @classmethod
    def of(cls, pair: Pair) -> Self:
        """Sizes extrapolated from caches of one and two tokens."""
        target = Target(pair.target, pair.layer_ids)
        target_bytes, draft_bytes = (
            [model.new_cache(1, length).num_bytes for length in (1, 2)] for model in (target, pair.prepared_draft)
        )
        target_token_bytes, draft_token_bytes = target_bytes[1] - target_bytes[0], draft_bytes[1] - draft_bytes[0]
        token = target_token_bytes + draft_token_bytes
        slot = target_bytes[0] + draft_bytes[0] - token + MAX_BLOCK_SIZE * target_token_bytes
        return cls(slot, token, 0 if target.has_states else token)

    def num_bytes(self, num_slots: int, max_length: int, prefix_tokens: int) -> int:
        """Bytes of the caches of an engine."""
        return num_slots * (self.slot + max_length * self.token) + prefix_tokens // PAGE * PAGE * self.kept_token

    def most_slots(self, num_bytes: int, max_length: int) -> int:
        """Maximum number of slots of this length, with a prefix cache of as many tokens as all slots together."""
        return max(0, num_bytes // (self.slot + max_length * (self.token + self.kept_token)))

    def longest(self, num_bytes: int, num_slots: int) -> int:
        """Maximum length of this number of slots, with a prefix cache of as many tokens as all slots together."""
        return max(0, (num_bytes // num_slots - self.slot) // (self.token + self.kept_token))


def check_memory(pair: Pair, num_slots: int, max_length: int, prefix_tokens: int) -> None:
    """Raise ValueError, saying what fits, if these slots and prefix tokens do not fit into the free memory."""
    device, size = pair.target.device, CacheSize.of(pair)
    free, needed = free_bytes(device), size.num_bytes(num_slots, max_length, prefix_tokens)
    if free is None:
        return
    if device.type == "cuda":
        free -= int(WORKING_SHARE * torch.cuda.get_device_properties(device).total_memory)
    if needed > free:
        slots, longest = size.most_slots(free, max_length), min(size.longest(free, num_slots), pair.max_length)
        raise ValueError(
            f"num_slots {num_slots} of {max_length} tokens, prefix_tokens {prefix_tokens}: the caches take"
            f" {gib(needed)}, {gib(free)} are free; with as many prefix_tokens {slots} slots of {max_length} tokens"
            f" fit, or {num_slots} of {longest}"
        )
