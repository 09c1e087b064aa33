"""What a step of draft and verification costs on this device, by block size and active rows.

Measured by the engine itself: rows that really decode, timed step by step. The text does not matter for the cost, so
prompts are random tokens; block sizes take turns, so that a slow moment of the machine falls on all of them.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockpilot.storage import Place, read_bytes
from blockpilot.types import PairId

COSTS_FILE = "costs.json"
Array = NDArray[np.float64]
Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step, [block size][rows], each axis ascending; of one pair, dtype and device.

    All rows had `context` tokens when they were measured.

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
        num_rows = sum(num_drafting(self.rows[r]) * of_r for r, of_r in _weights(self.rows, rows))
        drafted = (num_rows - 1) * (np.array(block_sizes) - 1)
        return one, (most - one).clip(min=0) / np.maximum(drafted, 1)

    def mixed_s(self, sizes: Sequence[int]) -> float:
        """Seconds of a step whose rows have these block sizes; those that are all alike never take longer for it."""
        widest, rows = max(sizes), len(sizes)
        first, each = self.mixing_s([widest], rows)
        mixed = float(first[0] + each[0] * (sum(sizes) - rows - widest + 1))
        return mixed if min(sizes) < widest else min(mixed, self.step_s(widest, rows))

    def _between(self, table: str, block_sizes: Sequence[int], rows: int) -> Array:
        by_size = sum(of_r * self._arrays[table][:, r] for r, of_r in _weights(self.rows, rows))
        return np.interp(block_sizes, self.block_sizes, by_size)

    @cached_property
    def _arrays(self) -> dict[str, Array]:
        """The tables, for choices before every step."""
        return {name: np.array(getattr(self, name)) for name in _TABLES}

    def speed_up(self, block_size: int, tau: float, rows: int) -> float:
        """Tokens per second at this acceptance length, divided by those of plain decoding."""
        return tau * self.step_s(1, rows) / self.step_s(block_size, rows)

    def scaled(self, plain: float, alike: float, mixed: float) -> "StepCosts":
        """Costs of which steps that only decode plainly take `plain` times as long, those of rows that draft alike
        `alike` times, and others `mixed` times.
        """

        def times(table: str, drafting: float) -> Table:
            factors = np.array([plain if size == 1 else drafting for size in self.block_sizes])
            return _as_table(factors[:, None] * self._arrays[table])

        one_drafts, one_plain = times("one_drafts", mixed), times("one_plain", mixed)
        return replace(self, seconds=times("seconds", alike), one_drafts=one_drafts, one_plain=one_plain)

    def of_candidates(self, candidates: Sequence[int], rows: int) -> list[float]:
        """The cost of a step with each of them, in steps of plain decoding."""
        relative: list[float] = (self.alike_s(candidates, rows) / self.step_s(1, rows)).tolist()
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
        """From what `to_json` writes, read as JSON; also from tables [block size][rows][context] with one context."""
        if "contexts" in found:
            found = _of_one_context(found)
        block_sizes, rows = tuple(found["block_sizes"]), tuple(found["rows"])
        tables = {name: _as_table(_table(name, found[name], (len(block_sizes), len(rows)))) for name in _TABLES}
        return cls(**found | {"block_sizes": block_sizes, "rows": rows} | tables | {"pair": PairId(**found["pair"])})


_TABLES = ("seconds", "one_drafts", "one_plain")


def _of_one_context(found: dict[str, Any]) -> dict[str, Any]:
    """Fields of a file whose tables have an axis of contexts, without that axis."""
    contexts = found["contexts"]
    if len(contexts) != 1:
        raise ValueError(f"contexts {contexts}: costs of several contexts are no longer read; measure them at one")
    tables = {name: _table(name, found[name], (len(found["block_sizes"]), len(found["rows"]), 1)) for name in _TABLES}
    others = {name: value for name, value in found.items() if name != "contexts"}
    return others | {"context": contexts[0]} | {name: table[:, :, 0] for name, table in tables.items()}


def _table(name: str, values: Any, shape: tuple[int, ...]) -> Array:
    array = np.array(values)
    if array.shape != shape or array.dtype.kind not in "if" or not (np.isfinite(array) & (array > 0)).all():
        raise ValueError(f"{name} must be positive numbers of the shape {shape} of their axes")
    return array


def _as_table(array: Array) -> Table:
    return tuple(map(tuple, array.tolist()))


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
