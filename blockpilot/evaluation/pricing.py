"""Measurement of a pair's step cost on this device, from a few timed steps of a decoding engine.

The text does not affect the cost, so prompts are random tokens. A mixture says what each row of a step drafts and
verifies. Mixtures are interleaved, so that slow moments of the machine affect all of them. The drafted depth and the
number of verified tokens vary independently: if only the block size varied, the costs of a drafted position and a
verified token could not be separated. Without a draft a constraint forces the tokens to verify.

Decoding repeats steps of one kind, so the CPU's caches hold what the next one reads. A timed step therefore follows
an untimed one of its mixture: plain steps of 16 rows took 36 to 41 ms after other steps, and 26 ms after plain ones.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from blockpilot.control.acceptance import AcceptanceModel, Array
from blockpilot.control.choose import Trees
from blockpilot.control.controller import Controller, DepthPlan, Planned
from blockpilot.control.cost import (
    COEFFICIENTS,
    TILE,
    TILES,
    VECTORS,
    Load,
    StepPrice,
    Tiles,
    fit,
    passes,
    relative_error,
)
from blockpilot.device import device_name, dtype_name
from blockpilot.engine.engine import Engine
from blockpilot.engine.trees import MAX_DEPTH
from blockpilot.pairs.loading import Pair
from blockpilot.types import MAX_BLOCK_SIZE, PairId, Request

NUM_STEPS = 4  # timed steps of each mixture, of which the fastest counts; an untimed one precedes each
MOST_ERROR, NUM_ATTEMPTS = 0.25, 3  # a larger error: another process ran during some of the steps
CLEARLY = 0.8  # tiles replace the ones chosen so far if their error is below this share of theirs
OF_DRAFT = "launch_s", "slot_s"  # coefficients that are 0 without a draft


class Drafted(NamedTuple):
    """Positions that a row drafts in a step, and tokens that it verifies; without a draft the depth is 0."""

    depth: int
    num_verified: int

    @property
    def most_accepted(self) -> int:
        """Maximum number of accepted tokens."""
        return self.depth or self.num_verified

    @classmethod
    def from_size(cls, block_size: int, deepest: int) -> "Drafted":
        """A chain, or a tree if the block size is larger than the draft's."""
        return cls(min(block_size - 1, deepest), block_size - 1)


PLAIN = Drafted(0, 0)


class TimedStep(NamedTuple):
    """Load and seconds of a step."""

    load: Load
    seconds: float


class _FixedMixture(Controller):
    """Controller with given depths and numbers of nodes: `mixture`, in the order of the requests."""

    mixture: Sequence[Drafted]

    def __init__(self, deepest: int) -> None:
        super().__init__(AcceptanceModel(deepest), follows=False)

    def plan(self, rows: Planned, other_load: Load) -> DepthPlan:
        plan = super().plan(rows, other_load)  # its time is part of the step cost
        return plan._replace(depths=np.array([row.depth for row in self.mixture]))

    def select(self, trees: Trees, rates: Array, drafted: Load) -> Array:
        super().select(trees, rates, drafted)
        return np.minimum([row.num_verified for row in self.mixture], trees.nodes.num)


