"""Step costs that are known in advance."""

from collections.abc import Sequence

import numpy as np

from blockpilot.control.price import StepCosts
from blockpilot.types import PairId

ROWS, CONTEXTS = (1, 3, 6), (50, 100)


def step_costs(
    block_sizes: Sequence[int],
    seconds: Sequence[Sequence[Sequence[float]]],
    of_one: Sequence[float] = (1, 1 / 3, 1 / 6),
    of_most: Sequence[float] = (1, 2 / 3, 5 / 6),
) -> StepCosts:
    """Costs of [block size][rows][context] at ROWS and CONTEXTS; one row that drafts adds a share of what all of them
    add, and so do all rows but one.
    """
    every = np.array(seconds, dtype=float)
    one, most = (every[0] + (every - every[0]) * np.array(share)[:, None] for share in (of_one, of_most))
    tables = [tuple(tuple(map(tuple, of_size)) for of_size in table.tolist()) for table in (every, one, most)]
    return StepCosts(PairId("t", "1", "d", "2"), "float32", "cpu", tuple(block_sizes), ROWS, CONTEXTS, *tables)


def linear_costs(per_slot: float, largest: int = 16) -> StepCosts:
    """1 + per_slot * (block size - 1) * drafting rows seconds."""
    sizes = range(1, largest + 1)
    return step_costs(sizes, [[[1 + per_slot * (size - 1) * r] * len(CONTEXTS) for r in ROWS] for size in sizes])
