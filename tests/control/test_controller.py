"""Plans, selections and learning of a controller."""

from functools import partial

import numpy as np
import pytest

from blockpilot.control.acceptance import DOUBT, NUM_KINDS, AcceptanceModel
from blockpilot.control.choose import Drafting, best_drafting, choose_nodes, plan_rows
from blockpilot.control.controller import (
    EXPLORE_EVERY,
    EXPLORE_SHARE,
    LEARN_EVERY,
    NUM_EARLY,
    PROBE_EVERY,
    UPDATE_EVERY,
    Controller,
    Planned,
    StepOutcome,
)
from blockpilot.control.cost import Load, StepPrice
from blockpilot.evaluation.baselines import DepthController
from helpers.controllers import NOTHING_VERIFIED
from helpers.paths import needs_functions, paths
from helpers.prices import price
from helpers.trees import trees_to_select

ALONE, DEEPEST = Load(0), 4
PRICE = price(launch_s=0.1, slot_s=0.02, token_s=0.05)


def controller_of(step_price: StepPrice | None = PRICE, kind: type[Controller] = Controller) -> Controller:
    return kind(AcceptanceModel(DEEPEST), step_price)


def greedy(num: int, deepest: int = DEEPEST) -> Planned:
    return Planned(np.zeros(num, dtype=int), np.full(num, deepest))


def run(
    controller: Controller, num_steps: int, chances: list[float], seconds: float | None = None
) -> list[list[int]]:
    """Depths and numbers of verified nodes of one row's steps, which take `seconds`, or as the first price says."""
    steps, first = list[list[int]](), controller.price
    for _ in range(num_steps):
        plan = controller.plan(greedy(1), ALONE)
        depth, taken = int(plan.depths[0]), 0
        if depth:
            taken = int(controller.select(trees_to_select([chances[:depth]]), plan.rates, Load(1, depth))[0])
        load = Load(1, depth, taken)
        controller.learn(StepOutcome(load), first.seconds(load) if seconds is None else seconds)
        steps.append([depth, taken])
    return steps


def test_depths_are_those_of_the_choice_and_no_deeper_than_rows_may() -> None:
    model, other_load = AcceptanceModel(DEEPEST), Load(2, 3, 3)
    kinds, most = np.array([0, 1, 0]), np.array([4, 1, 0])
    plans = plan_rows(model.expected(), 3, PRICE, other_load)
    drafting = best_drafting(plans, kinds, most, PRICE, other_load)
    assert drafting.saved_s > 0
    depths = Controller(model, PRICE).plan(Planned(kinds, most), other_load).depths
    assert depths.tolist() == drafting.depths.tolist()
    assert depths.tolist()[1:] == [1, 0]
    assert depths[0] > 1


def test_nodes_are_selected_at_the_rate_that_is_expected() -> None:
    """Long-run rate, not that of the current step: poor candidates are no reason to verify worse ones."""
    controller = controller_of(price(token_s=0.2))
    rate = plan_rows(controller.model.expected(), 1, controller.price, ALONE).rate[0]
    plan = controller.plan(greedy(1), ALONE)
    drafted = Load(1, int(plan.depths[0]))
    trees = trees_to_select([[rate * 0.2 + 0.01, rate * 0.2 - 0.01]])
    assert controller.select(trees, plan.rates, drafted).tolist() == [1]
    assert choose_nodes(trees, controller.price, drafted, np.array([1.0])).tolist() == [2]


def test_rows_whose_text_carries_them_on_need_no_draft() -> None:
    """Gains of paths are learned from steps; then a draft is worth its launch only for rows without a path."""
    controller = controller_of(price(launch_s=0.5, slot_s=0.05, token_s=0.02))
    carried, other = NUM_KINDS - 2, 0
    for _ in range(100):
        kinds = np.array([carried, other])
        depths, rates = controller.plan(Planned(kinds, np.full(2, DEEPEST)), ALONE)
        trees = trees_to_select([[0.99] * 4, [0.8, 0.6, 0.4, 0.3][: int(depths[1])]])
        trees.nodes.path_index[0] = 0  # the first row's nodes are of a path
        controller.select(trees._replace(kinds=kinds, drafted=depths), rates, Load(2, int(depths.sum())))
        controller.learn(StepOutcome(Load(2, int(depths.sum()), 4)), 1.0)
    controller._spare_s = 0.0  # no exploration is due
    assert controller.plan(Planned(np.array([carried]), np.full(1, DEEPEST)), ALONE).depths.tolist() == [0]
    assert controller.plan(Planned(np.array([other]), np.full(1, DEEPEST)), ALONE).depths[0] > 0


def test_what_drafts_add_moves_the_plan() -> None:
    """A draft that adds little is not worth its launch; an accurate one drafts deep."""
    good, poor = controller_of(price(launch_s=0.3, token_s=0.02)), controller_of(price(launch_s=0.3, token_s=0.02))
    assert run(good, 400, [0.95, 0.9, 0.85, 0.8])[-1] == [4, 4]
    steps = run(poor, 400, [0.1, 0.01, 0.001, 0.0001])[-100:]
    assert sum(depth > 0 for depth, _ in steps) <= 100 * EXPLORE_SHARE / 0.3 + 1
    assert good.drafts
    assert poor.drafts == (steps[-1][0] > 0)


