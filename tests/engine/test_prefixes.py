"""Prefix cache: requests with a common prefix reuse keys and values; all results are those without the cache."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from blockpilot.engine.engine import Engine
from blockpilot.engine.prefixes import PAGE, Prefixes
from blockpilot.engine.rows import Row
from blockpilot.models.cache import SlotCache
from blockpilot.pairs.loading import Pair
from blockpilot.types import Layout, Prefill, Request, Sampling, Step
from helpers.controllers import Told, Watched
from helpers.engines import NEVER, plain_text, run, text_of

HOT = Sampling(6.0, seed=5)  # with shared noise a random draft is often right here
SYSTEM = tuple(torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(1)).tolist())
QUESTIONS = tuple(tuple(range(10 * i, 10 * i + 12)) for i in range(4))
PAIRS = ("tiny_pair", "markov_pair", "dflash2_pair", "eagle_pair")


def engine_of(pair: Pair, **options: Any) -> Engine:
    return Engine(pair, **{"num_slots": 3, "max_length": 256, "prefix_tokens": 4096, **options})


def looks(steps: Sequence[Step]) -> list[Any]:
    """All results that depend on the draft: tokens, block sizes, numbers of accepted tokens, and trees."""
    return [(step.tokens, step.block_size, step.num_accepted, step.tree) for step in steps]


def asked(
    prompt: Sequence[int], num: int = 30, sampling: Sampling = HOT, size: int | None = 6, layout: Layout = "tree"
) -> Request:
    return Request(tuple(prompt), num, sampling, size, NEVER, layout=layout)


# --- cached pages ---

CONFIG = LlamaConfig(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2)


class Kept:
    """Prefixes over two small caches, whose columns hold a hash of the text up to the next token."""

    def __init__(self, num_tokens: int) -> None:
        self.caches = [SlotCache(CONFIG, 2, 128, torch.float32, torch.device("cpu")) for _ in range(2)]
        self.prefixes = Prefixes(*self.caches, num_tokens)

    def reuse(self, text: Sequence[int], salt: str, drafts: bool) -> int:
        """Number of prompt tokens that a request reuses; checks their columns."""
        row = self._row(text, salt, drafts)
        self.prefixes.reuse(row, 1)
        assert row.num_reused == row.num_cached < len(text)
        for cache, column_hashes in zip(self.caches[: 1 + drafts], self._columns(text, salt), strict=False):
            for column in range(row.num_reused):
                assert (cache.layers[:, :, 1, :, column] == column_hashes[column]).all()
        return row.num_reused

    def keep(self, text: Sequence[int], salt: str, drafts: bool) -> None:
        for cache, column_hashes in zip(self.caches[: 1 + drafts], self._columns(text, salt), strict=False):
            for column, number in enumerate(column_hashes):
                cache.layers[:, :, 0, :, column] = number
        self.prefixes.keep([self._row(text, salt, drafts)], [Step(0, (1,), 1, 0, "length")])

    def waits(self, waiting: tuple[list[int], str, bool], prefilling: tuple[list[int], str, bool]) -> bool:
        """True if a request waits for another one in prefill."""
        return self.prefixes.worth_waiting(self._row(*waiting), [self._row(*prefilling)])

    def _row(self, text: Sequence[int], salt: str, drafts: bool) -> Row:
        return Row(0, Request(tuple(text), 1, cache_salt=salt), 128, list(text), None, can_draft=drafts)

    def _columns(self, text: Sequence[int], salt: str) -> list[list[int]]:
        return [[hash((by, len(salt), *text[: end + 2])) % 10**6 for end in range(len(text) - 1)] for by in (1, 2)]


HALF_PAGES = st.lists(st.integers(0, 1), min_size=1, max_size=7)
TEXTS = HALF_PAGES.map(lambda starts: [10 * start + i for start in starts for i in range(PAGE // 2)])


@given(
    st.lists(st.tuples(TEXTS, st.sampled_from(["", "a"]), st.booleans()), min_size=8, max_size=30),
    st.sampled_from([0, 1, 3, 4, 9]),
)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_a_slot_is_filled_with_what_its_tokens_made(texts: list[tuple[list[int], str, bool]], num: int) -> None:
    """Reused columns have the same tokens and salt after any evictions; the latest text is cached if it fits."""
    kept = Kept(num * PAGE + 3)
    for text in texts:
        kept.reuse(*text)
        kept.keep(*text)
        assert kept.prefixes.num_tokens <= num * PAGE
        assert kept.reuse(*text) == min(num, (len(text[0]) - 1) // PAGE) * PAGE


def test_what_was_not_used_for_longest_goes_first() -> None:
    first, second, third = ([start, *range(1, 2 * PAGE + 1)] for start in (100, 200, 300))
    kept = Kept(4 * PAGE)
    for text in (first, second):
        kept.keep(text, "", True)
    assert kept.reuse(first, "", True) == 2 * PAGE
    kept.keep(third, "", True)
    assert [kept.reuse(text, "", True) for text in (second, first, third)] == [0, 2 * PAGE, 2 * PAGE]
    kept.keep(range(400, 401 + PAGE), "", True)
    assert kept.reuse(first, "", True) == PAGE  # evicted from its end


def test_a_request_waits_for_what_it_shares_and_does_not_find() -> None:
    kept, text = Kept(16 * PAGE), list(range(5 * PAGE))  # sharing 64 tokens is worth waiting for
    assert kept.waits((text, "", True), prefilling=(text[:64], "", True))
    assert not kept.waits((text, "", True), prefilling=(text[:63], "", True))
    assert not kept.waits((text[:63], "", True), prefilling=(text[:63], "", True))
    assert not kept.waits(([*text[:63], 0], "", True), prefilling=(text, "", True))
    assert not kept.waits((text, "a", True), prefilling=(text, "", True))
    assert not kept.waits((text, "", True), prefilling=(text, "", False))
    assert kept.waits((text, "", False), prefilling=(text, "", True))
    kept.keep(text[: PAGE + 1], "", True)
    assert kept.waits((text, "", True), prefilling=(text, "", True))  # 16 cached, 64 more shared
    assert not kept.waits((text, "", True), prefilling=(text[:-1], "", True))


# --- requests with a common prefix ---


@pytest.mark.parametrize("pair", PAIRS, indirect=True)
@pytest.mark.parametrize(("sampling", "layout"), [(Sampling(), "tree"), (HOT, "chain"), (HOT, "tree")])
def test_steps_on_a_hit_are_those_on_a_miss(pair: Pair, sampling: Sampling, layout: Layout) -> None:
    """Same proposals and acceptance, too, in three turns of a chat; answers were drafted, and partly rejected."""
    engine, prompt = engine_of(pair), (*SYSTEM, *QUESTIONS[0])
    for turn, question in enumerate(QUESTIONS[1:]):
        request = asked(prompt, sampling=sampling, layout=layout)
        [steps], [expected] = run(engine, [request]), run(engine_of(pair, prefix_tokens=0), [request])
        assert looks(steps) == looks(expected)
        assert text_of(steps) == plain_text(pair, prompt, 30, sampling)
        num_old = len(prompt) - len(question) - 1
        assert [step.num_reused for step in steps] == [num_old // PAGE * PAGE if turn else 0] + [0] * (len(steps) - 1)
        for seen, whole in zip(steps[0].prefill[:2], expected[0].prefill[:2], strict=True):  # type: ignore[index]
            torch.testing.assert_close(seen, whole, rtol=1e-4, atol=1e-4)
        prompt = (*prompt, *text_of(steps), *question)


@pytest.mark.parametrize("pair", PAIRS, indirect=True)
def test_texts_that_part_where_a_page_ends(pair: Pair) -> None:
    """The last common page is not shared: an EAGLE-3 entry depends on the token after it."""
    engine = engine_of(pair)
    first, last = (asked((*SYSTEM[: 4 * PAGE], *question)) for question in QUESTIONS[:2])
    run(engine, [first])
    [steps], [expected] = run(engine, [last]), run(engine_of(pair), [last])
    assert steps[0].num_reused == 3 * PAGE
    assert looks(steps) == looks(expected)


@pytest.mark.parametrize("plainly", ["asked for", "chosen"])
def test_only_a_row_that_never_drafts_leaves_no_context_to_those_that_do(eagle_pair: Pair, plainly: str) -> None:
    """Context is cached for a row whose steps are all plain by choice of the controller: it may still draft."""
    engine = engine_of(eagle_pair, controller=Told(3, [(0, 0)]))
    first, *later_prompts = ((*SYSTEM, *question) for question in QUESTIONS)
    size = 1 if plainly == "asked for" else None
    run(engine, [asked(first, size=size)])
    [also_plain] = run(engine, [asked(later_prompts[0], size=size)])
    assert not any(step.tree.tokens for step in also_plain)
    for prompt, num in zip(later_prompts[1:], (0 if size else 64, 64), strict=True):
        [steps] = run(engine, [asked(prompt)])
        assert steps[0].num_reused == num
        assert looks(steps) == looks(run(engine_of(eagle_pair), [asked(prompt)])[0])
    assert also_plain[0].num_reused == 64
    assert text_of(also_plain) == plain_text(eagle_pair, later_prompts[0], 30, HOT)


def test_choices_of_one_prompt_compute_it_once(tiny_pair: Pair) -> None:
    """Other requests wait until the first one's prefill is complete, although slots and prefill tokens are free."""
    controller = Watched(tiny_pair.block_size - 1)
    engine = engine_of(tiny_pair, num_slots=5, controller=controller, max_prefill_tokens=200)
    requests = [asked(SYSTEM, 10, replace(HOT, seed=i), None, "auto") for i in range(4)]
    unrelated = asked(QUESTIONS[0], 10)
    answers = run(engine, [requests[0], unrelated, *requests[1:]])
    assert [steps[0].num_reused for steps in answers] == [0, 0, 64, 64, 64]
    taken = [outcome.num_prompt_tokens for outcome in controller.outcomes]
    assert taken[:3] == [len(SYSTEM) + len(QUESTIONS[0]), 3 * (len(SYSTEM) - 64), 0]
    for request, steps in zip((requests[0], unrelated, *requests[1:]), answers, strict=True):
        assert text_of(steps) == plain_text(tiny_pair, request.prompt_ids, 10, request.sampling)


