"""Best fixed block sizes by batch size, against brute force over all of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpilot.evaluation.static import PromptTotals, choose_static, ranges
from blockpilot.evaluation.statistics import ratio_of_totals
from helpers.prices import price

SIZES = (2, 4, 8)
PRICES = st.builds(
    price,
    **{name: st.floats(0, 2) for name in ("row_s", "launch_s", "slot_s", "token_s", "tile_s")},
    is_sequential=st.booleans(),
)


def totals_of(emitted: dict[int, list[int]], steps: dict[int, list[int]]) -> dict[int, PromptTotals]:
    return {size: PromptTotals(np.array(emitted[size], float), np.array(steps[size], float)) for size in steps}


@st.composite
def acceptance(draw: st.DrawFn) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Tokens and steps of some prompts by block size; a step emits at most the block size."""
    num = draw(st.integers(2, 5))
    steps = {size: draw(st.lists(st.integers(1, 20), min_size=num, max_size=num)) for size in SIZES}
    emitted = {size: [draw(st.integers(n, n * size)) for n in of] for size, of in steps.items()}
    return emitted, steps


@settings(max_examples=200, deadline=None)
@given(acceptance(), PRICES, st.integers(1, 20))
def test_every_batch_size_gets_the_block_size_with_the_most_tokens_a_second(
    swept: tuple[dict[int, list[int]], dict[int, list[int]]], step_price: object, most: int
) -> None:
    emitted, steps = swept
    batch_sizes = range(1, most + 1)
    chosen = choose_static(totals_of(emitted, steps), step_price, batch_sizes)  # type: ignore[arg-type]

    def tokens_per_s(size: int, rows: int) -> float:
        tau = 1.0 if size == 1 else sum(emitted[size]) / sum(steps[size])
        return rows * tau / step_price.chains_s(size, rows)  # type: ignore[attr-defined]

    for rows, choice in zip(batch_sizes, chosen.choices, strict=True):
        of_all = {size: tokens_per_s(size, rows) for size in (1, *SIZES)}
        assert of_all[choice.block_size] == pytest.approx(max(of_all.values()))
        assert choice.speedup.value == pytest.approx(of_all[choice.block_size] / of_all[1])
        assert choice.over_single.value == pytest.approx(of_all[choice.block_size] / of_all[chosen.single])
        assert choice.speedup.value >= 1 - 1e-9
        if choice.block_size > 1:
            assert choice.tau == ratio_of_totals(emitted[choice.block_size], steps[choice.block_size])
    means = {
        size: np.mean([np.log(tokens_per_s(size, rows) / tokens_per_s(1, rows)) for rows in batch_sizes])
        for size in (1, *SIZES)
    }
    assert means[chosen.single] == pytest.approx(max(means.values()))
    by_range = {rows: size for first, last, size in ranges(chosen.choices) for rows in range(first, last + 1)}
    assert by_range == {choice.batch_size: choice.block_size for choice in chosen.choices}


def test_a_loaded_draft_slows_plain_decoding_unless_nothing_is_drafted() -> None:
    """Batch sizes 1 and 8, tau 1.5 at block size 2: it costs 1.25 plain steps for one row, 1.6 for eight."""
    totals = totals_of({2: [15, 30]}, {2: [10, 20]})
    step_price = price(row_s=0.0, launch_s=0.2, slot_s=0.0, token_s=0.05, tile_s=0.0)
    for idle_draft, sizes in ((0.0, [2, 1]), (0.05, [2, 1]), (0.1, [2, 2])):
        chosen = choose_static(totals, step_price, [1, 8], idle_draft=idle_draft)
        assert [choice.block_size for choice in chosen.choices] == sizes
    slowed = choose_static(totals, step_price, [1, 8], idle_draft=0.05)
    assert slowed.choices[1].speedup.value == pytest.approx(1 / 1.05)
    assert slowed.single == 2
    assert slowed.choices[1].over_single.value == pytest.approx(1.6 / 1.5 / 1.05)
    alone = choose_static(totals, step_price, [8, 16], idle_draft=0.1)  # nothing is drafted: no draft is loaded
    assert [(c.block_size, c.speedup.value) for c in alone.choices] == [(1, 1.0), (1, 1.0)]


def test_fewer_than_two_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="1 prompts: intervals need at least 2"):
        choose_static(totals_of({4: [9]}, {4: [3]}), price(), [1])
    with pytest.raises(ValueError, match="0 prompts"):
        choose_static({}, price(), [1])
