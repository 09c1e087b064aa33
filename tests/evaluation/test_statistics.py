"""Figures from sums: hand-worked values, a slow bootstrap, and intervals that cover what they should."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from blockpilot.evaluation.statistics import (
    Comparison,
    Figures,
    Interval,
    MethodRun,
    Totals,
    fastest_block_size,
    interval,
    ratio_of_totals,
    resampling_weights,
)
from blockpilot.evaluation.tables import cells, markdown

TOTALS = Totals(
    num_requests=1,
    num_tokens=13,
    total_s=2.0,
    num_later_tokens=10,
    num_later_steps=5,
    later_s=1.25,
    num_verified=6,
    num_emitted=12,
    sum_block_sizes=24,
    num_equal=1,
)
FASTER = replace(TOTALS, num_tokens=40, total_s=4.0, num_verified=4, num_emitted=39, sum_block_sizes=64, num_equal=0)


def run(method: str, prompt: int, totals: Totals = TOTALS, repeat: int = 0) -> MethodRun:
    return MethodRun(method, prompt, repeat, totals)


def test_figures_are_ratios_of_totals() -> None:
    """tau (12 + 39) / (6 + 4), not the mean of 2 and 9.75; the block size is that of a step, not of a request."""
    runs = [run("AR", 0), run("AR", 1), run("B=4", 0), run("B=4", 1, FASTER)]
    comparison = Comparison(runs)
    assert comparison.methods == ("AR", "B=4")
    assert comparison.figure("tau", "B=4").value == pytest.approx(5.1)
    assert comparison.figure("tokens_per_s", "B=4").value == pytest.approx(53 / 6)
    assert comparison.figure("decode_tokens_per_s", "B=4").value == pytest.approx(8)
    assert comparison.figure("step_s", "B=4").value == pytest.approx(0.25)
    assert comparison.ratio("tokens_per_s", "B=4", "AR").value == pytest.approx((53 / 6) / (13 / 2))
    plain, fixed = comparison.figures("AR")
    assert (plain.method, plain.speedup, plain.share_equal) == ("AR", Interval(1, 1, 1), 1)
    assert (fixed.share_equal, fixed.mean_block_size) == (0.5, (24 + 64) / (6 + 4))
    assert plain.mean_block_size == 4


def test_repeats_of_a_prompt_add_up() -> None:
    twice = Comparison(
        [run("AR", prompt, totals, repeat=r) for prompt in (0, 1) for r, totals in enumerate((TOTALS, FASTER))]
    )
    assert twice.figure("tau", "AR") == pytest.approx((5.1, 5.1, 5.1))  # both prompts are alike


def noisy_runs(num_prompts: int, speedup: float, seed: int) -> list[MethodRun]:
    """Groups whose speed varies a lot, and a method that is faster by `speedup` in each, give or take 5%."""
    draw = random.Random(seed)
    runs = []
    for prompt in range(num_prompts):
        seconds = draw.uniform(0.2, 5)
        ours = seconds / (speedup * draw.uniform(0.95, 1.05))
        tokens = draw.randint(5, 60)
        slow = replace(TOTALS, total_s=seconds, num_tokens=tokens)
        runs += [run("AR", prompt, slow), run("policy", prompt, replace(slow, total_s=ours))]
    return runs


def slow_intervals(
    runs: list[MethodRun], num_resamples: int, seed: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """95% intervals of tokens_per_s of "policy" and of its ratio to "AR", by drawing prompts one by one."""
    draw = random.Random(seed)
    by_prompt = {(r.method, r.prompt): r.totals for r in runs}
    prompts = sorted({r.prompt for r in runs})

    def speed(method: str, chosen: list[int]) -> float:
        tokens = sum(by_prompt[method, g].num_tokens for g in chosen)
        return tokens / sum(by_prompt[method, g].total_s for g in chosen)

    speeds, ratios = [], []
    for _ in range(num_resamples):
        chosen = [draw.choice(prompts) for _ in prompts]
        speeds.append(speed("policy", chosen))
        ratios.append(speed("policy", chosen) / speed("AR", chosen))
    low, high = int(0.025 * num_resamples), int(0.975 * num_resamples)
    return (sorted(speeds)[low], sorted(speeds)[high]), (sorted(ratios)[low], sorted(ratios)[high])


def test_intervals_equal_a_slow_bootstrap() -> None:
    """Both draw 4,000 resamples, from different generators; their ends differ by the draws alone."""
    runs = noisy_runs(30, speedup=1.5, seed=1)
    comparison = Comparison(runs, num_resamples=4000)
    speed, ratio = slow_intervals(runs, 4000, seed=2)
    assert comparison.figure("tokens_per_s", "policy")[1:] == pytest.approx(speed, rel=0.03)
    assert comparison.ratio("tokens_per_s", "policy", "AR")[1:] == pytest.approx(ratio, rel=0.005)


def test_pairing_makes_the_ratio_sharp() -> None:
    comparison = Comparison(noisy_runs(30, speedup=1.5, seed=3))
    speed, ratio = comparison.figure("tokens_per_s", "policy"), comparison.ratio("tokens_per_s", "policy", "AR")
    assert (speed.high - speed.low) / speed.value > 0.2
    assert (ratio.high - ratio.low) / ratio.value < 0.05
    assert ratio.low < 1.5 < ratio.high


def test_intervals_cover_the_truth_about_95_times_in_100() -> None:
    """100 experiments of 40 prompts; a right 95% interval misses the true ratio 12 times or more once in 200."""
    true_ratio = 1.2
    intervals = [
        Comparison(noisy_runs(40, true_ratio, seed), num_resamples=500).ratio("tokens_per_s", "policy", "AR")
        for seed in range(100)
    ]
    misses = sum(not interval.low <= true_ratio <= interval.high for interval in intervals)
    assert 1 <= misses <= 12


def test_the_seed_decides_the_resamples() -> None:
    runs = noisy_runs(10, 1.1, seed=0)
    first, same, other = (Comparison(runs, seed=s).figure("tau", "AR") for s in (1, 1, 2))
    assert first == same
    speeds = [Comparison(runs, seed=s).figure("tokens_per_s", "AR") for s in (1, 2)]
    assert speeds[0].value == speeds[1].value
    assert speeds[0].low != speeds[1].low
    assert other.value == first.value


def test_a_resample_draws_as_many_prompts_as_there_are() -> None:
    weights = resampling_weights(5, 200, seed=3)
    assert weights.shape == (201, 5)
    assert weights[0].tolist() == [1] * 5  # the figure itself
    assert set(weights.sum(axis=1)) == {5}
    assert weights.min() == 0
    assert (weights == resampling_weights(5, 200, seed=3)).all()
    assert (weights != resampling_weights(5, 200, seed=4)).any()


def test_an_interval_holds_95_in_100_of_the_resamples() -> None:
    values = np.array([7.0, *range(1001)])
    assert interval(values) == pytest.approx((7, 25, 975))
    assert interval(np.array([7.0, math.inf, 1, math.nan, 3])) == pytest.approx((7, 1.05, 2.95))
    for nothing in ([math.nan, 1.0, 2.0], [1.0, math.nan, math.inf], [1.0]):
        assert all(map(math.isnan, interval(np.array(nothing))))


def test_a_ratio_of_totals_is_that_of_a_comparison() -> None:
    taus = ratio_of_totals([12, 39, 12], [6, 4, 6])
    same = Comparison([run("AR", 0), run("AR", 1, FASTER), run("AR", 2)]).figure("tau", "AR")
    assert taus == same
    assert taus.value == 63 / 16


def test_what_was_never_counted_is_not_a_number() -> None:
    nothing = replace(TOTALS, num_verified=0, num_emitted=0, sum_block_sizes=0)
    comparison = Comparison([run("AR", 0, nothing), run("AR", 1, nothing), run("B=2", 0), run("B=2", 1, nothing)])
    assert all(map(math.isnan, comparison.figure("tau", "AR")))
    assert all(map(math.isnan, comparison.ratio("tau", "B=2", "AR")))
    assert comparison.figure("tau", "B=2") == Interval(2, 2, 2)  # of the resamples that hold prompt 0
    assert cells(comparison.figures("AR")[0])["tau"] == cells(comparison.figures("AR")[0])["B"] == "-"


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([run("AR", 0)], "1 prompts: intervals need at least 2"),
        ([], "0 prompts"),
        ([run("AR", 0), run("AR", 1), run("B=2", 0)], "method 'B=2' ran other prompts or repeats than 'AR'"),
        ([run("AR", 0), run("AR", 1), run("B=2", 0), run("B=2", 1, repeat=1)], "'B=2' ran other prompts or repeats"),
        ([run("AR", 0), run("AR", 1), run("AR", 1)], "'AR' ran other prompts or repeats"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(runs: list[MethodRun], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Comparison(runs)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="method 'oracle': must be one of AR"):
        Comparison([run("AR", 0), run("AR", 1)]).figure("tau", "oracle")


def test_the_fastest_block_size_weighs_tau_with_the_cost_of_a_step() -> None:
    taus = {1: 1.0, 2: 1.6, 4: 2.0, 8: 2.2}
    assert fastest_block_size(taus, {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}) == 8
    assert fastest_block_size(taus, {1: 1.0, 2: 1.2, 4: 1.6, 8: 2.0}) == 2
    assert fastest_block_size(taus, {1: 1.0, 2: 2.0, 4: 2.4, 8: 3.0}) == 1
    assert fastest_block_size(taus, {4: 1.0, 6: 0.1}) == 4  # what 6 would give is not known
    assert fastest_block_size({2: 1.0, 4: 2.0}, {2: 1.0, 4: 2.0}) == 2
    with pytest.raises(ValueError, match=r"block sizes \[2\] and \[4\]: none is in both"):
        fastest_block_size({2: 1.0}, {4: 1.0})


def test_the_table_reads_the_same_as_text_and_as_markdown() -> None:
    row = Figures(
        "B=4", Interval(2, 1.9, 2.1), Interval(50, 40, 60), Interval(61.25, 1, 99), Interval(1.5, 1, 2), 0.9996, 4
    )
    shown = cells(row)
    assert shown == {
        "method": "B=4",
        "B": "4",
        "tau": "2.00 (1.90 to 2.10)",
        "tokens/s": "50.0 (40.0 to 60.0)",
        "decode only": "61.2",
        "speed-up": "1.50 (1.00 to 2.00)",
        "same text": "99.9%",
    }
    lines = markdown([shown, cells(replace(row, method="policy", mean_block_size=3.256))]).splitlines()
    assert len({len(line) for line in lines}) == 1
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert table[0] == list(shown)
    assert set("".join(table[1])) == {"-"}
    assert table[2] == list(shown.values())
    assert table[3][:2] == ["policy", "3.26"]
