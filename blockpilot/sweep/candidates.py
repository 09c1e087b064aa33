"""Candidates of a sweep: the block sizes that it compares, by default BlockPilot's (arXiv 2606.31315)."""

from collections.abc import Sequence
from typing import Literal

from blockpilot.types import MAX_BLOCK_SIZE, CandidateSet

Method = Literal["replay", "dense", "decode"]


def candidates_around(block_size: int, k: int = 2) -> list[int]:
    """The paper's candidate set, {B0 - k .. B0 + k}, as far as it lies in 1 .. MAX_BLOCK_SIZE."""
    return [b for b in range(block_size - k, block_size + k + 1) if 1 <= b <= MAX_BLOCK_SIZE]


def check_candidates(candidates: Sequence[int], context: int | None = None) -> None:
    """Raise ValueError unless they are a candidate set of at most MAX_BLOCK_SIZE, and shorter than the context."""
    largest = max(CandidateSet(tuple(candidates)))
    if largest > MAX_BLOCK_SIZE:
        raise ValueError(f"candidates {tuple(candidates)}: block sizes must be at most {MAX_BLOCK_SIZE}")
    if context is not None and largest >= context:
        raise ValueError(f"candidates {tuple(candidates)}: must be shorter than the target's context of {context}")
