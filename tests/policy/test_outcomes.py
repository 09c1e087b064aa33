"""The node model: what it learns from, what it learns, and its file."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockpilot.drafts.choices import own_chances
from blockpilot.policy.nodes import (
    FEATURES,
    NUM_CONTEXTS,
    NodeModel,
    Outcomes,
    Proposed,
    features,
    fit_nodes,
    node_losses,
    outcomes_of,
)
from blockpilot.policy.store import NODES_FILE, load_policy, save_policy
from blockpilot.types import Candidates, PairId
from helpers.policies import tiny_policy

PAIR = PairId("t", "1", "d", "2")


def candidates(num: int, k: int, seed: int = 0) -> Candidates:
    """Scores that fall along k; every other slot is drawn, with noise on its scores."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = (
        (torch.randn(num, k + 4, generator=generator) * 2).log_softmax(dim=1).sort(dim=1, descending=True).values
    )
    log_probs = log_probs[:, :k]
    drawn = torch.arange(num) % 2 == 0
    noise = torch.randn(num, k, generator=generator).sort(dim=1, descending=True).values
    return Candidates(torch.zeros(num, k, dtype=torch.int64), log_probs + noise * drawn[:, None], log_probs, drawn)


def test_outcomes_are_of_slots_that_were_reached() -> None:
    ranks = torch.tensor([[0, 2, 1, -1], [-1, 0, 0, 0], [0, 0, -2, -2]], dtype=torch.int8)
    scores = torch.arange(3 * 4 * 2).view(3, 4, 2).half()
    found = outcomes_of(Proposed(ranks, scores, scores - 100, torch.tensor([True, False, False])))
    assert found.ranks.tolist() == [0, 2, 1, -1, -1, 0, 0]
    assert found.depths.tolist() == [0, 1, 2, 3, 0, 0, 1]
    assert found.num_passed.tolist() == [0, 0, 1, 2, 0, 0, 0]
    assert found.found.scores[:, 0].tolist() == [0, 2, 4, 6, 8, 16, 18]
    assert found.found.log_probs[:, 0].tolist() == [-100, -98, -96, -94, -92, -84, -82]
    assert found.found.drawn.tolist() == [True] * 4 + [False] * 3


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 10**6))
@settings(deadline=None)
def test_chances_fall_and_are_no_more_than_one_together(k: int, num: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = NodeModel().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=2)
    found = candidates(num, k, seed)
    found.scores[0, k // 2 :] = found.log_probs[0, k // 2 :] = -torch.inf
    assert features(found, torch.arange(num)).isfinite().all()
    assert features(found, torch.arange(num)).shape == (num, k, len(FEATURES))
    chances = model.chances(found, [num])
    assert chances.shape == (NUM_CONTEXTS, num, k)
    assert (chances.diff(dim=-1) <= 0).all()
    assert (chances.sum(dim=-1) <= 1 + 1e-5).all()
    assert (chances >= 0).all()


def test_slots_without_numbers_have_no_chance_and_the_others_theirs() -> None:
    found, model = candidates(6, 4), NodeModel().requires_grad_(False)
    own, learned = own_chances(found), model.chances(found, [6])
    for field in (found.scores, found.log_probs):
        field[[1, 2]] = -torch.inf  # as the sampler gives them
    for before, after in ((own, own_chances(found)), (learned, model.chances(found, [6]))):
        assert (after[:, [1, 2]] == 0).all()
        torch.testing.assert_close(after[:, [0, 3, 4, 5]], before[:, [0, 3, 4, 5]])


def test_before_it_has_learned_chances_are_the_drafts_own() -> None:
    found = candidates(6, 8)
    chances = NodeModel().requires_grad_(False).chances(found, [2, 4])
    for of_context in chances:
        torch.testing.assert_close(of_context, own_chances(found)[0].clamp(1e-4, 1 - 1e-4), atol=1e-3, rtol=1e-3)


def drawn_outcomes(num: int, seed: int) -> tuple[Outcomes, Tensor]:
    """The first choice is right in 0.9 of slots, after one that is no first in 0.5; the second in 0.05 or 0.25."""
    generator = torch.Generator().manual_seed(seed)
    passed = torch.randint(0, 2, (num,), generator=generator)
    first, second = torch.tensor([0.9, 0.5])[passed], torch.tensor([0.05, 0.25])[passed]
    chance = torch.rand(num, generator=generator)
    ranks = torch.where(chance < first, 0, torch.where(chance < first + second, 1, -1))
    depths = torch.randint(0, 5, (num,), generator=generator)
    return Outcomes(candidates(num, 4, seed), depths, passed, ranks), torch.stack([first, second], dim=1)


def test_it_learns_chances_that_the_draft_does_not_know() -> None:
    outcomes, _ = drawn_outcomes(6000, 0)
    model = fit_nodes(outcomes)
    test, expected = drawn_outcomes(3000, 1)
    found = model(features(test.found, test.depths), test.found.drawn).sigmoid()
    found = found[test.num_passed, torch.arange(len(test))][:, :2]
    assert (found - expected).abs().mean() < 0.05
    ours, own = node_losses(model, test)
    # The entropy of what is right, and no more than a little above it: third choices never are, which it cannot tell.
    entropy = float(sum(torch.special.entr(p) + torch.special.entr(1 - p) for p in expected.T).mean())
    assert entropy < ours < entropy + 0.15 < own


def test_slots_that_are_drawn_are_learned_apart() -> None:
    outcomes, _ = drawn_outcomes(400, 2)
    none_drawn = outcomes.found._replace(drawn=torch.zeros(400).bool())
    model = fit_nodes(Outcomes(none_drawn, *outcomes[1:]))
    assert model.weight[0].abs().min() > 0
    assert (model.weight[1] == 0).all()
    assert (model.of_context[1] == 0).all()


def test_equal_outcomes_give_equal_models() -> None:
    one, same = (fit_nodes(drawn_outcomes(300, 2)[0]).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], same[name]) for name in one)


