"""Caches after drafting equal those of plain decoding; drafts after plain steps equal those without such steps."""

import pytest
import torch
from torch import Tensor

from blockpilot.drafts.choices import ConditionalCandidates
from blockpilot.drafts.eagle3_prepared import Eagle3Cache
from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.types import Layout, Request, Sampling
from helpers.controllers import Told
from helpers.drafts import Pass, scatter, watch
from helpers.engines import NEVER, PROMPT, plain_text, resize

HOT = Sampling(6.0, seed=4)  # at this temperature a random draft is sometimes right
REQUESTS = [Request(PROMPT[i:], num, HOT, None, NEVER, lookup=False) for i, num in enumerate((5, 40, 48, 30))]
Proposals = dict[tuple[int, int], Tensor]


def scores_of(draft_pass: Pass) -> list[Tensor]:
    """Scores [positions, k] of every row; they depend on the whole context."""
    candidates = (
        draft_pass.found.candidates if isinstance(draft_pass.found, ConditionalCandidates) else draft_pass.found
    )
    per_position = len(candidates.scores) // sum(draft_pass.depths)
    return list(candidates.scores.split([depth * per_position for depth in draft_pass.depths]))


def proposals(
    pair: Pair, script: list[tuple[int, int]], num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Proposals, int]:
    """Scores of drafts, by request and number of tokens emitted before; and the number of accepted tokens."""
    engine = Engine(pair, num_slots=num_slots, max_length=128, controller=Told(3, script))
    passes, proposed, num_accepted = watch(engine, monkeypatch), Proposals(), 0
    emitted = dict.fromkeys([engine.add(request) for request in REQUESTS], 0)
    while not engine.idle:
        passes.clear()
        steps = engine.step()
        may_draft = [
            step.request_id
            for step in steps
            if step.block_size and REQUESTS[step.request_id].max_new_tokens - emitted[step.request_id] > 1
        ]
        for draft_pass in passes:
            for i, scores in zip(may_draft, scores_of(draft_pass), strict=True):
                proposed[i, emitted[i]] = scores
        for step in steps:
            emitted[step.request_id] += len(step.tokens)
            num_accepted += step.num_accepted
    return proposed, num_accepted


@pytest.mark.parametrize("pair", ["tiny_pair", "markov_pair", "dflash2_pair", "eagle_pair"], indirect=True)
def test_after_plain_steps_a_row_proposes_what_it_would_have_proposed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same scores after one plain step and after many, in a batch with other rows, one of which ends early."""
    always, _ = proposals(pair, [(3, 0)], 1, monkeypatch)
    script = [(0, 0), (3, 3), (0, 0), (0, 0), (3, 8), (3, 8), *[(0, 0)] * 9, (3, 0)]
    seldom, num_accepted = proposals(pair, script, 4, monkeypatch)
    assert len(always) == sum(request.max_new_tokens - 2 for request in REQUESTS)
    assert len(seldom) > 20
    assert num_accepted > 0
    for key, scores in seldom.items():
        torch.testing.assert_close(scores, always[key], rtol=1e-3, atol=1e-3)


def final_state(engine: Engine, end: int) -> list[Tensor]:
    """Keys and values of accepted tokens in both models, and the hidden state that an EAGLE-3 draft scores next."""
    cache = engine._drafter.cache
    hidden = [cache.hidden[0]] if isinstance(cache, Eagle3Cache) else []
    return [engine._cache.layers[..., 0, :, :end, :], cache.layers[..., 0, :, :end, :], *hidden]


@pytest.mark.parametrize(
    ("pair", "layout"), [("tiny_pair", "tree"), ("eagle_pair", "chain"), ("eagle_pair", "tree")], indirect=["pair"]
)
def test_drafting_leaves_the_caches_of_plain_decoding(
    pair: Pair, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, states = plain_text(pair, PROMPT, 30, HOT), []
    for block_size in (1, 14):
        # A cached prefix without the draft's context is computed.
        engine = Engine(pair, num_slots=1, max_length=64, prefix_tokens=64)
        if not pair.draft.is_sequential:
            scatter(engine, [(*PROMPT, *text)], 1, monkeypatch)
        request_id = engine.add(Request(PROMPT, 30, HOT, 14, NEVER, layout=layout))
        steps = engine.step()
        resize(engine, request_id, block_size)
        while not engine.idle:
            steps += engine.step()
        assert (sum(step.num_accepted for step in steps) > 5) == (block_size > 1)
        states.append(final_state(engine, len(PROMPT) + 28))
    for drafted, plain in zip(*states, strict=True):
        torch.testing.assert_close(drafted, plain, atol=1e-4, rtol=1e-3)