class _FixedTokens:
    """A constraint that proposes fixed tokens to verify, and allows every token."""

    error = None

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)

    def start(self) -> "_FixedTokens":
        return self

    def take(self, token: int) -> None:
        """Do nothing: every token is allowed."""

    def ends(self, path: Sequence[int] = ()) -> bool:
        return False

    def allowed(self, path: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        return [True] * len(tokens)

    def forced(self, path: Sequence[int] = ()) -> list[int]:
        return self._tokens[len(path) :]

    def mask(self, path: Sequence[int] = ()) -> torch.Tensor:
        raise ValueError("no mask: every token is allowed")


def measure_price(pair: Pair, rows: int, context: int, *, num_steps: int = NUM_STEPS) -> StepPrice:
    """Step cost, fitted to steps with one row and with `rows`, of up to `context` tokens each.

    `context` is reduced if it and the steps would exceed the target's context. A measurement with a large error is
    repeated, and the attempt with the smallest error is returned. Raises ValueError for numbers below 1.
    """
    for name, value in (("rows", rows), ("context", context), ("num_steps", num_steps)):
        if value < 1:
            raise ValueError(f"{name} {value}: must be at least 1")
    attempts = list[StepPrice]()
    while len(attempts) < NUM_ATTEMPTS and all(price.error > MOST_ERROR for price in attempts):
        attempts.append(_measured(pair, rows, context, num_steps))
    return min(attempts, key=lambda price: price.error)


def _measured(pair: Pair, rows: int, context: int, num_steps: int) -> StepPrice:
    mixtures_by_load = [mixtures_for(pair, num) for num in (1, max(rows, 2))]  # base_s and row_s need two sizes
    context = min(context, *(_most_context(pair, mixtures, num_steps) for mixtures in mixtures_by_load))
    timed = time_steps(pair, [*chain(*mixtures_by_load)], context, num_steps=num_steps)
    alone, together = timed[: len(mixtures_by_load[0])], timed[len(mixtures_by_load[0]) :]
    fitted, held_out = [*alone[:-1], *together[:-1]], [alone[-1], together[-1]]
    names, share = coefficients_of(pair), expert_share(pair)
    # Tile sizes: the last possible ones, unless others fit the steps clearly better. A choice by noise alone would
    # change every later choice (LOG.md).
    possible = possible_tiles(pair)
    fits = {tiles: fit(*_columns(fitted), names, expert_share=share, tiles=tiles) for tiles in possible}
    errors = {
        tiles: relative_error(of, *_columns(fitted), expert_share=share, tiles=tiles) for tiles, of in fits.items()
    }
    chosen = possible[-1]
    for tiles in reversed(possible):
        chosen = tiles if errors[tiles] < CLEARLY * errors[chosen] else chosen
    coefficients = fits[chosen]
    error = max(errors[chosen], relative_error(coefficients, *_columns(held_out), expert_share=share, tiles=chosen))
    by_name = dict(zip(COEFFICIENTS, coefficients.tolist(), strict=True))
    price = StepPrice(*_made_for(pair), context, rows, **by_name, error=error, is_sequential=pair.draft.is_sequential)
    return replace(price, expert_share=share, tile=chosen.first, next_tile=chosen.further)


def possible_tiles(pair: Pair) -> Sequence[Tiles]:
    """Tile sizes that a step's time may depend on: matrix products use tiles with AMX and on a GPU, else vectors."""
    target = pair.target
    by_tiles = target.dtype == torch.bfloat16 and torch.cpu.get_capabilities().get("amx_bf16", False)
    return TILES if target.device.type != "cpu" or by_tiles else VECTORS


def expert_share(pair: Pair) -> float:
    """Share of the target's experts that a token chooses; 0 without experts."""
    config = pair.target.config
    num_experts = getattr(config, "num_experts", None)
    if not num_experts:
        return 0.0
    chosen = config.top_k_experts if config.model_type == "gemma4_text" else config.num_experts_per_tok
    return float(chosen / num_experts)


def coefficients_of(pair: Pair) -> list[str]:
    """Coefficients to fit; the others are 0. With experts, experts_s takes nearly all of what tile_s would."""
    absent = {"tile_s" if expert_share(pair) else "experts_s", *(() if pair.has_draft else OF_DRAFT)}
    return [name for name in COEFFICIENTS if name not in absent]


def _columns(steps: Sequence[TimedStep]) -> tuple[list[Load], list[float]]:
    return [step.load for step in steps], [step.seconds for step in steps]


def holds_here(price: StepPrice, pair: Pair) -> bool:
    """True if a step cost was measured for this pair, its dtype, its device and its share of experts."""
    return price.made_for(*_made_for(pair)) and price.expert_share == expert_share(pair)


def _made_for(pair: Pair) -> tuple[PairId, str, str]:
    return pair.id, dtype_name(pair.target.dtype), device_name(pair.target.device)


def mixtures_for(pair: Pair, rows: int) -> list[list[Drafted]]:
    """Mixtures for a pair in steps of `rows` rows; the last one is held out for the error of the fit."""
    return mixtures_of(rows, pair.block_size) if pair.has_draft else _without_draft(rows)


def _without_draft(rows: int) -> list[list[Drafted]]:
    single, few, deep = (Drafted(0, num) for num in (1, TILE // 2, MAX_DEPTH))
    if rows == 1:  # numbers of tokens within a tile, just above it, and to the end of the next
        sizes = 0, 1, TILE // 4, TILE // 2, TILE - 1, TILE + 3, MAX_DEPTH, 3 * TILE // 4
        return [[Drafted(0, num)] for num in sizes]
    uniform, plain = [[row] * rows for row in (PLAIN, single, few, deep)], [PLAIN] * (rows - 1)
    return [
        *uniform,
        *([row, *plain] for row in (single, few, deep)),
        ([few, single, PLAIN, Drafted(0, TILE // 4)] * rows)[:rows],
    ]


def mixtures_of(rows: int, block_size: int) -> list[list[Drafted]]:
    """Mixtures for a draft's block size in steps of `rows` rows; the last one is held out for the fit's error."""
    deepest = block_size - 1
    small = max(1, deepest // 2)
    tree_size, largest = min(2 * block_size, MAX_BLOCK_SIZE) - 1, MAX_BLOCK_SIZE - 1
    chain = Drafted(deepest, deepest)
    if rows == 1:  # numbers of tokens within a tile, just above it, and to the end of the next
        alone = [PLAIN, Drafted(1, 1), Drafted(deepest, 1), Drafted(small, small), chain]
        alone += [Drafted(deepest, min(n, largest)) for n in (tree_size, TILE + 3, largest)]
        alone += [Drafted(small, 4), Drafted(small, 6)]  # about where vector products begin to take time per token
        alone += [Drafted(small, (deepest + tree_size) // 2)]
        return [[row] for row in alone]
    # Pairs of mixtures just below and just above the end of a tile: most numbers of rows divide a tile.
    plain, one, some, whole = ([row] * (rows - 1) for row in (PLAIN, Drafted(1, 1), Drafted(small, small), chain))
    return [
        [PLAIN, *plain],
        [Drafted(1, 1), *plain],
        [chain, *plain],
        [Drafted(deepest, tree_size), *plain],
        [Drafted(1, 1), *one],
        [chain, *one],
        [Drafted(deepest, 1)] * rows,
        [Drafted(small, small), *some],
        [chain, *some],
        [Drafted(small, small + 1)] * rows,
        [chain, *whole],
        [Drafted(deepest, tree_size), *whole],
        ([Drafted(deepest, tree_size), Drafted(1, 1), PLAIN, Drafted(small, small)] * rows)[:rows],
    ]


def time_steps(
    pair: Pair, mixtures: Sequence[Sequence[Drafted]], context: int, *, num_steps: int = NUM_STEPS
) -> list[TimedStep]:
    """The fastest of `num_steps` steps with each mixture.

    All mixtures are interleaved; there is one engine for each number of rows. All rows begin with `context` tokens,
    or fewer if the target's context would not have room for the steps.
    """
    mixtures_by_rows: dict[int, list[Sequence[Drafted]]] = {}
    for mixture in mixtures:
        mixtures_by_rows.setdefault(len(mixture), []).append(mixture)
    context = min(context, *(_most_context(pair, same_rows, num_steps) for same_rows in mixtures_by_rows.values()))
    batches = {
        num_rows: _TimedBatch(pair, num_rows, context, _num_emitted(pair, same_rows, num_steps))
        for num_rows, same_rows in mixtures_by_rows.items()
    }
    fastest: list[TimedStep | None] = [None] * len(mixtures)
    for _ in range(num_steps):
        for index, mixture in enumerate(mixtures):
            batches[len(mixture)].timed(mixture)
            step, best = batches[len(mixture)].timed(mixture), fastest[index]
            if best is None or step.seconds < best.seconds:
                fastest[index] = step
    return [step for step in fastest if step is not None]


class _TimedBatch:
    """An engine with `num_rows` decoding rows, each of `context` random tokens and with room for `room` more."""

    def __init__(self, pair: Pair, num_rows: int, context: int, room: int) -> None:
        self._pair, self._controller = pair, _FixedMixture(pair.block_size - 1)
        max_length = min(context + room, pair.max_length)
        self._engine = Engine(pair, num_slots=num_rows, max_length=max_length, controller=self._controller)
        prompts = torch.randint(0, pair.vocab_size, (num_rows, context), generator=torch.Generator().manual_seed(0))
        for prompt in prompts.tolist():  # rows differ: equal tokens would choose the same experts
            constraint = None if pair.has_draft else _FixedTokens((prompt * MAX_DEPTH)[:MAX_DEPTH])
            self._engine.add(Request(tuple(prompt), room, constraint=constraint, lookup=False))
        while self._engine.num_decoding < num_rows:
            self._controller.mixture = [PLAIN] * self._engine.num_decoding
            self._engine.step()

    def timed(self, mixture: Sequence[Drafted]) -> TimedStep:
        """One timed step in which the rows draft and verify what `mixture` says."""
        self._controller.mixture = mixture
        started = time.perf_counter()
        steps = self._engine.step()
        seconds = time.perf_counter() - started
        depths = [row.depth for row in mixture]
        num_passes = passes(depths, self._pair.draft.is_sequential)
        return TimedStep(Load(len(mixture), sum(depths), sum(len(s.tree.tokens) for s in steps), num_passes), seconds)


def _num_emitted(pair: Pair, mixtures: Sequence[Sequence[Drafted]], num_steps: int) -> int:
    """Upper bound of the tokens that a row emits, plus the columns that the engine keeps free."""
    emitted = [1 + max(row.most_accepted for row in mixture) for mixture in mixtures]
    return 2 * num_steps * sum(emitted) + pair.block_size + 2


def _most_context(pair: Pair, mixtures: Sequence[Sequence[Drafted]], num_steps: int) -> int:
    """Maximum number of tokens that a row may begin with."""
    return max(1, pair.max_length - _num_emitted(pair, mixtures, num_steps))
