"""Step costs: what is measured, what lies in between, and files that are not what they should be."""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpilot.control.price import StepCosts
from blockpilot.engine.engine import Engine
from blockpilot.evaluation.step_costs import costs_to_json, measure_costs, never_falling, read_costs, relative_costs
from blockpilot.pairs.loading import Pair
from blockpilot.types import PairId, Request

COSTS = StepCosts(
    PairId("t", "1", "d", "2"),
    "float32",
    "cpu, 1 threads",
    block_sizes=(1, 5),
    rows=(2, 4),
    context=100,
    seconds=((1.0, 3.0), (5.0, 7.0)),
    one_drafts=((1.0, 3.0), (4.0, 5.0)),
    one_plain=((1.0, 3.0), (5.0, 7.4)),
)


@pytest.mark.parametrize(
    ("point", "seconds"),
    [
        ((1, 2), 1.0),
        ((5, 4), 7.0),
        ((3, 2), 3.0),
        ((1, 3), 2.0),
        ((3, 3), 4.0),
        ((9, 1), 5.0),  # constant beyond what was measured
    ],
)
def test_costs_are_linear_between_what_was_measured(point: tuple[int, int], seconds: float) -> None:
    assert COSTS.step_s(*point) == pytest.approx(seconds)


def test_what_one_row_drafts_and_what_every_token_more_costs() -> None:
    """Four rows: one block of 5 takes 5 seconds, three of them, which have 8 drafted tokens more, take 7.4."""
    first, each = COSTS.mixing_s([1, 3, 5], 4)
    assert first == pytest.approx([3, 4, 5])
    assert each == pytest.approx([0, (5.2 - 4) / 4, (7.4 - 5) / 8])
    first, each = COSTS.mixing_s([5], 2)  # of two rows both draft
    assert (first, each) == (pytest.approx([4]), pytest.approx([1 / 4]))
    first, each = COSTS.mixing_s([5], 1)  # one row is all rows
    assert (first, each) == (pytest.approx([5]), pytest.approx([0]))


def test_the_widest_block_and_the_tokens_say_what_a_mixed_step_costs() -> None:
    assert COSTS.mixed_s([1, 1, 1, 1]) == pytest.approx(3)
    assert COSTS.mixed_s([5, 1, 1, 1]) == pytest.approx(5)
    assert COSTS.mixed_s([1, 5, 3, 1]) == pytest.approx(5 + 2 * 2.4 / 8)
    assert COSTS.mixed_s([5, 5, 1, 5]) == pytest.approx(7.4)
    assert COSTS.mixed_s([5]) == pytest.approx(5)


def test_rows_that_are_all_alike_are_cheaper_than_mixed_ones_of_fewer_tokens() -> None:
    assert COSTS.mixed_s([5, 5, 5, 5]) == pytest.approx(7)
    assert COSTS.mixed_s([5, 5, 5, 3]) == pytest.approx(5 + 10 * 2.4 / 8)
    assert COSTS.mixed_s([3, 3, 3, 3]) == pytest.approx(5)
    cheap = dataclasses.replace(COSTS, one_plain=COSTS.one_drafts)
    assert cheap.mixed_s([5, 5, 5, 5]) == pytest.approx(5)  # never dearer than as many tokens of mixed rows


@pytest.mark.parametrize("rows", [2, 4, 3])
def test_candidates_cost_so_many_plain_steps(rows: int) -> None:
    """Also those that were not measured, and in any order."""
    plain = COSTS.step_s(1, rows)
    found = relative_costs(COSTS, [1, 3, 5, 2], rows)
    assert found[0] == 1
    assert [cost * plain for cost in found] == pytest.approx([COSTS.step_s(b, rows) for b in (1, 3, 5, 2)])
    assert relative_costs(COSTS, [], rows) == []


def test_kinds_of_steps_may_take_longer_by_factors_of_their_own() -> None:
    scaled = COSTS.scaled(plain=2.0, alike=3.0, mixed=4.0)
    for sizes, factor in (([1, 1], 2), ([5], 3), ([5, 5], 3), ([5, 1], 4), ([5, 5, 1, 1], 4)):
        assert scaled.mixed_s(sizes) == pytest.approx(factor * COSTS.mixed_s(sizes))
    assert COSTS.scaled(1.0, 1.0, 1.0) == COSTS


