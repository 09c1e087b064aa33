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

import torch
from torch import Tensor
from torch.nn import functional

from blockpilot.device import tensor_on
from blockpilot.native.ranking import LARGEST, Ranked, Subset, in_c, rank
from blockpilot.types import Candidates, Sampling

GROUP = 64  # tokens
NUM_ARRIVALS = 256  # drawn one by one: more of them leave fewer tokens that may win after all
FEW_BEST = (256, 4096)  # tokens among which top_p looks for its last one, before it looks at all
ROUNDING = 1e-3  # of float32 scores, and much more
LOWEST, TINY = torch.finfo(torch.float32).min, torch.finfo(torch.float32).tiny
NO_TOKEN = -1


def _as_int64(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


_GAMMA = _as_int64(0x9E3779B97F4A7C15)


def keyed_sample(logits: Tensor, positions: Sequence[int], sampling: Sequence[Sampling]) -> Tensor:
    """The target's token at each of N positions: logits [N, V] -> tokens [N] (int64).

    `positions` holds the absolute position of the token that is drawn (one past the token that was scored) and
    `sampling` the parameters of the request it belongs to; both have N entries. NO_TOKEN where logits are no numbers.
    """
    way = rank if in_c(logits) else ranked_by_torch
    found = way(logits, positions, sampling, 1, with_log_probs=False)
    return found.tokens[:, 0].masked_fill(found.broken, NO_TOKEN)


def candidates(
    logits: Tensor, positions: Sequence[int], sampling: Sequence[Sampling], num: int, of: Subset | None = None
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
        found = ranked_by_torch(logits, positions, sampling, num, with_log_probs=True)
        found = found._replace(tokens=some.tokens[found.tokens]) if some else found
    tokens, values, broken, log_probs = found
    assert log_probs is not None
    of_race, of_scores = (each.masked_fill(broken[:, None], -math.inf) for each in (values, log_probs))
    drawn = tensor_on(logits.device, [not each.is_greedy for each in sampling])
    return Candidates(tokens, of_race, of_scores, drawn)


def cuts(sampling: Sampling, vocab_size: int) -> bool:
    """True if top_p or top_k keeps some tokens from being drawn."""
    return sampling.top_p < 1 or 0 < sampling.top_k < vocab_size


def ranked_by_torch(
    logits: Tensor, positions: Sequence[int], sampling: Sequence[Sampling], num: int, *, with_log_probs: bool
) -> Ranked:
    """The `num` best, at most V, of logits [N, V]."""
    scores = logits.float()  # bfloat16 is several times slower on a CPU
    tokens, values = top(scores, num)
    broken = ~(values[:, 0].abs() < LARGEST)  # true of NaN
    drawn = [i for i, s in enumerate(sampling) if not s.is_greedy]
    if drawn:
        scores = scores.masked_fill(broken[:, None], 0.0)
        index = tensor_on(logits.device, drawn)
        of_drawn = truncated_scores(scores[index], [sampling[i] for i in drawn])
        scores = scores.index_copy(0, index, of_drawn)
        there = values > -math.inf
        values = scores.gather(1, tokens).where(there, -math.inf)  # in the order of the logits, but for what is cut
        seeds = tensor_on(logits.device, [sampling[i].seed for i in drawn])
        places = tensor_on(logits.device, [positions[i] for i in drawn])
        tokens[index], perturbed = race(of_drawn, tokens[index], _keys(seeds, places))
        values[index] = perturbed.float()
    if not with_log_probs:
        return Ranked(tokens, values, broken, None)
    log_probs = scores.log_softmax(dim=-1).gather(1, tokens)  # logsumexp: 8 times as long where many are -inf
    total = scores.gather(1, tokens[:, :1]) - log_probs[:, :1]
    return Ranked(tokens, values - total, broken, log_probs.where(values > -math.inf, -math.inf))


def truncated_scores(logits: Tensor, sampling: Sequence[Sampling]) -> Tensor:
    """logits / temperature, with -inf outside top_k and then top_p. logits [N, V] float32; ties stay in."""
    device, vocab_size = logits.device, logits.shape[-1]
    temperatures = [min(s.temperature, LARGEST) for s in sampling]
    scores = logits / tensor_on(device, temperatures)[:, None]
    cut = [i for i, s in enumerate(sampling) if cuts(s, vocab_size)]
    if not cut:
        return scores
    index = tensor_on(device, cut)
    top_k = tensor_on(device, [min(sampling[i].top_k or vocab_size, vocab_size) for i in cut])[:, None]
    # Above 0 in float32, so that the likeliest stays in; without a limit where it is 1, which sums reach early.
    limits = [max(sampling[i].top_p, TINY) if sampling[i].top_p < 1 else math.inf for i in cut]
    least = _least_kept(scores[index], top_k, tensor_on(device, limits)[:, None])
    scores[index] = scores[index].masked_fill(scores[index] < least, -math.inf)
    return scores


def _least_kept(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The least of each row's scores [N, V] that top_k [N, 1] and then top_p [N, 1] leave in: [N, 1].

    Nearly always it is among the best few, which takes a tenth of the time of sorting all of them. A row decides by
    itself how many it needs, so its result does not depend on its neighbours.
    """
    vocab_size = scores.shape[-1]
    least = torch.empty_like(scores[:, :1])
    left = torch.arange(len(scores), device=scores.device)
    for num in (min(few, vocab_size) for few in (*FEW_BEST, vocab_size)):
        of_row, most = scores[left], top_k[left]
        best, tokens = of_row.topk(num, dim=-1)
        ranked = best.masked_fill(torch.arange(num, device=scores.device) >= most, -math.inf)
        # Not logsumexp: it takes 8 times as long where many are -inf, and sums one row in another order than many.
        of_all, of_few = of_row.log_softmax(dim=-1).gather(-1, tokens[:, :1]), ranked.log_softmax(dim=-1)[:, :1]
        probs = (ranked - best[:, :1] + torch.where(most < vocab_size, of_few, of_all)).exp()
        kept = ((probs.cumsum(dim=-1) - probs < top_p[left]) & (ranked > -math.inf)).sum(dim=-1, keepdim=True)
        least[left] = ranked.gather(-1, kept - 1)
        left = left[
            ((most > num) & ((most < vocab_size) | (kept == num)))[:, 0]
        ]  # what top_k leaves, or top_p, is more
        if num == vocab_size or not len(left):
            break
    return least


def race(scores: Tensor, likeliest: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The first k of E_v / exp(scores[v]), and the logarithms of its inverse: both [N, k], the winner first.

    scores [N, V] float32, `likeliest` [N, k] the best ones of each, keys [N] int64. A Poisson process in which every
    token arrives at rate 1 gives the noise: E_v is the time of v's first arrival. Its first arrivals are drawn; after
    them (`horizon`) a token that has not come has an Exp(1) of its own before it, since the process has no memory.
    """
    num = likeliest.shape[1]
    arrived, times = arrivals(keys, scores.shape[-1])
    horizon = times[:, -1:]
    values = scores.gather(1, arrived) - times.log()
    lead = scores.gather(1, likeliest) - (horizon + own_times(keys[:, None], likeliest)).log()
    reached = torch.maximum(first_of_each(arrived, values, num)[1], lead.sort(dim=1, descending=True).values)[:, -1:]
    bound = reached + horizon.log()  # of scores that no time after the horizon can bring among the first k
    row, late = _at_least(_grouped(scores), (bound[:, 0] - ROUNDING).float().clamp(min=LOWEST))
    of_late = scores[row, late] - (horizon[row, 0] + own_times(keys[row], late)).log()
    return first_of_each(*_joined(arrived, values, row, late, of_late), num)


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


def _joined(arrived: Tensor, values: Tensor, row: Tensor, late: Tensor, of_late: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and values [N, A + most]: those that arrived [N, A], and late ones of their rows, all three [L]."""
    counts = torch.bincount(row, minlength=len(arrived))
    place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    shape = len(arrived), int(counts.max())
    tokens = late.new_zeros(shape).index_put_((row, place), late)
    more = values.new_full(shape, -math.inf).index_put_((row, place), of_late)
    return torch.cat([arrived, tokens], dim=1), torch.cat([values, more], dim=1)


def top(scores: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The places [N, num] of the largest of scores [N, V], and these; of equals one of them."""
    grouped = _grouped(scores)
    _, groups = _largest(grouped.amax(dim=2), min(num, grouped.shape[1]))
    found = grouped.gather(1, groups[:, :, None].expand(-1, -1, GROUP))
    best, place = _largest(found.flatten(1), num)
    places = groups.gather(1, place // GROUP) * GROUP + place % GROUP
    return places.clamp_max(scores.shape[1] - 1), best  # of scores -inf any place will do


def _largest(values: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The `num` largest of values [N, M], and their places; of equals the first, where one is wanted."""
    return values.max(dim=1, keepdim=True) if num == 1 else values.topk(num, dim=1)


def _grouped(scores: Tensor) -> Tensor:
    """[N, V] -> [N, groups, GROUP]: the maximum is found many times faster than its place."""
    short = -scores.shape[1] % GROUP
    whole = functional.pad(scores, (0, short), value=-math.inf) if short else scores
    return whole.reshape(len(scores), whole.shape[1] // GROUP, GROUP)


def _at_least(grouped: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and places of all that reach bound [N] of their row."""
    row, group = (grouped.amax(dim=2) >= bound[:, None]).nonzero(as_tuple=True)
    found, inside = (grouped[row, group] >= bound[row, None]).nonzero(as_tuple=True)
    return row[found], group[found] * GROUP + inside


def arrivals(keys: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Tokens and times [N, NUM_ARRIVALS] (int64, float64) of the first arrivals in the processes of keys [N]."""
    numbers = torch.arange(NUM_ARRIVALS, device=keys.device)
    gaps = _exponential(_uniform(keys[:, None], numbers)) / vocab_size
    tokens = (_uniform(keys[:, None], numbers + NUM_ARRIVALS) * vocab_size).long().clamp_max(vocab_size - 1)
    return tokens, gaps.cumsum(dim=1)


def own_times(keys: Tensor, tokens: Tensor) -> Tensor:
    """How long after the horizon each of the tokens arrives; keys and tokens have one shape."""
    return _exponential(_uniform(keys, tokens + 2 * NUM_ARRIVALS))


def _exponential(uniform: Tensor) -> Tensor:
    return -torch.log1p(-uniform)


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
