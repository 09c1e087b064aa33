"""Measurement of a pair's step cost: the mixtures that are timed, and the fit to their seconds."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from blockpilot.control.cost import COEFFICIENTS, TILES, VECTORS, Load, Tiles
from blockpilot.engine.drafting import NUM_CANDIDATES
from blockpilot.evaluation import pricing
from blockpilot.evaluation.pricing import (
    MOST_ERROR,
    NUM_ATTEMPTS,
    PLAIN,
    Drafted,
    TimedStep,
    coefficients_of,
    expert_share,
    measure_price,
    mixtures_for,
    mixtures_of,
    time_steps,
)
from blockpilot.pairs.loading import Pair
from blockpilot.types import MAX_BLOCK_SIZE
from helpers.prices import price
from helpers.tiny import tiny_mixture


def load_of(mixture: Sequence[Drafted]) -> Load:
    return Load(len(mixture), sum(row.depth for row in mixture), sum(row.num_verified for row in mixture))


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize("block_size", [2, 16, 32])
def test_mixtures_have_plain_and_drafting_rows_and_trees(rows: int, block_size: int) -> None:
    mixtures = mixtures_of(rows, block_size)
    drafted = [row for mixture in mixtures for row in mixture]
    assert mixtures[0] == [PLAIN] * rows
    assert all(len(mixture) == rows for mixture in mixtures)
    assert all(0 <= row.depth < block_size and 0 <= row.num_verified < MAX_BLOCK_SIZE for row in drafted)
    assert all((row.depth > 0) == (row.num_verified > 0) for row in drafted)
    assert {row.depth for row in drafted} >= {0, 1, block_size - 1}
    assert max(row.num_verified for row in drafted) >= min(block_size, MAX_BLOCK_SIZE - 1)  # more than are drafted
    if rows > 1:  # mixtures in which no, one or all rows draft, and one with different rows
        assert {sum(row.depth > 0 for row in mixture) for mixture in mixtures} >= {0, 1, rows}
        assert len(set(mixtures[-1])) > 1


@pytest.mark.parametrize("block_size", [4, 8, 16])
def test_loads_of_mixtures_tell_all_coefficients_apart(block_size: int, tiny_pair: Pair) -> None:
    """Loads of a draft that is not sequential, with one row and with 16."""
    loads = [load_of(mixture) for rows in (1, 16) for mixture in mixtures_of(rows, block_size)[:-1]]
    known = price(row_s=0.05, launch_s=0.2, slot_s=0.03, token_s=0.1)
    for pair in (tiny_pair, replace(tiny_pair, target=tiny_mixture())):
        columns = [COEFFICIENTS.index(name) for name in coefficients_of(pair)]
        for tiles in (*TILES, *VECTORS):
            terms = np.array([load.terms(expert_share(pair), tiles) for load in loads], dtype=float)[:, columns]
            relative = terms / [[known.seconds(load)] for load in loads]  # as in the fit
            assert np.linalg.cond(relative / np.linalg.norm(relative, axis=0)) < 50


@pytest.mark.parametrize("rows", [4, 8, 16])
def test_two_mixtures_are_on_both_sides_of_a_tiles_end(rows: int) -> None:
    """Whole tiles alone cannot separate a tile's cost from that of its tokens."""
    num_tokens = sorted(load_of(mixture).num_tokens for mixture in mixtures_of(rows, 8))
    assert any(low % 32 == 0 and high - low <= 8 for low, high in pairwise(num_tokens) if high > low)


@pytest.mark.parametrize("tiles", [*TILES, *VECTORS])
def test_tiles_have_as_many_tokens_as_the_steps_say(
    tiles: Tiles, tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"tile": tiles.first, "next_tile": tiles.further}
    known = price(row_s=0.02, launch_s=0.2, slot_s=0.01, token_s=0.004, tile_s=0.1, **sizes)

    def timed(pair: Pair, mixtures: list[list[Drafted]], context: int, *, num_steps: int) -> list[TimedStep]:
        return [TimedStep(load_of(mixture), known.seconds(load_of(mixture))) for mixture in mixtures]

    monkeypatch.setattr(pricing, "time_steps", timed)
    monkeypatch.setattr(pricing, "possible_tiles", lambda pair: TILES if tiles in TILES else VECTORS)
    found = measure_price(tiny_pair, 16, 10)
    assert found.tiles == tiles
    np.testing.assert_allclose(found.coefficients, known.coefficients, atol=1e-6)


