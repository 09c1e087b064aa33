"""The keyed sampler samples from the right distribution, and depends on nothing but its key."""

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from blockpilot.engine.sampling import (
    FEW,
    NO_TOKEN,
    NUM_ARRIVALS,
    arrivals,
    best_choices,
    keyed_sample,
    own_times,
    race,
    ranked_by_torch,
)
from blockpilot.models.graphs import Graphs
from blockpilot.native.ranking import Subset, in_c, rank
from blockpilot.types import Sampling

LOGITS = torch.tensor([1.0, 0.3, -0.7, 2.1, 0.0, -3.0, 1.4])


def left_in(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Mask [V] of the tokens that torch samples from, given logits [1, V]; a single one is the most probable."""
    ranked = ranked_by_torch(logits, [7], [sampling], logits.shape[1], with_log_probs=True)
    assert ranked.log_probs is not None
    return torch.zeros(logits.shape[1], dtype=torch.bool).index_fill_(
        0, ranked.tokens[ranked.log_probs > -math.inf], True
    )


@pytest.mark.parametrize(("temperature", "vary"), [(0.5, "seed"), (1.7, "seed"), (1.0, "position")])
def test_distribution_is_the_softmax(temperature: float, vary: str) -> None:
    num = 20_000
    sampling = [Sampling(temperature, seed=i if vary == "seed" else 5) for i in range(num)]
    positions = range(num) if vary == "position" else [9] * num
    counts = torch.bincount(keyed_sample(LOGITS.expand(num, -1), positions, sampling), minlength=len(LOGITS)).double()
    expected = (LOGITS / temperature).softmax(0).double()
    # One in 10,000 correct samplers would fail; the key is fixed, so this test never fails by chance.
    assert chisquare(counts.numpy(), (expected / expected.sum() * num).numpy()).pvalue > 1e-4


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
    """Flat distributions, where the first arrival mostly wins, to peaked ones, where it mostly does not."""
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
    bin_counts = torch.bincount(bins[torch.cat(draws)], minlength=num_bins).double()
    likely = expected * num >= 5
    counts, wanted = ([*x[likely].tolist(), float(x[~likely].sum())] for x in (bin_counts, expected * num))
    keep = len(wanted) if wanted[-1] > 0 else -1
    assert chisquare(counts[:keep], [w * sum(counts) / sum(wanted) for w in wanted[:keep]]).pvalue > 1e-4


@given(st.integers(1, 3000), st.floats(0.0, 12.0), st.integers(0, 10**6), st.sampled_from([1, 2, 8]))
@settings(max_examples=80, deadline=None)
def test_the_race_ends_in_the_order_that_a_look_at_all_times_says(
    vocab_size: int, spread: float, seed: int, num: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(4, vocab_size, generator=generator) * spread
    scores[:, torch.rand(vocab_size, generator=generator) < 0.2] = -math.inf
    scores[:, seed % vocab_size] = 1.0
    num = min(num, vocab_size)
    keys = torch.tensor([seed, -seed, 7, 2**62 + seed])
    few = max(num, min(seed % 100, vocab_size))
    best = scores.topk(few, dim=1)
    tokens, values, ended = race(scores, best.indices, best.values, keys, num)
    arrived, times = arrivals(keys, vocab_size)
    token_times = own_times(keys[:, None].expand(-1, vocab_size), torch.arange(vocab_size).expand(4, -1))
    first = (times[:, -1:] + token_times).scatter_reduce(1, arrived, times, "amin")
    wanted = (scores - first.log()).topk(num, dim=1)
    assert ended.all() or few < vocab_size
    assert values[ended].equal(wanted.values[ended])
    can_win = ended[:, None] & (values > -math.inf)
    assert tokens[can_win].equal(wanted.indices[can_win])


SAMPLINGS = [
    Sampling(),
    Sampling(1),
    Sampling(0.7, seed=3),
    Sampling(1.0, top_k=2, seed=4),
    Sampling(1.3, top_p=0.6, seed=5),
    Sampling(1.1, min_p=0.1, seed=6),
    Sampling(0.9, top_p=0.9, top_k=200, min_p=0.003, seed=7),
]


@given(st.integers(0, 10**6), st.integers(1, 9), st.lists(st.sampled_from(SAMPLINGS), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_candidates_are_what_would_be_chosen_one_after_the_other(
    position: int, num: int, sampling: list[Sampling]
) -> None:
    """Each candidate is the choice of `keyed_sample` without the ones before it, as long as a token is possible."""
    rows = torch.randn(len(sampling), 500, generator=torch.Generator().manual_seed(position)) * 3
    positions = range(position, position + len(sampling))
    candidates = best_choices(rows, positions, sampling, num)
    open_ = rows.clone()
    for i, s in enumerate(sampling):
        if s.temperature:
            open_[i, ~left_in(rows[i : i + 1], s)] = -math.inf
    free = [Sampling(s.temperature, seed=s.seed) for s in sampling]
    for index in range(num):
        possible = open_.amax(dim=1) > -math.inf
        assert candidates.scores[:, index].isfinite().equal(possible)
        chosen = keyed_sample(open_[possible], [p for p, b in zip(positions, possible, strict=True) if b],
                              [s for s, b in zip(free, possible, strict=True) if b])  # fmt: skip
        assert candidates.tokens[possible, index].equal(chosen)
        open_[possible.nonzero()[:, 0], chosen] = -math.inf


@given(
    vocab_size=st.integers(2, 12) | st.integers(1, 6000),
    spread=st.just(0.0) | st.floats(1e-3, 12.0),
    seed=st.integers(0, 10**6),
    sampling=st.builds(
        Sampling,
        st.floats(0.05, 5.0),
        st.floats(1e-9, 1.0),
        st.integers(0, 14) | st.integers(0, 7000),
        min_p=st.just(0.0) | st.floats(1e-9, 1.0),
    ),
    few=st.sampled_from([None, FEW, (1, 2, 3)]),
)
@settings(max_examples=200, deadline=None)
def test_those_tokens_are_left_that_float64_leaves(
    vocab_size: int, spread: float, seed: int, sampling: Sampling, few: tuple[int, ...] | None
) -> None:
    """The best tokens, including all that float32 cannot distinguish at the limits of min_p and top_p.

    few: numbers of top tokens that torch tries first; None: in C.
    """
    if few is None and not in_c(LOGITS):
        pytest.skip("no compiler, or no CPU for it")
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    if few is not None:
        with mock.patch("blockpilot.engine.sampling.FEW", few):
            left = left_in(logits, sampling).nonzero()[:, 0]
    else:
        ranked = rank(logits, [7], [sampling], vocab_size, with_log_probs=True)
        left = ranked.tokens[ranked.values > -math.inf]
        assert ranked.log_probs is not None
        torch.testing.assert_close(ranked.log_probs.exp().sum(), torch.tensor(1.0), rtol=1e-4, atol=1e-4)
    ordered = logits[0].double().sort(descending=True).values
    bounds = []
    for slack in (-1e-5, 1e-5):
        likely = (ordered - ordered[0]) / sampling.temperature >= math.log(max(sampling.min_p, 1e-300)) - slack
        num_likely = max(1, min(int(likely.sum()), sampling.top_k or vocab_size))
        probs = (ordered[:num_likely] / sampling.temperature).softmax(0)
        bounds.append(max(1, int((probs.cumsum(0) - probs < sampling.top_p + slack).sum())))
    fewest, most = bounds
    assert ordered[most - 1] <= logits[0, left].min() <= ordered[fewest - 1]
    assert len(left) == int((logits[0] >= logits[0, left].min()).sum())


def _rounding_cuts(logits: torch.Tensor, sampling: Sampling) -> bool:
    """True if the last token that min_p or top_p includes depends on the rounding of sums."""
    if sampling.is_greedy or (sampling.top_p == 1 and not sampling.min_p):
        return False
    scores = (logits.double() / sampling.temperature).sort(descending=True).values
    above_floor = scores - scores[0] - math.log(max(sampling.min_p, 1e-300))
    if (above_floor.abs() < 1e-5).any():
        return True
    mass = scores[above_floor >= 0][: sampling.top_k or None].softmax(dim=0).cumsum(dim=0)
    return bool(((mass - sampling.top_p).abs() < 1e-5).any())


@given(
    vocab_size=st.integers(1, 3000),
    spread=st.just(0.0) | st.floats(1e-3, 12.0),
    seed=st.integers(0, 10**6),
    num=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    sampling=st.lists(st.sampled_from([*SAMPLINGS, Sampling(0.05), Sampling(1e30)]), min_size=1, max_size=6),
    is_part=st.booleans(),
)
@example(  # a token that is included with sums in float64, but not in float32
    vocab_size=1689,
    spread=0.05,
    seed=1689,
    num=1,
    dtype=torch.float32,
    sampling=[Sampling()] * 4 + [Sampling(1.3, top_p=0.6), Sampling()],
    is_part=False,
)
@settings(max_examples=200, deadline=None)
def test_c_ranks_as_torch_does(
    vocab_size: int,
    spread: float,
    seed: int,
    num: int,
    dtype: torch.dtype,
    sampling: list[Sampling],
    *,
    is_part: bool,
) -> None:
    """Same ranks, also of scores that are -inf or equal, and of rows that are not finite; the input is unchanged.

    Scores of all tokens, or of a subset of them, which may be a single one.
    """
    if not in_c(LOGITS):
        pytest.skip("no compiler, or no CPU for it")
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(len(sampling), vocab_size, generator=generator) * spread).to(dtype)
    logits[:, torch.rand(vocab_size, generator=generator) < 0.3] = -math.inf
    logits[0, seed % vocab_size] = [1.0, math.nan, math.inf, 1e35][seed % 4]
    sampling = [replace(row_sampling, seed=seed) for row_sampling in sampling]
    subset = None
    if is_part:
        subset_tokens = torch.randperm(vocab_size, generator=generator)[: 1 + seed % vocab_size].sort().values
        subset, logits = Subset.of(subset_tokens, vocab_size), logits[:, subset_tokens]
    num, positions, before = min(num, logits.shape[1]), range(seed, seed + len(sampling)), logits.clone()
    tokens, values, broken, log_probs = rank(logits, positions, sampling, num, of=subset, with_log_probs=True)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    logits = logits if subset is None else subset.expanded(logits)
    expected = ranked_by_torch(logits, positions, sampling, num, with_log_probs=True)
    assert broken.equal(expected.broken)
    for row in (~broken).nonzero()[:, 0].tolist():
        if _rounding_cuts(logits[row], sampling[row]):
            continue
        can_be = expected.values[row] > -math.inf
        assert can_be.equal(values[row] > -math.inf)
        tolerance = {"rtol": 1e-4, "atol": 1e-3}
        torch.testing.assert_close(values[row], expected.values[row], **tolerance)
        torch.testing.assert_close(log_probs[row], expected.log_probs[row], **tolerance)
        row_tokens, wanted = tokens[row][can_be], expected.tokens[row][can_be]
        if sampling[row].is_greedy:  # ties may have another order
            assert logits[row, row_tokens].equal(logits[row, wanted])
        else:
            assert row_tokens.equal(wanted)


@pytest.mark.parametrize("second", [Sampling(), Sampling(1.0, seed=2)])
def test_candidates_of_a_part_are_those_of_all_by_torch(second: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockpilot.engine.sampling.in_c", lambda logits: False)
    subset = Subset.of(torch.arange(3, 200, 2), 260)
    logits = torch.randn(2, len(subset.tokens), generator=torch.Generator().manual_seed(0))
    candidates = best_choices(logits, [1, 2], [Sampling(), second], 5, subset)
    expected = best_choices(subset.expanded(logits), [1, 2], [Sampling(), second], 5)
    assert candidates.tokens.equal(expected.tokens)
    torch.testing.assert_close(candidates.scores, expected.scores)
    torch.testing.assert_close(candidates.log_probs, expected.log_probs)


def test_candidates_have_their_log_probabilities() -> None:
    candidates = best_choices(LOGITS.repeat(2, 1), [4, 5], [Sampling(), Sampling(0.5, seed=1)], 20)
    assert candidates.tokens.shape == (2, 7)
    for row, scale in enumerate((1.0, 2.0)):
        expected = (LOGITS * scale).log_softmax(0)[candidates.tokens[row]]
        torch.testing.assert_close(candidates.log_probs[row], expected)
    torch.testing.assert_close(candidates.scores[0], candidates.log_probs[0])
    assert (candidates.scores[1].diff() <= 0).all()


def test_all_64_bits_of_the_seed_count() -> None:
    texts = set()
    for seed in (1, 1 + 2**32, 1 + 2**40, -(2**63) + 1):
        texts.add(tuple(keyed_sample(LOGITS.expand(50, -1), range(50), [Sampling(1.0, seed=seed)] * 50).tolist()))
    assert len(texts) == 4


@pytest.mark.parametrize("num", [1, 5])
@torch.inference_mode()
def test_rows_of_a_graph_are_ranked_as_those_alone(num: int) -> None:
    """Graphs pad rows and try the top few tokens; if these do not suffice, more are tried without a graph."""
    logits = torch.randn(len(SAMPLINGS), 3000, generator=torch.Generator().manual_seed(num)) * 3
    logits[2, 5:900], logits[4] = 9.0, math.nan
    graphs, positions = Graphs(logits.device, capture=False), range(len(SAMPLINGS))
    for few in (FEW, (2, 2, 30)):
        with mock.patch("blockpilot.engine.sampling.FEW", few):
            ranked = ranked_by_torch(logits, positions, SAMPLINGS, num, with_log_probs=True, graphs=graphs)
        for i, sampling in enumerate(SAMPLINGS):
            alone = ranked_by_torch(logits[i : i + 1], [i], [sampling], num, with_log_probs=True)
            for batch_values, row_values in zip(ranked, alone, strict=True):
                assert batch_values is not None
                assert row_values is not None
                assert batch_values[i].nan_to_num().equal(row_values[0].nan_to_num())
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", -0.1, "at least 0"),
        ("temperature", math.nan, "a finite number"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.1, "above 0 and at most 1"),
        ("top_k", -1, "at least 0"),
        ("seed", 2**63, "64-bit"),
        ("min_p", 1.5, "0 to 1"),
        ("presence_penalty", math.inf, "a finite number"),
        ("frequency_penalty", math.nan, "a finite number"),
        ("repetition_penalty", 0.0, "above 0"),
        ("logit_bias", {-1: 1.0}, "a token id and a finite number"),
        ("logit_bias", {1: math.nan}, "a token id and a finite number"),
        ("logit_bias", {"1": 1.0}, "a token id and a finite number"),
    ],
)
def test_bad_parameters_are_named(name: str, value: Any, allowed: str) -> None:
    shown = next(iter(value)) if isinstance(value, dict) else value
    with pytest.raises(ValueError, match=f"{name} {shown!r}: .*{allowed}"):
        Sampling(**{name: value})


# --- any numbers ---

any_sampling = st.builds(
    Sampling,
    temperature=st.floats(0, allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, 1.0, 1e-40, 5e-324]),
    top_p=st.floats(0, 1, exclude_min=True) | st.just(1e-50),
    top_k=st.integers(0) | st.just(10**30),
    seed=st.integers(-(2**63), 2**63 - 1),
    min_p=st.floats(0, 1) | st.just(5e-324),
)
any_logits = st.lists(st.floats(width=32), min_size=5, max_size=5)


@given(st.lists(st.tuples(any_logits, any_sampling), min_size=1, max_size=3), any_sampling, st.integers(1, 5))
@settings(deadline=None, max_examples=500)
def test_no_number_makes_the_sampler_raise_or_reaches_another_row(
    rows: list[tuple[list[float], Sampling]], neighbour: Sampling, num: int
) -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0, 1.9, -math.inf], *(scores for scores, _ in rows)])
    sampling = [neighbour, *(row_sampling for _, row_sampling in rows)]
    positions = list(range(len(logits)))
    tokens = keyed_sample(logits, positions, sampling)
    candidates = best_choices(logits, positions, sampling, num)
    assert tokens[0] == keyed_sample(logits[:1], [0], [neighbour])[0]
    assert tokens[0] in range(4)
    assert not (candidates.scores.isnan() | candidates.log_probs.isnan()).any()
    for scores, token, row_scores in zip(logits[1:], tokens[1:].tolist(), candidates.scores[1:], strict=True):
        if scores.isnan().any() or not scores.max().isfinite():
            assert token == NO_TOKEN
            assert (row_scores == -math.inf).all()
        elif scores.abs().max() < 1e30:
            assert token in range(5)
            assert scores[token] > -math.inf


@pytest.mark.parametrize(
    "least",
    [Sampling(1e-39), Sampling(1.0, top_p=1e-50), Sampling(1e-5), Sampling(5.0, top_k=1), Sampling(5.0, min_p=1.0)],
)
def test_the_least_of_a_parameter_is_the_argmax(least: Sampling) -> None:
    logits = LOGITS.expand(50, -1)
    assert (keyed_sample(logits, range(50), [least] * 50) == LOGITS.argmax()).all()


def test_the_most_of_a_parameter_is_without_it() -> None:
    logits = LOGITS.expand(50, -1)
    free = keyed_sample(logits, range(50), [Sampling(1.0)] * 50)
    assert torch.equal(keyed_sample(logits, range(50), [Sampling(1.0, top_k=10**30)] * 50), free)
    hottest = (Sampling(temperature, seed=3) for temperature in (1e30, 1.7e308))
    first, second = (keyed_sample(logits, range(50), [sampling] * 50) for sampling in hottest)
    assert torch.equal(first, second)
    assert len(first.unique()) > 3
