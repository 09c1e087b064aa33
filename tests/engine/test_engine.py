"""Engine: tokens of steps by acceptance, choice of block sizes, isolation of failures, refusals."""

import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

import blockpilot as bp
from blockpilot.control.acceptance import UNTRAINED, AcceptanceModel
from blockpilot.control.controller import Controller
from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.models import packing
from blockpilot.pairs.loading import Pair
from blockpilot.sweep.replay import Text, know
from blockpilot.types import Prefill, Request, Sampling, Step
from helpers.engines import NEVER, PROMPT, plain_text, run, text_of
from helpers.prices import price
from helpers.worlds import knowing

LONG = tuple(range(10, 70))


def scripted_pair(pair: Pair, text: Sequence[int], wrong: Collection[int]) -> Pair:
    """The pair with a draft that proposes this text, with errors at the positions in `wrong`."""
    pad = pair.target.config.pad_token_id
    assert not {pad - 1, pad} & {*text}  # the target's embedding of `pad` is zero: no draft can propose it
    scripted, draft = knowing(pair, lambda position: (position in wrong,) * 2)
    draft.remember(text)
    return scripted


def slow_sizes(text: Sequence[int], start: int, block_size: int, wrong: frozenset[int]) -> list[int]:
    """Emitted tokens of each step by a slow walk; start: the first anchor's position; text: to the answer's end."""
    emitted, anchor = [], start
    while anchor < len(text) - 1:
        count = 1
        while count < block_size and anchor + count not in wrong:
            count += 1
        emitted.append(min(count, len(text) - 1 - anchor))
        anchor += emitted[-1]
    return emitted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong_every", [1, 3, 1000])
def test_a_step_emits_what_is_right_of_its_block_and_one_token_more(
    tiny_pair: Pair, temperature: float, wrong_every: int
) -> None:
    options = {"max_new_tokens": 40, "temperature": temperature, "seed": 14, "stop_token_ids": NEVER}
    expected = plain_text(tiny_pair, PROMPT, 40, Sampling(temperature, seed=14))
    text = PROMPT + expected
    wrong = frozenset(range(0, len(text), wrong_every))
    pair = scripted_pair(tiny_pair, text, wrong)
    for block_size in (1, 2, 5, 12):
        steps = list(generate(pair, PROMPT, block_size=block_size, **options))  # type: ignore[arg-type]
        assert text_of(steps) == expected
        emitted = [len(step.tokens) for step in steps[1:]]
        assert emitted == slow_sizes(text, len(PROMPT), block_size, wrong)
        assert [step.num_accepted for step in steps[1:-1]] == [n - 1 for n in emitted[:-1]]


def test_without_a_policy_every_step_is_chosen(tiny_pair: Pair) -> None:
    """Depth of an accurate draft is the one it was trained for; the depth of an inaccurate draft falls."""
    prompt, num = PROMPT[1:], 300
    plain = generate(tiny_pair, prompt, block_size=1, max_new_tokens=num, stop_token_ids=NEVER)
    text = text_of(list(plain))
    pairs = [scripted_pair(tiny_pair, prompt + text, errors) for errors in (NEVER, frozenset(range(1000)))]
    request = Request(prompt, num, stop_token_ids=frozenset(NEVER), lookup=False)

    def steps_of(pair: Pair) -> list[Step]:
        controller = Controller(AcceptanceModel(pair.block_size - 1), follows=False)  # no step depends on the machine
        return run(Engine(pair, controller=controller), [request])[0]

    right, wrong = map(steps_of, pairs)
    assert text_of(right) == text_of(wrong) == text
    assert {step.num_accepted for step in right[1:-1]} == {tiny_pair.block_size - 1}
    assert [step.num_accepted for step in wrong] == [0] * num
    drafted = [step.block_size - 1 for step in wrong[1:]]
    assert sum(drafted[:20]) > 2 * sum(drafted[-23:-3])


