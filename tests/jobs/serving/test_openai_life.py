"""The life of a request, at the level of ASGI: clients that vanish, full queues, deadlines, engines that fail."""

import asyncio
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi.testclient import TestClient
from torch import Tensor

from blockpilot.control.controller import FixedPolicy
from blockpilot.engine.batch import Batch
from blockpilot.engine.generate import generate
from blockpilot.pairs.loading import Pair
from blockpilot.types import Prefill, Request, Step
from helpers.api import COMPLETIONS, LONG, HttpCall, app_of, check_error, client_of, idle, replica_of, until
from helpers.patience import patient
from jobs.serving import engine_loop, policies
from jobs.serving.api import GONE, Exchange, Limits
from jobs.serving.engine_loop import MAX_FAILURES
from jobs.serving.replica import Replica

MAX_LENGTH = 300

Scores = tuple[Tensor, Tensor | None]


@pytest.fixture
def replica(tiny_pair: Pair) -> Iterator[Replica]:
    with replica_of(tiny_pair, num_slots=4, max_length=MAX_LENGTH, max_queue=8) as replica:
        yield replica


def test_a_vanished_client_frees_its_row_and_no_other(replica: Replica, tiny_pair: Pair) -> None:
    app = app_of(replica)
    ids = tuple(tiny_pair.tokenizer("Once")["input_ids"])
    steps = generate(tiny_pair, ids, block_size=1, max_new_tokens=250)
    want = tiny_pair.tokenizer.decode([t for step in steps for t in step.tokens], skip_special_tokens=True)

    async def scene() -> None:
        stays = HttpCall(app, COMPLETIONS, LONG)
        streamed = HttpCall(app, COMPLETIONS, LONG | {"stream": True})
        plain = HttpCall(app, COMPLETIONS, LONG)
        await streamed.until("data: ")
        await until(lambda: replica.loop.num_in_flight == 3)
        await plain.vanish()
        await streamed.vanish()
        assert "[DONE]" not in streamed.text
        assert plain.status != 200
        await until(lambda: (replica.loop.num_in_flight, replica.loop.engine.num_active) == (1, 1))
        assert not stays.task.done()
        await stays.task
        assert json.loads(stays.text)["choices"][0]["text"] == want
        await idle(replica)

    asyncio.run(scene())


def test_full_queue_is_429_at_once_and_recovers(tiny_pair: Pair) -> None:
    with replica_of(tiny_pair, num_slots=1, max_length=MAX_LENGTH, max_queue=1) as replica:
        app = app_of(replica)

        async def scene() -> None:
            taken = [HttpCall(app, COMPLETIONS, LONG) for _ in range(2)]
            await until(lambda: replica.loop.num_in_flight == 2)
            refused = HttpCall(app, COMPLETIONS, LONG)
            async with asyncio.timeout(patient(1)):
                await refused.task
            assert refused.status == 429
            assert check_error(json.loads(refused.text))["type"] == "rate_limit_error"
            await asyncio.gather(*(exchange.task for exchange in taken))
            assert [exchange.status for exchange in taken] == [200, 200]
            again = HttpCall(app, COMPLETIONS, LONG | {"max_tokens": 1})
            await again.task
            assert again.status == 200

        asyncio.run(scene())


