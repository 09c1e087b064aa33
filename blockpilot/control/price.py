"""Step costs: seconds of draft and verification on a device, by block size and active rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from blockpilot.types import PairId

Array = NDArray[np.float64]
Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step of rows of `context` tokens, [block size][rows], each axis ascending.

    In `seconds` all rows draft blocks of that size, in `one_drafts` one row does and the others decode plainly, in
    `one_plain` it is the other way about (of two rows both draft). Rows of different sizes take longer than as many
    tokens of rows that are all alike: of such a step the widest block says which costs to look at (attention pads to
    it), and the number of drafted tokens where it lies between `one_drafts` and `one_plain`.
    """

    pair: PairId
    dtype: str
    device: str
    block_sizes: tuple[int, ...]
    rows: tuple[int, ...]
    context: int
    seconds: Table
    one_drafts: Table
    one_plain: Table

    def step_s(self, block_size: int, rows: int) -> float:
        """Seconds of a step of rows that are all alike, linear between what was measured and constant beyond it."""
        return float(self.alike_s([block_size], rows)[0])

    def alike_s(self, block_sizes: Sequence[int], rows: int) -> Array:
        """`step_s` of many block sizes, [K]."""
        return self._between("seconds", block_sizes, rows)

    def mixing_s(self, block_sizes: Sequence[int], rows: int) -> tuple[Array, Array]:
        """Two [K]: seconds of a step in which one of the rows drafts, a block of block_sizes[k], and of every token
        drafted beyond those if none of the other blocks is wider.
        """
        if rows == 1:
            alike = self.alike_s(block_sizes, rows)
            return alike, 0 * alike
        one, most = (self._between(table, block_sizes, rows) for table in ("one_drafts", "one_plain"))
        num_rows = np.interp(rows, self.rows, list(map(num_drafting, self.rows)))
        drafted = (num_rows - 1) * (np.array(block_sizes) - 1)
        return one, (most - one).clip(min=0) / np.maximum(drafted, 1)

    def mixed_s(self, sizes: Sequence[int]) -> float:
        """Seconds of a step whose rows have these block sizes; those that are all alike never take longer for it."""
        widest, rows = max(sizes), len(sizes)
        first, each = self.mixing_s([widest], rows)
        mixed = float(first[0] + each[0] * (sum(sizes) - rows - widest + 1))
        return mixed if min(sizes) < widest else min(mixed, self.step_s(widest, rows))

    def _between(self, table: str, block_sizes: Sequence[int], rows: int) -> Array:
        place = np.interp(rows, self.rows, np.arange(len(self.rows)))
        below, above = self._arrays[table][:, [math.floor(place), math.ceil(place)]].T
        by_size: Array = np.interp(block_sizes, self.block_sizes, below + place % 1 * (above - below))
        return by_size

    @cached_property
    def _arrays(self) -> dict[str, Array]:
        """The tables, for choices before every step."""
        return {name: np.array(getattr(self, name)) for name in TABLES}

    def scaled(self, plain: float, alike: float, mixed: float) -> "StepCosts":
        """Costs of which steps that only decode plainly take `plain` times as long, those of rows that draft alike
        `alike` times, and others `mixed` times.
        """

        def times(table: str, drafting: float) -> Table:
            factors = np.array([plain if size == 1 else drafting for size in self.block_sizes])
            return as_table(factors[:, None] * self._arrays[table])

        one_drafts, one_plain = times("one_drafts", mixed), times("one_plain", mixed)
        return replace(self, seconds=times("seconds", alike), one_drafts=one_drafts, one_plain=one_plain)

    def cover(self, block_sizes: Sequence[int], rows: int) -> bool:
        """True if the costs hold for these block sizes and so many rows."""
        return set(block_sizes) <= set(self.block_sizes) and rows <= self.rows[-1]


TABLES = ("seconds", "one_drafts", "one_plain")


def as_table(array: Array) -> Table:
    """An array [block size, rows] as a field of StepCosts."""
    return tuple(map(tuple, array.tolist()))


def num_drafting(rows: int) -> int:
    """Rows that draft in `one_plain`."""
    return min(max(2, rows - 1), rows)