def test_who_waits_for_a_prompt_goes_on_without_it(tiny_pair: Pair) -> None:
    """The other request continues when a long one is cancelled in chunked prefill, of which nothing is cached."""
    engine = engine_of(tiny_pair, max_prefill_tokens=30)
    gone, stays = engine.add(asked(SYSTEM)), engine.add(asked(SYSTEM))
    engine.step(), engine.step()
    engine.cancel(gone)
    steps = list[Step]()
    while not engine.idle:
        steps += engine.step()
    assert {step.request_id for step in steps} == {stays}
    assert steps[0].num_reused == 0
    assert text_of(steps) == plain_text(tiny_pair, SYSTEM, 30, HOT)


def test_nothing_is_kept_of_requests_that_fail_or_whose_step_does(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(prefill: Prefill) -> int:
        raise RuntimeError("no")

    engine, failed = engine_of(tiny_pair, policy=refuse), list[int]()
    engine.on_failure = lambda request_id, error: failed.append(request_id)
    run(engine, [asked(SYSTEM, size=None)])
    assert (failed, engine.num_kept_tokens) == ([0], 0)
    request_id = engine.add(asked(SYSTEM))
    engine.step()
    num_kept = engine.num_kept_tokens
    with monkeypatch.context() as patch:
        patch.setattr(engine._drafter, "update_cache", refuse)
        for _ in range(8):
            with pytest.raises(TypeError):
                engine.step()
    engine.cancel(request_id)
    assert engine.num_kept_tokens == num_kept == 64
