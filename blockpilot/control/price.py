"""What a step of draft and verification costs on this device, by block size, active rows and context.

Measured by the engine itself: rows that really decode, timed step by step. The text does not matter for the cost, so
prompts are random tokens; block sizes take turns, so that a slow moment of the machine falls on all of them.
"""

import json
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from blockpilot.engine.engine import Engine, Request
from blockpilot.pairs.loading import Pair, PairId
from blockpilot.storage import Place, read_bytes

COSTS_FILE = "costs.json"
BFLOAT16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")
CPU_INSTRUCTIONS = (*BFLOAT16_INSTRUCTIONS, "avx512_f", "avx2")  # best first
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
        num_rows = sum(_num_drafting(self.rows[r]) * of_r for r, of_r in _weights(self.rows, rows))
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

    def fits(self, pair: Pair, block_sizes: Sequence[int], rows: int) -> bool:
        """Whether they hold for this pair where it is loaded, for these block sizes and so many rows."""
        found = self.pair, self.dtype, self.device
        there = set(block_sizes) <= set(self.block_sizes) and rows <= self.rows[-1]
        return there and found == (pair.id, dtype_name(pair), device_name(pair.target.device))

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
MIXTURES_OF_A_SIZE = len(_TABLES)


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


def measure_costs(
    pair: Pair, block_sizes: Sequence[int], rows: Sequence[int], contexts: Sequence[int], *, num_steps: int = 7
) -> StepCosts:
    """Seconds of the fastest of `num_steps` steps at every point of the grid; axes ascend.

    What the others take longer is the machine's other business, and so is a larger block that seems to cost less than
    a smaller one: both then have their mean.

    Raises ValueError for an axis that does not ascend or a context that leaves no room for the steps.
    """
    for name, axis in (("block_sizes", block_sizes), ("rows", rows), ("contexts", contexts)):
        if not axis or axis[0] < 1 or any(a >= b for a, b in pairwise(axis)):
            raise ValueError(f"{name} {tuple(axis)}: must be ascending numbers of at least 1")
    measured: dict[tuple[tuple[int, ...], int], float] = {}
    for r, c in product(rows, contexts):
        numbers = 1, _num_drafting(r), r  # MIXTURES_OF_A_SIZE
        mixtures = list(dict.fromkeys(_drafting(size, num, r) for size in block_sizes for num in numbers))
        seconds = time_steps(pair, mixtures, c, num_steps=num_steps)
        measured |= {(mixture, c): each for mixture, each in zip(mixtures, seconds, strict=True)}

    def table(num_drafting: Callable[[int], int]) -> Table:
        values = {
            (r, c): never_falling([measured[_drafting(size, num_drafting(r), r), c] for size in block_sizes])
            for r, c in product(rows, contexts)
        }
        return tuple(tuple(tuple(values[r, c][b] for c in contexts) for r in rows) for b in range(len(block_sizes)))

    return StepCosts(
        pair.id,
        dtype_name(pair),
        device_name(pair.target.device),
        tuple(block_sizes),
        tuple(rows),
        tuple(contexts),
        seconds=table(lambda r: r),
        one_drafts=table(lambda r: 1),
        one_plain=table(_num_drafting),
    )


def _num_drafting(rows: int) -> int:
    """Rows that draft in `one_plain`."""
    return min(max(2, rows - 1), rows)


def _drafting(block_size: int, num: int, rows: int) -> tuple[int, ...]:
    """Block sizes of a batch of which `num` rows draft and the others decode plainly."""
    return (block_size,) * num + (1,) * (rows - num)


def never_falling(values: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls, by least squares (isotonic regression: pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # sum and number of neighbours with one mean
    for value in values:
        pool = (value, 1)
        while pools and pools[-1][0] / pools[-1][1] > pool[0] / pool[1]:
            before = pools.pop()
            pool = (before[0] + pool[0], before[1] + pool[1])
        pools.append(pool)
    return [total / num for total, num in pools for _ in range(num)]


def time_steps(pair: Pair, mixtures: Sequence[Sequence[int]], context: int, *, num_steps: int = 7) -> list[float]:
    """Seconds of the fastest of `num_steps` steps with each mixture, the block sizes of as many rows.

    All rows begin with `context` tokens, and the mixtures take turns.

    Raises ValueError for a context that leaves no room for the steps.
    """
    num_rows, widest = len(mixtures[0]), max(2, *(max(sizes) for sizes in mixtures))  # rows that could draft
    room = _room([max(sizes) for sizes in mixtures], num_steps)
    if context + room > pair.max_length:
        raise ValueError(f"context {context}: {room} tokens of steps must fit below {pair.max_length} with it")
    engine = Engine(pair, num_slots=num_rows, max_length=context + room, max_block_size=widest)
    prompts = torch.randint(0, pair.vocab_size, (num_rows, context), generator=torch.Generator().manual_seed(0))
    ids = [engine.add(Request(tuple(prompt), room, block_size=widest)) for prompt in prompts.tolist()]
    num_begun = 0
    while num_begun < num_rows:
        num_begun += sum(step.prefill is not None for step in engine.step())
    seconds: list[list[float]] = [[] for _ in mixtures]
    for turn in range(num_steps + 1):
        for sizes, of_mixture in zip(mixtures, seconds, strict=True):
            for request_id, size in zip(ids, sizes, strict=True):
                engine.set_block_size(request_id, size)
            started = time.perf_counter()
            engine.step()
            if turn:  # the first one of a shape pays for memory and kernels
                of_mixture.append(time.perf_counter() - started)
    return [min(of_mixture) for of_mixture in seconds]


def _room(widths: Sequence[int], num_steps: int) -> int:
    """Tokens that a row may emit in steps of these widths, the warm-up's included."""
    return (num_steps + 1) * sum(widths) + max(widths) + 2


def measured_up_to(
    pair: Pair, block_sizes: Sequence[int], rows: int, context: int, *, num_steps: int = 7
) -> StepCosts:
    """The costs of one context, as far as it has room, with 1, 2, 4, ... rows up to `rows`."""
    powers = sorted({min(2**i, rows) for i in range(rows.bit_length() + 1)})
    sizes = sorted({1, *block_sizes})
    room = _room(MIXTURES_OF_A_SIZE * sizes, num_steps)
    return measure_costs(pair, sizes, powers, [max(1, min(context, pair.max_length - room))], num_steps=num_steps)


def dtype_name(pair: Pair) -> str:
    """Of the target's weights."""
    return str(pair.target.dtype).removeprefix("torch.")


def device_name(device: torch.device) -> str:
    """What the costs depend on: the GPU's name, or the CPU's with its best instructions, and the number of threads.

    One name may stand for CPUs with and without instructions for bfloat16, a factor of three apart.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu = torch.cpu.get_capabilities()
    best = next((name for name in CPU_INSTRUCTIONS if cpu.get(name)), cpu.get("architecture"))
    return f"{cpu.get('cpu_name', device.type)} ({best}), {torch.get_num_threads()} threads"
