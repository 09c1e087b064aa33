"""The engine's text is the target's own, whatever the block sizes, the batch and the acceptance."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from blockpilot.control.calibration import TrackRecord
from blockpilot.control.forecasts import RunningMeans
from torch import Tensor

import blockpilot as bp
from blockpilot.control.choose import buy, choose_depths
from blockpilot.control.controller import (
    DOUBT,
    MEMORY,
    SLOTS_DOUBT,
    SLOTS_MEMORY,
    Controller,
    FixedPolicy,
    StepOutcome,
)
from blockpilot.control.cost import Load
from blockpilot.drafts.choices import own_chances
from blockpilot.drafts.decoder import DraftDecoder, PreparedDFlash
from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.engine.trees import Slots, best_first, tree_of
from blockpilot.evaluation.baselines import DepthController
from blockpilot.evaluation.pricing import StaticForecast
from blockpilot.models.cache import SlotView
from blockpilot.models.packing import Packing
from blockpilot.pairs.loading import Pair
from blockpilot.policy.learned import LearnedForecast, LearnedPolicy
from blockpilot.sweep.replay import KnownTexts, Text, know
from blockpilot.types import LAYOUTS, Candidates, Forecast, Layout, Policy, Prefill, Request, Sampling, Step
from helpers.controllers import Switch
from helpers.drafts import scatter
from helpers.engines import NEVER, PROMPT, plain_text, run, text_of
from helpers.policies import reading_policy, step_policy
from helpers.prices import linear_price, price


class ScriptedDraft(DraftDecoder):
    """A draft that knows the text and errs where it is told to: acceptance becomes an oracle's business."""

    def __init__(self, pair: Pair, text: Sequence[int], wrong: frozenset[int]) -> None:
        """text[p] is the token at absolute position p; it drafts another one at positions in `wrong`."""
        super().__init__(pair.draft)
        self.embedding = pair.target.get_input_embeddings().weight.detach()
        self.text, self.wrong = list(text) + [0] * 64, wrong
        pad = pair.target.config.pad_token_id
        assert not {pad - 1, pad} & {*text}  # the target's embedding of it is zero: no draft could mean it

    def propose(self, embedded: Tensor, packing: Packing, cache: SlotView) -> Tensor:
        super().propose(embedded, packing, cache)
        tokens = [(self.text[p] + (p in self.wrong)) % len(self.embedding) for p in packing.positions.tolist()]
        # Tied embeddings: the LM head's best match of a scaled embedding is its own token.
        normed = self.embedding / self.embedding.norm(dim=1, keepdim=True).square()
        return normed[torch.tensor(tokens)] * 1e3


def scripted_pair(pair: Pair, text: Sequence[int], wrong: frozenset[int]) -> Pair:
    scripted = replace(pair)
    scripted.__dict__["prepared_draft"] = PreparedDFlash(ScriptedDraft(pair, text, wrong), pair.target)
    return scripted


def oracle_steps(text: Sequence[int], start: int, block_size: int, wrong: frozenset[int]) -> list[int]:
    """num_emitted of each step by a slow walk: `start` is the first anchor's position, `text` ends the answer."""
    emitted, anchor = [], start
    while anchor < len(text) - 1:
        count = 1
        while count < block_size and anchor + count not in wrong:
            count += 1
        emitted.append(min(count, len(text) - 1 - anchor))
        anchor += emitted[-1]
    return emitted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong_every", [1, 2, 3, 7, 1000])
def test_every_block_size_emits_the_plain_text_at_every_acceptance(
    tiny_pair: Pair, temperature: float, wrong_every: int
) -> None:
    sampling, num = Sampling(temperature, seed=14), 40
    expected = plain_text(tiny_pair, PROMPT, num, sampling)
    text = PROMPT + expected
    wrong = frozenset(range(0, len(text), wrong_every))
    pair = scripted_pair(tiny_pair, text, wrong)
    for block_size in range(1, 13):
        steps = list(
            generate(
                pair,
                PROMPT,
                block_size=block_size,
                max_new_tokens=num,
                temperature=temperature,
                seed=14,
                stop_token_ids=NEVER,
            )
        )
        assert text_of(steps) == expected
        emitted = [len(step.tokens) for step in steps[1:]]
        assert emitted == oracle_steps(text, len(PROMPT), block_size, wrong)
        assert [step.num_accepted for step in steps[1:-1]] == [n - 1 for n in emitted[:-1]]