@needs_functions
def test_paths_are_cut_where_a_token_costs_more_than_it_saves() -> None:
    """A path after a match of two sampled tokens is right one time in seven."""
    sizes = list[int]()
    for token_s in (0.01, 0.5):
        controller = controller_of(price(launch_s=0.1, token_s=token_s))
        controller.plan(greedy(1), ALONE)
        cut = controller.cut_paths(paths([2], drawn=1))
        sizes.append(0 if cut is None else int(cut.sizes[0]))
    assert sizes[0] > 0
    assert sizes[1] == 0


@needs_functions
@pytest.mark.parametrize(("num_long", "is_merged"), [(0, False), (1, True), (16, True)])
def test_paths_that_save_less_than_merging_them_costs_are_dropped(num_long: int, is_merged: bool) -> None:
    """Of sixteen rows in a step where a token is dear, short matches in some save nothing; one long match does."""
    controller = controller_of(price(base_s=0.3, row_s=0.06, launch_s=9.0, token_s=0.05))
    controller.plan(greedy(16), ALONE)
    cut = controller.cut_paths(paths([32] * num_long + [2] * (16 - num_long)))
    assert (cut is not None) == is_merged


def test_plans_are_renewed_soon_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """First steps of sixteen rows tell more than any guess, and a short run has few others."""
    controller, planned = controller_of(), list[int]()
    expected = controller.model.expected
    monkeypatch.setattr(controller.model, "expected", lambda: planned.append(controller._num_plans) or expected())
    for _ in range(40 * UPDATE_EVERY):
        controller.plan(greedy(16), ALONE)
    gaps = np.diff(planned).tolist()
    assert gaps[:3] == [1, 1, 1]
    assert gaps == sorted(gaps)
    assert gaps[-1] == UPDATE_EVERY


def test_plans_are_of_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, planned = controller_of(), list[int]()
    for _ in range(20 * UPDATE_EVERY):
        controller.plan(greedy(1), ALONE)
    expected = controller.model.expected
    monkeypatch.setattr(controller.model, "expected", lambda: planned.append(len(planned)) or expected())
    for _ in range(2 * UPDATE_EVERY):
        controller.plan(greedy(1), ALONE)
    assert len(planned) == 2
    controller.plan(greedy(2), ALONE)
    assert len(planned) == 3
    controller.plan(Planned(np.array([0, 1]), np.full(2, DEEPEST)), ALONE)  # of another kind
    assert len(planned) == 3
    controller.plan(Planned(np.array([0, 1]), np.full(2, DEEPEST)), Load(1))
    assert len(planned) == 4