def test_costs_survive_the_file(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(costs_to_json(COSTS))
    assert read_costs(tmp_path / "costs.json") == COSTS


def as_before(contexts: list[int]) -> str:
    """A file of tables [block size][rows][context], as it was written once."""
    found = json.loads(costs_to_json(COSTS))
    del found["context"]
    tables = {
        name: [[[each] * len(contexts) for each in of_size] for of_size in found[name]]
        for name in ("seconds", "one_drafts", "one_plain")
    }
    return json.dumps(found | tables | {"contexts": contexts})


def test_an_old_file_of_one_context_is_read(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(as_before([100]))
    assert read_costs(tmp_path / "costs.json") == COSTS


def test_an_old_file_of_several_contexts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(as_before([100, 200]))
    with pytest.raises(ValueError, match=r"costs\.json: .*contexts \[100, 200\].*measure them at one"):
        read_costs(tmp_path / "costs.json")


@pytest.mark.parametrize(
    "change",
    [
        {"pair": None},
        {"rows": [2]},
        {"seconds": [[1, 2], [3]]},
        {"seconds": [[1, 2], [3, float("nan")]]},
        {"one_drafts": [["1", 2], [3, 4]]},
        {"one_drafts": [[1, 2], [3, 0]]},
        {"extra": 1},
        {"seconds": 3},
    ],
)
def test_other_files_are_refused(change: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(json.loads(costs_to_json(COSTS)) | change))
    with pytest.raises(ValueError, match=r"costs\.json: "):
        read_costs(path)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=12))
def test_noise_is_no_discount(values: list[float]) -> None:
    found = never_falling(values)
    assert all(a <= b + 1e-12 for a, b in pairwise(found))
    assert sum(found) == pytest.approx(sum(values))
    assert sorted(values) != values or found == pytest.approx(values)
    # No other that never falls is nearer: not one a step away towards any sorted sequence.
    error = sum((f - v) ** 2 for f, v in zip(found, values, strict=True))
    for other in (sorted(values), [sum(values) / len(values)] * len(values)):
        for share in (0.01, 0.5, 1.0):
            mixed = [f + share * (o - f) for f, o in zip(found, other, strict=True)]
            assert sum((m - v) ** 2 for m, v in zip(mixed, values, strict=True)) >= error - 1e-9


def test_every_point_is_measured(tiny_pair: Pair) -> None:
    costs = measure_costs(tiny_pair, [1, 4, 6], [1, 3], 10, num_steps=2)
    assert (costs.pair, costs.dtype) == (tiny_pair.id, "float32")
    assert all(s > 0 for of_size in costs.seconds for s in of_size)
    assert (len(costs.seconds), len(costs.seconds[0]), costs.context) == (3, 2, 10)
    for mixed in (costs.one_drafts, costs.one_plain):
        assert [of_size[0] for of_size in mixed] == [of_size[0] for of_size in costs.seconds]  # of one row
    assert costs.one_drafts[0][1] != costs.one_drafts[1][1] != costs.seconds[1][1]


@pytest.mark.parametrize("axes", [([4, 2], [1]), ([2], [0]), ([2], [])])
def test_axes_ascend(axes: tuple[list[int], list[int]], tiny_pair: Pair) -> None:
    with pytest.raises(ValueError, match="ascending"):
        measure_costs(tiny_pair, *axes, 8)


def test_steps_must_fit(tiny_pair: Pair) -> None:
    with pytest.raises(ValueError, match="must fit below"):
        measure_costs(tiny_pair, [2], [1], tiny_pair.max_length - 2)
    with pytest.raises(ValueError, match="context 0: must be at least 1"):
        measure_costs(tiny_pair, [2], [1], 0)


def test_a_running_request_changes_its_block_size(tiny_pair: Pair) -> None:
    engine = Engine(tiny_pair, num_slots=2, max_length=60)
    drafting = engine.add(Request((1, 2, 3), 40, block_size=4))
    plain = engine.add(Request((1, 2, 3), 40, block_size=1))
    engine.step()
    engine.set_block_size(drafting, 2)
    assert {step.request_id: step.block_size for step in engine.step()} == {drafting: 2, plain: 1}
    with pytest.raises(ValueError, match="cannot draft"):
        engine.set_block_size(plain, 2)
    with pytest.raises(ValueError, match="holds no slot"):
        engine.set_block_size(99, 2)
    with pytest.raises(ValueError, match="must be 1 to 32"):
        engine.set_block_size(drafting, 33)