@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_ragged_batches_of_mixed_block_sizes_equal_single_runs(tiny_pair: Pair, num_slots: int) -> None:
    requests = [
        Request(
            PROMPT[: 1 + i % 9],
            5 + 3 * i,
            Sampling([0.0, 1.0, 0.7][i % 3], [1.0, 0.9][i % 2], [0, 20][i % 2], seed=i),
            block_size=1 + i % 12,
            stop_token_ids=NEVER,
        )
        for i in range(16)
    ]
    together = run(Engine(tiny_pair, num_slots=num_slots, max_length=128), requests)
    for request, steps in zip(requests, together, strict=True):
        expected = plain_text(tiny_pair, request.prompt_ids, request.max_new_tokens, request.sampling)
        assert text_of(steps) == expected
        assert steps[-1].finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_embedded_pair_is_exact_at_every_block_size(embedded_pair: Pair, temperature: float) -> None:
    """The real draft, whose acceptance is its own: single runs and one batch of all block sizes, fp32."""
    messages = [{"role": "user", "content": "Count from one to ten in words."}]
    prompt = tuple(
        embedded_pair.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    )
    sampling, num = Sampling(temperature, seed=3), 14
    expected = plain_text(embedded_pair, prompt, num, sampling)
    requests = [Request(prompt, num, sampling, block_size=b, stop_token_ids=NEVER) for b in range(1, 13)]
    together = run(Engine(embedded_pair, num_slots=12, max_length=128), requests)
    assert [text_of(steps) for steps in together] == [expected] * 12
    for block_size in (3, 8):
        alone = generate(
            embedded_pair,
            prompt,
            block_size=block_size,
            max_new_tokens=num,
            temperature=temperature,
            seed=3,
            stop_token_ids=NEVER,
        )
        assert text_of(list(alone)) == expected


def test_greedy_text_is_that_of_transformers_generate(embedded_pair: Pair) -> None:
    messages = [{"role": "user", "content": "Name three fruits."}]
    ids = embedded_pair.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    theirs = embedded_pair.target.generate(torch.tensor([ids]), max_new_tokens=30, do_sample=False)
    ours = text_of(list(generate(embedded_pair, ids, block_size=6, max_new_tokens=30)))
    assert ours == tuple(theirs[0, len(ids) :].tolist())


# --- ends of a request ---


def test_a_stop_token_ends_mid_block_and_nothing_follows(tiny_pair: Pair) -> None:
    expected = plain_text(tiny_pair, PROMPT, 30, Sampling())
    pair = scripted_pair(tiny_pair, PROMPT + expected, NEVER)  # everything is accepted
    stop = expected[10]
    first = expected.index(stop)
    steps = list(generate(pair, PROMPT, block_size=12, max_new_tokens=30, stop_token_ids=frozenset({stop})))
    assert text_of(steps) == expected[: first + 1]
    assert steps[-1].finish_reason == "stop"
    assert sum(len(s.tokens) for s in steps) == first + 1


def test_a_stop_string_ends_at_the_token_that_completes_it(tiny_pair: Pair) -> None:
    expected = plain_text(tiny_pair, PROMPT, 30, Sampling(1.0, seed=4))
    pair = scripted_pair(tiny_pair, PROMPT + expected, NEVER)
    whole = tiny_pair.tokenizer.decode(expected)
    stop = next(char for char in whole[8:] if char.isascii() and char.isprintable() and char not in whole[:8])
    steps = list(
        generate(
            pair,
            PROMPT,
            block_size=9,
            max_new_tokens=30,
            temperature=1.0,
            seed=4,
            stop_token_ids=NEVER,
            stop_strings=(stop,),
        )
    )
    text = tiny_pair.tokenizer.decode(text_of(steps))
    assert steps[-1].finish_reason == "stop"
    assert stop in text
    assert stop not in tiny_pair.tokenizer.decode(text_of(steps)[:-1])


def test_the_context_ends_a_request(tiny_pair: Pair) -> None:
    [steps] = run(Engine(tiny_pair, num_slots=1, max_length=32), [Request(PROMPT, 500, block_size=8)])
    assert len(PROMPT) + len(text_of(steps)) == 32
    assert steps[-1].finish_reason == "length"
    assert text_of(steps) == plain_text(tiny_pair, PROMPT, 32 - len(PROMPT), Sampling())


def test_one_token_needs_no_step(tiny_pair: Pair) -> None:
    steps = list(generate(tiny_pair, PROMPT, max_new_tokens=1, stop_token_ids=NEVER))
    assert [(len(s.tokens), s.block_size, s.finish_reason) for s in steps] == [(1, 0, "length")]


# --- batch life ---


