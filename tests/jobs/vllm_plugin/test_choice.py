"""Choice of drafted tokens in vLLM's batches; none of this needs vLLM."""

import numpy as np
import pytest
import torch

from blockpilot.control.cost import Load
from blockpilot.sweep.rows import MIN_PROB
from blockpilot.types import Prefill
from helpers.prices import price
from jobs.vllm_plugin.choice import BatchChoice, Chooser, VerifiedRow
from jobs.vllm_plugin.hooks import Hook, check_hooks, missing
from jobs.vllm_plugin.prefill import SparseDistribution

PREFILL = Prefill(torch.zeros(4), None, 3)


def _choice(policy=None, of_step=None, num_drafted=7) -> BatchChoice:
    return BatchChoice(Chooser.of(policy, of_step, num_drafted), num_drafted)


def test_a_request_that_asks_for_a_block_size_gets_it_and_no_policy() -> None:
    choice = _choice(policy=lambda _: 2)
    choice.admit("a", 4)
    assert not choice.waits("a")
    choice.decide("a", PREFILL)
    choice.admit("b", 32)
    assert choice.depths(["a", "b"]) == {"a": 1, "b": 7}


def test_policy_chooses_at_the_first_logits_and_the_draft_is_as_wide_as_the_widest_row() -> None:
    sizes = iter([3, 6, 1])
    choice = _choice(policy=lambda _: next(sizes))
    for key in "abc":
        choice.admit(key, None)
    assert choice.width("abc") == 7, "the draft runs in full until the policy has chosen"
    assert all(map(choice.waits, "abc"))
    for key in "abc":
        choice.decide(key, PREFILL)
    assert not any(map(choice.waits, "abc"))
    assert choice.depths(list("abc")) == {"a": 2, "b": 5, "c": 0}
    assert (choice.width("abc"), choice.width("ac"), choice.width("c")) == (5, 2, 0)
    choice.forget(["b", "never seen"])
    assert choice.depths(["a", "b"]) == {"a": 2}


def test_price_takes_drafts_away_under_load_and_gives_them_back() -> None:
    """A step costs a second and 0.1 for each token beyond 8: one row drafts in full, sixteen do not."""
    choice = _choice(of_step=price(token_s=0.05))
    choice.admit("a", None)
    assert choice.depths(["a"])["a"] >= 4
    crowd = [str(i) for i in range(64)]
    for key in crowd:
        choice.admit(key, None)
    choice.chooser.controller.price = price(base_s=0.01, row_s=0.05, token_s=0.05)
    assert set(choice.depths(crowd).values()) == {0}
    assert choice.width(crowd) == 0
    choice.chooser.controller.price = price(token_s=0.001)
    assert choice.depths(["a"])["a"] >= 4


def test_price_never_buys_more_than_the_policy_chose() -> None:
    choice = _choice(policy=lambda _: 3, of_step=price())
    choice.admit("a", None)
    choice.decide("a", PREFILL)
    assert choice.depths(["a"]) == {"a": 2}


def test_what_is_never_accepted_is_no_longer_bought() -> None:
    choice = _choice(of_step=price(token_s=0.05))
    choice.admit("a", None)
    first = choice.depths(["a"])["a"]
    for _ in range(50):
        depth = choice.depths(["a"])["a"]
        load = choice.learn({"a": VerifiedRow(depth, 1)}, depth, 0, 1.0 + 0.05 * depth)
        assert load == Load(1, depth, depth)
    assert choice.depths(["a"])["a"] < first


def test_distribution_arrives_as_the_policy_would_see_it_in_the_engine() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 6
    sent = SparseDistribution.of(logits)
    seen = sent.prefill(500, 12, 0.5)
    exact = logits.softmax(-1)
    kept = exact >= MIN_PROB
    assert 0 < kept.sum() < 500
    torch.testing.assert_close(seen.probs[kept], exact[kept])
    assert seen.probs[~kept].max() < MIN_PROB
    assert (seen.num_prompt_tokens, seen.temperature) == (12, 0.5)
    assert sent.tail_mass == pytest.approx(float(exact[~kept].sum()), abs=1e-6)
    np.testing.assert_array_equal(sent.ids, kept.nonzero()[:, 0].numpy())


def test_what_a_version_lacks_is_named() -> None:
    hooks = [
        Hook("json", "JSONDecoder", ("decode", "object_hook", "no_such_method")),
        Hook("json", "NoSuchClass", ("decode",)),
        Hook("no_such_module", "Thing", ()),
    ]
    assert missing(hooks) == ["json.JSONDecoder.no_such_method", "json.NoSuchClass", "no_such_module.Thing"]
    with pytest.raises(ValueError, match=r"lacks json.JSONDecoder.no_such_method, .* tested with 0.32.0"):
        check_hooks(hooks)
