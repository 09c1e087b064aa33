"""What a controller does with forecasts: prices them, buys what was drafted, and keeps account of what came of it."""

from collections.abc import Iterator, Sequence
from itertools import chain

import pytest

from blockpilot.control.choose import choose_depths
from blockpilot.control.controller import (
    DOUBT,
    NOMINAL,
    SLOTS_DOUBT,
    Controller,
    FixedPolicy,
    StepOutcome,
)
from blockpilot.control.cost import Load
from blockpilot.engine.trees import Node
from blockpilot.evaluation.baselines import DepthController
from blockpilot.pairs.loading import Pair
from blockpilot.types import MAX_BLOCK_SIZE
from helpers.policies import step_policy
from helpers.prices import linear_price, price

REACH, ALONE = (0.8, 0.6, 0.4), Load(0)
PRICE = price(launch_s=0.1, slot_s=0.02, token_s=0.05)
FIRST_RATE = choose_depths([REACH], PRICE, ALONE, [1.0] * 3).rate


def offered(chances: Sequence[float], depth: int = 1) -> list[Node]:
    return [Node(7, 0, chance, depth, True) for chance in chances]


def outcome(num_accepted: int) -> StepOutcome:
    return StepOutcome(Load(1, 3, 3), 0, 1, num_accepted, 1 + num_accepted, next_rows=1)


def bought(controller: Controller, *of_rows: Sequence[Node], most: int = 31) -> list[list[Node]]:
    """One step that every row drafts in, and whose tokens are worth their chances."""
    depths = controller.depths([REACH] * len(of_rows), ALONE)
    assert all(depths)
    tokens = controller.buy(of_rows, most)
    controller.finish(outcome(0))
    return tokens


def test_the_price_is_given_or_the_policys_or_nominal(tiny_pair: Pair) -> None:
    own = linear_price(0.3)
    policy = step_policy(tiny_pair, (1, 2), price=own)
    assert Controller(policy).price is own
    assert Controller(policy, PRICE).price is PRICE
    assert Controller(FixedPolicy(2)).price is Controller(step_policy(tiny_pair, (1, 2))).price is NOMINAL


def test_depths_are_those_of_the_choice() -> None:
    reaches, beside = [REACH, (0.3,), ()], Load(2, 3, 3)
    assert (
        Controller(FixedPolicy(2), PRICE).depths(reaches, beside)
        == choose_depths(reaches, PRICE, beside, [1.0] * 3).depths
    )


def test_a_token_is_bought_if_its_chance_is_worth_its_seconds() -> None:
    """At the rate that the step is expected to have; its verification alone is still to be paid."""
    worth = FIRST_RATE * PRICE.token_s
    chances = [0.9, worth + 1e-9, worth - 1e-9, 0.0]
    [tokens] = bought(Controller(FixedPolicy(2), PRICE), offered(chances))
    assert [token.chance for token in tokens] == chances[:2]


def test_what_is_bought_of_a_row_is_limited() -> None:
    rows = offered([0.9, 0.8, 0.7]), offered([0.6]), offered([])
    assert bought(Controller(FixedPolicy(2), PRICE), *rows, most=2) == [rows[0][:2], rows[1], []]


def test_calibration_is_what_was_accepted_over_what_was_expected() -> None:
    controller = Controller(FixedPolicy(2), PRICE)
    assert controller.calibration == 1
    for num in range(1, 4):
        controller.depths([REACH, REACH], ALONE)
        controller.buy([offered([0.9, 0.7, 0.001]), offered([0.4])], 31)  # 2 expected of those bought
        controller.finish(outcome(1))
        assert controller.calibration == pytest.approx((DOUBT + num) / (DOUBT + 2 * num), rel=1e-3)
    for _ in range(5):  # steps that buy nothing, or draft nothing, say nothing
        before = controller.calibration
        controller.finish(outcome(0))
        assert controller.calibration == pytest.approx(before, rel=1e-3)


def test_the_less_comes_of_what_is_expected_the_more_a_token_must_promise() -> None:
    """Half of what was expected: a chance is worth half of what it says."""
    controller = Controller(FixedPolicy(2), PRICE)
    for _ in range(3000):
        controller.depths([REACH], ALONE)
        controller.buy([offered([0.9, 0.6, 0.5], 1)], 31)
        controller.finish(outcome(1))
    assert controller.calibration == pytest.approx(0.5, abs=0.05)
    controller.depths([REACH], ALONE)
    tokens_a_slot = [(3.0, 0.0, 0.0), (1.0, 1.0, 1.0)]
    rates = [choose_depths([REACH], PRICE, ALONE, of).rate for of in tokens_a_slot]
    least, most = (rate * PRICE.token_s / controller.calibration for rate in rates)
    [tokens] = controller.buy([offered([max(least, most) + 0.01, min(least, most) - 0.01])], 31)
    assert len(tokens) == 1
    assert min(least, most) - 0.01 > FIRST_RATE * PRICE.token_s  # which would have been bought at first


def test_slots_are_priced_by_the_tokens_that_were_bought_at_their_depth() -> None:
    """Two choices at depth 1 of both rows that draft, one of one row at depth 2, and none deeper."""
    reaches, dear = [(0.9, 0.8, 0.7)] * 2, price(token_s=0.1)
    controller = Controller(FixedPolicy(2), dear)
    assert controller.depths(reaches, ALONE) == [3, 3]
    for num in range(1, 20):
        controller.buy([offered([1.0, 1.0]), [*offered([1.0, 1.0]), *offered([1.0], depth=2)]], 31)
        controller.finish(outcome(5))
        kept = [record.ratio for record in controller._tokens_a_slot]
        expected = [(SLOTS_DOUBT + bought) / (SLOTS_DOUBT + 2 * num) for bought in (4 * num, num, 0)]
        assert kept == pytest.approx([*expected, *[1.0] * (MAX_BLOCK_SIZE - 3)], rel=0.02)
        assert controller.depths(reaches, ALONE) == choose_depths(reaches, dear, ALONE, kept).depths == [3, 3]
    # A chance of 0.15 pays for one token, and not for the 1.5 that a first slot brings by now.
    assert choose_depths([(0.15,)], dear, ALONE, [1.0]).depths == [1]
    assert controller.depths([(0.15,)], ALONE) == [0]


def test_only_positions_that_were_drafted_count() -> None:
    controller = Controller(FixedPolicy(2), price(token_s=0.3))
    assert controller.depths([(0.9, 0.9), (0.9,)], ALONE) == [2, 1]
    controller.buy([offered([0.9]), offered([0.9])], 31)
    found = [record.ratio for record in controller._tokens_a_slot[:3]]
    assert found == pytest.approx([1.0, SLOTS_DOUBT / (SLOTS_DOUBT + 1), 1.0])


def test_chains_of_running_means_are_verified_as_deep_as_they_are_drafted() -> None:
    controller = DepthController(FixedPolicy(2), PRICE)
    assert controller.depths([REACH], ALONE) == [3]
    tokens = offered([0.5, 1e-3, 1e-6])
    endless: Iterator[Node] = chain(tokens, iter(lambda: tokens[-1], None))
    assert controller.buy([iter(tokens), endless], 5) == [tokens, [*tokens, tokens[-1], tokens[-1]]]
    assert controller.speculates