def test_requests_join_and_leave_a_running_batch(tiny_pair: Pair) -> None:
    engine = Engine(tiny_pair, num_slots=3, max_length=128)
    requests = [Request(PROMPT[: 3 + i], 6 + 5 * (i % 4), block_size=1 + i, stop_token_ids=NEVER) for i in range(9)]
    texts: dict[int, list[int]] = {}
    pending = list(requests)
    while pending or not engine.idle:
        if pending:  # one more arrives before every step
            texts[engine.add(pending.pop(0))] = []
        for step in engine.step():
            texts[step.request_id] += step.tokens
    for request, text in zip(requests, texts.values(), strict=True):
        assert tuple(text) == plain_text(tiny_pair, request.prompt_ids, request.max_new_tokens, Sampling())


def test_cancel_frees_the_slot_and_disturbs_nobody(tiny_pair: Pair) -> None:
    engine = Engine(tiny_pair, num_slots=3, max_length=128)
    requests = [Request(PROMPT[: 5 + i], 25, block_size=3 + i, stop_token_ids=NEVER) for i in range(4)]
    ids = [engine.add(request) for request in requests]
    texts: dict[int, list[int]] = {i: [] for i in ids}
    for step in engine.step() + engine.step():
        texts[step.request_id] += step.tokens
    engine.cancel(ids[0])
    assert (engine.num_active, engine.num_waiting) == (2, 1)
    engine.cancel(999)
    while not engine.idle:
        for step in engine.step():
            assert step.request_id != ids[0]
            texts[step.request_id] += step.tokens
    for i, request in zip(ids[1:], requests[1:], strict=True):
        assert tuple(texts[i]) == plain_text(tiny_pair, request.prompt_ids, 25, Sampling())


def test_cancel_of_a_waiting_request(tiny_pair: Pair) -> None:
    engine = Engine(tiny_pair, num_slots=1, max_length=64)
    first, second = (engine.add(Request(PROMPT, 4, stop_token_ids=NEVER)) for _ in range(2))
    engine.cancel(second)
    seen = set()
    while not engine.idle:
        seen |= {step.request_id for step in engine.step()}
    assert seen == {first}


# --- policy ---


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


def test_without_a_policy_the_trained_block_size_is_used(tiny_pair: Pair) -> None:
    steps = list(generate(tiny_pair, PROMPT, max_new_tokens=20, stop_token_ids=NEVER))
    assert steps[1].block_size == tiny_pair.block_size


def test_a_policy_out_of_range_is_an_error(tiny_pair: Pair) -> None:
    with pytest.raises(ValueError, match="the policy's block size 0: must be 1 to 32"):
        list(generate(tiny_pair, PROMPT, policy=lambda prefill: 0, max_new_tokens=4))


