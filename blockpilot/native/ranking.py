"""Ranking of logits in C on a CPU (ranking.c), equivalent to `ranked_by_torch` of sampling.py.

At temperature 1, a block of 16 tokens takes less than 1 ms; by torch, which reads all scores several times, 9 ms.
"""

import math
from collections.abc import Sequence
from ctypes import c_int, c_long, c_void_p
from typing import NamedTuple, Self

import torch
from torch import Tensor

from blockpilot.native.library import library_for
from blockpilot.types import Sampling

LARGEST = 1e30  # scores beyond it count as not finite; higher temperatures are clipped, with the same result


class Ranked(NamedTuple):
    """The best tokens of N positions and their values in the race, both [N, num], and the mask [N] of broken rows.

    With log_probs [N, num], values are normalised over each position, as in `Candidates`. Tokens are arbitrary in
    broken rows, and beyond the tokens that can be drawn.
    """

    tokens: Tensor
    values: Tensor
    broken: Tensor
    log_probs: Tensor | None


class Subset(NamedTuple):
    """Tokens [K] of a vocabulary, ascending, and every token's index among them, places [V] (int32), -1 for none."""

    tokens: Tensor
    places: Tensor

    @classmethod
    def of(cls, tokens: Tensor, vocab_size: int) -> Self:
        places = torch.full((vocab_size,), -1, dtype=torch.int32, device=tokens.device)
        places[tokens] = torch.arange(len(tokens), dtype=torch.int32, device=tokens.device)
        return cls(tokens, places)

    def expanded(self, logits: Tensor) -> Tensor:
        """Logits [N, V] of the vocabulary, given those of the subset [N, K]; -inf for other tokens."""
        return logits.new_full((len(logits), len(self.places)), -math.inf).index_copy_(1, self.tokens, logits)


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
    logits, shape = logits.contiguous(), (len(logits), num)
    # 1. Parameters of every row as arrays; temperature 0 is greedy, and top_k of the vocabulary size is no limit.
    parameters = list[tuple[float, int, float, float, int]]()
    for request in sampling:
        temperature = 0.0 if request.is_greedy else min(request.temperature, LARGEST)
        most = min(request.top_k or logits.shape[1], logits.shape[1])
        parameters.append((temperature, most, request.top_p, log_min_p(request), request.seed))
    columns = list(zip(*parameters, strict=True)) or [()] * 5
    temperatures = torch.tensor(columns[0], dtype=torch.float32)
    top_p, min_p = torch.tensor(columns[2], dtype=torch.float64), torch.tensor(columns[3], dtype=torch.float64)
    top_k, seeds = torch.tensor(columns[1], dtype=torch.int64), torch.tensor(columns[4], dtype=torch.int64)
    row_positions = torch.tensor(list(positions), dtype=torch.int64)
    assert len(temperatures) == len(row_positions) == len(logits)
    # 2. Buffers for the results, and the call.
    tokens, values = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.float64)
    log_probs = torch.empty(shape, dtype=torch.float64) if with_log_probs else None
    broken = torch.empty(len(logits), dtype=torch.bool)
    inputs = map(_pointer, (logits, temperatures, top_k, top_p, min_p, seeds, row_positions))
    results = map(_pointer, (tokens, values, log_probs, broken))
    ids, places = (None, None) if of is None else map(_pointer, of)
    vocab_size = logits.shape[1] if of is None else len(of.places)
    sizes = map(c_long, (*logits.shape, vocab_size))
    library.rank_rows(*sizes, ids, places, *inputs, c_long(num), *results, c_int(torch.get_num_threads()))
    return Ranked(tokens, values.float(), broken, None if log_probs is None else log_probs.float())


def _pointer(values: Tensor | None) -> c_void_p | None:
    return None if values is None else c_void_p(values.data_ptr())
