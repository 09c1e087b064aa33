"""Which token the target chooses at a position, and how many drafted tokens agree with it.

The keyed sampler makes a sampled token a pure function of (the target's logits at its position, the sampling
parameters, the seed, the absolute position). It carries no generator state, so the text of a request does not depend
on its block size, on the batch it ran in, or on speculation at all, at any temperature: exactness is an equality.

Sampling is the exponential race (equivalently Gumbel-max): token v wins with probability softmax(logits / T)[v] when
it has the smallest E_v / p_v, E_v ~ Exp(1). The noise E is a hash of (seed, position), computed with wrapping int64
arithmetic and float64, hence the same on every device. Only what can win is ever computed: tokens arrive at random,
NUM_ARRIVALS of them are drawn one by one, and all others, which are later than the last of those, are looked at only
where they are likely enough to win nevertheless.

Verification is DFlash's (arXiv 2602.06036): the target samples every position of the block, drafted tokens are
accepted while they are equal, and the first that differs is replaced by the target's own, the bonus token.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from blockpilot.types import Sampling

GROUP = 64  # tokens
NUM_ARRIVALS = 256  # drawn one by one: more of them leave fewer tokens that may win after all
ROUNDING = 1e-3  # of float32 scores, and much more


def _as_int64(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


_GAMMA = _as_int64(0x9E3779B97F4A7C15)


def keyed_sample(logits: Tensor, positions: Sequence[int], sampling: Sequence[Sampling]) -> Tensor:
    """The target's token at each of N positions: logits [N, V] -> tokens [N] (int64).

    `positions` holds the absolute position of the token that is drawn (one past the token that was scored) and
    `sampling` the parameters of the request it belongs to; both have N entries.
    """
    logits = logits.float()  # bfloat16 is several times slower on a CPU
    tokens = _argmax(_grouped(logits))
    drawn = [i for i, s in enumerate(sampling) if s.temperature > 0]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        scores = truncated_scores(
            logits if len(drawn) == len(logits) else logits[index], [sampling[i] for i in drawn]
        )
        seeds = torch.tensor([sampling[i].seed for i in drawn], device=logits.device)
        places = torch.tensor([positions[i] for i in drawn], device=logits.device)
        tokens[index] = race(scores, tokens[index], _keys(seeds, places))
    return tokens


def truncated_scores(logits: Tensor, sampling: Sequence[Sampling]) -> Tensor:
    """logits / temperature, with -inf outside top_k and then top_p. logits [N, V] float32; ties stay in."""
    device, vocab_size = logits.device, logits.shape[-1]
    scores = logits / torch.tensor([s.temperature for s in sampling], device=device)[:, None]
    cut = [i for i, s in enumerate(sampling) if s.top_p < 1 or 0 < s.top_k < vocab_size]
    if not cut:
        return scores
    index = torch.tensor(cut, device=device)
    top_k = torch.tensor([sampling[i].top_k or vocab_size for i in cut], device=device)[:, None]
    limits = [sampling[i].top_p if sampling[i].top_p < 1 else math.inf for i in cut]  # float32 sums reach 1 early
    top_p = torch.tensor(limits, device=device)[:, None]
    ranked = scores[index].sort(dim=-1, descending=True).values
    ranked = ranked.masked_fill(torch.arange(vocab_size, device=device) >= top_k, -math.inf)
    probs = ranked.softmax(dim=-1)
    kept = (probs.cumsum(dim=-1) - probs < top_p) & (ranked > -math.inf)
    least = ranked.gather(-1, kept.sum(dim=-1, keepdim=True) - 1)
    scores[index] = scores[index].masked_fill(scores[index] < least, -math.inf)
    return scores


def race(scores: Tensor, likeliest: Tensor, keys: Tensor) -> Tensor:
    """Winners [N] of E_v / exp(scores[v]): scores [N, V] float32, `likeliest` [N] a best one of each, keys [N] int64.

    A Poisson process in which every token arrives at rate 1 gives the noise: E_v is the time of v's first arrival.
    Its first arrivals are drawn; after them (`horizon`) a token that has not come has an Exp(1) of its own before it,
    since the process has no memory.
    """
    arrived, times = arrivals(keys, scores.shape[-1])
    horizon = times[:, -1]
    early, place = (scores.gather(1, arrived) - times.log()).max(dim=1)
    winners = arrived.gather(1, place[:, None])[:, 0]
    lead = scores.gather(1, likeliest[:, None])[:, 0] - (horizon + own_times(keys, likeliest)).log()
    bound = torch.maximum(early, lead) + horizon.log()  # of scores that no time after the horizon can make win
    row, late = _at_least(_grouped(scores), (bound - ROUNDING).float())
    values = scores[row, late] - (horizon[row] + own_times(keys[row], late)).log()
    best = torch.full_like(early, -math.inf).scatter_reduce(0, row, values, "amax")
    wins = (values == best[row]) & (values > early[row])
    winners[row[wins]] = late[wins]
    return winners


def _grouped(scores: Tensor) -> Tensor:
    """[N, V] -> [N, groups, GROUP]: the maximum is found many times faster than its place."""
    short = -scores.shape[1] % GROUP
    whole = functional.pad(scores, (0, short), value=-math.inf) if short else scores
    return whole.reshape(len(scores), -1, GROUP)


def _argmax(grouped: Tensor) -> Tensor:
    """[N, groups, GROUP] -> [N]: the place of a maximum among the flattened groups."""
    group = grouped.amax(dim=2).argmax(dim=1)
    return group * GROUP + grouped[torch.arange(len(grouped), device=grouped.device), group].argmax(dim=1)


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
    return (_shifted(_mixed(keys + numbers * _GAMMA), 12) + 0.5) * 2.0**-52


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


def count_accepted(drafted: Sequence[int], chosen: Sequence[int]) -> int:
    """Drafted tokens accepted: the length of the common prefix of `drafted` (B-1) and the target's `chosen` (B)."""
    for i, token in enumerate(drafted):
        if token != chosen[i]:
            return i
    return len(drafted)
