"""EAGLE-3 drafts in the engine: proposals equal those of a slow reference network; nothing is computed twice."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from blockpilot.drafts.choices import draft_probs
from blockpilot.drafts.eagle3 import Eagle3Model
from blockpilot.drafts.eagle3_prepared import PreparedEagle3
from blockpilot.engine.engine import Engine
from blockpilot.engine.sampling import best_choices
from blockpilot.models.native_layers import NativeLayers
from blockpilot.pairs.loading import Pair
from blockpilot.sweep.replay import Text, know
from blockpilot.types import Request, Sampling
from helpers.drafts import Proposal, proposals_of
from helpers.eagle3 import SlowEagle3, eagle3_pair
from helpers.engines import NEVER, PROMPT, resize
from helpers.tiny import tiny_mixture, tiny_qwen3, tiny_target

# At high temperatures the shared noise decides, and a random draft is often right.
SAMPLINGS = Sampling(), Sampling(1.0, seed=3), Sampling(6.0, seed=5)
TARGETS = {
    "llama": tiny_target,
    "qwen3": lambda: tiny_qwen3(hidden_size=64, head_dim=32, tie_word_embeddings=False),
    "qwen3_moe": lambda: tiny_mixture(head_dim=16, num_attention_heads=6, tie_word_embeddings=False),
}


# --- against a slow network ---


def check(pair: Pair, slow: SlowEagle3, proposal: Proposal) -> int:
    """Compare all choices after the anchor with the reference; returns the number of contexts."""
    slots, sampling = proposal.found, proposal.request.sampling
    assert isinstance(pair.draft, Eagle3Model)
    vocabulary, num_contexts = pair.draft.vocabulary, 0
    contexts: list[tuple[tuple[int, ...], int, float]] = [((), 0, 1.0)]  # drafted tokens, list, probability
    for depth, (tokens, next_lists, chances) in enumerate(
        zip(slots.tokens, slots.next_lists, slots.chances[0], strict=True)
    ):
        following, path_chances = [], []
        for drafted, list_index, chance in contexts:
            scores = torch.full((1, pair.vocab_size), -math.inf)
            scores[0, vocabulary] = slow.along(pair.target, (*proposal.tokens, *drafted), len(proposal.tokens))
            position = len(proposal.tokens) + depth
            expected = best_choices(scores, [position], [sampling], len(tokens[list_index]))
            assert list(tokens[list_index]) == expected.tokens[0].tolist()
            torch.testing.assert_close(
                torch.tensor(chances[list_index]), draft_probs(expected)[0, 0], rtol=1e-2, atol=1e-3
            )
            num_contexts += 1
            ranked_choices = zip(tokens[list_index], next_lists[list_index], chances[list_index], strict=True)
            for rank, (token, after, choice_chance) in enumerate(ranked_choices):
                is_first = list_index == 0 and rank == 0
                path_chances.append((chance * choice_chance, after >= 0 and not is_first))
                if after >= 0:
                    following.append(((*drafted, token), after, chance * choice_chance))
                assert after == 0 or not is_first
        if len(tokens) > 1 and depth + 1 < len(slots.tokens):
            assert len(following) == 8
            followed, left = ([c for c, chosen in path_chances[1:] if chosen == is_in] for is_in in (True, False))
            assert min(followed) >= max(left, default=0.0) * 0.999
        contexts = following
    return num_contexts


def variant(tiny_pair: Pair, family: str, **options: Any) -> tuple[Pair, Eagle3Model]:
    """A kind of checkpoint per family: normed residuals and heads with qwen3, separate embeddings with experts."""
    options["head_norms"] = family == "qwen3"
    pair = eagle3_pair(tiny_pair, TARGETS[family](), torch.arange(0, 260, 2), **options)
    draft = pair.draft
    assert isinstance(draft, Eagle3Model)
    draft.midlayer.norm_before_residual = family == "qwen3"
    if family == "qwen3_moe":
        draft.carry_embeddings(torch.randn(260, 48))
    return pair, draft


@pytest.mark.parametrize("family", TARGETS)
@torch.inference_mode()
def test_proposals_are_those_of_a_slow_network(family: str, in_c: bool, tiny_pair: Pair) -> None:
    """Chains, and the eight most probable prefixes of every depth of trees, including the chain of first choices.

    The batch has rows that move, decode plainly for a while, and have chunked prefill.
    """
    torch.manual_seed(2)
    pair, draft = variant(tiny_pair, family, block_size=5)
    assert isinstance(pair.prepared_draft, PreparedEagle3)
    assert isinstance(pair.prepared_draft._layers, NativeLayers) == in_c
    slow = SlowEagle3(draft.state_dict(), draft.config, draft.midlayer.norm_before_residual)
    chains = [
        Request(PROMPT[: 3 + 5 * i], 6 + 4 * i, replace(SAMPLINGS[i % 3], seed=9), 2 + 2 * (i % 3), NEVER)
        for i in range(4)
    ]
    trees = [
        Request(PROMPT[: 4 + 3 * i], 9 + 3 * i, replace(SAMPLINGS[i], seed=9), 9 - 3 * i, NEVER, layout="tree")
        for i in range(3)
    ]
    proposals = proposals_of(Engine(pair, num_slots=3, max_length=64, max_prefill_tokens=6), [*trees, *chains])
    chain_proposals = [proposal for proposal in proposals if proposal.request.layout != "tree"]
    tree_proposals = [proposal for proposal in proposals if proposal.request.layout == "tree"]
    assert {len(proposal.found.tokens) for proposal in chain_proposals} >= {1, 2, 3, 5}
    assert {len(proposal.found.tokens) for proposal in tree_proposals} >= {2, 4}
    for proposal in chain_proposals[::2]:
        check(pair, slow, proposal)
    assert max(check(pair, slow, proposal) for proposal in tree_proposals[::4]) == 1 + 8 * 3


# --- passes and hidden states ---


def test_nothing_is_computed_twice(eagle_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of a step: one over the tokens accepted since the row's last draft, one for each drafted position but
    the first, and one over prompts.
    """
    counts, entries = list[int](), PreparedEagle3._entries

    def counted(self: PreparedEagle3, tokens: torch.Tensor, *inputs: Any) -> torch.Tensor:
        counts.append(len(tokens))
        return entries(self, tokens, *inputs)

    monkeypatch.setattr(PreparedEagle3, "_entries", counted)
    engine = Engine(eagle_pair, num_slots=2, max_length=64, max_prefill_tokens=12)
    chain, tree = (
        engine.add(Request(PROMPT[: 10 + i], 20, SAMPLINGS[2], 4, NEVER, layout=layout))
        for i, layout in enumerate(("chain", "tree"))
    )

    def advance() -> tuple[list[int], dict[int, int]]:
        counts.clear()
        return counts, {step.request_id: step.num_accepted + 1 for step in engine.step()}

    assert advance() == ([12], {chain: 1})  # the first prompt, and two tokens of the second
    step_counts, emitted = advance()
    assert step_counts == [1, 1, 9]
    resize(engine, tree, 1)
    lacking = emitted[chain]
    step_counts, emitted = advance()
    assert step_counts == [lacking, 1, 1]
    resize(engine, chain, 1)
    resize(engine, tree, 4)
    step_counts, _ = advance()
    assert step_counts == [1, 8, 8]


