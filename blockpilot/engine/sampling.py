"""Which token the target chooses at a position, and which a draft expects of it.

The keyed sampler makes a sampled token a pure function of (the target's logits at its position, the sampling
parameters, the seed, the absolute position). It carries no generator state, so the text of a request does not depend
on its block size, on the batch it ran in, or on speculation at all, at any temperature: exactness is an equality.

Sampling is the exponential race (equivalently Gumbel-max): token v wins with probability softmax(logits / T)[v] when
it has the smallest E_v / p_v, E_v ~ Exp(1). The noise E is a hash of (seed, position), computed with wrapping int64
arithmetic and float64, hence the same on every device. Only what can win is ever computed: tokens arrive at random,
NUM_ARRIVALS of them are drawn one by one, and all others, which are later than the last of those, are looked at only
where they are likely enough to win nevertheless.

Nothing here raises, whatever the logits are: where one is NaN, or the largest is not finite, the choice is NO_TOKEN,
and there are no candidates.

A draft's distribution is drawn from with the target's noise, so that where the two agree, so do the tokens (coupling
by shared randomness, arXiv 2408.07978); the tokens that come next in the race are what else the target may choose.
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

NUM_ARRIVALS = 256  # drawn one by one: more of them leave fewer tokens that may win after all
FEW = (256, 1024, 4096)  # likeliest tokens that are looked at, before all are; for several choices not the first
MOST_SCORES = 2**24  # of a graph, which keeps a few numbers of each
ROUNDING = 1e-3  # of float32 scores, and much more
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

    `positions` holds the absolute position of the token that is drawn (one past the token that was scored) and
    `sampling` the parameters of the request it belongs to; both have N entries. NO_TOKEN where logits are no numbers.
    """
    way = rank if in_c(logits) else partial(ranked_by_torch, graphs=graphs)
    found = way(logits, positions, sampling, 1, with_log_probs=False)
    return found.tokens[:, 0].masked_fill(found.broken, NO_TOKEN)


def candidates(
    logits: Tensor,
    positions: Sequence[int],
    sampling: Sequence[Sampling],
    num: int,
    of: Subset | None = None,
    graphs: Graphs | None = None,
) -> Candidates:
    """The `num` best tokens of each of N positions in the order in which `keyed_sample` would choose them.

    logits [N, V]; with `of` those of its tokens alone, [N, K]: others have no chance.
    """
    num = min(num, logits.shape[-1])
    if in_c(logits):
        found = rank(logits, positions, sampling, num, of=of, with_log_probs=True)
    else:
        some = of if all(each.is_greedy for each in sampling) else None  # where none is drawn they are enough
        logits = logits if of is None or some else of.expanded(logits)
        found = ranked_by_torch(logits, positions, sampling, num, with_log_probs=True, graphs=graphs)
        found = found._replace(tokens=some.tokens[found.tokens]) if some else found
    tokens, values, broken, log_probs = found
    assert log_probs is not None
    of_race, of_scores = (each.masked_fill(broken[:, None], -math.inf) for each in (values, log_probs))
    drawn = tensor_on(logits.device, [not each.is_greedy for each in sampling])
    return Candidates(tokens, of_race, of_scores, drawn)


def cuts(sampling: Sampling, vocab_size: int) -> bool:
    """True if min_p, top_k or top_p keeps some tokens from being drawn."""
    return sampling.top_p < 1 or 0 < sampling.top_k < vocab_size or sampling.min_p > 0


class _Draws(NamedTuple):
    """Keys and parameters of N positions' draws; temperature 0 for the likeliest, top_p infinite for no limit.

    log_min_p: how far a score may lie below the best at most; -inf for no limit.
    """

    keys: Tensor
    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor

    @classmethod
    def of(cls, numbers: Tensor) -> Self:
        """Those of `_numbers` [N, 6], on their device."""
        seeds, positions, _, top_k, _, _ = numbers.unbind(dim=1)
        _, _, temperatures, _, top_p, log_min_p = numbers.view(torch.float64).unbind(dim=1)
        return cls(_keys(seeds, positions), temperatures.float(), top_k, top_p.float(), log_min_p.float())


def _numbers(positions: Sequence[int], sampling: Sequence[Sampling], vocab_size: int) -> Tensor:
    """Seeds, positions, temperatures, top_k, top_p and log min_p [N, 6] on the host, in one tensor: floats by their
    bits.
    """
    found, own = np.empty((len(sampling), 6), dtype=np.int64), [GREEDY if s.is_greedy else s for s in sampling]
    floats = found.view(np.float64)
    found[:, 0], found[:, 1] = [each.seed for each in own], positions
    floats[:, 2] = [min(each.temperature, LARGEST) for each in own]
    found[:, 3] = [min(each.top_k or vocab_size, vocab_size) for each in own]
    # Above 0 in float32, so that the likeliest stays in; without a limit where it is 1, which sums reach early.
    floats[:, 4] = [max(each.top_p, TINY) if each.top_p < 1 else math.inf for each in own]
    floats[:, 5] = [log_min_p(each) for each in own]
    return torch.from_numpy(found)


