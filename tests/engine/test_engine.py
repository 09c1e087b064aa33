"""The engine's text is the target's own, whatever the block sizes, the batch and the acceptance."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import blockpilot as bp
from blockpilot.control.choose import choose
from blockpilot.control.controller import Controller, FixedPolicy
from blockpilot.drafts.dflash import DraftModel
from blockpilot.engine.engine import Engine, generate
from blockpilot.evaluation.baselines import EVController, StaticForecast
from blockpilot.models.cache import SlotView
from blockpilot.models.packing import Packing
from blockpilot.pairs.loading import Pair
from blockpilot.policy.learned import LearnedForecast, LearnedPolicy
from blockpilot.sweep.replay import KnownTexts, Text, know
from blockpilot.types import CandidateSet, Forecast, Policy, Prefill, Request, Sampling, Step
from helpers.costs import linear_costs
from helpers.engines import NEVER, PROMPT, plain_text, run, text_of
from helpers.policies import reading_policy, step_policy


class ScriptedDraft(DraftModel):
    """A draft that knows the text and errs where it is told to: acceptance becomes an oracle's business."""

    def script(self, pair: Pair, text: Sequence[int], wrong: frozenset[int]) -> "ScriptedDraft":
        """text[p] is the token at absolute position p; it drafts another one at positions in `wrong`."""
        self.embedding = pair.target.get_input_embeddings().weight.detach()
        self.text, self.wrong = list(text) + [0] * 64, wrong
        pad = pair.target.config.pad_token_id
        assert not {pad - 1, pad} & {*text}  # the target's embedding of it is zero: no draft could mean it
        return self

    def propose(self, block: Tensor, positions: Tensor, cache: SlotView, packing: Packing) -> Tensor:
        super().propose(block, positions, cache, packing)
        tokens = [
            [(self.text[p] + (p in self.wrong)) % len(self.embedding) for p in row] for row in positions.tolist()
        ]
        # Tied embeddings: the LM head's best match of a scaled embedding is its own token.
        normed = self.embedding / self.embedding.norm(dim=1, keepdim=True).square()
        return normed[torch.tensor(tokens)] * 1e3


def scripted_pair(pair: Pair, text: Sequence[int], wrong: frozenset[int]) -> Pair:
    draft = ScriptedDraft(pair.draft.config).eval().requires_grad_(False).script(pair, text, wrong)
    return Pair(pair.id, pair.target, draft, pair.tokenizer)


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

    for name in ("propose", "extend", "fuse"):
        monkeypatch.setattr(tiny_pair.draft, name, fail)
    steps = list(generate(tiny_pair, PROMPT, block_size=1, max_new_tokens=8, stop_token_ids=NEVER))
    assert len(text_of(steps)) == 8
    assert steps[0].prefill is not None
    assert steps[0].prefill.context is None


# --- policies that give a forecast ---

SIZES = CandidateSet((1, 2, 4, 7))
COSTS = linear_costs(0.12)  # the wider a step and the more rows, the dearer
OTHER_PROMPT = tuple(range(70, 82))


KINDS: dict[str, Callable[[Pair], Policy]] = {
    "static": lambda pair: lambda prefill: StaticForecast(SIZES, [1.0, 1.7, 2.4, 2.8]),
    "ev": lambda pair: EVController(SIZES),
    "reading": lambda pair: reading_policy(pair, SIZES.sizes),
}


