"""Who chooses a request's block size: itself, a policy after its prompt, or the controller at every step."""

import numpy as np
import pytest
import torch

from blockpilot.control.acceptance import NUM_WEIGHTS, UNTRAINED, Prior
from blockpilot.control.controller import FixedPolicy
from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.engine.trees import MAX_DEPTH
from blockpilot.pairs.loading import Pair
from blockpilot.sweep.replay import KnownTexts, Text, know
from blockpilot.types import Prefill, Request, Sampling
from helpers.engines import NEVER, PROMPT, plain_text, run, text_of
from helpers.scripted import OTHER_PROMPT, scripted_pair


def known_text(pair: Pair, prompt: tuple[int, ...], text: tuple[int, ...]) -> KnownTexts:
    tokens = (*prompt, *text)
    return know(pair, [Text(tokens, len(prompt), len(tokens), Sampling())])


def test_the_policy_sees_the_prefill_and_sets_the_block_size(tiny_pair: Pair) -> None:
    seen: list[Prefill] = []

    def policy(prefill: Prefill) -> int:
        seen.append(prefill)
        return 5

    steps = list(generate(tiny_pair, PROMPT, policy=policy, max_new_tokens=12, stop_token_ids=NEVER))
    assert steps[1].block_size == 5
    [prefill] = seen
    expected = tiny_pair.target(torch.tensor([PROMPT]), output_hidden_states=True)
    torch.testing.assert_close(prefill.logits, expected.logits[0, -1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(prefill.probs.sum(), torch.tensor(1.0))
    layers = tiny_pair.draft.options.target_layer_ids
    features = torch.cat([expected.hidden_states[i + 1][0, -1] for i in layers])
    assert prefill.context is not None
    torch.testing.assert_close(prefill.context, tiny_pair.draft.fuse(features), rtol=1e-4, atol=1e-5)
    assert prefill.num_prompt_tokens == len(PROMPT)
    assert steps[0].prefill is not None
    assert steps[0].prefill.logits is prefill.logits


def test_without_a_policy_every_step_is_chosen(tiny_pair: Pair) -> None:
    """A draft that is right drafts as deep as it was trained for; less and less is drafted of one that errs."""
    prompt, num = PROMPT[1:], 300
    text = plain_text(tiny_pair, prompt, num, Sampling())
    pairs = [scripted_pair(tiny_pair, prompt + text, errors) for errors in (NEVER, frozenset(range(1000)))]
    options = {"max_new_tokens": num, "stop_token_ids": NEVER, "lookup": False}
    right, wrong = (list(generate(each, prompt, **options)) for each in pairs)  # type: ignore[arg-type]
    assert text_of(right) == text_of(wrong) == text
    assert {step.num_accepted for step in right[1:-1]} == {tiny_pair.block_size - 1}
    assert [step.num_accepted for step in wrong] == [0] * num
    drafted = [step.block_size - 1 for step in wrong[1:]]
    assert sum(drafted[:20]) > 2 * sum(drafted[-23:-3])


def test_a_prior_is_that_of_the_default_controller(tiny_pair: Pair) -> None:
    """It fixes nothing: rows adapt."""
    prior = Prior(np.full((2, NUM_WEIGHTS), 0.25))
    with_prior, without = Engine(tiny_pair, max_length=64, policy=prior), Engine(tiny_pair, max_length=64)
    assert with_prior.policy is None
    for engine, expected in ((with_prior, prior), (without, UNTRAINED)):
        assert np.array_equal(engine.controller.model.weights, expected.weights)
        assert engine.controller.model.deepest == tiny_pair.block_size - 1 < MAX_DEPTH
        run(engine, [Request(PROMPT, 9, stop_token_ids=NEVER)])
    assert np.array_equal(prior.weights, np.full((2, NUM_WEIGHTS), 0.25))  # learning leaves the policy's own


def test_a_policy_out_of_range_is_an_error(tiny_pair: Pair) -> None:
    with pytest.raises(ValueError, match="the policy's block size 0: must be 1 to 32"):
        list(generate(tiny_pair, PROMPT, policy=lambda prefill: 0, max_new_tokens=4))


def test_a_policy_that_raises_ends_its_own_requests_alone(tiny_pair: Pair) -> None:
    def refuse(prefill: Prefill) -> int:
        raise RuntimeError("no block size")

    engine, failed = Engine(tiny_pair, num_slots=3, max_length=128, policy=refuse), list[int]()
    engine.on_failure = lambda request_id, error: failed.append(request_id)
    free = engine.add(Request(PROMPT, 30, stop_token_ids=NEVER))
    fixed = [engine.add(Request(PROMPT, 30, block_size=size, stop_token_ids=NEVER)) for size in (1, 4)]
    tokens = dict.fromkeys((free, *fixed), ())
    while not engine.idle:
        for step in engine.step():
            tokens[step.request_id] += step.tokens
    assert failed == [free]
    assert [tokens[each] for each in fixed] == [plain_text(tiny_pair, PROMPT, 30, Sampling())] * 2


def test_a_request_with_a_block_size_asks_no_policy(tiny_pair: Pair) -> None:
    seen = list[Prefill]()
    engine = Engine(tiny_pair, num_slots=3, max_length=64, policy=lambda prefill: seen.append(prefill) or 2)
    steps = run(engine, [Request(PROMPT, 9, block_size=b, stop_token_ids=NEVER) for b in (1, None, 5)])
    assert len(seen) == 1
    assert [of[1].block_size for of in steps] == [1, 2, 5]


def test_fixed_policies_verify_chains_of_one_size(tiny_pair: Pair) -> None:
    for size in (1, 3, 12):
        [steps] = run(Engine(tiny_pair, max_length=64, policy=FixedPolicy(size)), [Request(PROMPT, 30)])
        assert {step.block_size for step in steps[1:-size]} == {size}
        assert all(step.tree.is_chain for step in steps)


def test_plain_decoding_never_runs_the_draft(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the draft ran")

    for name in ("propose", "keep_up"):
        monkeypatch.setattr(tiny_pair.prepared_draft, name, fail)
    steps = list(generate(tiny_pair, PROMPT, block_size=1, max_new_tokens=8, stop_token_ids=NEVER))
    assert len(text_of(steps)) == 8
    assert steps[0].prefill is not None
    assert steps[0].prefill.context is None


def test_the_prefill_shows_context_and_temperature(tiny_pair: Pair) -> None:
    """Of a request that may draft; one that never does has no context."""
    engine = Engine(tiny_pair, num_slots=3, max_length=64, policy=FixedPolicy(3))
    requests = [
        Request(PROMPT, 4, Sampling(0.7, seed=3), stop_token_ids=NEVER),
        Request(OTHER_PROMPT, 4, stop_token_ids=NEVER),
        Request(PROMPT[:7], 4, Sampling(1.3), 1, NEVER),
    ]
    prefills = [steps[0].prefill for steps in run(engine, requests)]
    for request, prefill in zip(requests[:2], prefills, strict=False):
        assert prefill is not None
        (token,) = plain_text(tiny_pair, request.prompt_ids, 1, request.sampling)
        known = known_text(tiny_pair, request.prompt_ids, (token,))
        assert prefill.context is not None
        torch.testing.assert_close(prefill.context, known.prefill_context[0], rtol=1e-4, atol=1e-4)
        assert (prefill.temperature, prefill.num_prompt_tokens) == (
            request.sampling.temperature,
            len(request.prompt_ids),
        )
    plain = prefills[2]
    assert plain is not None
    assert (plain.temperature, plain.context) == (1.3, None)