@pytest.mark.parametrize("num_disturbed", [0, 2, NUM_ATTEMPTS])
def test_a_disturbed_measurement_is_repeated(
    num_disturbed: int, tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process slows some of the steps; if all attempts are disturbed, the best one counts."""
    known = price(row_s=0.02, launch_s=0.2, slot_s=0.01, token_s=0.004, tile_s=0.1, tile=8, next_tile=1)
    attempts = list[int]()
    monkeypatch.setattr(pricing, "possible_tiles", lambda pair: VECTORS)

    def timed(pair: Pair, mixtures: list[list[Drafted]], context: int, *, num_steps: int) -> list[TimedStep]:
        slower = 20 - 5 * len(attempts) if len(attempts) < num_disturbed else 1
        attempts.append(slower)
        loads = [load_of(mixture) for mixture in mixtures]
        return [TimedStep(load, known.seconds(load) * (slower if i % 3 == 2 else 1)) for i, load in enumerate(loads)]

    monkeypatch.setattr(pricing, "time_steps", timed)
    found = measure_price(tiny_pair, 16, 10)
    assert len(attempts) == min(num_disturbed + 1, NUM_ATTEMPTS)
    assert (found.error > MOST_ERROR) == (num_disturbed == NUM_ATTEMPTS)
    if num_disturbed < NUM_ATTEMPTS:
        np.testing.assert_allclose(found.coefficients, known.coefficients, atol=1e-6)


@pytest.mark.parametrize("pair", ["tiny_pair", "alone"], indirect=True)
def test_loads_are_what_the_timed_steps_verified(pair: Pair) -> None:
    """A target without a draft drafts nothing."""
    mixtures = [*mixtures_for(pair, 1), *mixtures_for(pair, 3)]
    timed, loads = time_steps(pair, mixtures, 10, num_steps=2), [*map(load_of, mixtures)]
    assert [step.load for step in timed] == loads
    assert any(load.num_drafted for load in loads) == pair.has_draft
    assert all(step.seconds > 0 for step in timed)
    assert loads[0].num_verified == 0 < max(load.num_verified for load in loads)


def test_a_tree_has_no_more_nodes_than_its_slot_has_choices(tiny_pair: Pair) -> None:
    """Nodes of a tree are limited to its slots' choices; a context that is too long is shortened."""
    mixtures = [[Drafted(3, 7), PLAIN], [Drafted(1, 19), PLAIN]]
    timed = time_steps(tiny_pair, mixtures, 10 * tiny_pair.max_length, num_steps=1)
    assert [step.load for step in timed] == [Load(2, 3, 7), Load(2, 1, NUM_CANDIDATES)]


@pytest.mark.parametrize("pair", ["tiny_pair", "alone"], indirect=True)
def test_a_price_is_measured(pair: Pair) -> None:
    """Without a draft the step cost depends only on rows and verified tokens."""
    found = measure_price(pair, 6, 10, num_steps=1)
    assert found.made_for(pair.id, "float32", found.device)
    assert pair.has_draft or (found.launch_s, found.slot_s, found.is_sequential) == (0, 0, False)
    assert (found.context, found.rows) == (10, 6)
    assert (found.coefficients >= 0).all()
    assert found.seconds(Load(1)) > 0
    assert 0 <= found.error < 10  # steps of a millisecond, on a machine with other processes


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rows": 0, "context": 8}, "rows 0: must be at least 1"),
        ({"rows": 1, "context": 0}, "context 0: must be at least 1"),
        ({"rows": 1, "context": 8, "num_steps": 0}, "num_steps 0: must be at least 1"),
    ],
)
def test_numbers_below_one_are_refused(tiny_pair: Pair, values: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_price(tiny_pair, **values)
