"""The step price of a pair on this device, from a few steps of an engine whose rows really decode.

The text does not matter for the cost, so prompts are random tokens; mixtures take turns, so that a slow moment of the
machine falls on all of them. How deep a row drafts and how many tokens it verifies vary apart: block sizes vary both
alike, and what a drafted position costs could not be told from what a verified token does. Without a draft nothing
is drafted, and the verified tokens are those that a constraint forces.
"""

import time
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from blockpilot.control.acceptance import AcceptanceModel, Array
from blockpilot.control.choose import Trees
from blockpilot.control.controller import Controller, Planned
from blockpilot.control.cost import COEFFICIENTS, TILE, Load, StepPrice, fit, passes, relative_error
from blockpilot.device import device_name, dtype_name
from blockpilot.engine.engine import Engine
from blockpilot.engine.trees import MAX_DEPTH
from blockpilot.pairs.loading import Pair
from blockpilot.types import MAX_BLOCK_SIZE, PairId, Request

NUM_STEPS = 5  # of each mixture after the first; the fastest counts
OF_NO_DRAFT = "base_s", "row_s", "token_s", "tile_s"  # coefficients of a pair without a draft; the others are 0


class Drafted(NamedTuple):
    """Positions that a row drafts in a step, and tokens that it verifies, without a draft also at depth 0."""

    depth: int
    num_verified: int

    @property
    def most_accepted(self) -> int:
        """Tokens of them that can be accepted."""
        return self.depth or self.num_verified

    @classmethod
    def of_size(cls, block_size: int, deepest: int) -> "Drafted":
        """A chain, or a tree where the block size is larger than the draft's own."""
        return cls(min(block_size - 1, deepest), block_size - 1)


PLAIN = Drafted(0, 0)


class TimedStep(NamedTuple):
    """The load of a mixture, and the seconds of its fastest step."""

    load: Load
    seconds: float


class _Dictated(Controller):
    """Rows draft and verify what `mixture` says of them, in the order of the requests."""

    mixture: Sequence[Drafted]

    def __init__(self, deepest: int) -> None:
        super().__init__(AcceptanceModel(deepest), follows=False)
        self._has_draft = deepest > 0

    def plan(self, rows: Planned, beside: Load) -> Array:
        super().plan(rows, beside)  # its time is part of a step
        return self._begin(rows, np.array([row.depth for row in self.mixture]))

    def select(self, trees: Trees, drafted: Load) -> Array:
        super().select(trees, drafted)
        growing = [row.num_verified for row in self.mixture if row.depth or not self._has_draft]
        return np.minimum(growing, trees.num)


