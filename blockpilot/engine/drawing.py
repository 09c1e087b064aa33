"""The target's choices in a step: one token after every token that it scored, by each request's sampling parameters.

Rows without a logits processor are sampled together from the target's unprocessed logits, the others from processed
copies. Constrained rows then correct their choices along the accepted path.
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

    An exception in an automaton fails only its row (`Row.error`).
    """
    draws, rows = batch.draws, [*batch.blocks, *batch.complete_prompts]
    if not draws:
        return []
    # 1. Logits processors change a copy, given the row's text and, in a tree, each node's path.
    processed = dict[Row, Tensor]()
    for row, tree, _, span in rows:
        if row.processor is not None:
            positions = [position for position, _ in draws[span]]
            processed[row] = row.processor(logits[span], row.tokens, positions, paths_of(tree))
    # 2. One sampler call for all rows without a processor, one for the others.
    if not processed:
        chosen = _sample(logits, draws, graphs)
    else:
        unprocessed_ids, processed_ids = list[int](), list[int]()
        for row, _, _, span in rows:
            (processed_ids if row in processed else unprocessed_ids).extend(range(span.start, span.stop))
        chosen = [NO_TOKEN] * len(draws)
        all_processed = torch.cat(list(processed.values()))
        for indices, values in ((unprocessed_ids, logits[unprocessed_ids]), (processed_ids, all_processed)):
            for i, token in zip(indices, _sample(values, [draws[i] for i in indices], graphs), strict=True):
                chosen[i] = token
    # 3. Constrained rows correct their choices; a row whose automaton fails has only NO_TOKEN.
    for row, tree, _, span in rows:
        if row.automaton is not None and row.error is None:
            try:
                row_logits = logits[span]
                decisive = processed.get(row, row_logits)
                chosen[span] = settle(row, row.automaton, tree, chosen[span], decisive, row_logits)
            except Exception as error:  # raised by the automaton: it fails this request only
                row.error = error
            row.error = row.error or row.automaton.error
        if row.error is not None:
            chosen[span] = [NO_TOKEN] * len(chosen[span])
    return chosen


def _sample(logits: Tensor, draws: Draws, graphs: Graphs | None) -> list[int]:
    if not draws:
        return []
    positions, sampling = zip(*draws, strict=True)
    tokens: list[int] = keyed_sample(logits, positions, sampling, graphs=graphs).tolist()
    return tokens
