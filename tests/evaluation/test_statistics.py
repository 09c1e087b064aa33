"""Figures from sums: hand-worked values, a slow jackknife, and the coverage of intervals."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import scipy.stats

from blockpilot.evaluation.statistics import (
    Comparison,
    Figures,
    Interval,
    MethodRun,
    Totals,
    chosen_across,
    fastest_block_size,
    ratio_of_totals,
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
    """tau is (12 + 39) / (6 + 4), not the mean of 2 and 9.75; the mean block size is over steps, not requests."""
    runs = [run("AR", 0), run("AR", 1), run("B=4", 0), run("B=4", 1, FASTER)]
    comparison = Comparison(runs)
    assert comparison.methods == ("AR", "B=4")
    assert comparison.figure("tau", "B=4").value == pytest.approx(5.1)
    assert comparison.figure("tokens_per_s", "B=4").value == pytest.approx(53 / 6)
    assert comparison.figure("decode_tokens_per_s", "B=4").value == pytest.approx(8)
    assert comparison.figure("step_s", "B=4").value == pytest.approx(0.25)
    assert comparison.ratio("tokens_per_s", "B=4", "AR").value == pytest.approx((53 / 6) / (13 / 2))
    taus = [TOTALS.num_emitted, FASTER.num_emitted], [TOTALS.num_verified, FASTER.num_verified]
    assert ratio_of_totals(*taus) == comparison.figure("tau", "B=4")
    plain, fixed = comparison.figures("AR")
    assert (plain.method, plain.speedup, plain.share_equal) == ("AR", Interval(1, 1, 1), 1)
    assert (fixed.share_equal, fixed.mean_block_size) == (0.5, (24 + 64) / (6 + 4))
    assert plain.mean_block_size == 4


def test_repeats_of_a_prompt_add_up() -> None:
    first, second = (TOTALS, FASTER), (FASTER, TOTALS)
    by_prompt = [run("AR", prompt, of[r], r) for prompt, of in enumerate((first, second)) for r in (0, 1)]
    assert Comparison(by_prompt).figure("tau", "AR") == pytest.approx((5.1, 5.1, 5.1))  # both prompts are alike
    by_repeat = [run("AR", prompt, first[r], r) for prompt in (0, 1) for r in (0, 1)]
    tau = Comparison(by_repeat).figure("tau", "AR")
    assert tau.value == pytest.approx(5.1)
    assert tau.high > 100  # two repeats only, and they differ


def slow_interval(runs: list[MethodRun]) -> tuple[float, float]:
    """95% interval of the ratio of tokens_per_s, policy to AR, by leaving out prompts one by one."""
    by_prompt = {(r.method, r.prompt): r.totals for r in runs}
    prompts = sorted({r.prompt for r in runs})

    def log_ratio(chosen: list[int]) -> float:
        speeds = [
            sum(by_prompt[method, p].num_tokens for p in chosen) / sum(by_prompt[method, p].total_s for p in chosen)
            for method in ("policy", "AR")
        ]
        return math.log(speeds[0] / speeds[1])

    without = [log_ratio([p for p in prompts if p != left_out]) for left_out in prompts]
    num, mean = len(prompts), sum(without) / len(prompts)
    variance = (num - 1) / num * sum((log - mean) ** 2 for log in without)
    counts = list(product(("policy", "AR"), ("num_tokens", "total_s")))
    totals = {(m, name): sum(getattr(by_prompt[m, p], name) for p in prompts) for m, name in counts}
    shares = [sum(getattr(by_prompt[m, p], name) / totals[m, name] for m, name in counts) / 4 for p in prompts]
    freedom = 1 / sum(share**2 for share in shares) - 1
    half = float(scipy.stats.t.ppf(0.975, freedom)) * math.sqrt(variance)
    middle = log_ratio(prompts)
    return math.exp(middle - half), math.exp(middle + half)


def run_of(method: str, prompt: int, repeat: int, seconds: float, tokens: int) -> MethodRun:
    return run(method, prompt, replace(TOTALS, total_s=seconds, num_tokens=tokens), repeat)


def experiment(
    draw: np.random.Generator, num_prompts: int, num_repeats: int = 1, of_repeat: float = 0, of_engine: float = 0
) -> list[MethodRun]:
    """AR, AR again and a policy that is on average as fast. Answers differ in length, the policy's speed by prompt.
    of_repeat and of_engine: standard deviations of the log speed of whole repeats and of whole engines.
    """
    lengths, gains = draw.lognormal(0, 0.5, num_prompts), draw.normal(0, 0.1, num_prompts)
    runs = []
    for method in ("AR", "AR again", "policy"):
        engine = draw.normal(0, of_engine)
        for repeat in range(num_repeats):
            common = engine + draw.normal(0, of_repeat)
            for prompt in range(num_prompts):
                tokens = int(100 * lengths[prompt]) + 20
                faster = common + draw.normal(0, 0.02) + gains[prompt] * (method == "policy")
                runs.append(run_of(method, prompt, repeat, tokens / 50 * math.exp(-faster), tokens))
    return runs


def test_intervals_equal_a_slow_jackknife() -> None:
    for num_prompts in (3, 30):
        runs = experiment(np.random.default_rng(1), num_prompts)
        ratio = Comparison(runs).ratio("tokens_per_s", "policy", "AR")
        assert ratio[1:] == pytest.approx(slow_interval(runs), rel=1e-6)


def coverage(num_prompts: int, control: tuple[str, str] | None = None, **noise: float) -> float:
    """Share of 400 experiments whose interval contains the true ratio, 1."""
    draw, covered = np.random.default_rng(num_prompts), 0
    for _ in range(400):
        runs = experiment(draw, num_prompts, **noise)  # type: ignore[arg-type]
        ratio = Comparison(runs, control).ratio("tokens_per_s", "policy", "AR")
        covered += ratio.low <= 1 <= ratio.high
    return covered / 400


@pytest.mark.parametrize("num_prompts", [2, 8, 32])
def test_intervals_cover_the_truth_95_times_in_100(num_prompts: int) -> None:
    """Coverage also with few prompts (standard error over 400: 1.1%). A bootstrap covers 47% with two."""
    assert 0.925 <= coverage(num_prompts) <= 0.98


def test_what_whole_repeats_differ_by_is_in_the_interval() -> None:
    """A ratio has the noise of both methods: 2 * of_repeat**2 for each repeat. Without it the coverage is 69%."""
    assert coverage(32, num_repeats=4, of_repeat=0.05) >= 0.9


def test_what_the_control_differs_by_is_in_the_interval() -> None:
    """Engines that do the same work differ by some percent, which one pair of them estimates."""
    alone = coverage(32, of_engine=0.03)
    assert alone < 0.7
    assert coverage(32, ("AR again", "AR"), of_engine=0.03) > alone + 0.1


def test_the_control_s_own_ratio_has_its_own_interval() -> None:
    runs = experiment(np.random.default_rng(0), 8, of_engine=0.1)
    alone, widened = Comparison(runs), Comparison(runs, ("AR again", "AR"))
    for pair in (("AR again", "AR"), ("AR", "AR again"), ("policy", "policy")):
        assert widened.ratio("tokens_per_s", *pair) == alone.ratio("tokens_per_s", *pair)
    wide, narrow = (comparison.ratio("tokens_per_s", "policy", "AR") for comparison in (widened, alone))
    assert wide.value == narrow.value
    assert wide.low < narrow.low
    assert wide.high > narrow.high
    assert widened.ratio("tau", "policy", "AR") == (1, 1, 1)  # the same work: no noise


def test_figures_without_counts_are_nan() -> None:
    nothing = replace(TOTALS, num_verified=0, num_emitted=0, sum_block_sizes=0)
    comparison = Comparison([run("AR", 0, nothing), run("AR", 1, nothing), run("B=2", 0), run("B=2", 1, nothing)])
    assert all(map(math.isnan, comparison.figure("tau", "AR")))
    assert all(map(math.isnan, comparison.ratio("tau", "B=2", "AR")))
    assert str(comparison.figure("tau", "B=2")) == str(Interval(2.0, math.nan, math.nan))  # of prompt 0 alone
    assert cells(comparison.figures("AR")[1])["tau"] == "2.00"
    assert cells(comparison.figures("AR")[0])["tau"] == cells(comparison.figures("AR")[0])["B"] == "-"


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([run("AR", 0)], "1 prompts: intervals need at least 2"),
        ([run("AR", 0), run("AR", 1), run("B=2", 0)], "method 'B=2' ran other prompts or repeats than 'AR'"),
        ([run("AR", 0), run("AR", 1), run("B=2", 0), run("B=2", 1, repeat=1)], "'B=2' ran other prompts or repeats"),
        ([run("AR", 0), run("AR", 1), run("AR", 1)], "'AR' ran other prompts or repeats"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(runs: list[MethodRun], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Comparison(runs)
    with pytest.raises(ValueError, match="method 'oracle': must be one of AR"):
        Comparison([run("AR", 0), run("AR", 1)]).figure("tau", "oracle")


def test_the_best_static_method_of_a_prompt_is_chosen_on_others() -> None:
    """B=2 is faster on even prompts, B=4 on odd ones; each half uses the method that is best on the other half."""
    runs = [
        run_of(method, prompt, 0, seconds=1.0 if (method == "B=2") == (prompt % 2 == 0) else 2.0, tokens=10)
        for method in ("AR", "B=2", "B=4")
        for prompt in range(6)
    ]
    best = chosen_across(runs, ["B=2", "B=4"], "best static")
    assert best.methods == ("B=4", "B=2")
    assert {(chosen.method, chosen.totals.total_s) for chosen in best.runs} == {("best static", 2.0)}
    assert sorted(chosen.prompt for chosen in best.runs) == list(range(6))
    with pytest.raises(ValueError, match="runs of one half"):
        chosen_across([odd for odd in runs if odd.prompt % 2], ["B=2"], "best static")


def test_the_fastest_block_size_weighs_tau_with_the_cost_of_a_step() -> None:
    taus = {1: 1.0, 2: 1.6, 4: 2.0, 8: 2.2}
    assert fastest_block_size(taus, {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}) == 8
    assert fastest_block_size(taus, {1: 1.0, 2: 1.2, 4: 1.6, 8: 2.0}) == 2
    assert fastest_block_size(taus, {1: 1.0, 2: 2.0, 4: 2.4, 8: 3.0}) == 1
    assert fastest_block_size(taus, {4: 1.0, 6: 0.1}) == 4  # the tau of 6 is unknown
    assert fastest_block_size({2: 1.0, 4: 2.0}, {2: 1.0, 4: 2.0}) == 2
    with pytest.raises(ValueError, match=r"block sizes \[2\] and \[4\]: none is in both"):
        fastest_block_size({2: 1.0}, {4: 1.0})


def test_figures_as_a_markdown_table() -> None:
    figures = Interval(2, 1.9, 2.1), Interval(50, 40, 60), Interval(61.25, 1, 99), Interval(1.5, 1, 2)
    row = Figures("B=4", *figures, share_equal=0.9996, mean_block_size=4)
    lines = markdown([cells(row), cells(replace(row, method="policy", mean_block_size=3.256))]).splitlines()
    assert len({len(line) for line in lines}) == 1
    names, dashes, first, second = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert names == ["method", "B", "tau", "tokens/s", "decode only", "speed-up", "same text"]
    assert set("".join(dashes)) == {"-"}
    assert first == ["B=4", "4", "2.00 (1.90 to 2.10)", "50.0 (40.0 to 60.0)", "61.2", "1.50 (1.00 to 2.00)", "99.9%"]
    assert second[:2] == ["policy", "3.26"]
