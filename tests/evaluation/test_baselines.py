"""Rivals' rules: their budgets against all there are, what margins learn, and the text in an engine."""

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from blockpilot.control.forecasts import RunningMeans
from hypothesis import given
from hypothesis import strategies as st

from blockpilot.control.controller import Controller
from blockpilot.control.cost import Load, StepPrice
from blockpilot.engine.engine import Engine
from blockpilot.evaluation.baselines import AdaptiveVerification, DepthController, Margins, TreeBudget
from blockpilot.pairs.loading import Pair
from blockpilot.types import Candidates, Layout, Policy, Request, Sampling
from helpers.engines import NEVER, PROMPT, plain_text, run, text_of
from helpers.prices import price


class Token(NamedTuple):
    chance: float
    depth: int


falling = st.lists(st.floats(0.01, 1), min_size=1, max_size=5).map(lambda found: sorted(found, reverse=True))
prices = st.builds(price, base_s=st.floats(0.1, 2), row_s=st.floats(0, 0.2), launch_s=st.floats(0, 1),
                   slot_s=st.floats(0, 0.1), token_s=st.floats(0.001, 0.5), tile_s=st.floats(0, 0.1))  # fmt: skip


def offered(rows: Sequence[Sequence[float]]) -> list[list[Token]]:
    return [[Token(chance, i + 1) for i, chance in enumerate(of_row)] for of_row in rows]


@given(st.lists(falling, min_size=1, max_size=4), prices)
def test_one_budget_for_the_chains_of_all_rows(rows: list[list[float]], price: StepPrice) -> None:
    rival = AdaptiveVerification(Margins(7), price)
    assert rival.depths([[1.0] * 7 for _ in rows], Load(1)) == [7] * len(rows)
    bought = rival.buy(offered(rows), most=9)
    every = sorted((chance for of_row in rows for chance in of_row), reverse=True)

    def rate(num: int) -> float:
        return (len(rows) + 1 + sum(every[:num])) / price.seconds(Load(len(rows) + 1, 7 * len(rows), num))

    taken = sorted((token.chance for of_row in bought for token in of_row), reverse=True)
    assert taken == every[: len(taken)]
    assert rate(len(taken)) == pytest.approx(max(map(rate, range(len(every) + 1))))
    assert [of_row[: len(b)] for of_row, b in zip(offered(rows), bought, strict=True)] == bought


@given(st.lists(falling, min_size=1, max_size=4), prices)
def test_a_budget_for_every_row_by_itself(rows: list[list[float]], price: StepPrice) -> None:
    rival = TreeBudget(RunningMeans(7), price)
    rival.depths([[1.0] * 7 for _ in rows], Load(0))
    for of_row, bought in zip(rows, rival.buy(offered(rows), most=4), strict=True):
        rates = [(1 + sum(of_row[:num])) / price.seconds(Load(1, 7, num)) for num in range(min(4, len(of_row)) + 1)]
        assert rates[len(bought)] == pytest.approx(max(rates))


def test_margins_learn_which_tokens_are_accepted() -> None:
    """Chances of a position by its margin, from what was verified; what was not reached teaches nothing."""
    policy, draw = Margins(3), random.Random(0)
    generator = torch.Generator().manual_seed(0)

    def truth(place: int, margin: float) -> float:
        return 1 / (1 + math.exp(-(margin - 1.5 * place)))

    def found(margins: torch.Tensor) -> Candidates:
        scores = torch.stack([torch.zeros_like(margins), -margins], dim=1)
        return Candidates(
            scores.long(), scores, scores.log_softmax(dim=1), torch.zeros(len(margins), dtype=torch.bool)
        )

    forecast = policy(None)  # type: ignore[arg-type]
    for _ in range(4000):
        margins = torch.rand(3, generator=generator) * 5
        policy.chances([forecast], found(margins), [3])
        accepted = 0
        while accepted < 3 and draw.random() < truth(accepted, float(margins[accepted])):
            accepted += 1
        forecast.observe(3, 2, min(accepted, 2))
    assert (policy.weights[2] == 0.5).all()
    for margin in (0.5, 2.0, 4.0):
        chances = policy.chances([forecast], found(torch.full((3,), margin)), [3])
        assert chances.shape == (1, 3, 2)
        for place in range(2):
            assert float(chances[0, place, 0]) == pytest.approx(truth(place, margin), abs=0.05)


RIVALS: dict[str, tuple[Callable[[Policy], Controller], Callable[[int], Policy], Layout]] = {
    "running means": (DepthController, RunningMeans, "chain"),
    "adaptive verification": (AdaptiveVerification, Margins, "chain"),
    "tree budget": (TreeBudget, RunningMeans, "tree"),
}


@pytest.mark.parametrize("rival", RIVALS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(6.0, seed=3)])
def test_the_text_is_the_targets(tiny_pair: Pair, rival: str, sampling: Sampling) -> None:
    controller, policy, layout = RIVALS[rival]
    engine = Engine(tiny_pair, num_slots=2, max_length=64, controller=controller(policy(tiny_pair.block_size - 1)))
    requests = [Request(PROMPT[i:], 20 + i, sampling, stop_token_ids=NEVER, layout=layout) for i in range(3)]
    found = run(engine, requests)
    with torch.inference_mode():
        for request, steps in zip(requests, found, strict=True):
            assert text_of(steps) == plain_text(tiny_pair, request.prompt_ids, request.max_new_tokens, sampling)
    assert all(step.tree.is_chain for steps in found for step in steps) or layout == "tree"
    assert any(step.num_accepted for steps in found for step in steps) or not sampling.temperature
