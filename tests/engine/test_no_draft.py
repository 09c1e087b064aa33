"""A target without a draft: its text is plain decoding's, and what it verifies is looked up in each row's text."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from blockpilot.constraints.automaton import GrammarCompiler
from blockpilot.constraints.grammar import Grammar
from blockpilot.control.acceptance import AcceptanceModel
from blockpilot.control.controller import Controller, FixedPolicy
from blockpilot.control.cost import NOMINAL, Load
from blockpilot.drafts.none import NoDraft, PreparedNoDraft
from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.evaluation.pricing import measure_price, mixtures_for, time_steps
from blockpilot.native.library import has_functions
from blockpilot.pairs.loading import Pair, load_pair, with_draft
from blockpilot.prompts.files import Message, Prompt
from blockpilot.sweep.sweep import sweep_prompts
from blockpilot.types import LOOKED_UP, Request, Sampling, Step
from helpers.engines import NEVER, PROMPT, plain_text, run, text_of

NUM = 60
SAMPLINGS = Sampling(), Sampling(1.0, top_k=2, seed=3, logit_bias=((65, 40.0), (66, 41.0)))
"""At T=1 a text of two tokens, so that much of it was there before."""
PROMPTS = [tuple(range(start, start + 6)) * 5 for start in (40, 70, 100)]

needs_c = pytest.mark.skipif(not has_functions(), reason="lookup needs the functions in C")


@pytest.fixture(scope="module")
def alone(tiny_pair_dirs: tuple[Path, Path]) -> Pair:
    """The tiny target without a draft."""
    return load_pair(target=tiny_pair_dirs[0], dtype="float32")


def num_accepted(steps: Sequence[Step]) -> int:
    return sum(step.num_accepted for step in steps)


# --- the pair ---


def test_a_target_alone_is_a_pair(alone: Pair, tiny_pair: Pair, tiny_pair_dirs: tuple[Path, Path]) -> None:
    assert (alone.has_draft, tiny_pair.has_draft) == (False, True)
    assert (alone.block_size, alone.layer_ids) == (1, ())
    assert alone.id == tiny_pair.id._replace(draft="none", draft_revision="none")
    assert "no draft" in repr(alone)
    assert isinstance(alone.draft, NoDraft)
    assert isinstance(alone.prepared_draft, PreparedNoDraft)
    assert not [*alone.draft.parameters()]
    assert with_draft(alone, tiny_pair_dirs[1]).id == tiny_pair.id


def test_no_memory_is_taken_for_a_draft(alone: Pair, tiny_pair: Pair) -> None:
    sizes = {"num_slots": 3, "max_length": 64, "prefix_tokens": 64}
    assert alone.prepared_draft.new_cache(8, 1000).num_bytes == 0
    assert Engine(alone, **sizes).cache_bytes < Engine(tiny_pair, **sizes).cache_bytes


# --- texts ---


@needs_c
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["T=0", "T=1"])
@pytest.mark.parametrize("num_slots", [1, 3])
@torch.inference_mode()
def test_texts_are_plain_decodings_and_looked_up_tokens_are_accepted(
    alone: Pair, sampling: Sampling, num_slots: int
) -> None:
    expected = [plain_text(alone, prompt, NUM, sampling) for prompt in PROMPTS]
    engine = Engine(alone, num_slots=num_slots, max_length=128, prefix_tokens=64)
    for controller in (engine.controller, Controller(AcceptanceModel(0), NOMINAL)):
        engine.controller = controller
        found = run(engine, [Request(prompt, NUM, sampling, stop_token_ids=NEVER) for prompt in PROMPTS])
        assert [text_of(steps) for steps in found] == expected
        assert sum(map(num_accepted, found)) > 0
        assert {source for steps in found for step in steps for source in step.tree.sources} == {LOOKED_UP}
        assert all(steps[0].prefill is not None and steps[0].prefill.context is None for steps in found)


@needs_c
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["T=0", "T=1"])
@pytest.mark.parametrize("num_slots", [1, 3])
def test_constrained_texts_are_plain_decodings(alone: Pair, sampling: Sampling, num_slots: int) -> None:
    compiled = GrammarCompiler(alone.tokenizer, alone.vocab_size, alone.stop_token_ids).compile(
        Grammar("regex", r"(abcd|[A-Z]){50}")
    )
    texts = {}
    for block_size in (1, None):
        requests = [
            Request(prompt, NUM, sampling, block_size, alone.stop_token_ids, constraint=compiled)
            for prompt in PROMPTS
        ]
        found = run(Engine(alone, num_slots=num_slots, max_length=128), requests)
        texts[block_size] = [text_of(steps) for steps in found]
    assert texts[None] == texts[1]
    assert sum(map(num_accepted, found)) > 0


@needs_c
@pytest.mark.parametrize("layout", ["auto", "chain", "tree"])
@torch.inference_mode()
def test_a_fixed_block_size_beside_lookup_verifies_looked_up_tokens(alone: Pair, layout: str) -> None:
    sampling = SAMPLINGS[1]
    expected = plain_text(alone, PROMPTS[0], NUM, sampling)
    asked = Request(PROMPTS[0], NUM, sampling, 5, NEVER, layout=layout, lookup=True)
    (steps,) = run(Engine(alone, max_length=128), [asked])
    assert text_of(steps) == expected
    assert num_accepted(steps) > 0
    assert max(step.block_size for step in steps) == 5


@torch.inference_mode()
def test_without_c_and_without_lookup_texts_are_decoded_plainly(alone: Pair, without_c: None) -> None:
    expected = plain_text(alone, PROMPT, 12, Sampling())
    for lookup in (None, False, True):
        (steps,) = run(Engine(alone, max_length=64), [Request(PROMPT, 12, stop_token_ids=NEVER, lookup=lookup)])
        assert text_of(steps) == expected
        assert {step.block_size for step in steps} == {0, 1}


# --- refusals ---


def test_what_needs_a_draft_is_refused_by_name(alone: Pair) -> None:
    engine = Engine(alone, max_length=64)
    with pytest.raises(ValueError, match="block_size 8: the pair has no draft"):
        engine.check(Request(PROMPT, 4, block_size=8))
    with pytest.raises(ValueError, match="block_size 2: the pair has no draft"):
        generate(alone, PROMPT, block_size=2)
    with pytest.raises(ValueError, match="the policy's block size 4: the pair has no draft"):
        list(generate(alone, PROMPT, policy=FixedPolicy(4)))
    with pytest.raises(ValueError, match=r"target '.*target' has no draft, a sweep needs one: --draft names one"):
        sweep_prompts(alone, [Prompt("demo", (Message("user", "a"),))], [2, 4], max_new_tokens=4)


# --- the price of a step ---


@pytest.mark.parametrize("rows", [1, 3])
def test_every_mixture_is_timed(alone: Pair, rows: int) -> None:
    mixtures = mixtures_for(alone, rows)
    timed = time_steps(alone, mixtures, 10, num_steps=1)
    expected = [Load(rows, 0, sum(row.num_verified for row in mixture)) for mixture in mixtures]
    assert [step.load for step in timed] == expected
    assert expected[0].num_verified == 0 < max(load.num_verified for load in expected)


def test_the_price_is_of_rows_and_verified_tokens(alone: Pair) -> None:
    price = measure_price(alone, 4, 10, num_steps=1)
    assert (price.launch_s, price.slot_s, price.is_sequential) == (0, 0, False)
    assert price.seconds(Load(1)) > 0
    assert price.made_for(alone.id, "float32", price.device)
