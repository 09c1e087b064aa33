"""Rows that adapt: their text is the target's own, whatever is drafted, and how much follows the step's price."""

from collections.abc import Callable

import pytest

from blockpilot.control.acceptance import AcceptanceModel, Array
from blockpilot.control.controller import Controller, Planned
from blockpilot.control.cost import Load
from blockpilot.engine.engine import Engine
from blockpilot.evaluation.baselines import DepthController
from blockpilot.pairs.loading import Pair
from blockpilot.types import LAYOUTS, Layout, Request, Sampling
from helpers.controllers import Told, Watched
from helpers.drafts import offer_always, scatter
from helpers.engines import NEVER, PROMPT, plain_text, run, text_of
from helpers.policies import step_policy
from helpers.prices import linear_price, price
from helpers.scripted import scripted_requests

PRICE = price(launch_s=0.1, slot_s=0.05, token_s=0.04)  # the deeper a step and the more rows, the dearer

KINDS: dict[str, Callable[[Pair], Controller]] = {
    "nominal": lambda pair: Controller(AcceptanceModel(3)),
    "by cost": lambda pair: Controller(AcceptanceModel(3), PRICE, follows=False),
    "by cost of steps": lambda pair: Controller(AcceptanceModel(3), PRICE),
    "prior": lambda pair: Controller(AcceptanceModel(3, step_policy(pair.id, pair.vocab_size, scale=0.1)), PRICE),
    "told": lambda pair: Told(3, [(3, 5), (0, 0), (1, 1), (2, 0), (3, 9)]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("num_slots", [1, 4])
def test_choices_never_change_the_text(tiny_pair: Pair, kind: str, temperature: float, num_slots: int) -> None:
    """One after the other, and in a batch with rows of fixed size, in fp32: the target's own text, token by token."""
    pair, requests = scripted_requests(tiny_pair, Sampling(temperature, seed=5))
    engine = Engine(pair, num_slots=num_slots, max_length=128, controller=KINDS[kind](pair))
    steps = run(engine, requests)
    for request, of_request in zip(requests, steps, strict=True):
        expected = plain_text(tiny_pair, request.prompt_ids, request.max_new_tokens, request.sampling)
        assert text_of(of_request) == expected
        if request.block_size is not None:
            assert of_request[1].block_size == max(step.block_size for step in of_request) == request.block_size
    chosen = [of for of, request in zip(steps, requests, strict=True) if request.block_size is None]
    assert max(step.block_size for of_request in chosen for step in of_request[1:-1]) > 1
    assert sum(step.num_accepted for of_request in chosen for step in of_request) > 5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_rows_that_adapt(tiny_pair: Pair, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that names none gets trees."""
    request = Request(PROMPT, 30, stop_token_ids=NEVER, layout=layout)
    controller = Controller(AcceptanceModel(3), price(token_s=0.02), follows=False)
    engine = Engine(tiny_pair, num_slots=1, max_length=64, controller=controller)
    expected = plain_text(tiny_pair, PROMPT, 30, Sampling())
    scatter(engine, [(*PROMPT, *expected)], 4, monkeypatch)
    [steps] = run(engine, [request])
    assert text_of(steps) == expected
    assert all(step.tree.is_chain for step in steps) == (layout == "chain")
    assert all(step.block_size == 1 + len(step.tree.tokens) for step in steps[1:])
    assert max(step.block_size for step in steps) > 2


def test_of_what_is_drafted_nothing_may_be_verified(tiny_pair: Pair) -> None:
    """Before anything was seen, more is expected of the draft than its tokens turn out to promise."""
    controller = Watched(3, price(token_s=0.4), follows=False)
    engine = Engine(tiny_pair, num_slots=1, max_length=64, controller=controller)
    offer_always(engine, range(8), [0.1] * 8)
    [steps] = run(engine, [Request(PROMPT, 20, stop_token_ids=NEVER)])
    assert {step.block_size for step in steps} == {0, 1}
    assert controller.outcomes[1].load == Load(1, num_drafted=2, num_verified=0)


class Deep(DepthController):
    """Keeps the depths that it chose last."""

    chosen: tuple[int, ...] = ()

    def plan(self, rows: Planned, beside: Load) -> Array:
        depths = super().plan(rows, beside)
        self.chosen = tuple(depths.tolist())
        return depths


def test_chains_of_running_means_are_verified_as_deep_as_they_are_drafted(tiny_pair: Pair) -> None:
    pair, requests = scripted_requests(tiny_pair, Sampling(), layouts=["chain"])
    controller = Deep(AcceptanceModel(pair.block_size - 1), PRICE, follows=False)
    engine, seen = Engine(pair, num_slots=3, max_length=128, controller=controller), list[int]()
    for request in requests:
        engine.add(request)
    while not engine.idle:
        controller.chosen = ()
        steps = [step for step in engine.step() if step.block_size]
        chosen = [step.block_size - 1 for step in steps if requests[step.request_id].block_size is None]
        assert chosen == list(controller.chosen)
        seen += chosen
    assert len(set(seen)) > 2


def test_no_deeper_than_the_draft_and_no_more_than_the_engine_verifies(tiny_pair: Pair) -> None:
    """However much a controller asks for."""
    controller = Told(tiny_pair.block_size - 1, [(99, 99)])
    engine = Engine(tiny_pair, num_slots=1, max_length=64, max_block_size=9, controller=controller)
    [steps] = run(engine, [Request(PROMPT, 20, stop_token_ids=NEVER)])
    assert {step.block_size for step in steps[1:-3]} == {9}
    assert controller.outcomes[1].load == Load(1, tiny_pair.block_size - 1, 8)
    for step, outcome in zip(steps[1:], controller.outcomes[1:], strict=True):
        assert len(step.tokens) <= outcome.load.num_drafted + 1


class Counted(Told):
    """Keeps how many rows it planned, and what others took in beside them."""

    def __init__(self, deepest: int, turns: list[tuple[int, int]]) -> None:
        super().__init__(deepest, turns)
        self.planned: list[tuple[int, Load]] = []

    def plan(self, rows: Planned, beside: Load) -> Array:
        self.planned.append((len(rows.kinds), beside))
        return super().plan(rows, beside)


def test_a_row_that_adapts_is_planned_beside_what_others_draft_and_verify(tiny_pair: Pair) -> None:
    controller = Counted(3, [(0, 0), (1, 1), (2, 2), (3, 3)])
    engine = Engine(tiny_pair, num_slots=2, max_length=64, controller=controller)
    fixed, adapts = (
        engine.add(Request(PROMPT, 30, block_size=size, stop_token_ids=NEVER, layout="chain")) for size in (3, None)
    )
    engine.step()
    for depth in (1, 2, 3, 0, 1):
        sizes = {step.request_id: step.block_size for step in engine.step()}
        assert sizes == {fixed: 3, adapts: 1 + depth}
        assert controller.outcomes[-1].load == Load(2, 2 + depth, 2 + depth)
    assert controller.planned == [(1, Load(1, 2, 2))] * 5
    engine.cancel(adapts)
    engine.step()
    assert len(controller.planned) == 5
    assert not len(controller.outcomes[-1].verified.choices)


def test_another_controller_chooses_from_the_next_step_on(tiny_pair: Pair) -> None:
    """Where drafts are dear nothing is drafted."""
    dear, cheap = (Controller(AcceptanceModel(3), each, follows=False) for each in (linear_price(5.0), price()))
    engine = Engine(tiny_pair, num_slots=1, max_length=64, controller=dear)
    engine.add(Request(PROMPT, 30, stop_token_ids=NEVER, layout="chain"))
    engine.step()
    for controller, size in ((dear, 1), (cheap, 4), (dear, 1)):
        engine.controller = controller
        assert engine.step()[-1].block_size == size
        assert controller.drafts == (size > 1)