def test_a_prompt_that_there_is_no_place_for_is_not_tokenized(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with replica_of(tiny_pair, num_slots=1, max_length=MAX_LENGTH, max_queue=0) as replica:
        app = app_of(replica)

        async def scene() -> None:
            taken = HttpCall(app, COMPLETIONS, LONG)
            await until(lambda: replica.loop.num_in_flight == 1)
            with monkeypatch.context() as full:
                full.setattr(replica, "_requests", lambda body: pytest.fail("tokenized"))
                refused = HttpCall(app, COMPLETIONS, LONG)
                await refused.task
            assert refused.status == 429
            await taken.task

        asyncio.run(scene())


def test_retry_after_is_sent_with_429(tiny_pair: Pair) -> None:
    with (
        replica_of(tiny_pair, num_slots=1, max_length=MAX_LENGTH, max_queue=0) as replica,
        TestClient(app_of(replica)) as client,
        ThreadPoolExecutor(6) as pool,
    ):
        answers = list(pool.map(lambda _: client.post(COMPLETIONS, json=LONG), range(6)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert 0 < len(refused) < 6
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)


def failing_policy(prefill: Prefill) -> int:
    raise RuntimeError("no choice")


@contextmanager
def failing_passes(replica: Replica) -> Iterator[None]:
    def fail(batch: Batch) -> Scores:
        raise RuntimeError("no memory")

    engine = replica.loop.engine
    score, engine._score = engine._score, fail  # type: ignore[method-assign]
    yield
    engine._score = score  # type: ignore[method-assign]


def test_a_failing_request_ends_alone(replica: Replica) -> None:
    """Whatever in a step belongs to one request: here what the policy makes of its prompt."""
    app = app_of(replica)

    async def scene() -> None:
        plain, streamed = (HttpCall(app, COMPLETIONS, LONG | {"stream": stream}) for stream in (False, True))
        await streamed.until("data: ")
        await until(lambda: replica.loop.engine.num_decoding == 2)
        replica.loop.use(failing_policy, replica.loop.engine.controller)
        fatal = HttpCall(app, COMPLETIONS, LONG)
        await fatal.task
        assert fatal.status == 500
        assert "RuntimeError" in check_error(json.loads(fatal.text))["message"]
        assert not plain.task.done()
        await asyncio.gather(plain.task, streamed.task)
        assert plain.status == 200
        assert streamed.text.endswith("data: [DONE]\n\n")
        await idle(replica)

    asyncio.run(scene())
    assert replica.loop.healthy


@pytest.mark.parametrize("temperature", [0, 1])
def test_scores_that_are_no_numbers_end_their_request_alone(
    temperature: int, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, app = replica.loop.engine, app_of(replica)
    score = engine._score

    def of_second_row(batch: Batch) -> Scores:
        logits, features = score(batch)
        if len(batch.trees) == 2:
            logits[batch.packing.firsts[1]] = math.nan
        return logits, features

    monkeypatch.setattr(engine, "_score", of_second_row)

    async def scene() -> None:
        stays = HttpCall(app, COMPLETIONS, LONG | {"temperature": temperature, "seed": 1, "stream": True})
        await stays.until("data: ")
        fatal = HttpCall(app, COMPLETIONS, LONG | {"temperature": temperature, "seed": 2})
        await fatal.task
        assert fatal.status == 500
        assert "FloatingPointError" in check_error(json.loads(fatal.text))["message"]
        await stays.task
        assert stays.text.endswith("data: [DONE]\n\n")
        await idle(replica)

    asyncio.run(scene())


def test_engine_failure_is_500_for_those_in_flight_and_the_loop_goes_on(replica: Replica) -> None:
    app = app_of(replica)

    async def scene() -> None:
        streamed = HttpCall(app, COMPLETIONS, LONG | {"stream": True})
        await streamed.until("data: ")
        plain = HttpCall(app, COMPLETIONS, LONG)
        await until(lambda: replica.loop.num_in_flight == 2)
        with failing_passes(replica):
            fatal = HttpCall(app, COMPLETIONS, LONG | {"stream": True})
            await asyncio.gather(streamed.task, plain.task, fatal.task)
        assert (plain.status, fatal.status) == (500, 500)
        for answer in (plain.text, fatal.text):
            assert check_error(json.loads(answer))["type"] == "server_error"
        assert streamed.status == 200
        assert "[DONE]" not in streamed.text
        check_error(json.loads(streamed.text.split("data: ")[-1]))
        await idle(replica)
        replica.loop.use(FixedPolicy(3), replica.loop.engine.controller)
        after = HttpCall(app, COMPLETIONS, LONG)
        await after.task
        assert json.loads(after.text)["usage"]["block_size"] == 3

    asyncio.run(scene())
    assert replica.loop.healthy


def test_repeated_engine_failures_make_health_fail(replica: Replica) -> None:
    with client_of(replica) as client:
        with failing_passes(replica):
            for _ in range(MAX_FAILURES):
                assert client.post(COMPLETIONS, json=LONG).status_code == 500
        assert client.get("/health").status_code == 503
        assert client.post(COMPLETIONS, json=LONG).status_code == 200
        assert client.get("/health").json()["status"] == "ok"


def test_a_step_that_does_not_end_makes_health_fail(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, goes_on = replica.loop.engine, threading.Event()
    score = engine._score

    def hang(batch: Batch) -> Scores:
        goes_on.wait(patient(20))
        return score(batch)

    monkeypatch.setattr(engine, "_score", hang)
    monkeypatch.setattr(engine_loop, "STALL_S", 0.2)
    app = app_of(replica)

    async def scene() -> None:
        stuck = HttpCall(app, COMPLETIONS, LONG | {"max_tokens": 3})
        await until(lambda: not replica.loop.healthy)
        health = HttpCall(app, "/health", {}, method="GET")
        await health.task
        assert (health.status, json.loads(health.text)["models"][replica.pair.id.target]["status"]) == (
            503,
            "stalled",
        )
        with pytest.raises(RuntimeError, match="broken"):
            replica.check_health()
        goes_on.set()
        await stuck.task
        assert stuck.status == 200

    asyncio.run(scene())
    assert replica.loop.healthy


def test_metrics_that_fail_end_no_request(replica: Replica, caplog: pytest.LogCaptureFixture) -> None:
    def fail(steps: Sequence[Step], seconds: float) -> None:
        raise OSError("the metrics agent is gone")

    replica.loop.on_step = fail
    with client_of(replica) as client:
        assert client.post(COMPLETIONS, json=LONG | {"max_tokens": 5}).status_code == 200
    assert replica.loop.healthy
    assert "the metrics agent is gone" in caplog.text


def test_requests_that_wait_in_the_loop_wait_for_nothing_else(tiny_pair: Pair) -> None:
    """The engine refuses what is added beyond its slots, and no stream that closes wakes the loop."""

    async def scene() -> None:
        with replica_of(tiny_pair, num_slots=1, max_length=MAX_LENGTH) as replica:
            asked = [Request((1, 2, 3), 3, stop_token_ids=frozenset())]
            streams = [replica.loop.submit(asked) for _ in range(5)]
            for stream in streams:
                stream.close = lambda: None  # type: ignore[method-assign]
            async with asyncio.timeout(patient(10)):
                for stream in streams:
                    while (await anext(stream))[1].finish_reason is None:
                        pass
            for stream in streams:
                del stream.close  # type: ignore[method-assign]
                stream.close()
            await idle(replica)

    asyncio.run(scene())


def test_closing_ends_requests_with_503(replica: Replica) -> None:
    app = app_of(replica)

    async def scene() -> None:
        running = HttpCall(app, COMPLETIONS, LONG)
        await until(lambda: replica.loop.num_in_flight == 1)
        await asyncio.to_thread(replica.loop.close)
        late = HttpCall(app, COMPLETIONS, LONG)
        await asyncio.gather(running.task, late.task)
        assert (running.status, late.status) == (503, 503)

    asyncio.run(scene())


def test_a_request_cancelled_at_once_leaves_no_row(replica: Replica) -> None:
    app = app_of(replica)

    async def scene() -> None:
        exchange = HttpCall(app, COMPLETIONS, LONG)
        await exchange.vanish()
        await idle(replica)

    asyncio.run(scene())


def test_negative_queue_is_refused(tiny_pair: Pair) -> None:
    with pytest.raises(ValueError, match="max_queue -1"):
        Replica(lambda: tiny_pair, max_queue=-1)


def test_only_the_engines_thread_keeps_a_team_of_openmps(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are loaded and prices measured on threads that end: with another team waiting threads sleep at once."""
    threads = list[threading.Thread]()

    def noted(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            threads.append(threading.current_thread())
            return work(*arguments)

        return run

    monkeypatch.setattr(policies, "measure_price", noted(policies.measure_price))
    replica = Replica(noted(lambda: tiny_pair))
    try:
        replica.reconfigure({"policy": "untrained"})
    finally:
        replica.close()
    assert len(threads) == 2
    assert not any(thread.is_alive() for thread in threads)


# --- draining ---


def test_a_server_that_drains_refuses_what_is_new_and_finishes_the_rest(replica: Replica) -> None:
    app = app_of(replica)

    async def scene() -> None:
        stays = HttpCall(app, COMPLETIONS, LONG | {"stream": True})
        await stays.until("data: ")
        app.state.api.draining = True
        late, health = HttpCall(app, COMPLETIONS, LONG), HttpCall(app, "/health", {}, method="GET")
        await asyncio.gather(late.task, health.task)
        assert (late.status, health.status) == (503, 503)
        assert check_error(json.loads(late.text))["code"] == "shutting_down"
        assert json.loads(health.text)["status"] == "draining"
        assert app.state.api.num_open == 1
        await stays.task
        assert stays.text.endswith("data: [DONE]\n\n")
        assert app.state.api.num_open == 0

    asyncio.run(scene())


def test_what_does_not_end_in_time_ends_with_an_error(replica: Replica) -> None:
    app = app_of(replica)

    async def scene() -> None:
        streamed, plain = HttpCall(app, COMPLETIONS, LONG | {"stream": True}), HttpCall(app, COMPLETIONS, LONG)
        await streamed.until("data: ")
        await until(lambda: replica.loop.num_in_flight == 2)
        app.state.api.cut()
        await asyncio.gather(streamed.task, plain.task)
        assert plain.status == 503
        assert check_error(json.loads(plain.text))["code"] == "shutting_down"
        assert check_error(json.loads(streamed.text.split("data: ")[-1]))["code"] == "shutting_down"
        await idle(replica)

    asyncio.run(scene())


# --- deadlines ---


def test_a_request_has_until_its_deadline_and_then_frees_its_row(replica: Replica) -> None:
    reported: list[Exchange] = []
    app = app_of(replica, on_exchange=reported.append)

    async def scene() -> None:
        plain = HttpCall(app, COMPLETIONS, LONG | {"timeout_s": 0.1})
        streamed = HttpCall(app, COMPLETIONS, LONG | {"timeout_s": 0.3, "stream": True})
        stays = HttpCall(app, COMPLETIONS, LONG)
        await plain.task
        assert plain.status == 504
        error = check_error(json.loads(plain.text), "timeout_s")
        assert "0.1 s" in error["message"]
        await streamed.task
        assert streamed.status == 200
        assert check_error(json.loads(streamed.text.split("data: ")[-1]))["code"] == "deadline_exceeded"
        assert not stays.task.done()
        await until(lambda: replica.loop.engine.num_active == 1)
        await stays.task
        assert stays.status == 200

    asyncio.run(scene())
    assert sorted(exchange.status for exchange in reported) == [200, 504, 504]


def test_the_servers_timeout_caps_the_requests(replica: Replica) -> None:
    app = app_of(replica, limits=Limits(timeout_s=0.1))

    async def scene() -> None:
        exchange = HttpCall(app, COMPLETIONS, LONG | {"timeout_s": 60})
        await exchange.task
        assert exchange.status == 504
        await idle(replica)

    asyncio.run(scene())


def test_a_request_that_waits_for_a_slot_has_a_deadline_too(tiny_pair: Pair) -> None:
    with replica_of(tiny_pair, num_slots=1, max_length=MAX_LENGTH, max_queue=4) as replica:
        app = app_of(replica)

        async def scene() -> None:
            first = HttpCall(app, COMPLETIONS, LONG)
            await until(lambda: replica.loop.engine.num_active == 1)
            waits = HttpCall(app, COMPLETIONS, LONG | {"timeout_s": 0.1})
            await waits.task
            assert waits.status == 504
            assert not first.task.done()
            await first.task
            await idle(replica)

        asyncio.run(scene())


def test_every_exchange_is_reported_once_with_its_status(replica: Replica) -> None:
    reported: list[Exchange] = []
    app = app_of(replica, on_exchange=reported.append)

    async def scene() -> None:
        whole = HttpCall(app, COMPLETIONS, LONG | {"max_tokens": 5})
        streamed = HttpCall(app, COMPLETIONS, LONG | {"max_tokens": 5, "stream": True})
        bad = HttpCall(app, COMPLETIONS, LONG | {"max_tokens": 0})
        unknown = HttpCall(app, COMPLETIONS, LONG | {"model": "gpt-9"})
        await asyncio.gather(whole.task, streamed.task, bad.task, unknown.task)
        gone, cut = HttpCall(app, COMPLETIONS, LONG), HttpCall(app, COMPLETIONS, LONG | {"stream": True})
        await cut.until("data: ")
        await cut.vanish()
        await gone.vanish()
        await idle(replica)

    asyncio.run(scene())
    assert sorted(exchange.status for exchange in reported) == [200, 200, 400, 404, GONE, GONE]
    assert {exchange.path for exchange in reported} == {COMPLETIONS}
    model = replica.loop.engine.pair.id.target
    assert {exchange.model for exchange in reported if exchange.status in (200, GONE)} == {model}
    assert all(exchange.seconds >= 0 for exchange in reported)