# --- its file ---


def saved(folder: Path) -> NodeModel:
    nodes = fit_nodes(drawn_outcomes(200, 3)[0])
    policy = tiny_policy(PAIR, 20, (1, 2, 4), kind="step", sizes=(3, 3))
    policy.nodes = nodes
    save_policy(policy, folder)
    return nodes


def test_it_survives_the_file(tmp_path: Path) -> None:
    nodes, loaded = saved(tmp_path), load_policy(tmp_path).nodes
    assert loaded is not None
    found = candidates(6, 8)
    assert torch.equal(loaded.chances(found, [2, 4]), nodes.chances(found, [2, 4]))
    save_policy(tiny_policy(PAIR, 20, (1, 2, 4), kind="step", sizes=(3, 3)), tmp_path)
    assert load_policy(tmp_path).nodes is None


@pytest.mark.parametrize("change", ["missing", "unknown", "nan", "shape", "text"])
def test_other_files_are_refused(change: str, tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / NODES_FILE
    tensors = load_file(path)
    if change == "missing":
        del tensors["weight"]
    elif change == "unknown":
        tensors["more"] = torch.zeros(1)
    elif change == "nan":
        tensors["weight"][0] = torch.nan
    elif change == "shape":
        tensors["weight"] = torch.zeros(2, 3)
    save_file(tensors, path)
    if change == "text":
        path.write_text("nodes")
    with pytest.raises(ValueError, match=r"nodes\.safetensors: "):
        load_policy(tmp_path)


def test_rows_without_recorded_choices_have_no_outcomes() -> None:
    nothing = torch.zeros(3, 0, 0)
    steps = Proposed(torch.zeros(3, 0, dtype=torch.int8), nothing, nothing, torch.zeros(3).bool())
    assert len(outcomes_of(steps)) == 0