@torch.inference_mode()
def test_the_context_vector_is_the_hidden_state_that_is_scored_next(eagle_pair: Pair) -> None:
    """Same vectors in the replay; the policy gets the one after the prompt, with the first token's embedding."""
    engine = Engine(eagle_pair, num_slots=1, max_length=64)
    engine.add(Request(PROMPT, 20, SAMPLINGS[2], 4, NEVER))
    tokens, shown = list(PROMPT), list[tuple[int, torch.Tensor]]()
    while not engine.idle:
        [step] = engine.step()
        tokens += step.tokens
        if step.prefill is not None:
            assert step.prefill.context is not None
            shown.append((len(tokens), step.prefill.context))
        if step.finish_reason is None:
            engine._drafter.update_cache(engine._rows, [0])
            shown.append((len(tokens), engine._drafter.cache.hidden[0].clone()))  # type: ignore[attr-defined]
    known_texts = know(eagle_pair, [Text(tuple(tokens), len(PROMPT), len(tokens), Sampling())])
    for length, context in shown:
        torch.testing.assert_close(context, known_texts.context[0, length - 2], rtol=1e-4, atol=1e-4)
    assert torch.equal(known_texts.prefill_context, known_texts.context[:, len(PROMPT) - 1])
    assert len(shown) > 4