def ranked_by_torch(
    logits: Tensor,
    positions: Sequence[int],
    sampling: Sequence[Sampling],
    num: int,
    *,
    with_log_probs: bool,
    graphs: Graphs | None = None,
) -> Ranked:
    """The `num` best, at most V, of logits [N, V].

    Nearly always what can win, and what top_p leaves in, is among the likeliest few. A row decides by itself how many
    are looked at, so its result does not depend on its neighbours. All shapes are fixed, hence one graph on a GPU.
    """
    vocab_size, drawn = logits.shape[1], [each for each in sampling if not each.is_greedy]
    is_cut, (first, *more) = any(cuts(each, vocab_size) for each in drawn), FEW if num == 1 else FEW[1:]
    ranked, rows = partial(_ranked, num=num, is_cut=is_cut, with_log_probs=with_log_probs), None
    numbers = sent(_numbers(positions, sampling, vocab_size), logits.device) if drawn else None
    if graphs is not None and numbers is not None and logits.numel() <= MOST_SCORES:
        key = "ranked", num, is_cut, with_log_probs, vocab_size, logits.dtype
        rows = graphs.of_tokens(key, partial(ranked, few=first), [(logits, 0), (numbers, 0)])
    whole, *found = rows or ranked(logits, numbers, few=first)
    for few in (*more, vocab_size):
        if numbers is None or whole.all():
            break
        left = (~whole).nonzero()[:, 0]  # rows that are not certain look at more
        whole[left], *of_left = ranked(logits[left], numbers[left], few=few)
        for values, some in zip(found, of_left, strict=True):
            values[left] = some
    tokens, values, broken, *log_probs = found
    return Ranked(tokens, values, broken, log_probs[0] if with_log_probs else None)


def _ranked(
    logits: Tensor, numbers: Tensor | None, *, few: int, num: int, is_cut: bool, with_log_probs: bool
) -> tuple[Tensor, ...]:
    """Rows [N] that are certain with `few` tokens looked at, then what `Ranked` holds; without numbers none drawn."""
    # 1. Greedy: the likeliest.
    scores = logits.float()  # bfloat16 is several times slower on a CPU
    values, tokens = _largest(scores, num if numbers is None else min(max(num, few), scores.shape[1]))
    broken = ~(values[:, 0].abs() < LARGEST)  # true of NaN
    whole = torch.ones_like(broken)
    if numbers is not None:
        # 2. Drawn: scores by temperature, cut, and raced.
        draws = _Draws.of(numbers)
        own = draws.temperatures > 0
        temperatures = torch.where(own, draws.temperatures, 1.0)[:, None]
        scores, values = (each.masked_fill(broken[:, None], 0.0) / temperatures for each in (scores, values))
        if is_cut:
            least, whole = _least_kept(scores, tokens, values, draws)
            scores, values = (each.masked_fill(each < least, -math.inf) for each in (scores, values))
        of_race, in_race, ended = race(scores, tokens, values, draws.keys, num)
        tokens = torch.where(own[:, None], of_race, tokens[:, :num])
        values = torch.where(own[:, None], in_race.float(), values[:, :num])
        whole = (whole & ended) | ~own | broken
    if not with_log_probs:
        return whole, tokens, values, broken
    # 3. Relative to all of a position: values as in a race of probabilities, not of scores.
    log_probs = scores.log_softmax(dim=-1).gather(1, tokens)  # logsumexp: 8 times as long where many are -inf
    total = scores.gather(1, tokens[:, :1]) - log_probs[:, :1]
    return whole, tokens, values - total, broken, log_probs.where(values > -math.inf, -math.inf)


