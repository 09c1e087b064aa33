"""Timing of requests that flow through an engine: sums, shares of steps, and flows that are interleaved."""

import dataclasses
import time
from types import SimpleNamespace

import pytest

from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.evaluation import measurement
from blockpilot.evaluation.measurement import Flow, RequestTiming, in_turns
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Prompt
from blockpilot.types import Prefill, Request, Sampling
from helpers.evaluations import NUM_TOKENS


def requests(pair: Pair, texts: list[Prompt], block_size: int | None, temperature: float = 0.0) -> list[Request]:
    sampling, stops = Sampling(temperature=temperature, seed=5), pair.stop_token_ids
    return [Request(text.encode(pair.tokenizer), NUM_TOKENS, sampling, block_size, stops) for text in texts]


def unstopped(pair: Pair, texts: list[Prompt]) -> list[Request]:
    """Plain requests that all run to their limit."""
    return [dataclasses.replace(request, stop_token_ids=frozenset()) for request in requests(pair, texts, 1)]


def timings(engine: Engine, flow_requests: list[Request]) -> list[RequestTiming]:
    flow = Flow(engine, flow_requests)
    in_turns([flow], 3)
    assert engine.idle
    return flow.results


@pytest.mark.parametrize(("block_size", "num_requests", "num_slots"), [(1, 3, 3), (2, 4, 2), (4, 3, 1)])
def test_sums_are_those_of_single_runs(
    tiny_pair: Pair, questions: list[Prompt], block_size: int, num_requests: int, num_slots: int
) -> None:
    texts = questions[:num_requests]
    engine = Engine(tiny_pair, num_slots=num_slots, max_length=256)
    started = time.perf_counter()
    measured = timings(engine, requests(tiny_pair, texts, block_size, temperature=1.0))
    elapsed_s = time.perf_counter() - started
    for text, timing in zip(texts, measured, strict=True):
        prompt_ids = text.encode(tiny_pair.tokenizer)
        steps = [*generate(tiny_pair, prompt_ids, block_size=block_size, max_new_tokens=12, temperature=1.0, seed=5)]
        verified = [step for step in steps if step.block_size]
        totals = timing.totals(reference=timing.output)
        assert timing.output == [token for step in steps for token in step.tokens]
        assert totals.num_verified == len(verified)
        assert totals.num_emitted == sum(len(step.tokens) for step in verified) == totals.num_tokens - 1
        assert totals.sum_block_sizes == sum(step.block_size for step in verified)
        assert totals.num_later_tokens < totals.num_tokens
        assert 0 < totals.later_s < totals.total_s
    assert 0.2 * elapsed_s < sum(timing.total_s for timing in measured) <= elapsed_s


@pytest.fixture
def steps_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every step take one second on the measurement's clock; the engine's clock is separate."""
    seconds = iter(range(10_000))
    monkeypatch.setattr(measurement, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))


@pytest.mark.usefixtures("steps_of_a_second")
def test_shares_are_those_of_full_batches(tiny_pair: Pair, questions: list[Prompt]) -> None:
    """Half of every step for each of three plain requests in two slots; the third never runs alone."""
    measured = timings(Engine(tiny_pair, num_slots=2, max_length=256), unstopped(tiny_pair, questions[:3]))
    assert [len(timing.output) for timing in measured] == [NUM_TOKENS] * 3
    for timing in measured:
        assert timing.total_s == NUM_TOKENS / 2
        # Two of a request's steps have a prefill: its own, and that of the request that starts next to it.
        assert timing.num_later_steps == timing.later_s == (NUM_TOKENS - 2) / 2
        assert timing.num_later_tokens == NUM_TOKENS - 2


def test_requests_begin_one_after_the_other_in_a_full_batch(tiny_pair: Pair, questions: list[Prompt]) -> None:
    engine = Engine(tiny_pair, num_slots=4, max_length=256)
    flow = Flow(engine, unstopped(tiny_pair, questions[:8]))
    num_begun, num_rows = list[int](), list[int]()
    while not flow.done:
        before = sum(bool(timing.output) for timing in flow.results)
        flow.step()
        num_begun.append(sum(bool(timing.output) for timing in flow.results) - before)
        num_rows.append(engine.num_active)
    assert max(num_begun) == 1
    assert sum(num_begun) == 8
    assert min(num_rows[:-1]) >= 3  # a row that ended is replaced in the next step


@pytest.mark.usefixtures("steps_of_a_second")
def test_all_parts_of_a_long_prompt_are_timed(tiny_pair: Pair) -> None:
    """Chunked prefill in five steps, the last of which emits a token, and one more step."""
    engine = Engine(tiny_pair, num_slots=1, max_length=600, max_prefill_tokens=20)
    (timing,) = timings(engine, [Request(tuple(range(1, 101)), 2, block_size=1)])
    assert (timing.total_s, timing.later_s) == (6, 1)


def test_prefill_and_policy_are_inside_the_end_to_end_time(tiny_pair: Pair, questions: list[Prompt]) -> None:
    def slow(prefill: Prefill) -> int:
        time.sleep(0.2)
        return 3

    engine = Engine(tiny_pair, num_slots=2, max_length=256, policy=slow)
    measured = timings(engine, requests(tiny_pair, questions[:2], None))
    assert all(0.2 <= timing.total_s - timing.later_s < timing.total_s for timing in measured)
    assert [timing.block_sizes[0] for timing in measured] == [3, 3]


def test_flows_are_interleaved_and_end_together(tiny_pair: Pair, questions: list[Prompt]) -> None:
    """Flows of one and of two tokens a step, interleaved by six tokens of each."""
    tokens: list[str] = []

    class Recorded(Flow):
        def step(self) -> None:
            before = self.num_tokens
            super().step()
            tokens.append(names[id(self)] * (self.num_tokens - before))

    plain_requests = unstopped(tiny_pair, questions[:2])
    alone, both = (Recorded(Engine(tiny_pair, num_slots=n, max_length=256), plain_requests) for n in (1, 2))
    names = {id(alone): "a", id(both): "b"}
    in_turns([alone, both], 6)
    assert tokens[:10] == [*"aaaaaa", "bb", "bb", "bb", "a"]
    assert alone.done
    assert both.done
    assert "".join(tokens).rindex("b") > len("".join(tokens)) // 2


def test_seconds_scale_with_the_machine_and_only_equal_texts_count_as_equal() -> None:
    timing = RequestTiming([1, 2, 3], [2], total_s=4.0, num_later_tokens=2, num_later_steps=1.5, later_s=3.0)
    assert timing.at_pace(0.5) == RequestTiming([1, 2, 3], [2], 2.0, 2, 1.5, 1.5)
    assert [timing.totals(text).num_equal for text in ([1, 2, 3], [1, 2], [1, 2, 3, 4], [1, 3, 2])] == [1, 0, 0, 0]