def test_short_prompts_share_a_step(tiny_pair: Pair) -> None:
    engine = Engine(tiny_pair, num_slots=8, max_length=128, max_prefill_tokens=20)
    ids = [engine.add(Request(LONG[:8], 40, block_size=1, stop_token_ids=NEVER)) for _ in range(5)]
    begun = [[step.request_id for step in engine.step() if step.prefill] for _ in range(2)]
    assert begun == [ids[:2], ids[2:]]  # the first step also took half of the third prompt


@pytest.mark.parametrize("name", ["tiny_pair", "gemma_pair", "hybrid_pair", "eagle_pair"])
def test_prompts_of_very_different_lengths_share_a_step(
    name: str, in_c: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short prompts are not padded to a long one; decoding rows attend in the same pass."""
    monkeypatch.setattr(packing, "FEW_PADDED", 1)
    pair, prompts = request.getfixturevalue(name), [LONG, LONG[:2], LONG[:3], LONG[5:], LONG[:1], LONG[3:50]]
    assert packing.text_groups(list(map(len, prompts))) == [0, 2, 4]
    engine = Engine(replace(pair), num_slots=len(prompts) + 1, max_length=128)
    requests = [Request(prompt, 12, stop_token_ids=NEVER) for prompt in (LONG[7:], *prompts)]
    texts = {engine.add(requests[0]): list[int]()}
    for added in ([], requests[1:]):  # the first row decodes while the others are prefilled
        texts |= {engine.add(request_): list[int]() for request_ in added}
        for step in engine.step():
            texts[step.request_id] += step.tokens
    while not engine.idle:
        for step in engine.step():
            texts[step.request_id] += step.tokens
    for request_, text in zip(requests, texts.values(), strict=True):
        assert tuple(text) == plain_text(pair, request_.prompt_ids, 12, Sampling())


def test_plain_decoding_never_runs_the_draft(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the draft ran")

    for name in ("propose", "update_cache"):
        monkeypatch.setattr(tiny_pair.prepared_draft, name, fail)
    steps = list(generate(tiny_pair, PROMPT, block_size=1, max_new_tokens=8, stop_token_ids=NEVER))
    assert len(text_of(steps)) == 8
    assert steps[0].prefill is not None
    assert steps[0].prefill.context is None


# --- policies ---


@pytest.mark.parametrize("max_prefill_tokens", [4, 1000])
def test_a_policy_sees_the_prefill_and_sets_the_block_size(tiny_pair: Pair, max_prefill_tokens: int) -> None:
    """Inputs: the target's logits and the draft's context after the prompt, however it is chunked. Requests with a
    fixed block size do not call the policy.
    """
    seen: list[Prefill] = []
    sampling = Sampling(0.7, seed=3)
    sizes = {"num_slots": 3, "max_length": 128, "max_prefill_tokens": max_prefill_tokens}
    engine = Engine(tiny_pair, policy=lambda prefill: seen.append(prefill) or 5, **sizes)
    requests = [Request(prompt, 12, sampling, size, NEVER) for prompt, size in ((LONG, None), (PROMPT, 1), (LONG, 2))]
    steps = run(engine, requests)
    assert [request_steps[1].block_size for request_steps in steps] == [5, 1, 2]
    assert all(step.tree.is_chain for step in steps[0])
    [prefill] = seen
    assert (prefill.num_prompt_tokens, prefill.temperature) == (len(LONG), 0.7)
    expected = tiny_pair.target(torch.tensor([LONG]), output_hidden_states=True)
    torch.testing.assert_close(prefill.logits, expected.logits[0, -1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(prefill.probs.sum(), torch.tensor(1.0))
    features = [expected.hidden_states[i + 1][0, -1] for i in tiny_pair.draft.options.target_layer_ids]
    assert prefill.context is not None
    torch.testing.assert_close(prefill.context, tiny_pair.draft.fuse(torch.cat(features)), rtol=1e-4, atol=1e-4)
    known_texts = know(tiny_pair, [Text((*LONG, *text_of(steps[0])), len(LONG), len(LONG) + 12, Sampling())])
    torch.testing.assert_close(prefill.context, known_texts.prefill_context[0], rtol=1e-4, atol=1e-4)
    contexts = [request_steps[0].prefill.context is None for request_steps in steps if request_steps[0].prefill]
    assert contexts == [False, True, False]  # a request that never drafts has none


@pytest.mark.parametrize("pair", ["tiny_pair", "eagle_pair"], indirect=True)
@pytest.mark.parametrize("reason", ["policy", "scores"])
def test_what_goes_wrong_with_a_request_ends_it_alone(
    pair: Pair, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failure of one request: its policy raises, or the scores of its third step are not finite."""

    def policy(prefill: Prefill) -> int:
        if reason == "policy":
            raise RuntimeError("no block size")
        return 4

    sampling = Sampling(6.0, seed=5)
    engine, failed = Engine(pair, num_slots=3, max_length=64, policy=policy), list[int]()
    engine.on_failure = lambda request_id, error: failed.append(request_id)
    texts = dict[int, tuple[int, ...]]()
    for i, (size, layout) in enumerate(((None, "auto"), (4, "chain"), (3, "tree"))):
        request = Request(PROMPT[i:], 20, sampling, size, NEVER, layout=layout)  # type: ignore[arg-type]
        texts[engine.add(request)] = ()
    logits, num_steps = engine._target.logits, 0

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        scores = logits(hidden)
        return scores.index_fill(0, torch.tensor([0]), math.nan) if (reason, num_steps) == ("scores", 3) else scores

    monkeypatch.setattr(engine._target, "logits", broken)
    while not engine.idle:
        num_steps += 1
        for step in engine.step():
            texts[step.request_id] += step.tokens
    assert failed == [0]
    for i in (1, 2):
        assert texts[i] == plain_text(pair, PROMPT[i:], 20, sampling)


# --- bad input ---


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), 5), "prompt is empty"),
        (Request(LONG + LONG, 5), r"120 tokens: at most 63 .*max_length is 64, the model's limit is 1024 tokens"),
        (Request((5, 260), 5), "prompt token 260: must be 0 to 259"),
        (Request((5, -1), 5), "prompt token -1: must be 0 to 259"),
        (Request(PROMPT, 0), "max_new_tokens 0: must be at least 1"),
        (Request(PROMPT, 5, stop_token_ids={260}), "stop_token_ids: token 260: must be 0 to 259"),
        (Request(PROMPT, 5, stop_token_ids={-1}), "stop_token_ids: token -1: must be 0 to 259"),
        (Request(PROMPT, 5, block_size=0), "block_size 0: must be 1 to 32"),
        (Request(PROMPT, 5, block_size=33), "block_size 33: must be 1 to 32"),
        (Request(PROMPT, 5, num_logprobs=-1), "num_logprobs -1: must be 0 to 260"),
        (Request(PROMPT, 5, num_prompt_logprobs=261), "num_prompt_logprobs 261: must be 0 to 260"),
        (Request(PROMPT, 5, min_new_tokens=6), "min_new_tokens 6: must be 0 to 5"),
        (Request(PROMPT, 5, Sampling(logit_bias=((260, 1.0),))), "logit_bias: token 260: must be 0 to 259"),
        (Request(PROMPT, 5, lookup="no"), "lookup 'no': must be True, False or None"),  # type: ignore[arg-type]
        (Request(PROMPT, 5, layout="star"), "layout 'star': must be one of auto, chain, tree"),  # type: ignore[arg-type]
    ],
)
def test_bad_requests_are_refused_before_they_queue(tiny_pair: Pair, request_: Request, message: str) -> None:
    engine = Engine(tiny_pair, num_slots=1, max_length=64)
    with pytest.raises(ValueError, match=message):
        engine.add(request_)
    assert engine.idle


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_slots": 0}, "num_slots 0: must be at least 1"),
        ({"max_length": 1}, "max_length 1: must be 2 to 1024"),
        ({"max_length": 5000}, "max_length 5000: must be 2 to 1024"),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens 0: must be at least 1"),
        ({"max_block_size": 0}, "max_block_size 0: must be at least 1"),
        ({"prefix_tokens": -1}, "prefix_tokens -1: must be at least 0"),
    ],
)
def test_bad_engines_are_refused(tiny_pair: Pair, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(tiny_pair, **sizes)  # type: ignore[arg-type]


def test_no_new_tokens_are_refused_by_their_name(tiny_pair: Pair) -> None:
    with pytest.raises(ValueError, match="max_new_tokens 0: must be at least 1"):
        generate(tiny_pair, PROMPT, max_new_tokens=0)


def test_a_prior_beside_a_controller_is_refused(tiny_pair: Pair) -> None:
    with pytest.raises(ValueError, match="policy: the prior of a controller's model"):
        Engine(tiny_pair, policy=UNTRAINED, controller=Controller(AcceptanceModel(3)))


@pytest.mark.parametrize("deepest", [0, 1])
def test_a_controller_of_a_shallower_draft_learns_as_deep_as_its_model(tiny_pair: Pair, deepest: int) -> None:
    controller = Controller(AcceptanceModel(deepest), price(launch_s=0.01, slot_s=0.01, token_s=0.01))
    engine = Engine(tiny_pair, max_length=300, controller=controller)
    [steps] = run(engine, [Request(PROMPT, 260, Sampling(6.0, seed=5), stop_token_ids=NEVER, lookup=False)])
    assert text_of(steps) == plain_text(tiny_pair, PROMPT, 260, Sampling(6.0, seed=5))
    assert controller.model.expected().counts[0].max() == pytest.approx(
        deepest and 1.0, abs=0.1
    )  # greedy: as guessed


@pytest.mark.parametrize("max_prefill_tokens", [8, 1000])
def test_prompts_of_a_step_that_raised_wait_again(
    tiny_pair: Pair, max_prefill_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the device's memory were exhausted: nothing is lost, also of a prompt that was half prefilled."""
    engine = Engine(tiny_pair, num_slots=4, max_length=64, max_prefill_tokens=max_prefill_tokens)
    score, num_passes = engine._target.score, 0

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal num_passes
        num_passes += 1
        if num_passes in (1, 3):
            raise MemoryError("out of memory")
        return score(*arguments, **options)

    monkeypatch.setattr(engine._target, "score", failing)
    requests = [Request(PROMPT[i:], 12, stop_token_ids=NEVER, num_prompt_logprobs=0) for i in range(3)]
    ids, texts, num_logprobs = [engine.add(request) for request in requests], dict[int, tuple[int, ...]](), []
    while not engine.idle:
        with suppress(MemoryError):
            for step in engine.step():
                texts[step.request_id] = texts.get(step.request_id, ()) + step.tokens
                num_logprobs += [len(step.prompt_logprobs)] * bool(step.prompt_logprobs)
    assert [texts[i] for i in ids] == [plain_text(tiny_pair, PROMPT[i:], 12, Sampling()) for i in range(3)]
    assert num_logprobs == [len(PROMPT[i:]) for i in range(3)]


def test_a_policy_out_of_range_is_an_error(tiny_pair: Pair) -> None:
    with pytest.raises(ValueError, match="the policy's block size 0: must be 1 to 32"):
        list(generate(tiny_pair, PROMPT, policy=lambda prefill: 0, max_new_tokens=4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_emits_the_text_of_one_token_at_a_time(tiny_pair_dirs: tuple[str, str]) -> None:
    pair = bp.load_pair(target=str(tiny_pair_dirs[0]), draft=str(tiny_pair_dirs[1]), device="cuda", dtype="float32")
    texts = {
        text_of(list(generate(pair, PROMPT, block_size=b, max_new_tokens=40, temperature=1.0, stop_token_ids=NEVER)))
        for b in (1, 2, 4, 8)
    }
    assert len(texts) == 1
