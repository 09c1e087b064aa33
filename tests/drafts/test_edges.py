"""Drafts with edges: slots are conditioned on the choice above, and the text stays the target's own."""

import pytest
import torch

from blockpilot.control.acceptance import AcceptanceModel
from blockpilot.control.controller import Controller
from blockpilot.drafts.edges import CandidateSelector, Edges, GatedMarkovHead, MarkovHead
from blockpilot.engine.engine import Engine
from blockpilot.engine.sampling import best_choices
from blockpilot.evaluation.baselines import Margins, WholeDraft
from blockpilot.native.linking import MOST_RANK
from blockpilot.pairs.loading import Pair
from blockpilot.types import Request, Sampling
from helpers.engines import NEVER, PROMPT, plain_text, run, text_of
from helpers.policies import step_policy
from helpers.prices import price

SAMPLINGS = (Sampling(), Sampling(0.8, seed=3))
WIDTH = 7


def controller_of(kind: str, pair: Pair) -> Controller:
    """Controller that selects nodes by the draft's own probabilities at first, by a prior's, or by margins."""
    cost = price(pair=pair.id, launch_s=0.1, token_s=0.001)
    if kind == "margins":
        return WholeDraft(Margins(3), cost)
    prior = {} if kind == "untrained" else {"prior": step_policy(pair.id, pair.vocab_size)}
    return Controller(AcceptanceModel(3, **prior), cost)


@pytest.mark.parametrize("pair", ["markov_pair", "gated_pair", "dflash2_pair"], indirect=True)
@pytest.mark.parametrize("kind", ["untrained", "prior", "margins"])
def test_however_nodes_are_selected_the_text_stays(pair: Pair, kind: str) -> None:
    engine = Engine(pair, num_slots=2, max_length=64, controller=controller_of(kind, pair))
    texts = run(engine, [Request(PROMPT, 24, sampling, stop_token_ids=NEVER) for sampling in SAMPLINGS])
    for sampling, steps in zip(SAMPLINGS, texts, strict=True):
        assert text_of(steps) == plain_text(pair, PROMPT, 24, sampling)
        assert any(step.tree.tokens for step in steps)


def edges_of(kind: str, size: int) -> Edges:
    """Random edges of a kind."""
    torch.manual_seed(0)
    edges_by_kind: dict[str, Edges] = {
        "vanilla": MarkovHead(size, 5),
        "gated": GatedMarkovHead(size, 5, WIDTH),
        "of a rank without C": MarkovHead(size, MOST_RANK + 1),
        "selector": CandidateSelector(size, 5, WIDTH, top_k=size),
    }
    torch.nn.init.normal_(edges_by_kind[kind].successors)
    return edges_by_kind[kind]


@pytest.mark.parametrize("kind", ["vanilla", "gated", "of a rank without C", "selector"])
def test_of_all_tokens_a_choice_has_the_probability_that_the_edges_give_it(kind: str) -> None:
    edges, samplings = edges_of(kind, 30), [*SAMPLINGS] * 2
    logits, hidden, before = torch.randn(4, 30), torch.randn(4, WIDTH), torch.randint(0, 30, (4, 3))
    slot_candidates = best_choices(logits, range(4), samplings, 30)
    linked = edges.link(slot_candidates, hidden, before, samplings, 6)
    for n, sampling in enumerate(samplings):
        for p in range(3):
            lifted = logits[n] + edges(hidden[n : n + 1], before[n, p : p + 1])[0]
            alone, row = best_choices(lifted[None], [n], [sampling], 6), n * 3 + p
            assert linked.candidates.tokens[row].tolist() == alone.tokens[0].tolist()
            assert slot_candidates.tokens[n, linked.next_lists[n, p]].tolist() == alone.tokens[0].tolist()
            torch.testing.assert_close(linked.candidates.log_probs[row], alone.log_probs[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(linked.candidates.scores[row], alone.scores[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["vanilla", "selector"])
@pytest.mark.parametrize("num", [3, 9])
def test_choices_are_linked_in_c_as_by_torch(kind: str, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same links, also next to greedy rows, and with tokens of probability 0."""
    edges, sampling = edges_of(kind, 30), [SAMPLINGS[i % len(SAMPLINGS)] for i in range(5)]
    logits, hidden, before = torch.randn(5, 30), torch.randn(5, WIDTH), torch.randint(0, 30, (5, 4))
    logits[1, 7:] = -torch.inf
    slot_candidates = best_choices(logits, range(5), sampling, 9)
    in_c = edges.link(slot_candidates, hidden, before, sampling, num)
    monkeypatch.setitem(edges.__dict__, "tables", None)
    by_torch = edges.link(slot_candidates, hidden, before, sampling, num)
    assert in_c.next_lists.shape == (5, 4, num)
    may_be_drawn = by_torch.candidates.scores > -torch.inf
    assert may_be_drawn.sum() > 40
    sides = ((*linked.candidates[:3], linked.next_lists.flatten(0, 1)) for linked in (in_c, by_torch))
    for one, other in zip(*sides, strict=True):
        torch.testing.assert_close(one[may_be_drawn], other[may_be_drawn], rtol=1e-4, atol=1e-4)
    assert in_c.candidates.scores[~may_be_drawn].equal(by_torch.candidates.scores[~may_be_drawn])
    assert in_c.candidates.drawn.equal(by_torch.candidates.drawn)


def test_a_selector_has_a_distribution_of_its_choices_alone() -> None:
    """Probabilities of a selector sum to 1; with a Markov head, tokens that are not choices keep theirs."""
    logits, hidden, before = torch.randn(4, 30), torch.randn(4, WIDTH), torch.randint(0, 30, (4, 3))
    best = best_choices(logits, range(4), [*SAMPLINGS] * 2, 8)
    sums = {
        kind: edges_of(kind, 30).link(best, hidden, before, [*SAMPLINGS] * 2, 8).candidates.log_probs.exp().sum(dim=1)
        for kind in ("vanilla", "selector")
    }
    torch.testing.assert_close(sums["selector"], torch.ones(12))
    assert (sums["vanilla"] < 0.999).all()
