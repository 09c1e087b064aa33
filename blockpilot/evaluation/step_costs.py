"""Seconds of a step of this pair on this device, and their file.

Measured by an engine whose rows really decode, step by step. The text does not matter for the cost, so prompts are
random tokens; block sizes take turns, so that a slow moment of the machine falls on all of them.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch

from blockpilot.control.price import TABLES, StepCosts, as_table, num_drafting
from blockpilot.device import device_name, dtype_name
from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.storage import Place, read_bytes
from blockpilot.types import PairId, Request

COSTS_FILE = "costs.json"


def costs_to_json(costs: StepCosts) -> str:
    """One line of JSON."""
    return json.dumps(asdict(costs) | {"pair": costs.pair._asdict()}) + "\n"


def read_costs(place: Place) -> StepCosts:
    """From a file of `costs_to_json`; raises ValueError for anything else."""
    try:
        return costs_from_fields(json.loads(read_bytes(place)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place}: not the step costs of a pair ({error})") from None


def costs_from_fields(found: Mapping[str, Any]) -> StepCosts:
    """From what `costs_to_json` writes, read as JSON; tables may be [block size][rows][context] of one context."""
    values = dict(found) | {name: tuple(found[name]) for name in ("block_sizes", "rows")}
    values["pair"] = PairId(**found["pair"])
    shape: tuple[int, ...] = len(found["block_sizes"]), len(found["rows"])
    if contexts := values.pop("contexts", ()):
        if len(contexts) > 1:
            raise ValueError(f"contexts {contexts}: costs of several are no longer read; measure them at one")
        values["context"], shape = contexts[0], (*shape, 1)
    for name in TABLES:
        array = np.array(found[name])
        if array.shape != shape or array.dtype.kind not in "if" or not (np.isfinite(array) & (array > 0)).all():
            raise ValueError(f"{name} must be positive numbers of the shape {shape} of their axes")
        values[name] = as_table(array.reshape(shape[:2]))
    return StepCosts(**values)


def relative_costs(costs: StepCosts, block_sizes: Sequence[int], rows: int) -> list[float]:
    """The cost of a step of rows that are all alike with each block size, in steps of plain decoding."""
    relative: list[float] = (costs.alike_s(block_sizes, rows) / costs.step_s(1, rows)).tolist()
    return relative


def hold_here(costs: StepCosts, pair: Pair, block_sizes: Sequence[int], rows: int) -> bool:
    """Whether costs are of this pair where it is loaded, and cover these block sizes and so many rows."""
    here = pair.id, dtype_name(pair.target.dtype), device_name(pair.target.device)
    return costs.cover(block_sizes, rows) and (costs.pair, costs.dtype, costs.device) == here


def measure_costs(
    pair: Pair, block_sizes: Sequence[int], rows: Sequence[int], context: int, *, num_steps: int = 7
) -> StepCosts:
    """Seconds of the fastest of `num_steps` steps at every point of the grid; axes ascend.

    What the others take longer is the machine's other business, and so is a larger block that seems to cost less than
    a smaller one: both then have their mean.

    Raises ValueError for an axis that does not ascend or a context that leaves no room for the steps.
    """
    for name, axis in (("block_sizes", block_sizes), ("rows", rows)):
        if not axis or axis[0] < 1 or any(a >= b for a, b in pairwise(axis)):
            raise ValueError(f"{name} {tuple(axis)}: must be ascending numbers of at least 1")
    if context < 1:
        raise ValueError(f"context {context}: must be at least 1")
    of_rows: dict[str, list[list[float]]] = {name: [] for name in TABLES}
    for r in rows:
        mixtures = {
            name: [(size,) * num + (1,) * (r - num) for size in block_sizes]
            for name, num in zip(TABLES, (r, 1, num_drafting(r)), strict=True)  # num of r rows draft
        }
        distinct = list(dict.fromkeys(chain.from_iterable(mixtures.values())))
        seconds = dict(zip(distinct, time_steps(pair, distinct, context, num_steps=num_steps), strict=True))
        for name, of_sizes in mixtures.items():
            of_rows[name].append(never_falling([seconds[mixture] for mixture in of_sizes]))
    tables = {name: as_table(np.transpose(columns)) for name, columns in of_rows.items()}
    dtype, device = dtype_name(pair.target.dtype), device_name(pair.target.device)
    return StepCosts(pair.id, dtype, device, tuple(block_sizes), tuple(rows), context, **tables)


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
    """The costs of a context, as far as it has room, with 1, 2, 4, ... rows up to `rows`."""
    powers = sorted({min(2**i, rows) for i in range(rows.bit_length() + 1)})
    sizes = sorted({1, *block_sizes})
    room = _room(len(TABLES) * sizes, num_steps)
    return measure_costs(pair, sizes, powers, max(1, min(context, pair.max_length - room)), num_steps=num_steps)
