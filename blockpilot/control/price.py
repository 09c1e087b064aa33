"""What a step of draft and verification costs on this device, by block size, active rows and context.

Measured by the engine itself: rows that really decode, timed step by step. The text does not matter for the cost, so
prompts are random tokens; block sizes take turns, so that a slow moment of the machine falls on all of them.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockpilot.storage import Place, read_bytes
from blockpilot.types import PairId

COSTS_FILE = "costs.json"
Array = NDArray[np.float64]
Table = tuple[tuple[tuple[float, ...], ...], ...]


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step, [block size][rows][context], each axis ascending; of one pair, dtype and device.

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
    contexts: tuple[int, ...]
    seconds: Table
    one_drafts: Table
    one_plain: Table

    def step_s(self, block_size: int, rows: int, context: int) -> float:
        """Seconds of a step of rows that are all alike, linear between what was measured and constant beyond it."""
        return float(self.alike_s([block_size], rows, context)[0])

    def alike_s(self, block_sizes: Sequence[int], rows: int, context: int) -> Array:
        """`step_s` of many block sizes, [K]."""
        return self._between("seconds", block_sizes, rows, context)

    def mixing_s(self, block_sizes: Sequence[int], rows: int, context: int) -> tuple[Array, Array]:
        """Two [K]: seconds of a step in which one of the rows drafts, a block of block_sizes[k], and of every token
        drafted beyond those if none of the other blocks is wider.
        """
        if rows == 1:
            alike = self.alike_s(block_sizes, rows, context)
            return alike, 0 * alike
        one, most = (self._between(table, block_sizes, rows, context) for table in ("one_drafts", "one_plain"))
        num_rows = sum(num_drafting(self.rows[r]) * of_r for r, of_r in _weights(self.rows, rows))
        drafted = (num_rows - 1) * (np.array(block_sizes) - 1)
        return one, (most - one).clip(min=0) / np.maximum(drafted, 1)

    def mixed_s(self, sizes: Sequence[int], context: int) -> float:
        """Seconds of a step whose rows have these block sizes; those that are all alike never take longer for it."""
        widest, rows = max(sizes), len(sizes)
        first, each = self.mixing_s([widest], rows, context)
        mixed = float(first[0] + each[0] * (sum(sizes) - rows - widest + 1))
        return mixed if min(sizes) < widest else min(mixed, self.step_s(widest, rows, context))

    def _between(self, table: str, block_sizes: Sequence[int], rows: int, context: int) -> Array:
        points = product(_weights(self.rows, rows), _weights(self.contexts, context))
        by_size = sum(of_r * of_c * self._arrays[table][:, r, c] for (r, of_r), (c, of_c) in points)
        return np.interp(block_sizes, self.block_sizes, by_size)

    @cached_property
    def _arrays(self) -> dict[str, Array]:
        """The tables, for choices before every step."""
        return {name: np.array(getattr(self, name)) for name in _TABLES}

    def speed_up(self, block_size: int, tau: float, rows: int, context: int) -> float:
        """Tokens per second at this acceptance length, divided by those of plain decoding."""
        return tau * self.step_s(1, rows, context) / self.step_s(block_size, rows, context)

    def scaled(self, plain: float, alike: float, mixed: float) -> "StepCosts":
        """Costs of which steps that only decode plainly take `plain` times as long, those of rows that draft alike
        `alike` times, and others `mixed` times.
        """

        def times(table: str, drafting: float) -> Table:
            factors = np.array([plain if size == 1 else drafting for size in self.block_sizes])
            return _as_table(factors[:, None, None] * self._arrays[table])

        one_drafts, one_plain = times("one_drafts", mixed), times("one_plain", mixed)
        return replace(self, seconds=times("seconds", alike), one_drafts=one_drafts, one_plain=one_plain)

    def of_candidates(self, candidates: Sequence[int], rows: int, context: int) -> list[float]:
        """The cost of a step with each of them, in steps of plain decoding."""
        relative: list[float] = (self.alike_s(candidates, rows, context) / self.step_s(1, rows, context)).tolist()
        return relative

    def cover(self, block_sizes: Sequence[int], rows: int) -> bool:
        """Whether they hold for these block sizes and so many rows."""
        return set(block_sizes) <= set(self.block_sizes) and rows <= self.rows[-1]

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self) | {"pair": self.pair._asdict()}) + "\n"

    @classmethod
    def read(cls, place: Place) -> "StepCosts":
        """From a file of `to_json`; raises ValueError for anything else."""
        try:
            return cls.from_fields(json.loads(read_bytes(place)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{place}: not the step costs of a pair ({error})") from None

    @classmethod
    def from_fields(cls, found: dict[str, Any]) -> "StepCosts":
        """From what `to_json` writes, read as JSON."""
        block_sizes, rows, contexts = (tuple(found[name]) for name in ("block_sizes", "rows", "contexts"))
        axes = {"block_sizes": block_sizes, "rows": rows, "contexts": contexts}
        tables = {name: _table(name, found[name], tuple(map(len, axes.values()))) for name in _TABLES}
        return cls(**found | axes | tables | {"pair": PairId(**found["pair"])})


_TABLES = ("seconds", "one_drafts", "one_plain")


def _table(name: str, values: Any, shape: tuple[int, ...]) -> Table:
    array = np.array(values)
    if array.shape != shape or array.dtype.kind not in "if" or not (np.isfinite(array) & (array > 0)).all():
        raise ValueError(f"{name} must be positive numbers of the shape {shape} of their axes")
    return _as_table(array)


def _as_table(array: Array) -> Table:
    return tuple(tuple(map(tuple, of_size)) for of_size in array.tolist())


def _weights(axis: Sequence[int], value: int) -> list[tuple[int, float]]:
    """Indices and weights of the measured points around a value."""
    above = bisect_right(axis, value)
    if above == 0 or above == len(axis):
        return [(min(above, len(axis) - 1), 1.0)]
    share = (value - axis[above - 1]) / (axis[above] - axis[above - 1])
    return [(above - 1, 1 - share), (above, share)]


MIXTURES_OF_A_SIZE = len(_TABLES)


def num_drafting(rows: int) -> int:
    """Rows that draft in `one_plain`."""
    return min(max(2, rows - 1), rows)
