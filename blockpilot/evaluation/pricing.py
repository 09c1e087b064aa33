"""The step price of a pair on this device, from a few steps of an engine whose rows really decode.

The text does not matter for the cost, so prompts are random tokens; mixtures of block sizes take turns, so that a
slow moment of the machine falls on all of them.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from blockpilot.control.price import COEFFICIENTS, Load, StepPrice, fit, passes, relative_error
from blockpilot.device import device_name, dtype_name
from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.types import MAX_BLOCK_SIZE, PairId, Request

NUM_STEPS = 2  # of each mixture after the first; the fastest counts


class TimedStep(NamedTuple):
    """A mixture of block sizes, and the seconds of its fastest step."""

    load: Load
    seconds: float


def measure_price(pair: Pair, rows: int, context: int, *, num_steps: int = NUM_STEPS) -> StepPrice:
    """Timed with one row and with `rows`, of `context` tokens each as far as the target has room for them.

    Raises ValueError for numbers below 1.
    """
    for name, value in (("rows", rows), ("context", context), ("num_steps", num_steps)):
        if value < 1:
            raise ValueError(f"{name} {value}: must be at least 1")
    fitted, held_out = list[TimedStep](), list[TimedStep]()
    largest = max(rows, 2)  # of one row alone base and row cannot be told apart
    for num in (1, largest):
        mixtures = mixtures_of(num, pair.block_size)
        context = min(context, _room(pair, mixtures, num_steps))
        timed = time_steps(pair, mixtures, context, num_steps=num_steps)
        fitted += timed[:-1]
        held_out += timed[-1:]
    coefficients = fit([step.load for step in fitted], [step.seconds for step in fitted])
    error = relative_error(coefficients, [step.load for step in held_out], [step.seconds for step in held_out])
    named = dict(zip(COEFFICIENTS, coefficients.tolist(), strict=True))
    return StepPrice(*_made_for(pair), context, rows, **named, error=error, is_sequential=pair.draft.is_sequential)


def holds_here(price: StepPrice, pair: Pair) -> bool:
    """Whether a price is of this pair, in its dtype and on its device."""
    return price.made_for(*_made_for(pair))


def _made_for(pair: Pair) -> tuple[PairId, str, str]:
    return pair.id, dtype_name(pair.target.dtype), device_name(pair.target.device)


def mixtures_of(rows: int, block_size: int) -> list[tuple[int, ...]]:
    """Block sizes of so many rows, trees where they are larger than the draft's own; the last one is a mixture."""
    small, large = max(2, block_size // 2), min(2 * block_size, MAX_BLOCK_SIZE)
    if rows == 1:  # up to a tile and beyond; the last one lies between
        return [(1,), (2,), (small,), (block_size,), (large,), (MAX_BLOCK_SIZE,), ((block_size + large) // 2,)]
    plain = (1,) * rows
    return [
        plain,
        (2, *plain[1:]),
        (block_size, *plain[1:]),
        (large, *plain[1:]),
        (2,) * rows,
        (small + 1,) * rows,
        (large, *(2, 1, small + 1) * rows)[:rows],
    ]


def time_steps(
    pair: Pair, mixtures: Sequence[Sequence[int]], context: int, *, num_steps: int = NUM_STEPS
) -> list[TimedStep]:
    """The fastest of `num_steps` steps with each mixture: block sizes of as many rows, which verify trees.

    All rows begin with `context` tokens, fewer where the target has no room for them and the steps.
    """
    num_rows, deepest = len(mixtures[0]), pair.block_size - 1
    context = min(context, most := _room(pair, mixtures, num_steps))
    room = pair.max_length - most
    engine = Engine(pair, num_slots=num_rows, max_length=min(context + room, pair.max_length))
    prompts = torch.randint(0, pair.vocab_size, (num_rows, context), generator=torch.Generator().manual_seed(0))
    requests = [Request(tuple(p), room, block_size=2, layout="tree") for p in prompts.tolist()]
    ids = [engine.add(request) for request in requests]
    while engine.num_decoding < num_rows:
        engine.step()
    found: list[TimedStep | None] = [None] * len(mixtures)
    for turn in range(num_steps + 1):
        for place, sizes in enumerate(mixtures):
            for request_id, size in zip(ids, sizes, strict=True):
                engine.set_block_size(request_id, size)
            started = time.perf_counter()
            steps = engine.step()
            seconds = time.perf_counter() - started
            depths = [min(n - 1, deepest) for n in sizes]
            num_passes = passes(depths, pair.draft.is_sequential)
            load = Load(num_rows, sum(depths), sum(len(s.tree.tokens) for s in steps), num_passes)
            best = found[place]
            if turn and (best is None or seconds < best.seconds):  # the first of a shape pays for memory and kernels
                found[place] = TimedStep(load, seconds)
    return [each for each in found if each is not None]


def _room(pair: Pair, mixtures: Sequence[Sequence[int]], num_steps: int) -> int:
    """Tokens that a row may begin with."""
    widest = [min(max(sizes), pair.block_size) for sizes in mixtures]
    return max(1, pair.max_length - (num_steps + 1) * sum(widest) - pair.block_size - 2)
