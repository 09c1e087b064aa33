"""Memory of a replica's caches: how much they take, and whether they fit."""

from pathlib import Path

import torch

from blockpilot.engine.prefixes import PAGE
from blockpilot.models.target import Target
from blockpilot.pairs.loading import Pair
from blockpilot.types import MAX_BLOCK_SIZE

MEMORY_FILE = Path("/proc/meminfo")


def check_memory(pair: Pair, num_slots: int, max_length: int, prefix_tokens: int) -> None:
    """Raise ValueError where the caches of so many slots and kept tokens do not fit into the memory that is left."""
    needed, free = cache_bytes(pair, num_slots, max_length, prefix_tokens), _free_bytes(pair.target.device)
    if free is not None and needed > free:
        raise ValueError(
            f"num_slots {num_slots} of {max_length} tokens, prefix_tokens {prefix_tokens}: the caches take"
            f" {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; fewer slots or prefix_tokens, or a smaller"
            " max_length, are needed"
        )


def cache_bytes(pair: Pair, num_slots: int, max_length: int, prefix_tokens: int) -> int:
    """Memory of the caches of an engine of this size, by those of one slot with one token."""
    target = Target(pair.target, pair.layer_ids).new_cache(1, 1).num_bytes
    first, second = (pair.prepared_draft.new_cache(1, length).num_bytes for length in (1, 2))
    of_slot = target * (max_length + MAX_BLOCK_SIZE) + first + (max_length - 1) * (second - first)
    return num_slots * of_slot + prefix_tokens // PAGE * PAGE * (target + second - first)


def _free_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU, or of a Linux machine; None where it is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if not MEMORY_FILE.exists():
        return None
    lines = MEMORY_FILE.read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
