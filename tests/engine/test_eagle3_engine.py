"""EAGLE-3 drafts in the engine: the text is the target's own, proposals are those of a slow network from scratch."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from blockpilot.control.acceptance import AcceptanceModel
from blockpilot.control.controller import Controller
from blockpilot.drafts.choices import own_chances
from blockpilot.drafts.eagle3 import Eagle3Model
from blockpilot.drafts.eagle3_prepared import Eagle3Cache, PreparedEagle3
from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.engine.sampling import candidates
from blockpilot.models.native_layers import NativeLayers
from blockpilot.pairs.loading import Pair
from blockpilot.sweep.replay import Text, know
from blockpilot.types import LAYOUTS, Layout, Request, Sampling
from helpers.drafts import Proposal, proposals_of
from helpers.eagle3 import SlowEagle3, eagle3_pair
from helpers.engines import NEVER, PROMPT, plain_text, resize, run, text_of
from helpers.policies import step_policy
from helpers.prices import price
from helpers.tiny import tiny_target

# Where the target is nearly indifferent the shared noise decides, and a random draft is often right.
SAMPLINGS = Sampling(), Sampling(1.0, seed=3), Sampling(6.0, seed=5)
SHAPE = {
    **{"vocab_size": 260, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 6, "head_dim": 16},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 256},
}
WIDE = SHAPE | {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 4}  # a shape for layers in C
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
TARGETS = {
    "llama": tiny_target,
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**WIDE)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS)),
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("layout", ["chain", "tree"])
def test_the_text_is_the_targets_own(eagle_pair: Pair, sampling: Sampling, layout: Layout) -> None:
    expected, num_accepted = plain_text(eagle_pair, PROMPT, 40, sampling), 0
    for block_size in (1, 2, 4, 9, 32):
        options = {"temperature": sampling.temperature, "seed": sampling.seed, "max_new_tokens": 40}
        steps = list(
            generate(eagle_pair, PROMPT, block_size=block_size, layout=layout, stop_token_ids=NEVER, **options)  # type: ignore[arg-type]
        )
        assert text_of(steps) == expected
        num_accepted += sum(step.num_accepted for step in steps)
        if block_size == 9:
            assert any(not step.tree.is_chain for step in steps) == (layout == "tree")
    assert num_accepted > 10 or sampling.temperature < 6


@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_ragged_batches_equal_single_runs(eagle_pair: Pair, num_slots: int) -> None:
    """Chains, trees and plain rows; prompts that are cut; limits and stop tokens; sizes fixed and chosen."""
    requests = []
    for i in range(16):
        prompt, sampling = PROMPT[: 1 + i], replace(SAMPLINGS[i % 3], seed=i)
        text = plain_text(eagle_pair, prompt, 5 + 2 * i, sampling)
        stop = frozenset(text[9:10]) if i % 4 == 3 else NEVER
        size = (4, 1, None, 9, 2, None, 3)[i % 7]
        requests.append(Request(prompt, 5 + 2 * i, sampling, size, stop, layout=LAYOUTS[i % 3]))
    cost = price(launch_s=0.05, slot_s=0.02, token_s=0.02)
    options: dict[str, Any] = {"num_slots": num_slots, "max_length": 40, "max_prefill_tokens": 7}
    engine = Engine(eagle_pair, controller=Controller(AcceptanceModel(3), cost), **options)
    together = run(engine, requests)
    for request, steps in zip(requests, together, strict=True):
        expected = plain_text(eagle_pair, request.prompt_ids, request.max_new_tokens, request.sampling)
        expected = expected[: 40 - len(request.prompt_ids)]
        ends = [i for i, token in enumerate(expected, 1) if token in request.stop_token_ids]
        assert text_of(steps) == expected[: ends[0] if ends else None]
        assert steps[-1].finish_reason == ("stop" if ends else "length")
    assert sum(step.num_accepted for steps in together for step in steps) > 10


def test_nodes_are_selected_of_its_trees(eagle_pair: Pair) -> None:
    """By a prior that has much hope of every choice."""
    prior = step_policy(eagle_pair.id, eagle_pair.vocab_size, bias=2.0)
    controller = Controller(AcceptanceModel(3, prior), price(pair=eagle_pair.id, launch_s=0.1, token_s=0.001))
    engine = Engine(eagle_pair, num_slots=2, max_length=64, controller=controller)
    found = run(engine, [Request(PROMPT[i:], 24, SAMPLINGS[2], stop_token_ids=NEVER) for i in (0, 1)])
    for i, steps in enumerate(found):
        assert text_of(steps) == plain_text(eagle_pair, PROMPT[i:], 24, SAMPLINGS[2])
    assert any(not step.tree.is_chain for steps in found for step in steps)


# --- against a slow network ---


def check(pair: Pair, slow: SlowEagle3, proposal: Proposal) -> int:
    """Compare all that follows from the anchor; returns the number of contexts."""
    found, sampling = proposal.found, proposal.request.sampling
    assert isinstance(pair.draft, Eagle3Model)
    vocabulary, num_contexts = pair.draft.vocabulary, 0
    contexts: list[tuple[tuple[int, ...], int, float]] = [((), 0, 1.0)]  # drafted tokens, place, chance
    for depth, (tokens, places, chances) in enumerate(zip(found.tokens, found.places, found.chances[0], strict=True)):
        following, offered = [], []
        for drafted, place, chance in contexts:
            scores = torch.full((1, pair.vocab_size), -math.inf)
            scores[0, vocabulary] = slow.along(pair.target, (*proposal.tokens, *drafted), len(proposal.tokens))
            position = len(proposal.tokens) + depth
            expected = candidates(scores, [position], [sampling], len(tokens[place]))
            assert list(tokens[place]) == expected.tokens[0].tolist()
            torch.testing.assert_close(
                torch.tensor(chances[place]), own_chances(expected)[0, 0], rtol=1e-2, atol=1e-3
            )
            num_contexts += 1
            of_context = zip(tokens[place], places[place], chances[place], strict=True)
            for rank, (token, after, own) in enumerate(of_context):
                is_first = place == 0 and rank == 0
                offered.append((chance * own, after >= 0 and not is_first))
                if after >= 0:
                    following.append(((*drafted, token), after, chance * own))
                assert after == 0 or not is_first
        if len(tokens) > 1 and depth + 1 < len(found.tokens):
            assert len(following) == 8
            followed, left = ([c for c, chosen in offered[1:] if chosen == is_in] for is_in in (True, False))
            assert min(followed) >= max(left, default=0.0) * 0.999
        contexts = following
    return num_contexts


def variant(tiny_pair: Pair, family: str, **options: Any) -> tuple[Pair, Eagle3Model]:
    """Another kind of checkpoint by family: normed residuals and heads with qwen3, own embeddings with experts."""
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
def test_chains_are_those_of_a_slow_network(family: str, in_c: bool, tiny_pair: Pair) -> None:
    """In a batch whose rows move, decode plainly for a while, and have their prompts cut."""
    torch.manual_seed(2)
    pair, draft = variant(tiny_pair, family)
    assert isinstance(pair.prepared_draft, PreparedEagle3)
    assert isinstance(pair.prepared_draft._layers, NativeLayers) == in_c
    slow = SlowEagle3(draft.state_dict(), draft.config, draft.midlayer.norm_before_residual)
    requests = [
        Request(PROMPT[: 3 + 5 * i], 6 + 4 * i, replace(SAMPLINGS[i % 3], seed=9), 2 + 2 * (i % 3), NEVER)
        for i in range(4)
    ]
    engine = Engine(pair, num_slots=2, max_length=64, max_prefill_tokens=6)
    found = proposals_of(engine, requests)
    assert {len(each.found.tokens) for each in found} >= {1, 2, 3, 5}
    assert all(len(of_slot) == 1 == len(of_slot[0]) for each in found for of_slot in each.found.tokens)
    for proposal in found[::2]:
        check(pair, slow, proposal)


@pytest.mark.parametrize("family", TARGETS)
@torch.inference_mode()
def test_trees_are_those_of_a_slow_network(family: str, in_c: bool, tiny_pair: Pair) -> None:
    """The eight most probable prefixes of every depth are followed, the chain of first choices among them."""
    torch.manual_seed(2)
    pair, draft = variant(tiny_pair, family, block_size=5)
    slow = SlowEagle3(draft.state_dict(), draft.config, draft.midlayer.norm_before_residual)
    requests = [
        Request(PROMPT[: 4 + 3 * i], 9 + 3 * i, replace(SAMPLINGS[i], seed=9), 9 - 3 * i, NEVER, layout="tree")
        for i in range(3)
    ]
    found = proposals_of(Engine(pair, num_slots=3, max_length=64, max_prefill_tokens=6), requests)
    depths = {len(each.found.tokens) for each in found}
    assert {2, 4} <= depths
    counts = [check(pair, slow, proposal) for proposal in found[::4]]
    assert max(counts) == 1 + 8 * 3


# --- its cache ---


def final_state(engine: Engine, end: int) -> list[torch.Tensor]:
    cache = engine._drafter.cache
    assert isinstance(cache, Eagle3Cache)
    return [engine._cache.layers[..., 0, :, :end, :], cache.layers[..., 0, :, :end, :], cache.hidden[0]]


@pytest.mark.parametrize("layout", ["chain", "tree"])
def test_drafting_leaves_the_caches_of_plain_decoding(eagle_pair: Pair, layout: Layout) -> None:
    """The target's keys and values of final tokens, the draft's entries, and the hidden state that is scored next."""
    states = []
    for block_size in (1, 14):
        engine = Engine(eagle_pair, num_slots=1, max_length=64, prefix_tokens=64)  # a kept prefix is caught up with
        request_id = engine.add(Request(PROMPT, 30, SAMPLINGS[2], 14, NEVER, layout=layout))
        steps = engine.step()
        resize(engine, request_id, block_size)
        while not engine.idle:
            steps += engine.step()
        assert (sum(step.num_accepted for step in steps) > 5) == (block_size > 1)
        states.append(final_state(engine, len(PROMPT) + 28))
    for drafted, plain in zip(*states, strict=True):
        torch.testing.assert_close(drafted, plain, atol=1e-4, rtol=1e-3)


def entries_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts of the entries that each pass of a draft's layer computes."""
    counts, entries = list[int](), PreparedEagle3._entries

    def counted(self: PreparedEagle3, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        counts.append(len(tokens))
        return entries(self, tokens, *rest)

    monkeypatch.setattr(PreparedEagle3, "_entries", counted)
    return counts


def test_nothing_is_computed_twice(eagle_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's passes: one over what became final since the row's last draft, one for each drafted position but the
    first, and one over prompts.
    """
    counts = entries_of(monkeypatch)
    engine = Engine(eagle_pair, num_slots=2, max_length=64, max_prefill_tokens=12)
    chain, tree = (
        engine.add(Request(PROMPT[: 10 + i], 20, SAMPLINGS[2], 4, NEVER, layout=layout))
        for i, layout in enumerate(("chain", "tree"))
    )

    def step() -> tuple[list[int], dict[int, int]]:
        counts.clear()
        return counts, {each.request_id: each.num_accepted + 1 for each in engine.step()}

    assert step() == ([12], {chain: 1})  # two tokens of the second prompt beside the first
    of_step, emitted = step()
    assert of_step == [1, 1, 9]
    resize(engine, tree, 1)
    lacking = emitted[chain]
    of_step, emitted = step()
    assert of_step == [lacking, 1, 1]
    resize(engine, chain, 1)
    resize(engine, tree, 4)
    of_step, _ = step()
    assert of_step == [1, 8, 8]


@torch.inference_mode()
def test_the_context_vector_is_the_hidden_state_that_is_scored_next(eagle_pair: Pair) -> None:
    """The replay's; the policy sees that after the prompt, embedding of the first token and all."""
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
            engine._drafter.keep_up(engine._rows, [0])
            shown.append((len(tokens), engine._drafter.cache.hidden[0].clone()))  # type: ignore[attr-defined]
    known = know(eagle_pair, [Text(tuple(tokens), len(PROMPT), len(tokens), Sampling())])
    for length, context in shown:
        torch.testing.assert_close(context, known.context[0, length - 2], rtol=1e-4, atol=1e-4)
    assert torch.equal(known.prefill_context, known.context[:, len(PROMPT) - 1])
    assert len(shown) > 4


def test_a_row_that_fails_leaves_its_neighbours_alone(eagle_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, failed = Engine(eagle_pair, num_slots=3, max_length=64), list[int]()
    engine.on_failure = lambda request_id, error: failed.append(request_id)
    logits = engine._target.logits
    texts: dict[int, list[int]] = {
        engine.add(Request(PROMPT[i:], 20, SAMPLINGS[2], 4, NEVER, layout=layout)): []
        for i, layout in enumerate(("tree", "chain", "tree"))
    }
    num_steps = 0

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden)
        return found.index_fill(0, torch.tensor([0]), math.nan) if num_steps == 3 else found

    monkeypatch.setattr(engine._target, "logits", broken)
    while not engine.idle:
        num_steps += 1
        for step in engine.step():
            texts[step.request_id] += step.tokens
    assert failed == [0]
    for i in (1, 2):
        assert tuple(texts[i]) == plain_text(eagle_pair, PROMPT[i:], 20, SAMPLINGS[2])


def test_cancelled_rows_make_room(eagle_pair: Pair) -> None:
    """The last row moves into each hole, with its entries and its hidden state."""
    engine = Engine(eagle_pair, num_slots=3, max_length=64, max_prefill_tokens=9)
    texts: dict[int, list[int]] = {}
    for i in range(9):
        request = Request(PROMPT[i:], 12 + i, SAMPLINGS[i % 3], (4, 7, 3)[i % 3], NEVER, layout=LAYOUTS[i % 3])
        texts[engine.add(request)] = []
    cancelled = iter_cancelled()
    for num_steps in range(1000):
        if engine.idle:
            break
        for step in engine.step():
            texts[step.request_id] += step.tokens
        if num_steps % 4 == 2:
            engine.cancel(next(cancelled))
    for i in (1, 2, 4, 5, 7, 8):
        assert tuple(texts[i]) == plain_text(eagle_pair, PROMPT[i:], 12 + i, SAMPLINGS[i % 3])


def iter_cancelled() -> Iterator[int]:
    yield from (0, 3, 6)
    while True:
        yield 99
