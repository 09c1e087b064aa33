"""The price of a pair's steps: which are timed, what they take in, and what is made of their seconds."""

import numpy as np
import pytest

from blockpilot.control.cost import Load
from blockpilot.engine.drafting import NUM_CANDIDATES
from blockpilot.evaluation.pricing import PLAIN, Drafted, measure_price, mixtures_of, time_steps
from blockpilot.pairs.loading import Pair
from blockpilot.types import MAX_BLOCK_SIZE


@pytest.mark.parametrize("rows", [1, 2, 4, 16])
@pytest.mark.parametrize("block_size", [2, 4, 16, 32])
def test_mixtures_have_plain_and_drafting_rows_and_trees(rows: int, block_size: int) -> None:
    mixtures = mixtures_of(rows, block_size)
    every = [row for mixture in mixtures for row in mixture]
    assert mixtures[0] == [PLAIN] * rows
    assert all(len(mixture) == rows for mixture in mixtures)
    assert all(0 <= row.depth < block_size and 0 <= row.num_verified < MAX_BLOCK_SIZE for row in every)
    assert all((row.depth > 0) == (row.num_verified > 0) for row in every)
    assert {row.depth for row in every} >= {0, 1, block_size - 1}
    assert max(row.num_verified for row in every) >= min(block_size, MAX_BLOCK_SIZE - 1)  # more than are drafted
    if rows > 1:  # one of them drafts, all of them, and rows that differ
        assert {sum(row.depth > 0 for row in mixture) for mixture in mixtures} >= {0, 1, rows}
        assert len(set(mixtures[-1])) > 1


@pytest.mark.parametrize("block_size", [4, 8, 16])
def test_their_loads_tell_all_coefficients_apart(block_size: int) -> None:
    """Loads of a draft that is not sequential, with one row and with 16."""
    loads = [
        Load(rows, sum(row.depth for row in mixture), sum(row.num_verified for row in mixture))
        for rows in (1, 16)
        for mixture in mixtures_of(rows, block_size)[:-1]
    ]
    terms = np.array([load.terms for load in loads], dtype=float)
    assert np.linalg.cond(terms / np.linalg.norm(terms, axis=0)) < 100


@pytest.mark.parametrize("rows", [1, 3])
def test_every_mixture_is_timed(tiny_pair: Pair, rows: int) -> None:
    """A step verifies larger trees than it drafts deep, and smaller ones."""
    mixtures = mixtures_of(rows, tiny_pair.block_size)
    timed = time_steps(tiny_pair, mixtures, 10, num_steps=2)
    assert [step.load for step in timed] == [
        Load(rows, sum(row.depth for row in mixture), sum(row.num_verified for row in mixture))
        for mixture in mixtures
    ]
    assert all(step.seconds > 0 for step in timed)


def test_loads_are_what_steps_really_verified(tiny_pair: Pair) -> None:
    """A tree of one depth has no more nodes than its slot has choices."""
    mixtures = [[PLAIN] * 2, [Drafted(2, 2), PLAIN], [Drafted(1, 19), PLAIN]]
    timed = time_steps(tiny_pair, mixtures, 10, num_steps=1)
    assert [step.load for step in timed] == [Load(2), Load(2, 2, 2), Load(2, 1, NUM_CANDIDATES)]


def test_a_context_beyond_the_targets_room_is_shortened(tiny_pair: Pair) -> None:
    deepest = tiny_pair.block_size - 1
    [timed] = time_steps(tiny_pair, [[Drafted(deepest, 7), PLAIN]], 10 * tiny_pair.max_length, num_steps=1)
    assert timed.load == Load(2, deepest, 7)


def test_a_price_is_measured(tiny_pair: Pair) -> None:
    price = measure_price(tiny_pair, 6, 10, num_steps=1)
    assert price.made_for(tiny_pair.id, "float32", price.device)
    assert (price.context, price.rows) == (10, 6)
    assert (price.coefficients >= 0).all()
    assert price.seconds(Load(1)) > 0
    assert 0 <= price.error < 10  # of steps of a millisecond on a machine that does other things, too


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
