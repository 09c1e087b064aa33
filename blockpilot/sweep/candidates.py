"""Candidate sets of sweeps: the block sizes to compare, by default those of BlockPilot (arXiv 2606.31315)."""

from collections.abc import Sequence
from typing import Literal

from blockpilot.types import MAX_BLOCK_SIZE, CandidateSet

Method = Literal["replay", "dense", "decode"]


def candidates_around(block_size: int, k: int = 2) -> list[int]:
    """The paper's candidate set {B0 - k .. B0 + k}, limited to 1 .. MAX_BLOCK_SIZE."""
    return [b for b in range(block_size - k, block_size + k + 1) if 1 <= b <= MAX_BLOCK_SIZE]


def check_candidates(candidates: Sequence[int], context: int | None = None) -> None:
    """Raise ValueError for an invalid candidate set, or block sizes above MAX_BLOCK_SIZE or not below `context`."""
    largest = max(CandidateSet(tuple(candidates)))
    if largest > MAX_BLOCK_SIZE:
        raise ValueError(f"candidates {tuple(candidates)}: block sizes must be at most {MAX_BLOCK_SIZE}")
    if context is not None and largest >= context:
        raise ValueError(f"candidates {tuple(candidates)}: must be shorter than the target's context of {context}")
