"""Baselines: their budgets against brute force, what margins learn, and the exact text in an engine."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockpilot.control.acceptance import AcceptanceModel
from blockpilot.control.controller import Controller, DepthPlan, Planned
from blockpilot.control.cost import Load, StepPrice
from blockpilot.engine.engine import Engine
from blockpilot.evaluation.baselines import (
    DepthController,
    LookupAlone,
    LookupOrDraft,
    Margins,
    TreeBudget,
    WholeDraft,
)
from blockpilot.pairs.loading import Pair
from blockpilot.types import Candidates, Layout, Request, Sampling
from helpers.engines import NEVER, PROMPT, plain_text, run, text_of
from helpers.prices import price
from helpers.trees import trees_to_select

DEEPEST = 7

falling = st.lists(st.floats(0.01, 1), min_size=1, max_size=DEEPEST).map(
    lambda chances: sorted(chances, reverse=True)
)
prices = st.builds(price, base_s=st.floats(0.1, 2), row_s=st.floats(0, 0.2), launch_s=st.floats(0, 1),
                   slot_s=st.floats(0, 0.1), token_s=st.floats(0.001, 0.5), tile_s=st.floats(0, 0.1))  # fmt: skip


def plan_of(controller: Controller, num_rows: int, beside: Load) -> DepthPlan:
    return controller.plan(Planned(np.zeros(num_rows, dtype=int), np.full(num_rows, DEEPEST)), beside)


@given(st.lists(falling, min_size=1, max_size=4), prices)
def test_one_budget_for_the_chains_of_all_rows(rows: list[list[float]], price: StepPrice) -> None:
    """The most probable tokens of all rows, in the number with the largest gain at the plan's rate."""
    rival = WholeDraft(Margins(DEEPEST), price)
    plan = plan_of(rival, len(rows), Load(1))
    assert plan.depths.tolist() == [DEEPEST] * len(rows)
    drafted = Load(len(rows) + 1, DEEPEST * len(rows))
    sizes = rival.select(trees_to_select(rows), plan.rates, drafted).tolist()
    chances = sorted((chance for of_row in rows for chance in of_row), reverse=True)

    def gain(num: int, rate: float = float(plan.rates[0])) -> float:
        return sum(chances[:num]) - rate * price.seconds(drafted._replace(num_verified=num))

    taken = sorted(
        (chance for of_row, size in zip(rows, sizes, strict=True) for chance in of_row[:size]), reverse=True
    )
    assert taken == chances[: len(taken)]
    assert gain(len(taken)) == pytest.approx(max(map(gain, range(len(chances) + 1))))


@given(st.lists(falling, min_size=1, max_size=4), prices)
def test_a_budget_for_every_row_by_itself(rows: list[list[float]], price: StepPrice) -> None:
    rival = TreeBudget(AcceptanceModel(DEEPEST), price)
    plan = plan_of(rival, len(rows), Load(0))
    assert plan.depths.tolist() == [DEEPEST] * len(rows)
    sizes = rival.select(trees_to_select(rows), plan.rates, Load(len(rows), DEEPEST * len(rows))).tolist()
    for of_row, size in zip(rows, sizes, strict=True):
        rates = [(1 + sum(of_row[:num])) / price.seconds(Load(1, DEEPEST, num)) for num in range(len(of_row) + 1)]
        assert rates[size] == pytest.approx(max(rates))


def test_margins_learn_which_tokens_are_accepted() -> None:
    """Acceptance probabilities by position and margin, learned only from verified tokens that were reached."""
    margins_model, draw = Margins(3), random.Random(0)
    generator = torch.Generator().manual_seed(0)
    known, slots, nothing = np.ones(3, dtype=bool), np.arange(3), np.zeros(3, dtype=int)

    def truth(slot: int, margin: float) -> float:
        return 1 / (1 + math.exp(-(margin - 1.5 * slot)))

    def candidates(margins: torch.Tensor) -> Candidates:
        scores = torch.stack([torch.zeros_like(margins), -margins], dim=1)
        return Candidates(scores.long(), scores, scores.log_softmax(dim=1), torch.zeros(3, dtype=torch.bool))

    for _ in range(4000):
        margins = torch.rand(3, generator=generator) * 5
        proposal = margins_model.propose(known, candidates(margins), slots)
        accepted = 0
        while accepted < 3 and draw.random() < truth(accepted, float(margins[accepted])):
            accepted += 1
        reached = min(accepted + 1, 2)  # the first two are verified
        choices = 2 * np.arange(reached)
        margins_model.learn(proposal.observed(choices, nothing[:reached], np.arange(reached) < accepted))
    assert (margins_model.margin_weights[2] == 0.5).all()
    for margin in (0.5, 2.0, 4.0):
        chances = margins_model.propose(known, candidates(torch.full((3,), margin)), slots).chances
        assert chances.shape == (3, 3, 2)
        for slot in range(2):
            assert float(chances[0, slot, 0]) == pytest.approx(truth(slot, margin), abs=0.05)


def test_lookup_alone_never_drafts_and_a_switch_does_where_nothing_matches() -> None:
    rows, cheap = Planned(np.array([0, 2]), np.full(2, DEEPEST)), price(slot_s=0.001, token_s=0.001)
    for rival, depths in ((Controller, [7, 7]), (LookupAlone, [0, 0]), (LookupOrDraft, [7, 0])):
        assert rival(AcceptanceModel(DEEPEST), cheap).plan(rows, Load(0)).depths.tolist() == depths


RIVALS: dict[str, tuple[Callable[[int], Controller], Layout]] = {
    "running means": (lambda deepest: DepthController(AcceptanceModel(deepest)), "chain"),
    "adaptive verification": (lambda deepest: WholeDraft(Margins(deepest)), "chain"),
    "tree budget": (lambda deepest: TreeBudget(AcceptanceModel(deepest)), "tree"),
    "lookup alone": (lambda deepest: LookupAlone(AcceptanceModel(deepest)), "auto"),
    "lookup or draft": (lambda deepest: LookupOrDraft(AcceptanceModel(deepest)), "auto"),
}


@pytest.mark.parametrize("rival", RIVALS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(6.0, seed=3)])
def test_the_text_is_the_targets(tiny_pair: Pair, rival: str, sampling: Sampling) -> None:
    controller_of, layout = RIVALS[rival]
    engine = Engine(tiny_pair, num_slots=2, max_length=64, controller=controller_of(tiny_pair.block_size - 1))
    requests = [Request(PROMPT[i:], 20 + i, sampling, stop_token_ids=NEVER, layout=layout) for i in range(3)]
    answers = run(engine, requests)
    for request, steps in zip(requests, answers, strict=True):
        assert text_of(steps) == plain_text(tiny_pair, request.prompt_ids, request.max_new_tokens, sampling)
    assert all(step.tree.is_chain for steps in answers for step in steps) or layout != "chain"
    drafts = rival != "lookup alone" and sampling.temperature > 0
    assert any(step.num_accepted for steps in answers for step in steps) or not drafts
