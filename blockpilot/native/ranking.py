"""Ranking of logits in C on a CPU (ranking.c), equivalent to `ranked_by_torch` of sampling.py.

At temperature 1, a block of 16 tokens takes less than 1 ms; by torch, which reads all scores several times, 9 ms.
"""

import math
from collections.abc import Sequence
from ctypes import c_int, c_long
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from blockpilot.native.library import library_for, pointer, tensor_pointer
from blockpilot.types import Sampling

LARGEST = 1e30  # scores beyond it count as not finite; higher temperatures are clipped, with the same result


class Ranked(NamedTuple):
    """The best tokens of N positions and the values that rank them, both [N, num]; mask [N] of broken rows.

    Values are scores, with the sampling noise at temperatures above 0. With log_probs [N, num], values are normalised
    over each position, as in `Candidates`. Broken: a logit is NaN, or the largest is not finite. In broken rows, and
    after the last token that can be sampled, tokens are arbitrary; `rank` sets their values to -inf.
    """

    tokens: Tensor
    values: Tensor
    broken: Tensor
    log_probs: Tensor | None


class Subset(NamedTuple):
    """Tokens [K] of a vocabulary, ascending, and every token's index among them, indices [V] (int32), -1 for none."""

    tokens: Tensor
    indices: Tensor

    @classmethod
    def of(cls, tokens: Tensor, vocab_size: int) -> Self:
        indices = torch.full((vocab_size,), -1, dtype=torch.int32, device=tokens.device)
        indices[tokens] = torch.arange(len(tokens), dtype=torch.int32, device=tokens.device)
        return cls(tokens, indices)

    def expanded(self, logits: Tensor) -> Tensor:
        """Logits [N, V] of the vocabulary, given those of the subset [N, K]; -inf for other tokens."""
        return logits.new_full((len(logits), len(self.indices)), -math.inf).index_copy_(1, self.tokens, logits)


def log_min_p(sampling: Sampling) -> float:
    """Logarithm of min_p: the least included score, relative to the best; -inf without min_p."""
    return math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf


def in_c(logits: Tensor) -> bool:
    """True if `rank` supports these logits."""
    return library_for(logits.dtype, logits.device) is not None


def rank(
    logits: Tensor,
    positions: Sequence[int],
    sampling: Sequence[Sampling],
    num: int,
    *,
    of: Subset | None = None,
    with_log_probs: bool,
) -> Ranked:
    """The `num` <= V best tokens of logits [N, V]; with `of` only its tokens have logits, [N, K]."""
    library = library_for(logits.dtype, logits.device)
    assert library is not None
    assert len(positions) == len(sampling) == len(logits)
    logits, shape, size = logits.contiguous(), (len(logits), num), logits.shape[1]
    # 1. Parameters of every row. Most rows share them with other rows of the same request.
    distinct = {id(request): request for request in sampling}
    limits_of, draw_of = dict[int, tuple[float, float, float]](), dict[int, tuple[int, int]]()
    for key, request in distinct.items():
        temperature = 0.0 if request.is_greedy else min(request.temperature, LARGEST)  # 0 is greedy
        limits_of[key] = temperature, request.top_p, log_min_p(request)
        draw_of[key] = min(request.top_k or size, size), request.seed  # the vocabulary size is no limit
    limits = np.array([limits_of[id(request)] for request in sampling], dtype=np.float64)
    draws = np.array([draw_of[id(request)] for request in sampling], dtype=np.int64)
    row_positions = np.array(positions, dtype=np.int64)
    # 2. Buffers for the results, and the call.
    tokens, values = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
    log_probs = torch.empty(shape) if with_log_probs else None
    broken = torch.empty(len(logits), dtype=torch.bool)
    room = torch.empty(shape, dtype=torch.float64)
    results = map(tensor_pointer, (tokens, values, log_probs, broken, room))
    ids, indices = (None, None) if of is None else map(tensor_pointer, of)
    sizes = map(c_long, (*logits.shape, size if of is None else len(of.indices)))
    inputs = tensor_pointer(logits), *map(pointer, (limits, draws, row_positions))
    library.rank_rows(*sizes, ids, indices, *inputs, c_long(num), *results, c_int(torch.get_num_threads()))
    return Ranked(tokens, values, broken, log_probs)
