"""The target's choices of a step: one token after every token that it scored, each row by its own sampling.

Rows without a logits processor are drawn together from the target's logits as they are. The others are drawn from a
changed copy, and constrained rows then settle their choices along the path that they accept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockpilot.engine.batch import Batch
from blockpilot.engine.constrained import settle
from blockpilot.engine.rows import Row
from blockpilot.engine.sampling import NO_TOKEN, keyed_sample
from blockpilot.engine.trees import paths_of
from blockpilot.models.graphs import Graphs
from blockpilot.types import Sampling

Draws = Sequence[tuple[int, Sampling]]


def choose_tokens(batch: Batch, logits: Tensor, graphs: Graphs | None = None) -> list[int]:
    """The target's choices [M] of a batch, from logits [M, V]; NO_TOKEN where a row fails.

    An exception of a row's automaton is that row's error (`Row.error`), and no other's.
    """
    draws, scored = batch.draws, batch.scored
    if not draws:
        return []
    # 1. Logits processors change a copy, each row by its own text and, in a tree, each node's path.
    changed = dict[Row, Tensor]()
    for row, tree, own in scored:
        if row.processor is not None:
            positions = [position for position, _ in draws[own]]
            changed[row] = row.processor(logits[own], row.tokens, positions, paths_of(tree))
    # 2. One draw for all rows that were not changed, one for the others.
    if not changed:
        chosen = _sample(logits, draws, graphs)
    else:
        free, apart = list[int](), list[int]()
        for row, _, own in scored:
            (apart if row in changed else free).extend(range(own.start, own.stop))
        chosen = [NO_TOKEN] * len(draws)
        of_changed = torch.cat(list(changed.values()))
        for places, some in ((free, logits[free]), (apart, of_changed)):
            for i, token in zip(places, _sample(some, [draws[i] for i in places], graphs), strict=True):
                chosen[i] = token
    # 3. Constrained rows settle their choices; one whose automaton fails has none.
    for row, tree, own in scored:
        if row.automaton is not None and row.error is None:
            try:
                own_logits = changed.get(row, logits[own])
                chosen[own] = settle(row, row.automaton, tree, chosen[own], own_logits, logits[own])
            except Exception as error:  # of the automaton, which is the request's own
                row.error = error
            row.error = row.error or row.automaton.error
        if row.error is not None:
            chosen[own] = [NO_TOKEN] * len(chosen[own])
    return chosen


def _sample(logits: Tensor, draws: Draws, graphs: Graphs | None) -> list[int]:
    if not draws:
        return []
    positions, sampling = zip(*draws, strict=True)
    tokens: list[int] = keyed_sample(logits, positions, sampling, graphs=graphs).tolist()
    return tokens
