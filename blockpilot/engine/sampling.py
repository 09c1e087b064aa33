"""Keyed sampler: the token that the target chooses at a position, and a draft's candidates for it.

A sampled token is a pure function of the target's logits at its position, the sampling parameters, the seed and the
absolute position. There is no generator state, so the text of a request does not depend on its block size, on the
batch it ran in, or on speculation, at any temperature: texts are equal, not only their distributions.

Sampling is an exponential race, equivalent to Gumbel-max: the token v with the smallest E_v / p_v wins, where
p = softmax(logits / T) and E_v ~ Exp(1), so v wins with probability p_v. The noise E is a hash of (seed, position),
computed with wrapping int64 arithmetic and float64, hence the same on every device. Only noise that can decide the
race is computed: the first NUM_ARRIVALS arrivals of any tokens, then only those of the most probable ones (`race`).

Invalid logits raise no error: if one is NaN, or the largest is not finite, the choice is NO_TOKEN, and there are no
candidates.

A draft's tokens are sampled with the target's noise: where the distributions are equal, so are the tokens (coupling
by shared randomness, arXiv 2408.07978). The runners-up of the race are the other candidates.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from blockpilot.device import sent, tensor_on
from blockpilot.models.graphs import Graphs
from blockpilot.native.ranking import LARGEST, Ranked, Subset, in_c, log_min_p, rank
from blockpilot.types import Candidates, Sampling

NUM_ARRIVALS = 256  # arrivals sampled one by one: with more of them fewer other tokens can win
FEW = (256, 1024, 4096)  # numbers of most probable tokens to try before all tokens; if num > 1, without the first
MOST_SCORES = 2**24  # maximum scores in a CUDA graph, whose memory is a few numbers per score
ROUNDING = 1e-3  # bound on the rounding error of float32 scores, with a wide margin
TINY = torch.finfo(torch.float32).tiny
GREEDY = Sampling()
NO_TOKEN = -1


def _as_int64(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


_GAMMA = _as_int64(0x9E3779B97F4A7C15)


def keyed_sample(
    logits: Tensor, positions: Sequence[int], sampling: Sequence[Sampling], *, graphs: Graphs | None = None
) -> Tensor:
    """The target's token at each of N positions: logits [N, V] -> tokens [N] (int64).

    positions [N]: absolute position of the sampled token, one past the token that was scored. sampling [N]:
    parameters of its request. The token is NO_TOKEN where a logit is NaN or the largest is not finite.
    """
    rank_rows = rank if in_c(logits) else partial(ranked_by_torch, graphs=graphs)
    ranked = rank_rows(logits, positions, sampling, 1, with_log_probs=False)
    return ranked.tokens[:, 0].masked_fill(ranked.broken, NO_TOKEN)


def best_choices(
    logits: Tensor,
    positions: Sequence[int],
    sampling: Sequence[Sampling],
    num: int,
    of: Subset | None = None,
    graphs: Graphs | None = None,
) -> Candidates:
    """The `num` best tokens at each of N positions, in the order in which `keyed_sample` would choose them.

    logits [N, V], or [N, K] for the tokens of the subset `of`: others have probability 0.
    """
    num = min(num, logits.shape[-1])
    if in_c(logits):
        tokens, scores, _, log_probs = rank(logits, positions, sampling, num, of=of, with_log_probs=True)
    else:
        # Greedy choices need the logits of the subset only; races are over the whole vocabulary.
        subset = of if all(request.is_greedy for request in sampling) else None
        logits = logits if of is None or subset else of.expanded(logits)
        ranked = ranked_by_torch(logits, positions, sampling, num, with_log_probs=True, graphs=graphs)
        tokens, scores, broken, log_probs = ranked
        tokens = subset.tokens[tokens] if subset else tokens
        assert log_probs is not None
        scores, log_probs = (numbers.masked_fill(broken[:, None], -math.inf) for numbers in (scores, log_probs))
    assert log_probs is not None
    drawn = tensor_on(logits.device, [not request.is_greedy for request in sampling])
    return Candidates(tokens, scores, log_probs, drawn)


def cuts(sampling: Sampling, vocab_size: int) -> bool:
    """True if min_p, top_k or top_p excludes tokens."""
    return sampling.top_p < 1 or 0 < sampling.top_k < vocab_size or sampling.min_p > 0


class _Draws(NamedTuple):
    """Sampling keys and parameters [N] of N positions; temperature 0 is greedy, an infinite top_p is off.

    log_min_p: least included score, relative to the best; -inf is off.
    """

    keys: Tensor
    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor

    @classmethod
    def of(cls, numbers: Tensor) -> Self:
        """From `_numbers` [N, 6], on their device."""
        seeds, positions, _, top_k, _, _ = numbers.unbind(dim=1)
        _, _, temperatures, _, top_p, log_min_p = numbers.view(torch.float64).unbind(dim=1)
        return cls(_keys(seeds, positions), temperatures.float(), top_k, top_p.float(), log_min_p.float())


def _numbers(positions: Sequence[int], sampling: Sequence[Sampling], vocab_size: int) -> Tensor:
    """Seeds, positions, temperatures, top_k, top_p, log min_p [N, 6] on the host, as int64 (floats by their bits)."""
    numbers = np.empty((len(sampling), 6), dtype=np.int64)
    floats, rows = numbers.view(np.float64), [GREEDY if row.is_greedy else row for row in sampling]
    numbers[:, 0], numbers[:, 1] = [row.seed for row in rows], positions
    floats[:, 2] = [min(row.temperature, LARGEST) for row in rows]
    numbers[:, 3] = [min(row.top_k or vocab_size, vocab_size) for row in rows]
    # top_p is above 0 in float32, so that the most probable token is included. 1 is off: rounded sums reach it early.
    floats[:, 4] = [max(row.top_p, TINY) if row.top_p < 1 else math.inf for row in rows]
    floats[:, 5] = [log_min_p(row) for row in rows]
    return torch.from_numpy(numbers)


def ranked_by_torch(
    logits: Tensor,
    positions: Sequence[int],
    sampling: Sequence[Sampling],
    num: int,
    *,
    with_log_probs: bool,
    graphs: Graphs | None = None,
) -> Ranked:
    """The `num` <= V best tokens of logits [N, V].

    Nearly always the tokens that can win, and the nucleus of top_p, are among the few most probable ones. The number
    that a row needs depends on this row only, so its result does not depend on the batch. All shapes are fixed, so
    that one CUDA graph runs everything.
    """
    vocab_size, drawn = logits.shape[1], [request for request in sampling if not request.is_greedy]
    is_cut, (first, *more) = any(cuts(request, vocab_size) for request in drawn), FEW if num == 1 else FEW[1:]
    ranked, from_graph = partial(_ranked, num=num, is_cut=is_cut, with_log_probs=with_log_probs), None
    numbers = sent(_numbers(positions, sampling, vocab_size), logits.device) if drawn else None
    if graphs is not None and numbers is not None and logits.numel() <= MOST_SCORES:
        key = "ranked", num, is_cut, with_log_probs, vocab_size, logits.dtype
        from_graph = graphs.run_tokens(key, partial(ranked, few=first), [(logits, 0), (numbers, 0)])
    final, *results = from_graph or ranked(logits, numbers, few=first)
    for few in (*more, vocab_size):
        if numbers is None or final.all():
            break
        left = (~final).nonzero()[:, 0]  # rows without a final result rank more tokens
        final[left], *results_left = ranked(logits[left], numbers[left], few=few)
        for values, values_left in zip(results, results_left, strict=True):
            values[left] = values_left
    tokens, values, broken, *log_probs = results
    return Ranked(tokens, values, broken, log_probs[0] if with_log_probs else None)


def _ranked(
    logits: Tensor, numbers: Tensor | None, *, few: int, num: int, is_cut: bool, with_log_probs: bool
) -> tuple[Tensor, ...]:
    """Mask [N] of rows whose result is final after the top `few`, then a `Ranked`; greedy if numbers is None."""
    # 1. Greedy: the most probable tokens.
    scores = logits.float()  # bfloat16 is several times slower on a CPU
    values, tokens = _largest(scores, num if numbers is None else min(max(num, few), scores.shape[1]))
    broken = ~(values[:, 0].abs() < LARGEST)  # also True for NaN
    final = torch.ones_like(broken)
    if numbers is not None:
        # 2. Temperature above 0: divide scores by it, apply min_p, top_k and top_p, and run the race.
        draws = _Draws.of(numbers)
        drawn = draws.temperatures > 0
        temperatures = torch.where(drawn, draws.temperatures, 1.0)[:, None]
        scores, values = (s.masked_fill(broken[:, None], 0.0) / temperatures for s in (scores, values))
        if is_cut:
            least, final = _least_included(scores, tokens, values, draws)
            scores, values = (s.masked_fill(s < least, -math.inf) for s in (scores, values))
        raced_tokens, raced_values, ended = race(scores, tokens, values, draws.keys, num)
        tokens = torch.where(drawn[:, None], raced_tokens, tokens[:, :num])
        values = torch.where(drawn[:, None], raced_values.float(), values[:, :num])
        final = (final & ended) | ~drawn | broken
    if not with_log_probs:
        return final, tokens, values, broken
    # 3. Normalise: values as in a race with probabilities p_v, not with unnormalised exp(scores).
    log_probs = scores.log_softmax(dim=-1).gather(1, tokens)  # logsumexp takes 8 times as long if many are -inf
    total = scores.gather(1, tokens[:, :1]) - log_probs[:, :1]
    return final, tokens, values - total, broken, log_probs.where(values > -math.inf, -math.inf)


def _least_included(scores: Tensor, tokens: Tensor, best: Tensor, draws: _Draws) -> tuple[Tensor, Tensor]:
    """The least score [N, 1] that min_p, top_k and then top_p include in each row [N, V]; ties are included.

    tokens [N, few] are the most probable, `best` their scores. Also returns the mask [N] of rows where they suffice.
    """
    few, vocab_size = best.shape[1], scores.shape[1]
    most, floor = draws.top_k[:, None], best[:, :1] + draws.log_min_p[:, None]
    is_free = (most == vocab_size) & floor.isneginf()
    ranked = best.masked_fill((torch.arange(few, device=best.device) >= most) | (best < floor), -math.inf)
    # Not logsumexp: it takes 8 times as long if many are -inf, and sums a single row in another order than several.
    top_of_all, top_of_few = scores.log_softmax(dim=-1).gather(1, tokens[:, :1]), ranked.log_softmax(dim=-1)[:, :1]
    probs = (ranked - best[:, :1] + torch.where(is_free, top_of_all, top_of_few)).exp()
    included = (probs.cumsum(dim=-1) - probs < draws.top_p[:, None]) & (ranked > -math.inf)
    num_included = included.sum(dim=-1, keepdim=True)
    least, is_open = ranked.gather(1, (num_included - 1).clamp(min=0)), is_free & draws.top_p[:, None].isinf()
    is_cut_here = (most <= few) | (best[:, -1:] < floor)  # top_k or min_p excludes all tokens beyond the top `few`
    suffice = is_open | is_cut_here | (is_free & (num_included < few))
    return least.masked_fill(is_open, -math.inf), suffice[:, 0]


def race(scores: Tensor, likeliest: Tensor, best: Tensor, keys: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `num` tokens with the least E_v / exp(scores[v]), best first, and the logarithms of its inverse, [N, num].

    scores [N, V] float32, `likeliest` [N, few] the tokens with the best scores, `best` these scores, keys [N] int64.
    Also returns the mask [N] of rows in which no other token can be among the first.

    The noise is a Poisson process in which every token arrives at rate 1: E_v is the time of v's first arrival. The
    first NUM_ARRIVALS arrivals are sampled. The process is memoryless: after the last of them (`horizon`), the time
    until any other token arrives is again Exp(1).
    """
    # 1. Tokens that arrived, with their times; a token that arrived twice counts with its first time.
    arrived, times = arrivals(keys, scores.shape[-1])
    horizon = times[:, -1:]
    arrived_values = scores.gather(1, arrived) - times.log()
    # 2. The most probable tokens, with a time after the horizon; if they also arrived, the earlier time wins.
    likeliest_values = best - (horizon + own_times(keys[:, None], likeliest)).log()
    both = torch.cat([arrived, likeliest], dim=1), torch.cat([arrived_values, likeliest_values], dim=1)
    tokens, values = first_of_each(*both, num)
    # 3. Any other token arrives after the horizon: to be among the best, its score would have to reach the bound.
    bound = values[:, -1] + horizon[:, 0].log()
    ended = (best[:, -1] < bound - ROUNDING) | (best[:, -1] == -math.inf)
    return tokens, values, ended | (best.shape[1] == scores.shape[1])


