"""Choosing block sizes from forecasts, against all combinations there are; track records; running means."""

import math
import random
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpilot.adaptive.calibration import TrackRecord
from blockpilot.control.choose import choose
from blockpilot.control.price import StepCosts
from blockpilot.evaluation.baselines import EVController, RunningMeans, StaticForecast
from blockpilot.types import CandidateSet, Forecast, Prefill
from helpers.costs import ROWS, linear_costs, step_costs

PREFILL = Prefill(torch.zeros(4), None, 3)
# --- against all combinations ---


def rate(
    sizes: Sequence[int],
    forecasts: Sequence[StaticForecast],
    costs: StepCosts | None,
    others: Sequence[int],
) -> float:
    """Tokens a second of a step, rows that do not choose emitting one; without costs the tokens.

    A step takes a plain one's time and, of every row that drafts, its share of what that many such rows add.
    """
    tokens = sum(f.taus[list(f.candidates).index(size)] for f, size in zip(forecasts, sizes, strict=True))
    if costs is None:
        return tokens
    return (tokens + len(others)) / costs.mixed_s([*sizes, *others])


def by_brute_force(forecasts: Sequence[StaticForecast], costs: StepCosts | None, others: Sequence[int]) -> list[int]:
    """Of all combinations with the highest rate the one with the smallest sizes."""
    every = list(product(*(forecast.candidates for forecast in forecasts)))
    highest = max(rate(sizes, forecasts, costs, others) for sizes in every)
    best = [sizes for sizes in every if rate(sizes, forecasts, costs, others) == highest]
    return list(min(best, key=sum))


candidate_sets = st.sets(st.integers(1, 9), min_size=1, max_size=4).map(lambda s: CandidateSet(tuple(sorted(s))))


@st.composite
def forecasts_of(draw: st.DrawFn, taus: st.SearchStrategy[float]) -> StaticForecast:
    candidates = draw(candidate_sets)
    return StaticForecast(candidates, draw(st.lists(taus, min_size=len(candidates), max_size=len(candidates))))


def cost_tables(values: st.SearchStrategy[float], block_sizes: Sequence[int]) -> st.SearchStrategy[StepCosts]:
    """At every load dearer, or no cheaper, the larger the blocks are."""
    shape = len(ROWS), len(block_sizes)
    num, shares = math.prod(shape), st.lists(st.floats(0, 1.5), min_size=len(ROWS), max_size=len(ROWS))

    def costs(drawn: list[float], of_one: list[float], of_most: list[float]) -> StepCosts:
        ascending = np.sort(np.array(drawn).reshape(shape), axis=1)
        return step_costs(block_sizes, ascending.T.tolist(), of_one, of_most)

    return st.builds(costs, st.lists(values, min_size=num, max_size=num), shares, shares)


@settings(deadline=None)
@given(
    forecasts=st.lists(forecasts_of(st.floats(1, 9)), min_size=1, max_size=3),
    costs=cost_tables(st.floats(0.01, 10), (1, 4, 7)),
    others=st.lists(st.integers(1, 12), max_size=3),
)
def test_the_choice_has_the_highest_rate(
    forecasts: list[StaticForecast], costs: StepCosts, others: list[int]
) -> None:
    """Any costs, also between and beyond what was measured. Rates are sums of a few numbers in another order."""
    chosen = choose(forecasts, costs, others)
    best = by_brute_force(forecasts, costs, others)
    found, expected = (rate(sizes, forecasts, costs, others) for sizes in (chosen, best))
    assert found == pytest.approx(expected, rel=1e-9)


def test_without_costs_every_row_takes_its_longest() -> None:
    one = StaticForecast(CandidateSet((1, 2, 4)), [1.0, 1.5, 1.2])
    other = StaticForecast(CandidateSet((2, 4, 8)), [1.5, 2.5, 2.5])
    assert choose([one, other], None) == [2, 4]
    assert choose([one, other], None, others=[1, 16]) == [2, 4]
    assert choose([other], None) == [4]
    assert choose([], linear_costs(1.0), others=[4]) == []


