"""The keyed sampler draws from the right distribution, and depends on nothing but its key."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from blockpilot.engine.sampling import (
    NUM_ARRIVALS,
    arrivals,
    count_accepted,
    keyed_sample,
    own_times,
    race,
    truncated_scores,
)
from blockpilot.types import Sampling

LOGITS = torch.tensor([1.0, 0.3, -0.7, 2.1, 0.0, -3.0, 1.4])


def frequencies(sampling: list[Sampling], positions: list[int], logits: torch.Tensor = LOGITS) -> torch.Tensor:
    tokens = keyed_sample(logits.expand(len(positions), -1), positions, sampling)
    return torch.bincount(tokens, minlength=len(logits)).double()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_distribution_is_the_softmax(temperature: float, vary: str) -> None:
    num = 20_000
    numbers = list(range(num))
    sampling = [Sampling(temperature, seed=i if vary == "seed" else 5) for i in numbers]
    found = frequencies(sampling, numbers if vary == "position" else [9] * num)
    expected = (LOGITS / temperature).softmax(0).double()
    # One draw in 10,000 correct samplers would fail; the key is fixed, so this one never will by chance.
    assert chisquare(found.numpy(), (expected / expected.sum() * num).numpy()).pvalue > 1e-4


def test_a_wrong_distribution_would_be_noticed() -> None:
    found = frequencies([Sampling(1.0, seed=i) for i in range(20_000)], [3] * 20_000)
    wrong = (LOGITS / 1.05).softmax(0).double()
    assert chisquare(found.numpy(), (wrong / wrong.sum() * 20_000).numpy()).pvalue < 1e-4


def test_draws_at_neighbouring_positions_and_seeds_are_independent() -> None:
    """Joint counts of two draws against the product of their distributions, for keys that differ by one."""
    num, expected = 20_000, LOGITS.softmax(0).double()
    joint = torch.outer(expected, expected)
    for first, second in [((0, 0), (0, 1)), ((0, 0), (1, 0))]:
        draws = [
            keyed_sample(
                LOGITS.expand(num, -1),
                [2 * i + position for i in range(num)],
                [Sampling(1.0, seed=seed) for _ in range(num)],
            )
            for seed, position in (first, second)
        ]
        counts = torch.bincount(draws[0] * 7 + draws[1], minlength=49).double()
        assert chisquare(counts.numpy(), (joint.flatten() / joint.sum() * num).numpy()).pvalue > 1e-4


@pytest.mark.parametrize("spread", [0.0, 2.0, 6.0])
def test_distribution_over_more_tokens_than_arrive(spread: float) -> None:
    """From flat, where the first to arrive mostly wins, to peaked, where it mostly does not."""
    vocab_size, num, num_bins = 20 * NUM_ARRIVALS, 6_000, 40
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * spread
    order = logits.argsort(descending=True)
    probs = logits.softmax(0)[order].double()
    bins = torch.empty(vocab_size, dtype=torch.int64)  # of about equal probability, by rank
    bins[order] = ((probs.cumsum(0) - probs / 2) * num_bins).long().clamp_max(num_bins - 1)
    expected = torch.zeros(num_bins, dtype=torch.float64).index_add_(0, bins[order], probs)
    draws = [
        keyed_sample(logits.expand(500, -1), range(i, i + 500), [Sampling(1.0)] * 500) for i in range(0, num, 500)
    ]
    found = torch.bincount(bins[torch.cat(draws)], minlength=num_bins).double()
    likely = expected * num >= 5
    counts, wanted = ([*x[likely].tolist(), float(x[~likely].sum())] for x in (found, expected * num))
    keep = len(wanted) if wanted[-1] > 0 else -1
    assert chisquare(counts[:keep], [w * sum(counts) / sum(wanted) for w in wanted[:keep]]).pvalue > 1e-4


@given(st.integers(1, 3000), st.floats(0.0, 12.0), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_the_race_is_won_by_whom_a_look_at_all_times_says(vocab_size: int, spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(4, vocab_size, generator=generator) * spread
    scores[:, torch.rand(vocab_size, generator=generator) < 0.2] = -math.inf
    scores[:, seed % vocab_size] = 1.0
    keys = torch.tensor([seed, -seed, 7, 2**62 + seed])
    found = race(scores, scores.argmax(dim=-1), keys)
    arrived, times = arrivals(keys, vocab_size)
    own = own_times(keys[:, None].expand(-1, vocab_size), torch.arange(vocab_size).expand(4, -1))
    first = (times[:, -1:] + own).scatter_reduce(1, arrived, times, "amin")
    assert found.equal((scores - first.log()).argmax(dim=-1))


def test_arrivals_are_a_poisson_process_over_all_tokens() -> None:
    vocab_size, num = 50_000, 400
    tokens, times = arrivals(torch.arange(num), vocab_size)
    for seconds in (times[:, 0], times.diff(dim=1)[:, 100]):
        quantiles = (1 - (-seconds * vocab_size).exp()).sort().values
        uniform = (torch.arange(num) + 0.5) / num
        assert (quantiles - uniform).abs().max() < 1.63 / math.sqrt(num)  # Kolmogorov-Smirnov, 1%
    counts = torch.bincount(tokens.flatten() * 50 // vocab_size, minlength=50)
    assert chisquare(counts.numpy()).pvalue > 1e-4


def test_temperature_zero_is_greedy() -> None:
    assert keyed_sample(LOGITS[None], [0], [Sampling()]).tolist() == [3]


@given(st.integers(0, 10**6), st.integers(-(2**63), 2**63 - 1), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_a_token_does_not_depend_on_the_batch_it_is_drawn_in(position: int, seed: int, others: int) -> None:
    sampling = Sampling(0.8, 0.9, 5, seed)
    alone = keyed_sample(LOGITS[None], [position], [sampling])
    rows = torch.cat([torch.randn(others, 7), LOGITS[None]])
    mixed = [Sampling(float(i % 2), seed=i) for i in range(others)]
    assert keyed_sample(rows, [*range(others), position], [*mixed, sampling])[-1] == alone[0]


def test_all_64_bits_of_the_seed_count() -> None:
    texts = set()
    for seed in (1, 1 + 2**32, 1 + 2**40, -(2**63) + 1):
        texts.add(tuple(keyed_sample(LOGITS.expand(50, -1), range(50), [Sampling(1.0, seed=seed)] * 50).tolist()))
    assert len(texts) == 4


def slow_truncation(logits: list[float], sampling: Sampling) -> set[int]:
    """Tokens that may be drawn: top_k first, then the smallest set of at least top_p mass."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[: sampling.top_k or None]
    weights = [math.exp(logits[i] / sampling.temperature) for i in order]
    kept, mass = set(), 0.0
    for token, weight in zip(order, weights, strict=True):
        if mass >= sampling.top_p < 1:
            break
        kept.add(token)
        mass += weight / sum(weights)
    return kept


