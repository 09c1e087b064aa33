"""A target without a draft: refused requests. Its texts are in test_fuzz.py, its step costs in test_pricing.py."""

from pathlib import Path

import pytest
import torch

from blockpilot.control.controller import FixedPolicy
from blockpilot.drafts.none import NoDraft, PreparedNoDraft
from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.pairs.loading import Pair, with_draft
from blockpilot.prompts.files import Message, Prompt
from blockpilot.sweep.sweep import sweep_prompts
from blockpilot.types import Request, Sampling
from helpers.engines import NEVER, PROMPT, plain_text, run, text_of

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
    assert alone.prepared_draft.new_cache(8, 1000).num_bytes == 0
    sizes = {"num_slots": 3, "max_length": 64, "prefix_tokens": 64}
    assert Engine(alone, **sizes).cache_bytes < Engine(tiny_pair, **sizes).cache_bytes


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
