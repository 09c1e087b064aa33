"""Step cost: a sum of terms, fitted to timed steps and stored in a file."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpilot.control.cost import COEFFICIENTS, Array, Load, StepPrice, fit, read_price, relative_error
from blockpilot.evaluation.tables import loads_up_to
from blockpilot.types import PairId
from helpers.prices import linear_price, price

PRICE = price(base_s=10.0, row_s=2.0, launch_s=3.0, slot_s=0.5, token_s=0.25, tile_s=0.125, error=0.03)
# Like the measured loads (evaluation/pricing.py): plain steps, one row that drafts, many rows that draft.
LOADS = [
    Load(rows, drafted, verified)
    for rows in (1, 4, 16)
    for drafted, verified in ((0, 0), (1, 1), (7, 7), (7, 31), (7 * rows, 15 * rows))
]


SHARE = 1 / 16  # share of a mixture's experts that a token chooses


def seconds_of(coefficients: Array) -> list[float]:
    return [float(coefficients @ load.terms(SHARE)) for load in LOADS]


# --- terms ---


@pytest.mark.parametrize(
    ("load", "seconds"),
    [
        (Load(1), 12.0),
        (Load(6), 22.0),
        (Load(2, 1, 1), 14 + 3 + 0.75),
        (Load(2, 6, 4), 14 + 3 + 3 + 1),
        (Load(2, 6), 14 + 3 + 3),  # drafted tokens, none of them verified
        (Load(2, 6, 14), 14 + 3 + 3 + 3.5),  # a tile
        (Load(2, 6, 15), 14 + 3 + 3 + 3.75 + 0.125),
        (Load(40), 90 + 0.25),
    ],
)
def test_a_step_costs_the_sum_of_its_terms(load: Load, seconds: float) -> None:
    assert PRICE.seconds(load) == pytest.approx(seconds)


def test_tiles_may_have_other_sizes() -> None:
    wide = replace(PRICE, tile=32, next_tile=32)
    assert [wide.seconds(Load(num)) - PRICE.seconds(Load(num)) for num in (16, 17, 32, 33)] == [0, *[-0.125] * 3]
    assert StepPrice.from_fields(json.loads(wide.to_json())) == wide
    ramp, tokens = replace(PRICE, tile=4, next_tile=1), (1, 4, 5, 9)
    tile_seconds = [ramp.seconds(Load(num)) - PRICE.seconds(Load(num)) for num in tokens]
    assert tile_seconds == [0, 0, 0.125, 5 * 0.125]
    for name in ("tile", "next_tile"):
        with pytest.raises(ValueError, match=f"{name} 0"):
            StepPrice.from_fields(json.loads(wide.to_json()) | {name: 0})


def test_further_tiles_of_an_older_file_are_as_large_as_the_first() -> None:
    fields = json.loads(replace(PRICE, tile=32, next_tile=32).to_json())
    del fields["next_tile"]
    assert StepPrice.from_fields(fields).tiles == (32, 32)


def test_a_mixture_costs_the_experts_that_its_tokens_choose() -> None:
    """Each token chooses a quarter of the experts, independently of the others."""
    mixture = replace(PRICE, experts_s=16.0, expert_share=0.25)
    assert mixture.seconds(Load(1)) == pytest.approx(12 + 4)
    assert mixture.seconds(Load(2)) == pytest.approx(14 + 7)
    assert mixture.seconds(Load(1, 2, 2)) == pytest.approx(12 + 3 + 1 + 0.5 + 9.25)
    assert mixture.more_experts_s(2, 1) == pytest.approx(2.25)
    assert replace(mixture, expert_share=0.0).seconds(Load(1)) == 12


def test_chains_are_priced_in_plain_steps() -> None:
    """Relative costs of block sizes in any order, and of none."""
    assert PRICE.chains_s(1, 4) == PRICE.seconds(Load(4))
    assert PRICE.chains_s(5, 4) == PRICE.seconds(Load(4, 16, 16))
    sequential = replace(PRICE, is_sequential=True)
    assert sequential.chains_s(5, 4) == PRICE.seconds(Load(4, 16, 16, num_passes=4))
    assert sequential.chains_s(1, 4) == PRICE.seconds(Load(4))
    assert PRICE.relative([1, 5, 3], 4) == pytest.approx([1, (18 + 3 + 12 + 0.125) / 18, (18 + 3 + 6) / 18])
    assert PRICE.relative([], 4) == []
    assert linear_price(0.1).relative([1, 11], 2) == pytest.approx([1, 3])


def test_a_price_is_of_one_pair_in_one_precision_on_one_device() -> None:
    setup = {"pair": PRICE.pair, "dtype": PRICE.dtype, "device": PRICE.device}
    assert PRICE.made_for(**setup)
    for other in ({"pair": PairId("t", "2", "d", "2")}, {"dtype": "bfloat16"}, {"device": "cpu, 2 threads"}):
        assert not PRICE.made_for(**setup | other)


def test_figures_are_shown_at_powers_of_four_and_at_the_most_rows() -> None:
    assert [loads_up_to(rows) for rows in (1, 3, 16, 20)] == [[1], [1, 3], [1, 4, 16], [1, 4, 16, 20]]


# --- fits ---

coefficients = st.lists(
    st.just(0.0) | st.floats(1e-3, 1.0), min_size=len(COEFFICIENTS), max_size=len(COEFFICIENTS)
).map(np.array)


def of_squares(fitted: Array, seconds: list[float]) -> float:
    return sum((fitted @ load.terms(SHARE) / load_s - 1) ** 2 for load, load_s in zip(LOADS, seconds, strict=True))


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=len(LOADS), max_size=len(LOADS)), coefficients, st.floats(0.01, 1))
def test_no_coefficients_fit_better(seconds: list[float], other: Array, share: float) -> None:
    """Least squares of relative errors without negative coefficients, compared with any others and those in between.
    Linear step costs are recovered exactly.
    """
    fitted = fit(LOADS, seconds, expert_share=SHARE)
    assert (fitted >= 0).all()
    assert of_squares(fitted, seconds) <= of_squares(fitted + share * (other - fitted), seconds) + 1e-9
    if other[0] + other[1] > 0:
        refitted = fit(LOADS, seconds_of(other), expert_share=SHARE)
        np.testing.assert_allclose(refitted, other, rtol=1e-5, atol=1e-7)
        assert relative_error(refitted, LOADS, seconds_of(other), expert_share=SHARE) < 1e-6


def test_the_error_is_the_mean_of_relative_ones() -> None:
    ten_percent_off = [1.1 * seconds for seconds in seconds_of(PRICE.coefficients)]
    assert relative_error(PRICE.coefficients, LOADS, ten_percent_off) == pytest.approx(1 - 1 / 1.1)
    one_off = [2 * PRICE.seconds(LOADS[0]), *seconds_of(PRICE.coefficients)[1:]]
    assert relative_error(PRICE.coefficients, LOADS, one_off) == pytest.approx(0.5 / len(LOADS))


# --- files ---


def test_a_price_survives_the_file(tmp_path: Path) -> None:
    (tmp_path / "price.json").write_text(PRICE.to_json())
    assert read_price(tmp_path / "price.json") == read_price(str(tmp_path / "price.json")) == PRICE
    assert PRICE.to_json().count("\n") == 1


OPTIONAL = {"is_sequential", "tile_s", "experts_s", "expert_share", "tile", "next_tile"}  # not in older files


def test_an_older_price_is_that_of_a_draft_that_is_not_sequential_without_tiles_and_experts(tmp_path: Path) -> None:
    fields = json.loads(PRICE.to_json())
    for name in OPTIONAL:
        del fields[name]
    (tmp_path / "price.json").write_text(json.dumps(fields))
    assert read_price(tmp_path / "price.json") == replace(PRICE, tile_s=0.0)


CHANGES: list[dict[str, object]] = [
    *({"pair": None}, {"pair": {"target": "t"}}, {"base_s": -0.1}, {"token_s": "0.1"}, {"slot_s": None}),
    *({"launch_s": float("nan")}, {"launch_s": float("inf")}, {"base_s": 0, "row_s": 0}),
    *({"block_sizes": [1, 2]}, {"is_sequential": 1}, {"expert_share": -0.5}, {"tile": 0}, {"next_tile": 0}),
]
FIELDS = json.loads(PRICE.to_json())
REFUSED = [
    *((text, "") for text in ("", "[]", "3", PRICE.to_json()[:-9])),
    *((json.dumps(FIELDS | change), "") for change in CHANGES),
    *((json.dumps({k: v for k, v in FIELDS.items() if k != name}), name) for name in FIELDS if name not in OPTIONAL),
]


@pytest.mark.parametrize(("text", "name"), REFUSED)
def test_other_files_are_refused(text: str, name: str, tmp_path: Path) -> None:
    """Files with wrong values, without a field (named in the error), truncated or empty."""
    path = tmp_path / "price.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"price\.json: not the step price of a pair .*{name}"):
        read_price(path)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"price\.json: not the step price of a pair"):
        read_price(tmp_path / "price.json")