def test_rows_choose_apart() -> None:
    """One row's long block costs its neighbours nothing."""
    easy, hard = (StaticForecast(CandidateSet((1, 4, 8)), taus) for taus in ([1.0, 3.8, 7.0], [1.0, 1.1, 1.2]))
    costs = linear_costs(0.1)
    assert choose([easy, hard], costs) == [8, 1]
    assert choose([hard, easy, hard, easy], costs) == [1, 8, 1, 8]
    assert choose([hard], costs, others=[8]) == [1]


def test_a_draft_pass_wants_company() -> None:
    """Where most of what drafting adds is the pass itself, rows draft that would not alone."""
    row = StaticForecast(CandidateSet((1, 4)), [1.0, 2.0])
    costs = step_costs((1, 4), [[1.0] * 3, [1.6] * 3], of_one=(1, 0.9, 0.8), of_most=(1, 0.95, 0.96))
    assert choose([row], costs, others=[1] * 5) == [1]
    assert choose([row] * 6, costs) == [4] * 6
    assert choose([row], costs, others=[4] * 5) == [4]


def test_rows_are_alike_where_mixing_costs_more_than_it_brings() -> None:
    """The second row expects little of its drafts, and to leave it out would take longer than to have it draft."""
    eager, other = (StaticForecast(CandidateSet((1, 2)), [1.0, tau]) for tau in (1.8, 1.05))
    seconds, others = [[1.0] * 3, [1.4] * 3], [2]
    even, dear = (step_costs((1, 2), seconds, of_one=(1, 0.7, most), of_most=(1, most, most)) for most in (0.8, 1.2))
    assert choose([eager, other], even, others) == [2, 1]
    assert choose([eager, other], dear, others) == [2, 2]


def test_equals_take_the_smallest() -> None:
    free, doubling = linear_costs(0.0), step_costs((1, 2), [[1.0] * 3, [2.0] * 3])
    wide, flat = StaticForecast(CandidateSet((1, 2)), [1.0, 2.0]), StaticForecast(CandidateSet((1, 2)), [1.0, 1.0])
    assert choose([wide], doubling) == [1]
    assert choose([wide, flat], free) == [2, 1]
    assert choose([wide, flat], None) == [2, 1]
    assert choose([flat, wide], free) == [1, 2]  # whoever comes first


def test_load_fades_speculation_out() -> None:
    """What a slot costs grows with the rows: the more of them, the narrower the step, down to plain decoding."""
    row = StaticForecast(CandidateSet((1, 2, 4, 8)), [1.0, 1.6, 2.2, 2.6])
    costs = linear_costs(0.12)
    sizes = [set(choose([row] * num, costs)) for num in range(1, 7)]
    assert all(len(of_load) == 1 for of_load in sizes)
    widths = [max(of_load) for of_load in sizes]
    assert widths == sorted(widths, reverse=True)
    assert (widths[0], widths[-1]) == (4, 1)


def test_a_dear_target_makes_drafts_cheap() -> None:
    """Where the target's own pass is dear, drafts are cheap beside it."""
    row = StaticForecast(CandidateSet((1, 8)), [1.0, 2.0])
    assert choose([row], step_costs((1, 8), [[1.0] * 3, [3.0] * 3])) == [1]
    assert choose([row], step_costs((1, 8), [[10.0] * 3, [12.0] * 3])) == [8]


# --- track records ---


def test_a_record_weighs_evidence_against_doubt() -> None:
    record = TrackRecord(doubt=10)
    assert record.ratio == 1
    record.add(5, 2)
    assert record.ratio == pytest.approx(12 / 15)
    record.add(5, 6)
    assert record.ratio == pytest.approx(18 / 20)