def test_of_some_drafting_steps_a_row_drafts_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row in rotation; not with a draft that takes a pass for each depth, nor if no row drafts."""
    shallow = [1, 1]
    function_name = "blockpilot.control.controller.best_drafting"
    monkeypatch.setattr(function_name, lambda *_: Drafting(np.array(shallow), 1.0))
    controller = controller_of()
    plans = [controller.plan(greedy(2), ALONE).depths.tolist() for _ in range(4 * EXPLORE_EVERY)]
    assert [i for i, depths in enumerate(plans, start=1) if depths != [1, 1]] == [4, 8, 12, 16]
    assert plans[EXPLORE_EVERY - 1 :: EXPLORE_EVERY] == [[1, 4], [4, 1]] * 2
    sequential = controller_of(price(launch_s=0.1, is_sequential=True))
    assert all(sequential.plan(greedy(2), ALONE).depths.tolist() == [1, 1] for _ in range(4 * EXPLORE_EVERY))
    shallow[:] = [0, 0]
    plain = controller_of()
    assert not any(plain.plan(greedy(2), ALONE).depths.any() for _ in range(4 * EXPLORE_EVERY))


def test_deep_drafts_come_back_while_shallow_ones_go_on() -> None:
    """Deep drafts after texts in which only the first position is right."""
    good, poor = [0.95, 0.9, 0.85, 0.8], [0.95, 0.01, 0.001, 0.001]
    step_price = price(launch_s=0.05, slot_s=0.1, token_s=0.02)
    controller = Controller(AcceptanceModel(DEEPEST), step_price, follows=False)
    steps = run(controller, 3000, poor)
    assert sum(depth for depth, _ in steps[-EXPLORE_EVERY:]) == EXPLORE_EVERY - 1 + DEEPEST
    assert [depth for depth, _ in run(controller, 1000, good)[-EXPLORE_EVERY:]] == [DEEPEST] * EXPLORE_EVERY


def test_plain_steps_and_drafting_ones_probe_the_other_kind_now_and_then() -> None:
    """Probes only if the step cost is updated from the steps."""
    dear = price(launch_s=100.0)
    depths = [depth for depth, _ in run(controller_of(dear), 3 * PROBE_EVERY, [0.9])]
    probes = [i for i, depth in enumerate(depths) if depth]
    assert probes == [PROBE_EVERY, 2 * PROBE_EVERY + 1]
    fixed = Controller(AcceptanceModel(DEEPEST), dear, follows=False)
    assert not any(depth for depth, _ in run(fixed, 3 * PROBE_EVERY, [0.9]))


@pytest.mark.parametrize(("launch_s", "drafts"), [(0.01, True), (0.5, False)])
def test_without_a_measured_cost_drafting_stops_where_it_is_dear(launch_s: float, drafts: bool) -> None:
    """The nominal cost says that drafting pays; the seconds of a hundred steps correct it, in any unit."""
    dear = price(base_s=0.01, launch_s=launch_s, slot_s=1e-4, token_s=1e-3)
    controller, drafted = Controller(AcceptanceModel(DEEPEST)), list[bool]()
    for _ in range(400):
        depths, rates = controller.plan(greedy(1), ALONE)
        depth = int(depths[0])
        trees = trees_to_select([[0.8, 0.6, 0.4, 0.3][:depth]])
        load = Load(1, depth, int(controller.select(trees, rates, Load(1, depth))[0]) if depth else 0)
        controller.learn(StepOutcome(load), dear.seconds(load))
        drafted.append(depth > 0)
    assert drafted[0]
    assert np.mean(drafted[100:]) > 0.95 if drafts else np.mean(drafted[100:]) < 0.05


def test_a_probe_that_is_cheap_brings_drafting_back() -> None:
    """Drafting resumes although the initial step cost of a draft is far too high; it costs almost nothing."""
    controller = controller_of(price(launch_s=3.0))
    assert run(controller, 1, [0.9])[0][0] == 0
    steps = run(controller, 40 * PROBE_EVERY, [0.9, 0.8, 0.7, 0.6], seconds=1.0)
    assert steps[-1][0] > 0


@pytest.mark.parametrize("of", [None, price(launch_s=0.3, token_s=0.02)])
def test_drafts_come_back_after_texts_that_they_fail_in(of: StepPrice | None) -> None:
    """While drafts fail, trying them again costs little of plain decoding's speed; then they come back."""
    good, poor = [0.95, 0.9, 0.85, 0.8], [0.05, 0.01, 0.001, 0.001]
    controller = controller_of(of)
    run(controller, 3000, good)
    steps = run(controller, 6000, poor)[3000:]
    seconds = sum(controller.price.seconds(Load(1, depth, taken)) for depth, taken in steps)
    tokens = sum(1 + sum(poor[:taken]) for _, taken in steps)
    assert 0.985 < tokens / seconds * controller.price.seconds(Load(1)) < 1
    assert run(controller, 2000, good)[-1] == [4, 4]


def test_chains_of_running_means_are_verified_as_deep_as_they_are_drafted() -> None:
    controller = controller_of(kind=DepthController)
    depths, rates = controller.plan(greedy(1), ALONE)
    depth = int(depths[0])
    trees = trees_to_select([[0.5, 1e-3, 1e-6][:depth]])
    assert controller.select(trees, rates, Load(1, depth)).tolist() == [min(depth, 3)]


def test_what_a_constraint_forces_is_not_what_a_draft_added() -> None:
    """Forced nodes are not observed, of a row that drafted one position and of one that drafted none."""
    controller = controller_of(price(launch_s=0.01))
    before = controller.model.expected().counts[0, 1:]
    rates = controller.plan(greedy(2), ALONE).rates
    trees = trees_to_select([[1.0, 1.0, 1.0], [1.0, 1.0]])
    trees.nodes.choice_index[0, 1:], trees.nodes.choice_index[1] = -1, -1
    controller.select(trees._replace(drafted=np.array([1, 0])), rates, Load(2, 1))
    for _ in range(UPDATE_EVERY):
        controller.plan(greedy(1), ALONE)
    after = controller.model.expected().counts[0, 1:]
    np.testing.assert_array_equal(after[1:], before[1:])
    assert (after[0] <= 1).all()
    assert after[0, -1] == pytest.approx(1 / (DOUBT + 1), rel=1e-2)


def test_later_steps_are_learned_from_by_one_in_some() -> None:
    """All of the first steps are learned from; outcomes that are not learned from are not computed."""
    controller, learned = controller_of(), list[int]()
    for step in range(NUM_EARLY + 10 * UPDATE_EVERY * LEARN_EVERY):
        outcomes = partial(lambda step: learned.append(step) or NOTHING_VERIFIED, step)
        controller.learn(StepOutcome(Load(1, 1, 1), verified=outcomes), 1.0)
    assert learned[:NUM_EARLY] == list(range(NUM_EARLY))
    later = list(range(NUM_EARLY + LEARN_EVERY - 1, step + 1, LEARN_EVERY))
    assert 0 <= len(later) - len(learned[NUM_EARLY:]) < UPDATE_EVERY  # these wait for an update
    assert learned[NUM_EARLY:] == later[: len(learned) - NUM_EARLY]
