"""Step costs that are known in advance."""

from collections.abc import Sequence

import numpy as np

from blockpilot.control.price import StepCosts
from blockpilot.types import PairId

ROWS, CONTEXT = (1, 3, 6), 50


def step_costs(
    block_sizes: Sequence[int],
    seconds: Sequence[Sequence[float]],
    of_one: Sequence[float] = (1, 1 / 3, 1 / 6),
    of_most: Sequence[float] = (1, 2 / 3, 5 / 6),
) -> StepCosts:
    """Costs of [block size][rows] at ROWS; one row that drafts adds a share of what all of them add, and so do all
    rows but one.
    """
    every = np.array(seconds, dtype=float)
    one, most = (every[0] + (every - every[0]) * np.array(share) for share in (of_one, of_most))
    tables = [tuple(map(tuple, table.tolist())) for table in (every, one, most)]
    return StepCosts(PairId("t", "1", "d", "2"), "float32", "cpu", tuple(block_sizes), ROWS, CONTEXT, *tables)


def linear_costs(per_slot: float, largest: int = 16) -> StepCosts:
    """1 + per_slot * (block size - 1) * drafting rows seconds."""
    sizes = range(1, largest + 1)
    return step_costs(sizes, [[1 + per_slot * (size - 1) * r for r in ROWS] for size in sizes])