def test_a_record_fades_step_by_step() -> None:
    """Also by steps that draft nothing: what was given up for its record is tried anew some day."""
    record = TrackRecord(doubt=1, memory=4)
    record.add(8, 0)
    for num in range(1, 30):
        record.add(0, 0)
        assert record.ratio == pytest.approx(1 / (1 + 8 * 0.75**num))
    assert record.ratio > 0.99


def test_a_record_begins_where_its_prior_is_and_tells_it() -> None:
    of_all = TrackRecord(doubt=4)
    first = TrackRecord(doubt=6, prior=of_all)
    first.add(4, 0)
    assert of_all.ratio == pytest.approx(4 / 8)
    assert first.ratio == pytest.approx(6 * (4 / 8) / 10)
    second = TrackRecord(doubt=6, prior=of_all)
    assert second.ratio == of_all.ratio
    second.add(2, 2)
    assert of_all.ratio == pytest.approx(6 / 10)
    assert first.ratio == pytest.approx(6 * (6 / 10) / 10)  # it hears of the others by the prior


# --- the EV controller ---

SIZES = CandidateSet((1, 2, 4, 8))


def accepted(hazards: Sequence[float], block_size: int, draw: random.Random) -> int:
    """Drafts accepted in a step if slot k's is with chance hazards[k - 1] once it is reached."""
    count = 0
    while count < block_size - 1 and draw.random() < hazards[count]:
        count += 1
    return count


def true_taus(hazards: Sequence[float], sizes: Sequence[int]) -> list[float]:
    return [1 + sum(math.prod(hazards[:k]) for k in range(1, size)) for size in sizes]


def test_before_anything_was_seen_it_guesses() -> None:
    controller = EVController(SIZES)
    forecast = controller(PREFILL)
    assert [record.ratio for record in controller.records] == [0.75] * 7
    assert forecast.taus == pytest.approx(true_taus([0.75] * 7, SIZES.sizes))
    assert forecast.reader is None
    assert EVController(CandidateSet((1,)))(PREFILL).taus == [1.0]


def test_what_a_step_teaches() -> None:
    """A step of 4 slots with one draft accepted has reached the first two; a full one has reached all three."""
    controller = EVController(SIZES)
    forecast = controller(PREFILL)
    forecast.observe(4, 1)
    assert [record.ratio for record in controller.records[:4]] == [4 / 5, 3 / 5, 3 / 4, 3 / 4]
    forecast.observe(4, 3)
    assert [record.ratio for record in controller.records[:4]] == [5 / 6, 4 / 6, 4 / 5, 3 / 4]
    forecast.observe(1, 0)
    assert [record.ratio for record in controller.records[:4]] == [5 / 6, 4 / 6, 4 / 5, 3 / 4]
    # The request's own two steps against four of all requests.
    mine = [(2 + 4 * 5 / 6) / 6, (1 + 4 * 4 / 6) / 6, (1 + 4 * 4 / 5) / 5]
    assert list(forecast.taus)[:3] == pytest.approx([1, 1 + mine[0], 1 + mine[0] * (1 + mine[1] * (1 + mine[2]))])
    assert list(controller(PREFILL).taus)[:2] == pytest.approx([1, 1 + 5 / 6])  # a new one knows what all have shown


