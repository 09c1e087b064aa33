"""Which token the target chooses at a position, and how many drafted tokens agree with it.

The keyed sampler makes a sampled token a pure function of (the target's logits at its position, the sampling
parameters, the seed, the absolute position). It carries no generator state, so the text of a request does not depend
on its block size, on the batch it ran in, or on speculation at all, at any temperature: exactness is an equality.

Sampling is the exponential race (equivalently Gumbel-max): token v wins with probability softmax(logits / T)[v] when
it has the smallest E_v / p_v, E_v ~ Exp(1). The noise E_v is a hash of (seed, position, v), computed with wrapping
int32 arithmetic and hence the same on every device.

Verification is DFlash's (arXiv 2602.06036): the target samples every position of the block, drafted tokens are
accepted while they are equal, and the first that differs is replaced by the target's own, the bonus token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK_64 = 2**64 - 1


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are drawn. temperature 0 is greedy; top_p 1 and top_k 0 are off; seed is an int64."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature {self.temperature}: must be a finite number, at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: must be above 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k}: must be at least 0 (0 is off)")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed {self.seed}: must fit in a signed 64-bit integer")


def keyed_sample(logits: Tensor, positions: Sequence[int], sampling: Sequence[Sampling]) -> Tensor:
    """The target's token at each of N positions: logits [N, V] -> tokens [N] (int64).

    `positions` holds the absolute position of the token that is drawn (one past the token that was scored) and
    `sampling` the parameters of the request it belongs to; both have N entries.
    """
    tokens = logits.float().argmax(dim=-1)  # bfloat16 is several times slower on a CPU
    drawn = [i for i, s in enumerate(sampling) if s.temperature > 0]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        chosen = [sampling[i] for i in drawn]
        scores = truncated_scores(logits[index].float(), chosen)
        scores -= log_exponential_noise([positions[i] for i in drawn], [s.seed for s in chosen], logits)
        tokens[index] = scores.argmax(dim=-1)
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
    top_p = torch.tensor([sampling[i].top_p for i in cut], device=device)[:, None]
    ranked = scores[index].sort(dim=-1, descending=True).values
    ranked = ranked.masked_fill(torch.arange(vocab_size, device=device) >= top_k, -math.inf)
    probs = ranked.softmax(dim=-1)
    kept = (probs.cumsum(dim=-1) - probs < top_p) & (ranked > -math.inf)
    least = ranked.gather(-1, kept.sum(dim=-1, keepdim=True) - 1)
    scores[index] = scores[index].masked_fill(scores[index] < least, -math.inf)
    return scores


def log_exponential_noise(positions: Sequence[int], seeds: Sequence[int], like: Tensor) -> Tensor:
    """log E for independent E ~ Exp(1), keyed by (seed, position, token): [N, V] float32 on `like`'s device."""
    keys = [_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    first = torch.tensor([_as_int32(k & 0xFFFFFFFF) for k in keys], dtype=torch.int32, device=like.device)
    second = torch.tensor([_as_int32(k >> 32) for k in keys], dtype=torch.int32, device=like.device)
    bits = torch.arange(like.shape[-1], dtype=torch.int32, device=like.device) * _as_int32(0x9E3779B9)
    bits = bits ^ first[:, None]
    _mix(bits, 0x7FEB352D, 16)
    bits += second[:, None]
    _mix(bits, _as_int32(0x846CA68B), 15)
    _mix(bits, 0x2C1B3C6D, 16)
    # Unsigned 32 bits to (0, 1): small values keep float32's relative precision, and small E decide the race.
    uniform = torch.where(bits < 0, bits.float() + 2.0**32, bits.float()).add_(0.5).mul_(2.0**-32)
    return uniform.neg_().log1p_().neg_().log_()


def _mix(bits: Tensor, multiplier: int, shift: int) -> None:
    """One round of a 32-bit finaliser, in place: bits ^= bits >> shift (logical); bits *= multiplier."""
    bits ^= (bits >> shift) & ((1 << (32 - shift)) - 1)
    bits *= multiplier


def _key(seed: int, position: int) -> int:
    """64 bits from (seed, position): two rounds of the splitmix64 finaliser."""
    return _splitmix64(_splitmix64(seed & _MASK_64) ^ (position & _MASK_64))


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


def _as_int32(x: int) -> int:
    return x - 2**32 if x >= 2**31 else x


def count_accepted(drafted: Sequence[int], chosen: Sequence[int]) -> int:
    """Drafted tokens accepted: the length of the common prefix of `drafted` (B-1) and the target's `chosen` (B)."""
    for i, token in enumerate(drafted):
        if token != chosen[i]:
            return i
    return len(drafted)
