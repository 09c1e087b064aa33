"""What acceptance models expect, and how they learn it."""

import numpy as np
import pytest
import torch

from blockpilot.control.acceptance import (
    FIRST_GUESS,
    NUM_WEIGHTS,
    RECENT,
    AcceptanceModel,
    Array,
    Prior,
    Proposal,
    knowledge,
    logistic,
)
from blockpilot.drafts.choices import own_chances
from blockpilot.types import Candidates

DEEPEST, K = 4, 6


def drafted(num_rows: int, seed: int, *, drawn: bool) -> Candidates:
    """What a draft says of DEEPEST slots of each row: the log probabilities of K tokens, which add up to 0.9."""
    logits = torch.randn(num_rows * DEEPEST, K, generator=torch.Generator().manual_seed(seed)).double() * 2
    log_probs = (logits.log_softmax(dim=1) + np.log(0.9)).sort(dim=1, descending=True).values.float()
    return Candidates(torch.arange(K).expand_as(log_probs), log_probs, log_probs, torch.full((len(logits),), drawn))


def proposed(model: AcceptanceModel, found: Candidates, num_rows: int) -> Proposal:
    rows, slots = np.repeat(np.arange(num_rows), DEEPEST), np.tile(np.arange(DEEPEST), num_rows)
    return model.propose(rows, found, slots)


def taught(model: AcceptanceModel, num_steps: int, rightness: float, *, drawn: bool) -> None:
    """Steps of a row that verifies every first choice, which is right so many times as often as its draft says."""
    draws = np.random.default_rng(5)
    for step in range(num_steps):
        model.depth_means((0,), [drawn])
        proposal = proposed(model, found := drafted(1, step, drawn=drawn), 1)
        own = own_chances(found)[0, :, 0].numpy()
        right = draws.random(DEEPEST) < rightness * own
        reached = np.concatenate([[True], right[:-1]]).cumprod().astype(bool)
        choices = K * np.flatnonzero(reached)
        model.learn(proposal, choices, np.zeros(len(choices), dtype=int), right[reached])


def test_untrained_chances_are_the_drafts_own() -> None:
    for drawn in (False, True):
        model = AcceptanceModel(DEEPEST)
        model.depth_means((3, 7), [drawn] * 2)
        found = drafted(2, 0, drawn=drawn)
        chances = proposed(model, found, 2).chances
        np.testing.assert_allclose(chances, np.repeat(own_chances(found).numpy(), 3, axis=0), rtol=1e-4, atol=2e-4)


def test_chances_fall_and_what_cannot_be_drawn_has_none() -> None:
    draws = np.random.default_rng(0)
    model = AcceptanceModel(DEEPEST, Prior(draws.normal(0, 0.5, (2, NUM_WEIGHTS))))
    model.depth_means((0, 1), [False, True])
    found = drafted(2, 1, drawn=True)
    found.scores[:, 4:] = found.log_probs[:, 4:] = -torch.inf
    chances = proposed(model, found, 2).chances
    assert (np.diff(chances, axis=-1) <= 0).all()
    assert (chances[..., 4:] == 0).all()
    assert (chances.sum(axis=-1) <= 1 + 1e-9).all()


def test_rows_of_which_nothing_is_known_have_the_drafts_own() -> None:
    model = AcceptanceModel(DEEPEST, Prior(np.ones((2, NUM_WEIGHTS))))
    model.depth_means((0,), [True])
    found = drafted(2, 2, drawn=True)
    rows = np.repeat([-1, 0], DEEPEST)
    chances = model.propose(rows, found, np.tile(np.arange(DEEPEST), 2)).chances
    np.testing.assert_array_equal(chances[:, :DEEPEST], own_chances(found)[:, :DEEPEST].numpy().repeat(3, axis=0))
    assert not np.allclose(chances[0, DEEPEST:], own_chances(found)[0, DEEPEST:].numpy())


@pytest.mark.parametrize("rightness", [0.6, 0.9])
def test_drawn_slots_learn_how_far_a_draft_is_right(rightness: float) -> None:
    model = AcceptanceModel(DEEPEST)
    taught(model, 600, rightness, drawn=True)
    found = drafted(40, 12345, drawn=True)
    model.depth_means(tuple(range(40)), [True] * 40)
    chances, own = proposed(model, found, 40).chances[0, :, 0], own_chances(found)[0, :, 0].numpy()
    assert chances.mean() == pytest.approx(rightness * own.mean(), rel=0.06)


