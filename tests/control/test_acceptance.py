"""Acceptance models: expected nodes, acceptance probabilities, and learning."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from blockpilot.control import acceptance
from blockpilot.control.acceptance import (
    FIRST_GUESS,
    NUM_KINDS,
    NUM_WEIGHTS,
    OF_PATH,
    PATH_WEIGHTS,
    PRIOR_VARIANCE,
    THRESHOLDS,
    AcceptanceModel,
    Array,
    Expected,
    Prior,
    Proposal,
    Regression,
    knowledge,
    logistic,
)
from blockpilot.drafts.choices import draft_probs
from blockpilot.types import Candidates
from helpers.paths import needs_functions, paths

DEEPEST, K = 4, 6


def drafted(num_rows: int, seed: int, *, drawn: bool) -> Candidates:
    """Candidates of DEEPEST slots of each row: log probabilities of K tokens, whose probabilities add up to 0.9."""
    logits = torch.randn(num_rows * DEEPEST, K, generator=torch.Generator().manual_seed(seed)).double() * 2
    log_probs = (logits.log_softmax(dim=1) + np.log(0.9)).sort(dim=1, descending=True).values.float()
    return Candidates(torch.arange(K).expand_as(log_probs), log_probs, log_probs, torch.full((len(logits),), drawn))


def proposed(model: AcceptanceModel, candidates: Candidates) -> Proposal:
    num = len(candidates.drawn)
    return model.propose(np.ones(num, dtype=bool), candidates, np.tile(np.arange(DEEPEST), num // DEEPEST))


def taught(model: AcceptanceModel, num_steps: int, rightness: float, *, drawn: bool) -> None:
    """Teach steps of a row that verifies every first choice, right `rightness` times as often as the draft says."""
    draws = np.random.default_rng(5)
    for step in range(num_steps):
        proposal = proposed(model, candidates := drafted(1, step, drawn=drawn))
        draft_chances = draft_probs(candidates)[0, :, 0].numpy()
        right = draws.random(DEEPEST) < rightness * draft_chances
        reached = np.concatenate([[True], right[:-1]]).cumprod().astype(bool)
        choices = K * np.flatnonzero(reached)
        model.learn(proposal.observed(choices, np.zeros(len(choices), dtype=int), right[reached]))


@pytest.mark.parametrize("seed", range(6))
def test_chances_are_the_same_in_c_and_by_numpy(seed: int) -> None:
    """Same probabilities with weights in another memory order, scores that are not finite, and rows that are not
    planned, which have the draft's own. They descend along choices; impossible tokens have probability 0.
    """
    draws, weights = np.random.default_rng(seed), np.random.default_rng(seed).normal(0, 0.5, (2, NUM_WEIGHTS))
    model = AcceptanceModel(DEEPEST, Prior(np.asfortranarray(weights)))
    candidates = drafted(5, seed, drawn=bool(seed % 2))
    scores, log_probs = candidates.scores.clone(), candidates.log_probs.clone()
    scores[3, 4:], log_probs[3, 4:] = -torch.inf, -torch.inf
    scores[7], log_probs[7] = torch.nan, torch.nan
    candidates = candidates._replace(scores=scores, log_probs=log_probs)
    planned, slots = draws.random(20) < 0.7, draws.integers(0, DEEPEST, 20)
    by_c = model.propose(planned, candidates, slots).chances
    with patch.object(acceptance, "choice_chances", lambda *given: None):
        by_numpy = model.propose(planned, candidates, slots).chances
    np.testing.assert_allclose(by_c, by_numpy, rtol=1e-5, atol=1e-7)
    assert (by_c[:, 7] == 0).all()
    assert (by_c[:, 3, 4:] == 0).all()
    assert (np.diff(by_c, axis=-1) <= 0).all()
    assert (by_c.sum(axis=-1) <= 1 + 1e-5).all()
    unplanned = ~planned & (np.arange(20) != 7)
    by_draft = np.repeat(draft_probs(candidates).numpy(), 3, axis=0)
    np.testing.assert_allclose(by_c[:, unplanned], by_draft[:, unplanned], rtol=1e-4, atol=2e-4)
    untrained = AcceptanceModel(DEEPEST).propose(planned, candidates, slots).chances
    np.testing.assert_allclose(np.delete(untrained, 7, axis=1), np.delete(by_draft, 7, axis=1), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(("rightness", "drawn"), [(0.6, False), (0.6, True), (1.0, True)])
def test_slots_learn_how_far_a_draft_is_right(rightness: float, *, drawn: bool) -> None:
    model = AcceptanceModel(DEEPEST)
    taught(model, 2500, rightness, drawn=drawn)
    candidates = drafted(40, 12345, drawn=drawn)
    chances, draft_chances = proposed(model, candidates).chances[0, :, 0], draft_probs(candidates)[0, :, 0].numpy()
    assert chances.mean() == pytest.approx(rightness * draft_chances.mean(), rel=0.1)
    other = drafted(40, 12345, drawn=not drawn)
    untouched = draft_probs(other)[0, :, 0].numpy().mean()
    assert proposed(model, other).chances[0, :, 0].mean() == pytest.approx(untouched, rel=1e-3)


def test_a_regression_follows_traffic_that_changes() -> None:
    """Ten million outcomes of one kind are outweighed by a few hundred thousand of another."""
    model, inputs = Regression(np.zeros((2, 1)), 1.0), np.ones((20_000, 1))
    for right, num in ((0.9, 500), (0.2, 15)):
        for _ in range(num):
            model.learn(inputs, np.zeros(20_000), (np.arange(20_000) < right * 20_000).astype(float))
    assert float(logistic(model.weights[0, 0])) == pytest.approx(0.2, abs=0.05)


def test_learning_is_the_regression_of_all_that_was_seen() -> None:
    """Probabilities close to those of the maximum posterior, found by Newton's method on all outcomes together."""
    model, draws = AcceptanceModel(DEEPEST), np.random.default_rng(1)
    inputs, rights = list[Array](), list[Array]()
    for step in range(400):
        proposal = proposed(model, drafted(1, step, drawn=True))
        choices, laters = draws.choice(DEEPEST * K, 5, replace=False), draws.choice([0, 0, 0, 1, 2, 5], 5)
        right = draws.random(5) < 0.3
        model.learn(proposal.observed(choices, laters, right))
        x = np.zeros((5, NUM_WEIGHTS))
        x[:, :5] = knowledge(*proposal[:4])[choices // K, choices % K]
        x[np.arange(5), 5 + 2 * laters.clip(max=2) + (choices % K > 0)] = 1  # the context of a choice
        inputs.append(x)
        rights.append(right)
    x, y, weights = np.concatenate(inputs), np.concatenate(rights), np.zeros(NUM_WEIGHTS)
    precision = np.eye(NUM_WEIGHTS) / PRIOR_VARIANCE
    for _ in range(200):
        chance = logistic(x[:, 0] + x @ weights)
        gradient = x.T @ (y - chance) - precision @ weights
        weights += 0.3 * np.linalg.solve((x * (chance * (1 - chance))[:, None]).T @ x + precision, gradient)
    learned, best = (logistic(x[:, 0] + x @ w) for w in (model.weights[1], weights))
    assert np.abs(learned - best).mean() < 0.02
    assert (model.weights[0] == 0).all()


# --- depths ---


def observe(model: AcceptanceModel, depths: list[int], chances: list[list[float]], kind: int = 0) -> None:
    """Observe drafts of these depths, with nodes of these probabilities at depths 1, 2 and so on."""
    at = np.repeat(np.arange(1, len(chances) + 1), list(map(len, chances)))
    kinds, node_kinds = np.full(len(depths), kind), np.full(len(at), kind)
    model.observe(
        kinds, np.array(depths), node_kinds, at, np.array([chance for at_depth in chances for chance in at_depth])
    )


def expected(model: AcceptanceModel, kind: int) -> Expected:
    """Expected nodes of rows of one kind."""
    thresholds, sums, counts = model.expected()
    return Expected(thresholds, sums[kind], counts[kind])


@pytest.mark.parametrize("kind", [0, 1, NUM_KINDS - 1])
def test_before_anything_was_seen_depths_are_guessed(kind: int) -> None:
    """First guess: a chain, whose nodes count if they reach the threshold; no nodes that need no draft."""
    guessed = expected(AcceptanceModel(DEEPEST), kind)
    guess = FIRST_GUESS ** np.arange(1, DEEPEST + 1)[:, None]
    np.testing.assert_allclose(guessed.counts[1:], guess >= THRESHOLDS)
    np.testing.assert_allclose(guessed.sums[1:], guess * (guess >= THRESHOLDS))
    assert not guessed.sums[0].any()
    assert not guessed.counts[0].any()
    with pytest.raises(ValueError, match="deepest -1"):
        AcceptanceModel(-1)


def test_expected_nodes_are_the_mean_of_those_that_drafts_added() -> None:
    """Depths that were not drafted are censored, and each kind of row has separate means."""
    model = AcceptanceModel(DEEPEST)
    before = model.expected().sums
    observe(model, [2], [[0.5], [0.1]])
    after = model.expected().sums
    np.testing.assert_array_equal(after[0, 3:], before[0, 3:])
    np.testing.assert_array_equal(after[1:], before[1:])
    assert (after[0, 1:3, 0] < before[0, 1:3, 0]).all()
    for _ in range(5000):
        observe(model, [2, 4], [[0.9, 0.05], [0.3]])
    means = expected(model, 0)
    for j, threshold in enumerate(THRESHOLDS):
        first, second = [chance for chance in (0.9, 0.05) if chance >= threshold], [0.3] * int(threshold <= 0.3)
        np.testing.assert_allclose(means.sums[1:3, j], [sum(first) / 2, sum(second) / 2], atol=0.01)
        np.testing.assert_allclose(means.counts[1:3, j], [len(first) / 2, len(second) / 2], atol=0.01)
    np.testing.assert_allclose(means.counts[3:], 0, atol=0.01)


def test_tokens_of_paths_are_those_of_every_step() -> None:
    """Nodes of paths at depth 0 are observed with and without a draft."""
    model = AcceptanceModel(DEEPEST)
    for depth in (0, 4):
        model.observe(np.array([5]), np.array([depth]), np.array([5, 5]), np.array([0, 0]), np.array([0.9, 0.5]))
    means = expected(model, 5)
    np.testing.assert_allclose(means.sums[0, [0, -1]], [1.4, 0.9], rtol=1e-2)
    np.testing.assert_allclose(means.counts[0, [0, -1]], [2, 1], rtol=1e-2)
    assert not expected(model, 3).sums[0].any()


def test_means_fade() -> None:
    model = AcceptanceModel(DEEPEST)
    for _ in range(5000):
        observe(model, [1], [[0.9]], kind=1)
    for _ in range(3000):
        observe(model, [1], [[0.2]], kind=1)
    assert expected(model, 1).sums[1, 0] == pytest.approx(0.2 + 0.7 * np.exp(-3), abs=0.01)


# --- paths ---


def chances_of(model: AcceptanceModel, drawn: int = 0, most: int = 8) -> list[list[float]]:
    """Probabilities of path tokens after matches of 2, 4, 8 and 32 tokens, each if those before it are right."""
    reached = [[1.0] * 4]
    gains = [model.cut_paths(paths([2, 4, 8, 32], num, drawn)).gains for num in range(most + 1)]
    reached += np.diff(gains, axis=0).tolist()
    return (np.array(reached[1:]) / np.array(reached[:-1])).T.tolist()


@needs_functions
@pytest.mark.parametrize("drawn", [0, 1])
def test_chances_of_paths_are_those_of_the_regression(drawn: int) -> None:
    for length, chances in zip((2, 4, 8, 32), chances_of(AcceptanceModel(DEEPEST), drawn), strict=True):
        for position, chance in enumerate(chances):
            inputs = [1, np.log2(length + position) / 5, 1.0, 0.5, position > 0]
            assert chance == pytest.approx(float(logistic(PATH_WEIGHTS[drawn, :5] @ inputs)))


@needs_functions
def test_paths_are_cut_where_they_are_hardly_reached() -> None:
    model = AcceptanceModel(DEEPEST)
    model.paths.weights[:] = 0
    model.paths.weights[:, 0] = np.log(0.3 / 0.7)
    cut = model.cut_paths(paths([5]))
    assert cut.sizes.tolist() == [3]  # 0.3, 0.09, 0.027 and 0.008
    assert cut.gains == pytest.approx([0.417])
    assert model.cut_paths(paths([5]), least=0.2).sizes.tolist() == [1]
    assert model.cut_paths(paths([5]), least=0.4).sizes.tolist() == [0]


@needs_functions
def test_kinds_are_by_what_paths_will_add_and_by_temperature() -> None:
    model = AcceptanceModel(DEEPEST)
    assert model.kinds(np.array([0, 1]), None).tolist() == [0, 1]
    for drawn in (0, 1):
        model.paths.weights[:] = 0
        path_kinds = list[int]()
        for chance in (0.001, 0.5, 0.75, 0.95):
            model.paths.weights[:, 0] = np.log(chance / (1 - chance))
            followed = model.cut_paths(paths([5, 0], most=31, drawn=drawn))
            kinds = model.kinds(followed.drawn, followed).tolist()
            assert kinds[1] == drawn
            path_kinds.append(kinds[0] - drawn)
        assert path_kinds == [0, 2, 4, 6]


@needs_functions
@pytest.mark.parametrize("drawn", [0, 1])
def test_paths_learn_how_often_they_hold(drawn: int) -> None:
    """Texts that copy less than those of the initial weights are learned; the other kind does not change."""
    model, draws = AcceptanceModel(DEEPEST), np.random.default_rng(0)
    before = chances_of(model, 1 - drawn)
    for _ in range(1500):
        inputs = np.zeros((4, len(OF_PATH)))
        inputs[:, 0], inputs[:, 1], inputs[:, 2], inputs[:, 3] = 1, np.log2(4) / 5, 1, 0.5
        model.learn_paths(inputs, np.full(4, drawn), draws.random(4) < 0.25)
    assert chances_of(model, drawn, most=1)[1][0] == pytest.approx(0.25, abs=0.04)
    assert chances_of(model, 1 - drawn) == before