def _least_kept(scores: Tensor, tokens: Tensor, best: Tensor, draws: _Draws) -> tuple[Tensor, Tensor]:
    """The least of each row's scores [N, V] that min_p, top_k and then top_p leave in, [N, 1], and ties with it.

    `tokens` [N, few] are the likeliest, `best` their scores. Of which rows [N] they suffice comes second.
    """
    few, vocab_size = best.shape[1], scores.shape[1]
    most, floor = draws.top_k[:, None], best[:, :1] + draws.log_min_p[:, None]
    is_free = (most == vocab_size) & floor.isneginf()
    ranked = best.masked_fill((torch.arange(few, device=best.device) >= most) | (best < floor), -math.inf)
    # Not logsumexp: it takes 8 times as long where many are -inf, and sums one row in another order than many.
    of_all, of_few = scores.log_softmax(dim=-1).gather(1, tokens[:, :1]), ranked.log_softmax(dim=-1)[:, :1]
    probs = (ranked - best[:, :1] + torch.where(is_free, of_all, of_few)).exp()
    kept = ((probs.cumsum(dim=-1) - probs < draws.top_p[:, None]) & (ranked > -math.inf)).sum(dim=-1, keepdim=True)
    least, is_open = ranked.gather(1, (kept - 1).clamp(min=0)), is_free & draws.top_p[:, None].isinf()
    is_cut_here = (most <= few) | (best[:, -1:] < floor)  # nothing beyond the likeliest `few` is left in
    whole = is_open | is_cut_here | (is_free & (kept < few))
    return least.masked_fill(is_open, -math.inf), whole[:, 0]


def race(scores: Tensor, likeliest: Tensor, best: Tensor, keys: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first `num` of E_v / exp(scores[v]), and the logarithms of its inverse, both [N, num], the winner first.

    scores [N, V] float32, `likeliest` [N, few] the best ones of each, `best` their scores, keys [N] int64. Of which
    rows [N] no other token can be among the first comes last.

    A Poisson process in which every token arrives at rate 1 gives the noise: E_v is the time of v's first arrival.
    Its first arrivals are drawn; after them (`horizon`) a token that has not come has an Exp(1) of its own before it,
    since the process has no memory.
    """
    # 1. Tokens that arrive early race with their times; one that comes twice counts by its first time.
    arrived, times = arrivals(keys, scores.shape[-1])
    horizon = times[:, -1:]
    of_arrived = scores.gather(1, arrived) - times.log()
    # 2. The likeliest race with a time after the horizon: where they also arrived, that one is better.
    of_likeliest = best - (horizon + own_times(keys[:, None], likeliest)).log()
    both = torch.cat([arrived, likeliest], dim=1), torch.cat([of_arrived, of_likeliest], dim=1)
    tokens, values = first_of_each(*both, num)
    # 3. Any other token is later than the horizon: its score would have to reach the bound.
    bound = values[:, -1] + horizon[:, 0].log()  # of scores that no time after the horizon can bring among the first
    ended = (best[:, -1] < bound - ROUNDING) | (best[:, -1] == -math.inf)
    return tokens, values, ended | (best.shape[1] == scores.shape[1])


def first_of_each(tokens: Tensor, values: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The `num` largest values [N, M] of different tokens, and these, both [N, num]; where there are fewer, -inf."""
    if num == 1:
        best, place = _largest(values, num)
        return tokens.gather(1, place), best
    values, order = values.sort(dim=1, descending=True)
    tokens = tokens.gather(1, order)
    alike, place = tokens.sort(dim=1, stable=True)  # of equal tokens the best comes first
    again = functional.pad(alike[:, 1:] == alike[:, :-1], (1, 0))
    best, order = _largest(values.masked_fill(again.gather(1, place.argsort(dim=1)), -math.inf), num)
    return tokens.gather(1, order), best


def _largest(values: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The `num` largest of values [N, M], and their places; of equals the first, where one is wanted."""
    return values.max(dim=1, keepdim=True) if num == 1 else values.topk(num, dim=1)


def arrivals(keys: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Tokens and times [N, NUM_ARRIVALS] (int64, float64) of the first arrivals in the processes of keys [N]."""
    numbers = torch.arange(NUM_ARRIVALS, device=keys.device)
    gaps = -torch.log1p(-_uniform(keys[:, None], numbers)) / vocab_size
    tokens = (_uniform(keys[:, None], numbers + NUM_ARRIVALS) * vocab_size).long().clamp_max(vocab_size - 1)
    return tokens, gaps.cumsum(dim=1)


def own_times(keys: Tensor, tokens: Tensor) -> Tensor:
    """Times after the horizon at which tokens arrive, Exp(1) each; keys and tokens have one shape."""
    return -torch.log1p(-_uniform(keys, tokens + 2 * NUM_ARRIVALS))


def _uniform(keys: Tensor, numbers: Tensor) -> Tensor:
    """Independent float64 of (0, 1) by key and number (splitmix64 as a counter-based generator)."""
    return (_shifted(_mixed(keys + numbers * _GAMMA), 12).double() + 0.5) * 2.0**-52


def _keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """64 bits from (seed, position): two steps of splitmix64. All three are int64 [N]."""
    return _mixed((_mixed(seeds + _GAMMA) ^ positions) + _GAMMA)


def _mixed(bits: Tensor) -> Tensor:
    """The finaliser of splitmix64."""
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ _shifted(bits, shift)) * _as_int64(multiplier)
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Logical right shift of int64."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
