"""Drafts with edges: a slot is drawn given the choice above it, and the text stays the target's own."""

import copy
import dataclasses
from itertools import pairwise

import pytest
import torch

from blockpilot.control.acceptance import AcceptanceModel
from blockpilot.control.controller import Controller
from blockpilot.drafts.edges import CandidateSelector, Edges, GatedMarkovHead, MarkovHead
from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.engine.sampling import candidates
from blockpilot.evaluation.baselines import Margins, WholeDraft
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import load_prompts
from blockpilot.sweep.sweep import sweep_prompts
from blockpilot.types import Layout, Request, Sampling
from helpers.engines import NEVER, PROMPT, plain_text, run, text_of
from helpers.policies import step_policy
from helpers.prices import price

SAMPLINGS = (Sampling(), Sampling(0.8, seed=3))
WIDTH = 7


@pytest.fixture(params=["markov_pair", "gated_pair", "dflash2_pair"])
def linked_pair(request: pytest.FixtureRequest) -> Pair:
    pair: Pair = request.getfixturevalue(request.param)
    return pair


def text(pair: Pair, sampling: Sampling, block_size: int, layout: Layout) -> list[int]:
    sampled = {"temperature": sampling.temperature, "seed": sampling.seed}
    how = {"block_size": block_size, "layout": layout, "max_new_tokens": 40, "stop_token_ids": NEVER}
    return [t for step in generate(pair, PROMPT, **sampled, **how) for t in step.tokens]  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_text_is_the_targets_own(linked_pair: Pair, sampling: Sampling) -> None:
    plain = text(linked_pair, sampling, 1, "chain")
    for block_size, layout in ((2, "chain"), (4, "chain"), (4, "tree"), (12, "tree")):
        assert text(linked_pair, sampling, block_size, layout) == plain  # type: ignore[arg-type]


def controller_of(kind: str, pair: Pair) -> Controller:
    """Nodes are selected by the draft's own chances at first, by those of a prior, or by margins."""
    cost = price(pair=pair.id, launch_s=0.1, token_s=0.001)
    if kind == "margins":
        return WholeDraft(Margins(3), cost)
    prior = {} if kind == "untrained" else {"prior": step_policy(pair.id, pair.vocab_size)}
    return Controller(AcceptanceModel(3, **prior), cost)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", ["untrained", "prior", "margins"])
def test_however_nodes_are_selected_the_text_stays(linked_pair: Pair, kind: str, sampling: Sampling) -> None:
    engine = Engine(linked_pair, num_slots=2, max_length=64, controller=controller_of(kind, linked_pair))
    requests = [Request(PROMPT[i:], 24, sampling, stop_token_ids=NEVER) for i in (0, 1)]
    found = run(engine, requests)
    for i, steps in enumerate(found):
        assert text_of(steps) == plain_text(linked_pair, PROMPT[i:], 24, sampling)
    assert any(step.tree.tokens for steps in found for step in steps)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_replay_equals_decoding(linked_pair: Pair, temperature: float) -> None:
    settings = {"max_new_tokens": 24, "temperature": temperature}
    replayed, decoded = (
        sweep_prompts(linked_pair, load_prompts("demo", 3), [1, 2, 4], method=method, **settings).rows  # type: ignore[arg-type]
        for method in ("replay", "decode")
    )
    assert [row.emitted_histograms for row in replayed] == [row.emitted_histograms for row in decoded]


def edges_of(kind: str, size: int) -> Edges:
    """Random ones of a kind."""
    torch.manual_seed(0)
    made: dict[str, Edges] = {
        "vanilla": MarkovHead(size, 5),
        "gated": GatedMarkovHead(size, 5, WIDTH),
        "selector": CandidateSelector(size, 5, WIDTH, top_k=size),
    }
    torch.nn.init.normal_(made[kind].successors)
    return made[kind]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", ["vanilla", "gated", "selector"])