def test_what_is_calibrated_hardly_moves() -> None:
    model = AcceptanceModel(DEEPEST)
    taught(model, 300, 1.0, drawn=False)
    model.depth_means((0,), [False])
    found = drafted(1, 777, drawn=False)
    np.testing.assert_allclose(proposed(model, found, 1).chances[0], own_chances(found)[0].numpy(), atol=0.03)


def test_learning_is_the_regression_of_all_that_was_seen() -> None:
    """Near enough to the weights of the greatest posterior, found by Newton's method on all outcomes at once."""
    model, draws = AcceptanceModel(DEEPEST), np.random.default_rng(1)
    inputs, rights = list[Array](), list[bool]()
    precision = model._precision[1].copy()
    for step in range(400):
        model.depth_means((0,), [True])
        proposal = proposed(model, drafted(1, step, drawn=True), 1)
        choices = draws.choice(DEEPEST * K, 5, replace=False)
        right = draws.random(5) < 0.3
        model.learn(proposal, choices, np.zeros(5, dtype=int), right)
        for choice, each in zip(choices, right, strict=True):
            x = np.zeros(NUM_WEIGHTS)
            x[:5] = proposal.known[choice // K, choice % K]
            x[5 + (choice % K > 0)] = 1
            inputs.append(x)
            rights.append(bool(each))
    x, y, weights = np.array(inputs), np.array(rights), np.zeros(NUM_WEIGHTS)
    for _ in range(200):
        chance = logistic(x[:, 0] + x @ weights)
        gradient = x.T @ (y - chance) - precision @ weights
        weights += 0.3 * np.linalg.solve((x * (chance * (1 - chance))[:, None]).T @ x + precision, gradient)
    found, best = (logistic(x[:, 0] + x @ w) for w in (model.weights[1], weights))
    assert np.abs(found - best).mean() < 0.02


# --- depths ---


def test_before_anything_was_seen_depths_are_guessed() -> None:
    means = AcceptanceModel(DEEPEST).depth_means((5, 6), [False, True])
    np.testing.assert_allclose(means, [FIRST_GUESS ** np.arange(1, DEEPEST + 1)] * 2)
    with pytest.raises(ValueError, match="deepest 0"):
        AcceptanceModel(0)


def test_depths_that_were_not_drafted_teach_nothing() -> None:
    model = AcceptanceModel(DEEPEST)
    for _ in range(200):
        before = model.depth_means((0,), [False])
        model.observe(np.array([0]), np.array([2]), np.array([[0.5, 0.1, 0.0, 0.0]]), np.zeros(1))
    after = model.depth_means((0,), [False])[0]
    assert after[:2] == pytest.approx([0.5, 0.1], abs=0.02)
    unseen = AcceptanceModel(DEEPEST).depth_means((0,), [False])[0]
    np.testing.assert_allclose(after[2:], np.minimum(unseen[2:], after[1]))
    assert before.shape == (1, DEEPEST)


def test_rows_differ_by_what_they_brought_and_new_ones_begin_between_them() -> None:
    model = AcceptanceModel(DEEPEST)
    brought = np.array([[0.9, 0.8, 0.7, 0.6], [0.3, 0.1, 0.05, 0.0]])
    for _ in range(100):
        model.depth_means((0, 1), [False, False])
        model.observe(np.zeros(2, dtype=int), np.array([4, 4]), brought, np.zeros(2))
    easy, hard, new, drawn = model.depth_means((0, 1, 2, 3), [False, False, False, True])
    assert (easy > new).all()
    assert (new > hard).all()
    np.testing.assert_allclose(drawn, FIRST_GUESS ** np.arange(1, DEEPEST + 1))
    gone, again = model.depth_means((2, 0), [False, False]), model.depth_means((0, 1), [False, False])
    np.testing.assert_allclose(gone[1], easy)
    np.testing.assert_allclose(again[0], easy)
    np.testing.assert_allclose(again[1], new)  # row 1 had left


def test_a_row_that_surprises_is_told_from_others() -> None:
    model = AcceptanceModel(DEEPEST)
    model.depth_means((0, 1), [True, True])
    for _ in range(3):
        model.observe(np.array([1, 1]), np.array([4, 4]), np.full((2, 4), 0.5), np.array([1.0, -1.0]))
    np.testing.assert_allclose(model._surprise, np.array([1, -1]) * (1 - RECENT**3))


def test_knowledge_of_scores_that_are_no_numbers_is_finite() -> None:
    values = np.array([[np.nan, -np.inf, 0.0], [0.0, -np.inf, -np.inf]], dtype=np.float32)
    for drawn in (False, True):
        assert np.isfinite(knowledge(values, values, np.array([drawn] * 2), np.array([0, 3]))).all()