def test_rates_converge_to_what_is_accepted() -> None:
    hazards, draw = [0.9, 0.7, 0.5, 0.8, 0.2, 0.6, 0.4], random.Random(0)
    controller = EVController(SIZES)
    num_steps = 20_000
    for _ in range(num_steps // 100):  # requests of 100 steps
        forecast = controller(PREFILL)
        for _ in range(100):
            forecast.observe(8, accepted(hazards, 8, draw))
    for slot, (hazard, record) in enumerate(zip(hazards, controller.records, strict=True)):
        reached = num_steps * math.prod(hazards[:slot])
        # Four standard errors of a share, and the first guess that is never forgotten.
        margin = 4 * math.sqrt(hazard * (1 - hazard) / reached) + EVController.DOUBT / reached
        assert record.ratio == pytest.approx(hazard, abs=margin)
    taus = controller(PREFILL).taus
    assert taus == pytest.approx(true_taus(hazards, SIZES.sizes), rel=0.05)


@pytest.mark.parametrize(
    ("hazards", "per_slot", "best"),
    [
        ([0.95] * 7, 0.02, 8),
        ([0.9, 0.9, 0.9, 0.1, 0.1, 0.1, 0.1], 0.1, 4),
        ([0.8, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], 0.2, 2),
        ([0.1] * 7, 0.3, 1),
    ],
)
def test_it_finds_the_best_size(hazards: list[float], per_slot: float, best: int) -> None:
    """A request of 200 steps after 20 others, each step chosen by what was seen before it."""
    costs = linear_costs(per_slot)
    by_truth = [tau / costs.step_s(size, 1) for tau, size in zip(true_taus(hazards, SIZES), SIZES, strict=True)]
    assert SIZES[by_truth.index(max(by_truth))] == best  # by a twentieth:
    assert sorted(by_truth)[-2] < 0.95 * max(by_truth)
    draw, controller = random.Random(1), EVController(SIZES)
    chosen: list[int] = []
    for _ in range(21):
        forecast, chosen = controller(PREFILL), []
        for _ in range(200):
            (size,) = choose([forecast], costs)
            forecast.observe(size, accepted(hazards, size, draw))
            chosen.append(size)
    unprobed = [size for i, size in enumerate(chosen) if i % EVController.PROBE_EVERY != EVController.PROBE_EVERY - 1]
    assert unprobed.count(best) > 0.9 * len(unprobed)


def probes(forecast: RunningMeans) -> list[int]:
    """The only candidate that may be taken, where there is but one."""
    allowed = [size for size, tau in zip(forecast.candidates, forecast.taus, strict=True) if tau > -math.inf]
    return allowed if len(allowed) == 1 else []


@pytest.mark.parametrize(("size", "probed"), [(1, [2]), (2, [4]), (3, [4]), (4, [8]), (8, [])])
def test_every_so_often_the_next_larger_size_is_tried(size: int, probed: list[int]) -> None:
    """3 is no candidate: a last step may be shorter than was chosen."""
    forecast = EVController(SIZES)(PREFILL)
    for step in range(4 * EVController.PROBE_EVERY):
        due = step % EVController.PROBE_EVERY == EVController.PROBE_EVERY - 1
        assert probes(forecast) == (probed if due else [])
        if due and probed:  # whatever it costs, and whatever its neighbours are
            costs = linear_costs(50.0)
            assert choose([forecast], costs) == probed
            neighbour: Forecast = StaticForecast(SIZES, [1.0, 1.1, 1.2, 1.3])
            assert choose([neighbour, forecast], costs, others=[1])[1:] == probed
        forecast.observe(size, 0)


def test_a_probe_leaves_its_neighbours_their_choice() -> None:
    forecast = EVController(SIZES)(PREFILL)
    for _ in range(EVController.PROBE_EVERY - 1):
        forecast.observe(1, 0)
    assert probes(forecast) == [2]
    easy: Forecast = StaticForecast(SIZES, [1.0, 1.9, 3.7, 7.0])
    assert choose([easy, forecast, easy], linear_costs(0.1)) == [8, 2, 8]


def test_a_probe_is_one_step() -> None:
    """The chosen size of every step is what the running means say, but for one in PROBE_EVERY."""
    forecast, costs = EVController(SIZES)(PREFILL), linear_costs(1.0)
    chosen = []
    for _ in range(3 * EVController.PROBE_EVERY):
        (size,) = choose([forecast], costs)
        chosen.append(size)
        forecast.observe(size, 0)
    assert [i for i, size in enumerate(chosen) if size > 1] == [15, 31, 47]
    assert {chosen[i] for i in (15, 31, 47)} == {2}
