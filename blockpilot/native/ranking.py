"""Rows of logits ranked in C on a CPU (ranking.c), as sampling.py ranks them by torch.

Temperature 1 costs a block of 16 tokens 9 ms by torch, which reads all scores several times, and less than 1 so.
"""

import math
from collections.abc import Sequence
from ctypes import c_int, c_long, c_void_p
from typing import NamedTuple, Self

import torch
from torch import Tensor

from blockpilot.native.library import library_for
from blockpilot.types import Sampling

LARGEST = 1e30  # of scores, which are no numbers beyond it; of temperatures, of which any higher one is as flat


class Ranked(NamedTuple):
    """The best tokens of N positions and their values in the race, both [N, num], and which rows are broken [N].

    With log_probs [N, num], values are relative to all of a position, as in `Candidates`. Of broken rows, and where
    fewer than num can be drawn, tokens are any.
    """

    tokens: Tensor
    values: Tensor
    broken: Tensor
    log_probs: Tensor | None


class Subset(NamedTuple):
    """Tokens [K] of a vocabulary, ascending, and the place [V] (int32) of every token among them, -1 for none."""

    tokens: Tensor
    places: Tensor

    @classmethod
    def of(cls, tokens: Tensor, vocab_size: int) -> Self:
        places = torch.full((vocab_size,), -1, dtype=torch.int32, device=tokens.device)
        places[tokens] = torch.arange(len(tokens), dtype=torch.int32, device=tokens.device)
        return cls(tokens, places)

    def expanded(self, logits: Tensor) -> Tensor:
        """Logits [N, K] of the tokens among those of all, [N, V]: -inf for others."""
        return logits.new_full((len(logits), len(self.places)), -math.inf).index_copy_(1, self.tokens, logits)


def log_min_p(sampling: Sampling) -> float:
    """Logarithm of min_p: the least score that is kept, relative to the best; -inf without min_p."""
    return math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf


def in_c(logits: Tensor) -> bool:
    """True if `rank` can rank these logits."""
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
    """The `num` best, at most V, of logits [N, V]; with `of` those of its tokens alone, the others having none."""
    library = library_for(logits.dtype, logits.device)
    assert library is not None
    logits, shape = logits.contiguous(), (len(logits), num)
    # 1. Parameters of every row as arrays; temperature 0 is greedy, and no limit is all tokens.
    columns = list[tuple[float, int, float, float, int]]()
    for each in sampling:
        temperature = 0.0 if each.is_greedy else min(each.temperature, LARGEST)
        most = min(each.top_k or logits.shape[1], logits.shape[1])
        columns.append((temperature, most, each.top_p, log_min_p(each), each.seed))
    of_rows = list(zip(*columns, strict=True)) or [()] * 5
    temperatures = torch.tensor(of_rows[0], dtype=torch.float32)
    top_p, min_p = torch.tensor(of_rows[2], dtype=torch.float64), torch.tensor(of_rows[3], dtype=torch.float64)
    top_k, seeds = torch.tensor(of_rows[1], dtype=torch.int64), torch.tensor(of_rows[4], dtype=torch.int64)
    places = torch.tensor(list(positions), dtype=torch.int64)
    assert len(temperatures) == len(places) == len(logits)
    # 2. Room for the results, and the call.
    tokens, values = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.float64)
    log_probs = torch.empty(shape, dtype=torch.float64) if with_log_probs else None
    broken = torch.empty(len(logits), dtype=torch.bool)
    given = map(_pointer, (logits, temperatures, top_k, top_p, min_p, seeds, places))
    found = map(_pointer, (tokens, values, log_probs, broken))
    ids, among = (None, None) if of is None else map(_pointer, of)
    vocab_size = logits.shape[1] if of is None else len(of.places)
    sizes = map(c_long, (*logits.shape, vocab_size))
    library.rank_rows(*sizes, ids, among, *given, c_long(num), *found, c_int(torch.get_num_threads()))
    return Ranked(tokens, values.float(), broken, None if log_probs is None else log_probs.float())


def _pointer(values: Tensor | None) -> c_void_p | None:
    return None if values is None else c_void_p(values.data_ptr())