def test_plain_decoding_never_runs_the_draft(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the draft ran")

    for name in ("propose", "keep_up"):
        monkeypatch.setattr(tiny_pair.prepared_draft, name, fail)
    steps = list(generate(tiny_pair, PROMPT, block_size=1, max_new_tokens=8, stop_token_ids=NEVER))
    assert len(text_of(steps)) == 8
    assert steps[0].prefill is not None
    assert steps[0].prefill.context is None


# --- policies that give a forecast ---

SIZES = (1, 2, 4, 7)
PRICE = price(launch_s=0.1, slot_s=0.05, token_s=0.04)  # the deeper a step and the more rows, the dearer
REACH = (0.7, 0.5, 0.3, 0.2)
OTHER_PROMPT = tuple(range(70, 82))


KINDS: dict[str, Callable[[Pair], Policy]] = {
    "static": lambda pair: lambda prefill: StaticForecast(REACH),
    "running": lambda pair: RunningMeans(pair.block_size - 1),
    "reading": lambda pair: reading_policy(pair, SIZES),
}


def scripted_requests(
    pair: Pair, sampling: Sampling, num: int = 40, layouts: Sequence[Layout] = LAYOUTS
) -> tuple[Pair, list[Request]]:
    """A draft that errs at every third and every eleventh position of one text; rows of it, and two of fixed size.

    They end at different lengths; with fewer slots than requests, some join late.
    """
    text = PROMPT + plain_text(pair, PROMPT, num, sampling)
    wrong = frozenset(range(0, len(text), 3)) & frozenset(range(0, 30)) | frozenset(range(0, len(text), 11))
    plain = [
        Request(PROMPT, length, sampling, stop_token_ids=NEVER, layout=layouts[i % len(layouts)])
        for i, length in enumerate((num, 14, 25, 1, 31))
    ]
    fixed = [Request(OTHER_PROMPT[:n], 9 + n, sampling, n, NEVER) for n in (1, 3)]
    return scripted_pair(pair, text, wrong), [plain[0], fixed[0], *plain[1:4], fixed[1], plain[4]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("num_slots", [1, 4])
def test_forecasts_never_change_the_text(tiny_pair: Pair, kind: str, temperature: float, num_slots: int) -> None:
    """One after the other, and in a batch with rows of fixed size, in fp32: the target's own text, token by token."""
    pair, requests = scripted_requests(tiny_pair, Sampling(temperature, seed=5))
    engine = Engine(pair, num_slots=num_slots, max_length=128, controller=Controller(KINDS[kind](pair), PRICE))
    steps = run(engine, requests)
    for request, of_request in zip(requests, steps, strict=True):
        expected = plain_text(tiny_pair, request.prompt_ids, request.max_new_tokens, request.sampling)
        assert text_of(of_request) == expected
        if request.block_size is not None:
            assert of_request[1].block_size == max(step.block_size for step in of_request) == request.block_size
    chosen = [of for of, request in zip(steps, requests, strict=True) if request.block_size is None]
    sizes = {step.block_size for of_request in chosen for step in of_request[1:-1]}
    assert max(sizes) > 1
    assert len(sizes) > 1 or (kind != "reading" and num_slots == 1)


class Shadow:
    """What rows of a running engine are, told by its steps and its draft's proposals alone: what a controller should
    have made of them.
    """

    def __init__(self, requests: Sequence[Request], policy: Policy, deepest: int, max_block_size: int) -> None:
        self.requests, self.policy, self.deepest, self.most = requests, policy, deepest, max_block_size - 1
        self.lengths = [len(request.prompt_ids) for request in requests]
        self.forecasts: dict[int, Forecast] = {}
        self.calibration = TrackRecord(DOUBT, MEMORY)
        self.tokens_a_slot = [TrackRecord(SLOTS_DOUBT, SLOTS_MEMORY) for _ in range(deepest)]

    def room(self, i: int) -> int:
        return len(self.requests[i].prompt_ids) + self.requests[i].max_new_tokens - self.lengths[i]

    def check(self, steps: Sequence[Step], proposed: Sequence[Slots]) -> list[int]:
        """Compare a step of the engine with `choose_depths` and `buy`; returns the depths of forecasts."""
        decoded = [step for step in steps if step.block_size]
        free = [step.request_id for step in decoded if step.request_id in self.forecasts]
        fixed = {
            step.request_id: min(self.requests[step.request_id].block_size or 0, self.room(step.request_id)) - 1
            for step in decoded
            if step.request_id not in self.forecasts
        }
        chosen, rate = list[int](), 0.0
        if free:
            reaches = [self.forecasts[i].reach[: min(self.deepest, self.room(i) - 1)] for i in free]
            beside = Load(len(fixed), sum(fixed.values()), sum(fixed.values()))
            ratios = [record.ratio for record in self.tokens_a_slot]
            chosen, rate = choose_depths(reaches, PRICE, beside, ratios)
        depths = fixed | dict(zip(free, chosen, strict=True))
        drafting = [step for step in decoded if depths[step.request_id]]
        assert [len(slots.tokens) for slots in proposed] == [depths[step.request_id] for step in drafting]
        self.check_trees(drafting, proposed, chosen, rate * PRICE.token_s / self.calibration.ratio)
        self.calibration.add(self.expected, sum(step.num_accepted for step in decoded if step.request_id in free))
        for step in steps:
            self.lengths[step.request_id] += len(step.tokens)
            if step.request_id in free:
                forecast = self.forecasts[step.request_id]
                forecast.observe(depths[step.request_id], len(step.tree.tokens), step.num_accepted)
            if step.prefill is not None and self.requests[step.request_id].block_size is None:
                forecast = self.policy(step.prefill)
                assert not isinstance(forecast, int)
                self.forecasts[step.request_id] = forecast
        return chosen

    def check_trees(
        self, drafting: Sequence[Step], proposed: Sequence[Slots], chosen: Sequence[int], worth: float
    ) -> None:
        bought = []
        for step, slots in zip(drafting, proposed, strict=True):
            if step.request_id not in self.forecasts:
                assert step.tree.is_chain
                continue
            is_chain = self.requests[step.request_id].layout == "chain"
            grown = best_first(slots.first_choices() if is_chain else slots)
            [nodes] = buy([grown], worth, 0.0, 0, self.most)
            assert step.tree == tree_of(nodes)
            assert step.block_size == 1 + len(nodes)
            bought += nodes
        self.expected = sum(node.chance for node in bought)
        if any(chosen):
            for depth in range(max(chosen)):
                num = sum(node.depth == depth + 1 for node in bought)
                self.tokens_a_slot[depth].add(sum(d > depth for d in chosen), num)


@pytest.mark.parametrize("kind", ["static", "running"])
@pytest.mark.parametrize("num_slots", [1, 3, 7])
def test_every_step_drafts_and_verifies_what_its_load_makes_worth_it(
    tiny_pair: Pair, num_slots: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows join and leave: each step's depths and trees are those for the rows that there are, at their lengths."""
    sampling = Sampling()
    _, requests = scripted_requests(tiny_pair, sampling)
    engine = Engine(
        tiny_pair,
        num_slots=num_slots,
        max_length=128,
        controller=Controller(KINDS[kind](tiny_pair), PRICE),
        max_block_size=9,
    )
    texts = [(*r.prompt_ids, *plain_text(tiny_pair, r.prompt_ids, r.max_new_tokens, sampling)) for r in requests]
    longest_first = sorted(texts, key=len, reverse=True)
    passes = scatter(engine, longest_first, 2, monkeypatch)
    shadow = Shadow(requests, KINDS[kind](tiny_pair), tiny_pair.block_size - 1, 9)
    depths, trees = list[int](), list[Step]()
    for request in requests:
        engine.add(request)
    while not engine.idle:
        passes.clear()
        steps = engine.step()
        assert len(passes) <= 1
        depths += shadow.check(steps, passes[0] if passes else [])
        trees += steps
    assert len(set(depths)) > 1
    assert any(not step.tree.is_chain and step.num_accepted for step in trees)
    assert any(step.num_accepted and requests[step.request_id].layout == "chain" for step in trees)
    assert shadow.calibration.ratio != 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_what_is_bought(tiny_pair: Pair, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that names none gets trees, where its drafts are bought."""
    request = Request(PROMPT, 30, stop_token_ids=NEVER, layout=layout)
    controller = Controller(KINDS["static"](tiny_pair), price(token_s=0.02))
    engine = Engine(tiny_pair, num_slots=1, max_length=64, controller=controller)
    expected = plain_text(tiny_pair, PROMPT, 30, Sampling())
    scatter(engine, [(*PROMPT, *expected)], 4, monkeypatch)
    [steps] = run(engine, [request])
    assert text_of(steps) == expected
    assert all(step.tree.is_chain for step in steps) == (layout == "chain")
    assert all(step.block_size == 1 + len(step.tree.tokens) for step in steps[1:])
    assert max(step.block_size for step in steps) > 2


def test_what_is_drafted_may_be_worth_nothing(tiny_pair: Pair) -> None:
    """More is expected of the draft than its own tokens promise, each of which is one of many."""
    switch = Switch(lambda prefill: StaticForecast((0.9, 0.9)), price(token_s=0.85))
    engine = Engine(tiny_pair, num_slots=1, max_length=64, controller=switch)
    [steps] = run(engine, [Request(PROMPT, 20, stop_token_ids=NEVER)])
    assert {step.block_size for step in steps} == {0, 1}
    assert switch.outcomes[1].load == Load(1, num_drafted=2, num_verified=0)


class Deep(DepthController):
    """Keeps the depths that it chose last, and its price, whatever the steps of a tiny pair take."""

    chosen: Sequence[int] = ()

    def finish(self, outcome: StepOutcome) -> None:
        pass

    def depths(self, reaches: Sequence[Sequence[float]], beside: Load) -> list[int]:
        self.chosen = super().depths(reaches, beside)
        return list(self.chosen)


def test_chains_of_running_means_are_verified_as_deep_as_they_are_drafted(tiny_pair: Pair) -> None:
    pair, requests = scripted_requests(tiny_pair, Sampling(), layouts=["chain"])
    controller = Deep(RunningMeans(pair.block_size - 1), PRICE)
    engine, seen = Engine(pair, num_slots=3, max_length=128, controller=controller), list[int]()
    for request in requests:
        engine.add(request)
    while not engine.idle:
        controller.chosen = ()
        steps = [step for step in engine.step() if step.block_size]
        free = [step.block_size - 1 for step in steps if requests[step.request_id].block_size is None]
        assert free == list(controller.chosen)
        seen += free
    assert len(set(seen)) > 2


def test_no_deeper_than_the_draft_and_no_more_than_the_engine_verifies(tiny_pair: Pair) -> None:
    """However much a forecast promises, and however little it costs."""
    switch = Switch(lambda prefill: StaticForecast((1.0,) * 20), price())
    engine = Engine(tiny_pair, num_slots=1, max_length=64, max_block_size=9, controller=switch)
    [steps] = run(engine, [Request(PROMPT, 20, stop_token_ids=NEVER)])
    assert {step.block_size for step in steps[1:-3]} == {9}
    assert switch.outcomes[1].load == Load(1, tiny_pair.block_size - 1, 8)
    for step, outcome in zip(steps[1:], switch.outcomes[1:], strict=True):
        assert len(step.tokens) <= outcome.load.num_drafted + 1


def known_text(pair: Pair, prompt: Sequence[int], text: Sequence[int]) -> KnownTexts:
    tokens = (*prompt, *text)
    return know(pair, [Text(tokens, len(prompt), len(tokens), Sampling())])


def test_a_reading_policy_chooses_by_what_a_replay_shows(tiny_pair: Pair) -> None:
    """One row: each step's depth is that of a prediction from the replayed context and the anchor's embedding."""
    pair, requests = scripted_requests(tiny_pair, Sampling(0.9, seed=5))
    of_slots = price(slot_s=0.2)
    switch = Switch(reading_policy(pair, SIZES), of_slots)
    [steps] = run(Engine(pair, num_slots=1, max_length=128, controller=switch), requests[:1])
    known = known_text(pair, PROMPT, text_of(steps))
    assert steps[0].prefill is not None
    policy = reading_policy(pair, SIZES)  # with a fresh record of what came of its forecasts
    forecast = policy(steps[0].prefill)
    assert isinstance(forecast, LearnedForecast)
    anchor, depths = len(PROMPT), list[int]()
    for step, outcome in zip(steps[1:], switch.outcomes[1:], strict=True):
        embedding = pair.target.get_input_embeddings()(known.tokens[0, anchor])
        policy.read([forecast], known.context[0, anchor - 1][None], embedding[None])
        reach = forecast.reach[: min(pair.block_size, len(PROMPT) + 40 - anchor - 1) - 1]
        depths += choose_depths([reach], of_slots, Load(0), [1.0] * 3).depths
        assert outcome.load.num_drafted == depths[-1]
        forecast.observe(depths[-1], step.block_size - 1, step.num_accepted)
        anchor += len(step.tokens)
    assert len(set(depths)) > 2


class Watched:
    """A forecast that keeps what its reader is shown, and wants depths in turn."""

    def __init__(self, reader: "Watcher", num_prompt_tokens: int) -> None:
        self.reader, self.anchor, self.num_steps = reader, num_prompt_tokens, 0
        self.shown: list[tuple[int, Tensor, Tensor]] = []

    @property
    def reach(self) -> tuple[float, ...]:
        return (1.0,) * self.reader.wanted[self.num_steps % len(self.reader.wanted)]

    def observe(self, depth: int, num_verified: int, num_accepted: int) -> None:
        assert num_accepted <= depth <= len(self.reach)
        assert (num_verified > 0) <= (depth > 0)
        self.anchor += num_accepted + 1
        self.num_steps += 1


class Watcher:
    def __init__(self, wanted: Sequence[int] = (0, 1, 2, 3)) -> None:
        self.wanted = wanted
        self.forecasts: list[Watched] = []

    def __call__(self, prefill: Prefill) -> Watched:
        self.forecasts.append(Watched(self, prefill.num_prompt_tokens))
        return self.forecasts[-1]

    def read(self, forecasts: Sequence[Watched], contexts: Tensor, anchors: Tensor) -> None:
        assert len(forecasts) == len(contexts) == len(anchors)
        for forecast, context, anchor in zip(forecasts, contexts, anchors, strict=True):
            forecast.shown.append((forecast.anchor, context.clone(), anchor.clone()))

    def chances(self, forecasts: Sequence[Watched], found: Candidates, depths: Sequence[int]) -> Tensor:
        assert len(forecasts) == len(depths)
        assert len(found.tokens) == sum(depths)
        return own_chances(found)


@pytest.mark.parametrize("wanted", [(0, 1, 2, 3), (0,), (0, 0, 0, 0, 0, 3)], ids=["mixed", "plain", "seldom"])
@pytest.mark.parametrize("num_slots", [1, 4])
def test_a_reader_is_shown_what_the_next_step_starts_from(
    tiny_pair: Pair, num_slots: int, wanted: Sequence[int]
) -> None:
    """The context vector before the anchor and the anchor's embedding, of every row before every step.

    Contexts as a replay has them; it runs the same layers on other shapes, in float32.
    """
    pair, requests = scripted_requests(tiny_pair, Sampling(0.9, seed=5))
    watcher = Watcher(wanted)
    controller = Controller(watcher, linear_price(0.01))
    steps = run(Engine(pair, num_slots=num_slots, max_length=128, controller=controller), requests)
    assert {
        step.block_size
        for of, request in zip(steps, requests, strict=True)
        for step in of[1:-3]
        if request.block_size is None
    } == {1 + depth for depth in wanted}
    of_forecasts = [of for of, request in zip(steps, requests, strict=True) if request.block_size is None]
    assert len(watcher.forecasts) == len(of_forecasts) == 5
    embeddings = pair.target.get_input_embeddings()
    for forecast, of_request in zip(watcher.forecasts, of_forecasts, strict=True):
        known = known_text(pair, PROMPT, text_of(of_request))
        for position, context, anchor in forecast.shown:
            torch.testing.assert_close(context, known.context[0, position - 1], rtol=1e-4, atol=1e-4)
            assert torch.equal(anchor, embeddings(known.tokens[0, position]))
        starts = [len(PROMPT)]
        for step in of_request[1:]:
            starts.append(starts[-1] + len(step.tokens))
        # At the prefill the policy saw it, and after the last one nothing follows.
        assert [position for position, _, _ in forecast.shown] == starts[1:-1]


class Breaking(Watcher):
    """Raises at its third step."""

    def read(self, forecasts: Sequence[Watched], contexts: Tensor, anchors: Tensor) -> None:
        if max(forecast.num_steps for forecast in forecasts) == 2:
            raise RuntimeError("no forecast")


def test_a_reader_that_raises_ends_its_own_requests_alone(tiny_pair: Pair) -> None:
    engine, failed = Engine(tiny_pair, num_slots=3, max_length=128, policy=Breaking()), list[int]()
    engine.on_failure = lambda request_id, error: failed.append(request_id)
    forecast = engine.add(Request(PROMPT, 30, stop_token_ids=NEVER))
    fixed = [engine.add(Request(PROMPT, 30, block_size=size, stop_token_ids=NEVER)) for size in (1, 4)]
    tokens = dict.fromkeys((forecast, *fixed), ())
    while not engine.idle:
        for step in engine.step():
            tokens[step.request_id] += step.tokens
    assert failed == [forecast]
    assert [tokens[each] for each in fixed] == [plain_text(tiny_pair, PROMPT, 30, Sampling())] * 2


def test_the_prefill_shows_anchor_and_temperature(tiny_pair: Pair) -> None:
    """Of a request that may draft; one that never does has neither context nor anchor."""
    engine = Engine(tiny_pair, num_slots=3, max_length=64, policy=KINDS["static"](tiny_pair))
    requests = [
        Request(PROMPT, 4, Sampling(0.7, seed=3), stop_token_ids=NEVER),
        Request(OTHER_PROMPT, 4, stop_token_ids=NEVER),
        Request(PROMPT[:7], 4, Sampling(1.3), 1, NEVER),
    ]
    prefills = [steps[0].prefill for steps in run(engine, requests)]
    for request, prefill in zip(requests[:2], prefills, strict=False):
        assert prefill is not None
        (token,) = plain_text(tiny_pair, request.prompt_ids, 1, request.sampling)
        assert prefill.anchor is not None
        assert torch.equal(prefill.anchor, tiny_pair.target.get_input_embeddings().weight[token])
        known = known_text(tiny_pair, request.prompt_ids, (token,))
        assert prefill.context is not None
        torch.testing.assert_close(prefill.context, known.prefill_context[0], rtol=1e-4, atol=1e-4)
        assert (prefill.temperature, prefill.num_prompt_tokens) == (
            request.sampling.temperature,
            len(request.prompt_ids),
        )
    plain = prefills[2]
    assert plain is not None
    assert (plain.temperature, plain.context, plain.anchor) == (1.3, None, None)


def test_setting_the_block_size_drops_the_forecast(tiny_pair: Pair) -> None:
    watcher = Watcher()
    switch = Switch(watcher, linear_price(0.01))
    engine = Engine(tiny_pair, num_slots=2, max_length=64, controller=switch)
    first, _ = (engine.add(Request(PROMPT, 30, stop_token_ids=NEVER)) for _ in range(2))
    engine.step()
    dropped, kept = watcher.forecasts
    engine.set_block_size(first, 3)
    told = dropped.num_steps, len(dropped.shown)
    for depth in watcher.wanted:
        sizes = {step.request_id: step.block_size for step in engine.step()}
        assert sizes[first] == 3
        assert switch.outcomes[-1].load.num_drafted == 2 + depth
        assert switch.outcomes[-1].num_chosen == 1
    assert (dropped.num_steps, len(dropped.shown)) == told
    assert kept.num_steps == 4


def test_a_running_request_changes_its_block_size(tiny_pair: Pair) -> None:
    engine = Engine(tiny_pair, num_slots=2, max_length=60)
    drafting = engine.add(Request((1, 2, 3), 40, block_size=4))
    plain = engine.add(Request((1, 2, 3), 40, block_size=1))
    engine.step()
    engine.set_block_size(drafting, 2)
    assert {step.request_id: step.block_size for step in engine.step()} == {drafting: 2, plain: 1}
    with pytest.raises(ValueError, match="cannot draft"):
        engine.set_block_size(plain, 2)
    with pytest.raises(ValueError, match="holds no slot"):
        engine.set_block_size(99, 2)
    with pytest.raises(ValueError, match="must be 1 to 32"):
        engine.set_block_size(drafting, 33)


def test_a_request_with_a_block_size_of_its_own_asks_no_policy(tiny_pair: Pair) -> None:
    watcher = Watcher()
    engine = Engine(tiny_pair, num_slots=2, max_length=64, policy=watcher)
    steps = run(engine, [Request(PROMPT, 9, block_size=b, stop_token_ids=NEVER) for b in (1, 5)])
    assert not watcher.forecasts
    assert [of[1].block_size for of in steps] == [1, 5]


def test_a_policy_of_the_request_comes_before_the_engines(tiny_pair: Pair) -> None:
    engine = Engine(tiny_pair, num_slots=3, max_length=64, policy=FixedPolicy(2))
    own = Request(tuple(PROMPT), 9, policy=FixedPolicy(4))
    of_requests = run(engine, [Request(tuple(PROMPT), 9), own, replace(own, block_size=3)])
    assert [steps[1].block_size for steps in of_requests] == [2, 4, 3]
    assert len({text_of(steps) for steps in of_requests}) == 1


def test_the_price_is_given_or_the_policys_and_may_change(tiny_pair: Pair) -> None:
    """Where drafts are dear nothing is drafted, from the step on that is told of it."""
    dear, cheap = linear_price(5.0), price()

    def policy() -> LearnedPolicy:
        outputs = [0.0, 0.0, 0.0, 0.0]  # half of the drafted tokens: the deeper the better
        return step_policy(tiny_pair, SIZES, outputs=outputs, price=dear)

    def first_size(engine: Engine) -> int:
        engine.add(Request(PROMPT, 30, stop_token_ids=NEVER, layout="chain"))
        engine.step()
        return engine.step()[-1].block_size

    assert first_size(Engine(tiny_pair, max_length=64, policy=policy())) == 1
    assert first_size(Engine(tiny_pair, max_length=64, controller=Controller(policy(), cheap))) == 4
    engine = Engine(tiny_pair, max_length=64, controller=Controller(KINDS["static"](tiny_pair), cheap))
    assert first_size(engine) == 4
    engine.controller = Controller(engine.controller.policy, dear)
    assert engine.step()[-1].block_size == 1


# --- bad input ---


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), 5), "prompt is empty"),
        (
            Request(tuple(range(64)), 5),
            r"64 tokens: at most 63 .* \(max_length is 64, the model's limit is 1024 tokens\)",
        ),
        (Request((5, 260), 5), "prompt token 260: must be 0 to 259"),
        (Request((5, -1), 5), "prompt token -1"),
        (Request(PROMPT, 0), "max_new_tokens 0: must be at least 1"),
        (Request(PROMPT, 5, block_size=0), "block_size 0: must be 1 to 32"),
        (Request(PROMPT, 5, block_size=33), "block_size 33: must be 1 to 32"),
    ],
)
def test_bad_requests_are_refused_before_they_queue(tiny_pair: Pair, request_: Request, message: str) -> None:
    engine = Engine(tiny_pair, num_slots=1, max_length=64)
    with pytest.raises(ValueError, match=message):
        engine.add(request_)
    assert engine.idle


@pytest.mark.parametrize(("num_slots", "max_length"), [(0, 64), (1, 1), (1, 5000)])
def test_bad_engines_are_refused(tiny_pair: Pair, num_slots: int, max_length: int) -> None:
    with pytest.raises(ValueError, match=r"num_slots 0|max_length"):
        Engine(tiny_pair, num_slots=num_slots, max_length=max_length)


def test_public_names() -> None:
    assert all(hasattr(bp, name) for name in bp.__all__)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_emits_the_text_of_one_token_at_a_time(tiny_pair_dirs: tuple[str, str]) -> None:
    pair = bp.load_pair(target=str(tiny_pair_dirs[0]), draft=str(tiny_pair_dirs[1]), device="cuda", dtype="float32")
    texts = {
        text_of(list(generate(pair, PROMPT, block_size=b, max_new_tokens=40, temperature=1.0, stop_token_ids=NEVER)))
        for b in (1, 2, 4, 8)
    }
    assert len(texts) == 1