@given(
    st.lists(st.integers(-40, 40), min_size=2, max_size=12, unique=True),
    st.floats(0.05, 0.999) | st.just(1.0),  # between them float32 cannot tell
    st.integers(0, 14),
    st.floats(0.2, 2.0),
)
@settings(max_examples=200, deadline=None)
def test_truncation_keeps_what_a_slow_loop_keeps(
    values: list[int], top_p: float, top_k: int, temperature: float
) -> None:
    logits, sampling = [v / 8 for v in values], Sampling(temperature, top_p, top_k)
    scores = truncated_scores(torch.tensor([logits]), [sampling])[0]
    assert {i for i, s in enumerate(scores.tolist()) if s > -math.inf} == slow_truncation(logits, sampling)


def test_top_p_of_1_keeps_tokens_that_a_float32_sum_does_not_see() -> None:
    logits = torch.tensor([[0.0, -20.0, -21.0, -22.0]])
    assert truncated_scores(logits, [Sampling(1.0, top_p=1.0, top_k=3)]).isfinite().tolist() == [[True] * 3 + [False]]


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), min_size=9, max_size=9))
def test_count_accepted_is_the_common_prefix(drafted: list[int], chosen: list[int]) -> None:
    count = count_accepted(drafted, chosen)
    assert drafted[:count] == chosen[:count]
    assert count == len(drafted) or drafted[count] != chosen[count]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"temperature": math.inf}, "temperature inf"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.1}, "top_p 1.1"),
        ({"top_k": -1}, "top_k -1"),
        ({"seed": 2**63}, "seed 9223372036854775808"),
    ],
)
def test_bad_parameters_are_named(arguments: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Sampling(**arguments)  # type: ignore[arg-type]