def scripted_requests(pair: Pair, sampling: Sampling, num: int = 40) -> tuple[Pair, list[Request]]:
    """A draft that errs at every third and every eleventh position of one text; rows of it, and two of fixed size.

    They end at different lengths; with fewer slots than requests, some join late.
    """
    text = PROMPT + plain_text(pair, PROMPT, num, sampling)
    wrong = frozenset(range(0, len(text), 3)) & frozenset(range(0, 30)) | frozenset(range(0, len(text), 11))
    plain = [Request(PROMPT, length, sampling, stop_token_ids=NEVER) for length in (num, 14, 25, 1, 31)]
    fixed = [Request(OTHER_PROMPT[:n], 9 + n, sampling, n, NEVER) for n in (1, 3)]
    return scripted_pair(pair, text, wrong), [plain[0], fixed[0], *plain[1:4], fixed[1], plain[4]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("num_slots", [1, 4])
def test_forecasts_never_change_the_text(tiny_pair: Pair, kind: str, temperature: float, num_slots: int) -> None:
    """One after the other, and in a batch with rows of fixed size, in fp32: the target's own text, token by token."""
    pair, requests = scripted_requests(tiny_pair, Sampling(temperature, seed=5))
    engine = Engine(pair, num_slots=num_slots, max_length=128, controller=Controller(KINDS[kind](pair), COSTS))
    steps = run(engine, requests)
    for request, of_request in zip(requests, steps, strict=True):
        expected = plain_text(tiny_pair, request.prompt_ids, request.max_new_tokens, request.sampling)
        assert text_of(of_request) == expected
        if request.block_size is not None:
            assert of_request[1].block_size == max(step.block_size for step in of_request) == request.block_size
    chosen = [of for of, request in zip(steps, requests, strict=True) if request.block_size is None]
    sizes = {step.block_size for of_request in chosen for step in of_request[1:-1]}
    assert len(sizes & set(SIZES)) > (0 if kind == "static" and num_slots == 1 else 1)


class Shadow:
    """What rows of a running engine are, told by its steps alone: the load that every choice was made at."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.lengths = [len(request.prompt_ids) for request in requests]
        self.forecasts: dict[int, Forecast] = {}

    def room(self, i: int) -> int:
        return len(self.requests[i].prompt_ids) + self.requests[i].max_new_tokens - self.lengths[i]

    def check(self, steps: Sequence[Step], policy: Callable[[], Forecast], costs: bp.StepCosts | None) -> list[int]:
        """Compare the block sizes of one step of the engine with `choose`; returns those of the forecasts."""
        for step in steps:
            if step.block_size == 0:
                self.lengths[step.request_id] += 1
                if self.requests[step.request_id].block_size is None:
                    self.forecasts[step.request_id] = policy()
        decoded = [step for step in steps if step.block_size]
        choosing = [step for step in decoded if step.request_id in self.forecasts]
        others = [
            min(self.requests[step.request_id].block_size or 0, self.room(step.request_id))
            for step in decoded
            if step.request_id not in self.forecasts
        ]
        assert [step.block_size for step in decoded if step.request_id not in self.forecasts] == others
        sizes: list[int] = []
        if choosing:
            sizes = choose([self.forecasts[step.request_id] for step in choosing], costs, others)
            rooms = [self.room(step.request_id) for step in choosing]
            assert [step.block_size for step in choosing] == [min(pair) for pair in zip(sizes, rooms, strict=True)]
        for step in decoded:
            self.lengths[step.request_id] += len(step.tokens)
            if step.request_id in self.forecasts:
                self.forecasts[step.request_id].observe(step.block_size, step.num_accepted)
        return sizes


@pytest.mark.parametrize("costs", [COSTS, None], ids=["costs", "no costs"])
@pytest.mark.parametrize("num_slots", [1, 3, 7])
def test_every_step_has_the_sizes_of_its_load(tiny_pair: Pair, num_slots: int, costs: bp.StepCosts | None) -> None:
    """Rows join and leave: each step's choice is that of `choose` for the rows that there are, at their lengths."""
    pair, requests = scripted_requests(tiny_pair, Sampling())
    engine = Engine(pair, num_slots=num_slots, max_length=128, controller=Controller(KINDS["static"](pair), costs))
    shadow, seen = Shadow(requests), []
    for request in requests:
        engine.add(request)
    while not engine.idle:
        seen += shadow.check(engine.step(), lambda: StaticForecast(SIZES, [1.0, 1.7, 2.4, 2.8]), costs)
    assert set(seen) == ({7} if costs is None else {4} if num_slots == 1 else set(seen))
    assert len(set(seen)) > 1 or costs is None or num_slots == 1


@pytest.mark.parametrize("num_slots", [1, 3])
def test_running_means_see_every_step(tiny_pair: Pair, num_slots: int) -> None:
    """A controller that is told the engine's steps afterwards chooses the same sizes."""
    pair, requests = scripted_requests(tiny_pair, Sampling())
    controller = EVController(SIZES)
    engine = Engine(pair, num_slots=num_slots, max_length=128, controller=Controller(EVController(SIZES), COSTS))
    shadow, seen = Shadow(requests), []
    for request in requests:
        engine.add(request)
    while not engine.idle:
        seen += shadow.check(engine.step(), lambda: controller(Prefill(torch.zeros(1), None, 1)), COSTS)
    assert len(set(seen)) > 1


def known_text(pair: Pair, prompt: Sequence[int], text: Sequence[int]) -> KnownTexts:
    tokens = (*prompt, *text)
    return know(pair, [Text(tokens, len(prompt), len(tokens), Sampling())], keep_context=True)


def test_a_reading_policy_chooses_by_what_a_replay_shows(tiny_pair: Pair) -> None:
    """One row: each step's size is that of a prediction from the replayed context and the anchor's embedding."""
    pair, requests = scripted_requests(tiny_pair, Sampling(0.9, seed=5))
    policy = reading_policy(pair, SIZES.sizes)
    engine = Engine(pair, num_slots=1, max_length=128, controller=Controller(policy, COSTS))
    [steps] = run(engine, requests[:1])
    known = known_text(pair, PROMPT, text_of(steps))
    assert known.context is not None
    assert steps[0].prefill is not None
    policy = reading_policy(pair, SIZES.sizes)  # with a fresh record of what came of its forecasts
    forecast = policy(steps[0].prefill)
    assert isinstance(forecast, LearnedForecast)
    anchor, sizes = len(PROMPT), []
    for step in steps[1:]:
        embedding = pair.target.get_input_embeddings()(known.tokens[0, anchor])
        policy.read([forecast], known.context[0, anchor - 1][None], embedding[None])
        (size,) = choose([forecast], COSTS)
        assert step.block_size == min(size, len(PROMPT) + 40 - anchor - 1)
        forecast.observe(step.block_size, step.num_accepted)
        sizes.append(size)
        anchor += len(step.tokens)
    assert len(set(sizes)) > 2


class Watched:
    """A forecast that keeps what its reader is shown, and wants blocks of some sizes in turn."""

    candidates = SIZES

    def __init__(self, reader: "Watcher", num_prompt_tokens: int) -> None:
        self.reader, self.anchor, self.num_steps = reader, num_prompt_tokens, 0
        self.shown: list[tuple[int, Tensor, Tensor]] = []

    @property
    def taus(self) -> list[float]:
        wanted = self.reader.wanted[self.num_steps % len(self.reader.wanted)]
        return [2.0 if size == wanted else 1.0 for size in SIZES]

    def observe(self, block_size: int, num_accepted: int) -> None:
        self.anchor += num_accepted + 1
        self.num_steps += 1


class Watcher:
    def __init__(self, wanted: Sequence[int] = SIZES.sizes) -> None:
        self.wanted = wanted
        self.forecasts: list[Watched] = []

    def __call__(self, prefill: Prefill) -> Watched:
        self.forecasts.append(Watched(self, prefill.num_prompt_tokens))
        return self.forecasts[-1]

    def read(self, forecasts: Sequence[Watched], contexts: Tensor, anchors: Tensor) -> None:
        assert len(forecasts) == len(contexts) == len(anchors)
        for forecast, context, anchor in zip(forecasts, contexts, anchors, strict=True):
            forecast.shown.append((forecast.anchor, context.clone(), anchor.clone()))


@pytest.mark.parametrize("wanted", [SIZES.sizes, (1,), (1, 1, 1, 1, 1, 4)], ids=["mixed", "plain", "seldom"])
@pytest.mark.parametrize("num_slots", [1, 4])
def test_a_reader_is_shown_what_the_next_step_starts_from(
    tiny_pair: Pair, num_slots: int, wanted: Sequence[int]
) -> None:
    """The context vector before the anchor and the anchor's embedding, of every row at every step that drafts.

    Contexts as a replay has them; it runs the same layers on other shapes, in float32.
    """
    pair, requests = scripted_requests(tiny_pair, Sampling(0.9, seed=5))
    watcher = Watcher(wanted)
    steps = run(Engine(pair, num_slots=num_slots, max_length=128, policy=watcher), requests)
    of_forecasts = [of for of, request in zip(steps, requests, strict=True) if request.block_size is None]
    assert len(watcher.forecasts) == len(of_forecasts) == 5
    embeddings = pair.target.get_input_embeddings()
    for forecast, of_request in zip(watcher.forecasts, of_forecasts, strict=True):
        known = known_text(pair, PROMPT, text_of(of_request))
        assert known.context is not None
        for position, context, anchor in forecast.shown:
            torch.testing.assert_close(context, known.context[0, position - 1], rtol=1e-4, atol=1e-4)
            assert torch.equal(anchor, embeddings(known.tokens[0, position]))
        starts = [len(PROMPT)]
        for step in of_request[1:]:
            starts.append(starts[-1] + len(step.tokens))
        shown = [position for position, _, _ in forecast.shown]
        if num_slots == 1:
            assert shown == starts[1:-1]  # at the prefill the policy saw it, and after the last nothing follows
        else:  # many rows that do not draft may wait
            drafted = [
                start for step, start in zip(of_request[1:-1], starts[1:-1], strict=False) if step.block_size > 1
            ]
            assert set(drafted) <= set(shown) <= set(starts[1:-1])
            assert shown == sorted(set(shown))
            assert shown or len(starts) < 10


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
    engine = Engine(tiny_pair, num_slots=2, max_length=64, policy=watcher)
    first, second = (engine.add(Request(PROMPT, 30, stop_token_ids=NEVER)) for _ in range(2))
    engine.step()
    dropped, kept = watcher.forecasts
    engine.set_block_size(first, 3)
    told = dropped.num_steps, len(dropped.shown)
    for _ in range(4):
        sizes = {step.request_id: step.block_size for step in engine.step()}
        assert sizes[first] == 3
    assert (dropped.num_steps, len(dropped.shown)) == told
    assert kept.num_steps == 4
    assert sizes[second] == SIZES[3]


def test_a_request_with_a_block_size_of_its_own_asks_no_policy(tiny_pair: Pair) -> None:
    watcher = Watcher()
    engine = Engine(tiny_pair, num_slots=2, max_length=64, policy=watcher)
    steps = run(engine, [Request(PROMPT, 9, block_size=b, stop_token_ids=NEVER) for b in (1, 5)])
    assert not watcher.forecasts
    assert [of[1].block_size for of in steps] == [1, 5]


def test_a_forecast_beyond_the_engines_blocks_is_an_error(tiny_pair: Pair) -> None:
    engine = Engine(tiny_pair, num_slots=1, max_length=64, policy=KINDS["static"](tiny_pair), max_block_size=6)
    engine.add(Request(PROMPT, 9))
    with pytest.raises(ValueError, match="the policy's largest block size 7: must be 1 to 6"):
        engine.step()


def test_a_policy_of_the_request_comes_before_the_engines(tiny_pair: Pair) -> None:
    engine = Engine(tiny_pair, num_slots=3, max_length=64, policy=FixedPolicy(2))
    own = Request(tuple(PROMPT), 9, policy=FixedPolicy(4))
    of_requests = run(engine, [Request(tuple(PROMPT), 9), own, replace(own, block_size=3)])
    assert [steps[1].block_size for steps in of_requests] == [2, 4, 3]
    assert len({text_of(steps) for steps in of_requests}) == 1


def test_costs_are_given_or_the_policys_and_may_change(tiny_pair: Pair) -> None:
    """Where drafts are dear nothing is drafted, from the step on that is told of it."""
    dear, cheap = linear_costs(5.0), linear_costs(0.0)

    def policy() -> LearnedPolicy:
        outputs = [0.0, 0.0, 0.0, 0.0]  # half of the drafted tokens: the wider the better
        return step_policy(tiny_pair, SIZES.sizes, outputs=outputs, costs=dear)

    def first_size(engine: Engine) -> int:
        engine.add(Request(PROMPT, 30, stop_token_ids=NEVER))
        engine.step()
        return engine.step()[-1].block_size

    assert first_size(Engine(tiny_pair, max_length=64, policy=policy())) == 1
    assert first_size(Engine(tiny_pair, max_length=64, controller=Controller(policy(), cheap))) == 7
    engine = Engine(tiny_pair, max_length=64, policy=KINDS["static"](tiny_pair))
    assert first_size(engine) == 7
    engine.controller = Controller(engine.controller.policy, dear)
    assert engine.step()[-1].block_size == 1


# --- bad input ---


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), 5), "prompt is empty"),
        (Request(tuple(range(64)), 5), "prompt of 64 tokens: at most 63"),
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
    pair = bp.load_pair(target=str(tiny_pair_dirs[0]), draft=str(tiny_pair_dirs[1]), device="cuda")
    texts = {
        text_of(list(generate(pair, PROMPT, block_size=b, max_new_tokens=40, temperature=1.0, stop_token_ids=NEVER)))
        for b in (1, 2, 4, 8)
    }
    assert len(texts) == 1