class _OfferedTokens:
    """A constraint that offers tokens of its own to verify, and allows whatever the target chooses."""

    error = None

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)

    def start(self) -> "_OfferedTokens":
        return self

    def take(self, token: int) -> None:
        """Nothing changes."""

    def ends(self, path: Sequence[int] = ()) -> bool:
        return False

    def allowed(self, path: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        return [True] * len(tokens)

    def forced(self, path: Sequence[int] = ()) -> list[int]:
        return self._tokens[len(path) :]

    def mask(self, path: Sequence[int] = ()) -> torch.Tensor:
        raise ValueError("no mask: every token is allowed")


def measure_price(pair: Pair, rows: int, context: int, *, num_steps: int = NUM_STEPS) -> StepPrice:
    """Timed with one row and with `rows`, of `context` tokens each as far as the target has room for them.

    Raises ValueError for numbers below 1.
    """
    for name, value in (("rows", rows), ("context", context), ("num_steps", num_steps)):
        if value < 1:
            raise ValueError(f"{name} {value}: must be at least 1")
    of_loads = [mixtures_for(pair, num) for num in (1, max(rows, 2))]  # of one alone base and row are one
    context = min(context, *(_most_context(pair, mixtures, num_steps) for mixtures in of_loads))
    timed = time_steps(pair, [*chain(*of_loads)], context, num_steps=num_steps)
    alone, together = timed[: len(of_loads[0])], timed[len(of_loads[0]) :]
    fitted, held_out = [*alone[:-1], *together[:-1]], [alone[-1], together[-1]]
    names = COEFFICIENTS if pair.has_draft else OF_NO_DRAFT
    coefficients = fit([step.load for step in fitted], [step.seconds for step in fitted], names)
    error = relative_error(coefficients, [step.load for step in held_out], [step.seconds for step in held_out])
    named = dict(zip(COEFFICIENTS, coefficients.tolist(), strict=True))
    return StepPrice(*_made_for(pair), context, rows, **named, error=error, is_sequential=pair.draft.is_sequential)


def holds_here(price: StepPrice, pair: Pair) -> bool:
    """Whether a price is of this pair, in its dtype and on its device."""
    return price.made_for(*_made_for(pair))


def _made_for(pair: Pair) -> tuple[PairId, str, str]:
    return pair.id, dtype_name(pair.target.dtype), device_name(pair.target.device)


def mixtures_for(pair: Pair, rows: int) -> list[list[Drafted]]:
    """Mixtures of what so many rows of a pair draft and verify; the last one is for the error of the fit."""
    return mixtures_of(rows, pair.block_size) if pair.has_draft else _without_draft(rows)


def _without_draft(rows: int) -> list[list[Drafted]]:
    one, few, most = (Drafted(0, num) for num in (1, TILE // 2, MAX_DEPTH))
    if rows == 1:  # within a tile, a little beyond, and to the end of the next
        sizes = 0, 1, TILE // 4, TILE // 2, TILE - 1, TILE + 3, MAX_DEPTH, 3 * TILE // 4
        return [[Drafted(0, num)] for num in sizes]
    each, plain = [[row] * rows for row in (PLAIN, one, few, most)], [PLAIN] * (rows - 1)
    return [
        *each,
        *([row, *plain] for row in (one, few, most)),
        ([few, one, PLAIN, Drafted(0, TILE // 4)] * rows)[:rows],
    ]


def mixtures_of(rows: int, block_size: int) -> list[list[Drafted]]:
    """Mixtures of what so many rows draft and verify; the last one is for the error of the fit."""
    deepest = block_size - 1
    small = max(1, deepest // 2)
    tree, largest = min(2 * block_size, MAX_BLOCK_SIZE) - 1, MAX_BLOCK_SIZE - 1
    if rows == 1:  # up to a tile, a little beyond, and to the end of the next
        each = [PLAIN, Drafted(1, 1), Drafted(deepest, 1), Drafted(small, small), Drafted(deepest, deepest)]
        each += [Drafted(deepest, min(n, largest)) for n in (tree, TILE - 1, TILE + 3, largest)]
        each += [Drafted(small, (deepest + tree) // 2)]
        return [[row] for row in each]
    plain = [PLAIN] * (rows - 1)
    return [
        [PLAIN, *plain],
        [Drafted(1, 1), *plain],
        [Drafted(deepest, deepest), *plain],
        [Drafted(deepest, tree), *plain],
        [Drafted(1, 1)] * rows,
        [Drafted(deepest, 1)] * rows,
        [Drafted(small, small)] * rows,
        [Drafted(small, deepest)] * rows,
        [Drafted(deepest, deepest)] * rows,
        ([Drafted(deepest, tree), Drafted(1, 1), PLAIN, Drafted(small, small)] * rows)[:rows],
    ]


def time_steps(
    pair: Pair, mixtures: Sequence[Sequence[Drafted]], context: int, *, num_steps: int = NUM_STEPS
) -> list[TimedStep]:
    """The fastest of `num_steps` steps with each mixture: what as many rows draft and verify, in trees.

    All mixtures take turns, also those of different numbers of rows, which have an engine for each number. All rows
    begin with `context` tokens, fewer where the target has no room for them and the steps.
    """
    of_nums = {num: [mixture for mixture in mixtures if len(mixture) == num] for num in map(len, mixtures)}
    context = min(context, *(_most_context(pair, some, num_steps) for some in of_nums.values()))
    batches = {
        num: _TimedBatch(pair, num, context, _num_emitted(pair, some, num_steps)) for num, some in of_nums.items()
    }
    found: list[TimedStep | None] = [None] * len(mixtures)
    for turn in range(num_steps + 1):
        for place, mixture in enumerate(mixtures):
            step, best = batches[len(mixture)].timed(mixture), found[place]
            if turn and (best is None or step.seconds < best.seconds):  # the first of a shape pays for its kernels
                found[place] = step
    return [each for each in found if each is not None]


class _TimedBatch:
    """Rows that decode, each of `context` random tokens and with room for so many more."""

    def __init__(self, pair: Pair, num_rows: int, context: int, room: int) -> None:
        self._pair, self._controller = pair, _Dictated(pair.block_size - 1)
        most = min(context + room, pair.max_length)
        self._engine = Engine(pair, num_slots=num_rows, max_length=most, controller=self._controller)
        prompts = torch.randint(0, pair.vocab_size, (num_rows, context), generator=torch.Generator().manual_seed(0))
        offers = None if pair.has_draft else _OfferedTokens((prompts[0].tolist() * MAX_DEPTH)[:MAX_DEPTH])
        for prompt in prompts.tolist():
            self._engine.add(Request(tuple(prompt), room, constraint=offers, lookup=False))
        while self._engine.num_decoding < num_rows:
            self._controller.mixture = [PLAIN] * self._engine.num_decoding
            self._engine.step()

    def timed(self, mixture: Sequence[Drafted]) -> TimedStep:
        """A step in which the rows draft and verify so much."""
        self._controller.mixture = mixture
        started = time.perf_counter()
        steps = self._engine.step()
        seconds = time.perf_counter() - started
        depths = [row.depth for row in mixture]
        num_passes = passes(depths, self._pair.draft.is_sequential)
        return TimedStep(Load(len(mixture), sum(depths), sum(len(s.tree.tokens) for s in steps), num_passes), seconds)


def _num_emitted(pair: Pair, mixtures: Sequence[Sequence[Drafted]], num_steps: int) -> int:
    """Tokens that a row may come to emit, with what an engine keeps free."""
    emitted = [1 + max(row.most_accepted for row in mixture) for mixture in mixtures]
    return (num_steps + 1) * sum(emitted) + pair.block_size + 2


def _most_context(pair: Pair, mixtures: Sequence[Sequence[Drafted]], num_steps: int) -> int:
    """Tokens that a row may begin with."""
    return max(1, pair.max_length - _num_emitted(pair, mixtures, num_steps))