def first_of_each(tokens: Tensor, values: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The `num` distinct tokens [N, num] with the largest values [N, M], and the values; -inf if there are fewer."""
    if num == 1:
        best, index = _largest(values, num)
        return tokens.gather(1, index), best
    values, order = values.sort(dim=1, descending=True)
    tokens = tokens.gather(1, order)
    by_token, index = tokens.sort(dim=1, stable=True)  # of equal tokens the best comes first
    is_repeated = functional.pad(by_token[:, 1:] == by_token[:, :-1], (1, 0))
    best, order = _largest(values.masked_fill(is_repeated.gather(1, index.argsort(dim=1)), -math.inf), num)
    return tokens.gather(1, order), best


def _largest(values: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The `num` largest of values [N, M], and their indices; for num 1 the first of equal values."""
    return values.max(dim=1, keepdim=True) if num == 1 else values.topk(num, dim=1)


def arrivals(keys: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Tokens (int64) and times (float64) [N, NUM_ARRIVALS] of the first arrivals, for keys [N]."""
    numbers = torch.arange(NUM_ARRIVALS, device=keys.device)
    gaps = -torch.log1p(-_uniform(keys[:, None], numbers)) / vocab_size
    tokens = (_uniform(keys[:, None], numbers + NUM_ARRIVALS) * vocab_size).long().clamp_max(vocab_size - 1)
    return tokens, gaps.cumsum(dim=1)


def own_times(keys: Tensor, tokens: Tensor) -> Tensor:
    """Exp(1) times from the horizon to the first later arrival of each token; keys and tokens are broadcast."""
    return -torch.log1p(-_uniform(keys, tokens + 2 * NUM_ARRIVALS))


def _uniform(keys: Tensor, numbers: Tensor) -> Tensor:
    """Independent uniform float64 in (0, 1) by key and number (splitmix64 as a counter-based generator)."""
    return (_shifted(_mixed(keys + numbers * _GAMMA), 12).double() + 0.5) * 2.0**-52


def _keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """64-bit keys from (seed, position) by two steps of splitmix64. All are int64 [N]."""
    return _mixed((_mixed(seeds + _GAMMA) ^ positions) + _GAMMA)


def _mixed(bits: Tensor) -> Tensor:
    """The finaliser of splitmix64."""
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ _shifted(bits, shift)) * _as_int64(multiplier)
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Logical right shift of int64."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