def test_of_all_tokens_a_choice_has_the_probability_that_the_edges_give_it(kind: str, sampling: Sampling) -> None:
    edges = edges_of(kind, 30)
    logits, hidden, before = torch.randn(4, 30), torch.randn(4, WIDTH), torch.randint(0, 30, (4, 3))
    every = candidates(logits, range(4), [sampling] * 4, 30)
    linked = edges.link(every, hidden, before, [sampling] * 4, 6)
    found, temperature = linked.found, sampling.temperature or 1.0
    for n in range(4):
        for p in range(3):
            bent = (logits[n] + edges(hidden[n : n + 1], before[n, p : p + 1])[0]) / temperature
            alone = candidates(bent[None] * temperature, [n], [sampling], 6)
            row = n * 3 + p
            assert found.tokens[row].tolist() == alone.tokens[0].tolist()
            assert every.tokens[n, linked.places[n, p]].tolist() == found.tokens[row].tolist()
            torch.testing.assert_close(found.log_probs[row], alone.log_probs[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found.scores[row], alone.scores[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["vanilla", "selector"])
@pytest.mark.parametrize("num", [3, 9])
def test_choices_are_linked_in_c_as_by_torch(kind: str, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside greedy rows, and with tokens that cannot be drawn."""
    edges, sampling = edges_of(kind, 30), [SAMPLINGS[i % len(SAMPLINGS)] for i in range(5)]
    logits, hidden, before = torch.randn(5, 30), torch.randn(5, WIDTH), torch.randint(0, 30, (5, 4))
    logits[1, 7:] = -torch.inf
    found = candidates(logits, range(5), sampling, 9)
    in_c = edges.link(found, hidden, before, sampling, num)
    monkeypatch.setitem(edges.__dict__, "tables", None)
    by_torch = edges.link(found, hidden, before, sampling, num)
    assert in_c.places.shape == (5, 4, num)
    may_be_drawn = by_torch.found.scores > -torch.inf
    assert may_be_drawn.sum() > 40
    sides = ((*linked.found[:3], linked.places.flatten(0, 1)) for linked in (in_c, by_torch))
    for one, other in zip(*sides, strict=True):
        torch.testing.assert_close(one[may_be_drawn], other[may_be_drawn], rtol=1e-4, atol=1e-4)
    assert in_c.found.scores[~may_be_drawn].equal(by_torch.found.scores[~may_be_drawn])
    assert in_c.found.drawn.equal(by_torch.found.drawn)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_selector_has_a_distribution_of_its_choices_alone(sampling: Sampling) -> None:
    """Those of a Markov head leave what is no choice its own probability."""
    logits, hidden, before = torch.randn(4, 30), torch.randn(4, WIDTH), torch.randint(0, 30, (4, 3))
    some = candidates(logits, range(4), [sampling] * 4, 8)
    of_kind = {
        kind: edges_of(kind, 30).link(some, hidden, before, [sampling] * 4, 8) for kind in ("vanilla", "selector")
    }
    sums = {kind: linked.found.log_probs.exp().sum(dim=1) for kind, linked in of_kind.items()}
    torch.testing.assert_close(sums["selector"], torch.ones(12))
    assert (sums["vanilla"] < 0.999).all()


def test_a_head_that_knows_what_follows_makes_longer_steps(
    markov_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that lifts, after each token of the text, the token that follows it there."""
    monkeypatch.setattr(MarkovHead, "width", markov_pair.vocab_size)  # a random draft knows nothing
    plain = text(markov_pair, Sampling(), 1, "chain")
    size = markov_pair.vocab_size
    draft = copy.deepcopy(markov_pair.draft)
    draft.markov_head = MarkovHead(size, size).requires_grad_(False)
    draft.markov_head.markov_w1.weight.copy_(torch.eye(size))
    for token, after in pairwise(plain):
        draft.markov_head.markov_w2.weight[after, token] = 30.0

    def num_steps(pair: Pair) -> int:
        steps = generate(pair, PROMPT, block_size=4, max_new_tokens=40, stop_token_ids=NEVER)
        return sum(step.block_size > 0 for step in steps)

    knowing = dataclasses.replace(markov_pair, draft=draft)
    assert text(knowing, Sampling(), 4, "chain") == plain
    assert num_steps(knowing) < 0.8 * num_steps(markov_pair)
