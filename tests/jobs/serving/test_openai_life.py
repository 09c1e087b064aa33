"""Life cycle of requests at the ASGI level: disconnected clients, full queues, deadlines, failing engines."""

import asyncio
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from blockpilot.control.controller import FixedPolicy
from blockpilot.engine.batch import Batch
from blockpilot.engine.generate import generate
from blockpilot.pairs.loading import Pair
from blockpilot.types import Prefill, Request, Step
from helpers.api import HttpCall, Send, app_of, client_of, finish, idle, replica_of, until
from helpers.bodies import COMPLETIONS, LONG, check_error
from helpers.patience import patient
from jobs.serving import engine_loop, policies
from jobs.serving.api import GONE, Deadline, Exchange, Limits
from jobs.serving.engine_loop import MAX_FAILURES
from jobs.serving.fields import ApiError, shutting_down
from jobs.serving.replica import Replica

STREAMED = LONG | {"stream": True}
Scores = tuple[Tensor, Tensor | None]


@pytest.fixture
def replica(tiny_pair: Pair) -> Iterator[Replica]:
    with replica_of(tiny_pair, num_slots=4, max_length=300, max_queue=8) as replica:
        yield replica


@pytest.fixture
def one_slot(tiny_pair: Pair) -> Iterator[Replica]:
    """Replica with one slot and one place in the queue."""
    with replica_of(tiny_pair, num_slots=1, max_length=300, max_queue=1) as replica:
        yield replica


def last_error(call: HttpCall, *param: str) -> dict[str, Any]:
    """The error that a call was answered with, or that ended its stream."""
    assert "[DONE]" not in call.text
    return check_error(json.loads(call.text.split("data: ")[-1]), *param)


def is_whole(call: HttpCall) -> bool:
    """True for a complete stream or a complete answer."""
    return call.status == 200 and (call.text.endswith("data: [DONE]\n\n") or "choices" in json.loads(call.text))


def test_a_vanished_client_frees_its_row_and_no_other(replica: Replica, tiny_pair: Pair, send: Send) -> None:
    app, ids = app_of(replica), tuple(tiny_pair.tokenizer("Once")["input_ids"])
    steps = generate(tiny_pair, ids, block_size=1, max_new_tokens=250)
    expected = tiny_pair.tokenizer.decode([t for step in steps for t in step.tokens], skip_special_tokens=True)
    survivor, streamed, plain = (send(app, body) for body in (LONG, STREAMED, LONG))
    send(app, LONG).vanish()  # before it has a row
    streamed.until("data: ")
    until(lambda: replica.loop.num_in_flight == 3)
    plain.vanish()
    streamed.vanish()
    assert "[DONE]" not in streamed.text
    assert plain.status != 200
    until(lambda: (replica.loop.num_in_flight, replica.loop.engine.num_active) == (1, 1))
    assert not survivor.done
    assert json.loads(survivor.finish().text)["choices"][0]["text"] == expected
    idle(replica)


def test_full_queue_is_429_before_a_prompt_is_tokenized_and_recovers(
    one_slot: Replica, monkeypatch: pytest.MonkeyPatch, send: Send
) -> None:
    app = app_of(one_slot)
    accepted = [send(app, LONG) for _ in range(2)]
    until(lambda: one_slot.loop.num_in_flight == 2)
    with monkeypatch.context() as patch:
        patch.setattr(one_slot, "_requests", lambda body: pytest.fail("tokenized"))
        refused = send(app, LONG).finish()
    assert refused.status == 429
    assert last_error(refused)["type"] == "rate_limit_error"
    finish(accepted)
    next_call = send(app, LONG | {"max_tokens": 1}).finish()
    assert all(map(is_whole, (*accepted, next_call)))


def test_a_request_whose_client_leaves_does_not_wait_for_a_slot(one_slot: Replica, send: Send) -> None:
    app = app_of(one_slot)
    running_call = send(app, STREAMED)
    running_call.until("data: ")
    waiting_call = send(app, LONG)
    until(lambda: one_slot.loop.num_waiting == 1)
    waiting_call.vanish()
    until(lambda: one_slot.loop.num_waiting == 0)
    assert not running_call.done
    assert is_whole(running_call.finish())


# --- failures ---


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


@pytest.mark.parametrize(
    ("cause", "error", "temperature"),
    [("policy", "RuntimeError", 0), ("scores", "FloatingPointError", 0), ("scores", "FloatingPointError", 1)],
)
def test_a_failing_request_ends_alone(
    cause: str, error: str, temperature: float, replica: Replica, monkeypatch: pytest.MonkeyPatch, send: Send
) -> None:
    """Failure of one request only: the policy raises at its prompt, or its logits are NaN."""
    engine, app = replica.loop.engine, app_of(replica)
    score = engine._score

    def of_second_row(batch: Batch) -> Scores:
        logits, features = score(batch)
        if len(batch.blocks) == 2:
            logits[batch.blocks[1].choices.start] = math.nan
        return logits, features

    survivor = send(app, STREAMED | {"temperature": temperature, "seed": 1})
    survivor.until("data: ")
    if cause == "policy":
        replica.loop.use(failing_policy, engine.controller)
    else:
        monkeypatch.setattr(engine, "_score", of_second_row)
    fatal = send(app, LONG | {"temperature": temperature, "seed": 2}).finish()
    assert fatal.status == 500
    assert error in last_error(fatal)["message"]
    assert not survivor.done
    assert is_whole(survivor.finish())
    idle(replica)
    assert replica.loop.healthy


def test_engine_failure_is_500_for_those_in_flight_and_the_loop_goes_on(replica: Replica, send: Send) -> None:
    app = app_of(replica)
    streamed = send(app, STREAMED)
    streamed.until("data: ")
    plain = send(app, LONG)
    until(lambda: replica.loop.num_in_flight == 2)
    with failing_passes(replica):
        fatal = send(app, STREAMED)
        finish((streamed, plain, fatal))
    assert (streamed.status, plain.status, fatal.status) == (200, 500, 500)
    assert {last_error(call)["type"] for call in (streamed, plain, fatal)} == {"server_error"}
    idle(replica)
    replica.loop.use(FixedPolicy(3), replica.loop.engine.controller)
    after = send(app, LONG).finish()
    assert json.loads(after.text)["usage"]["block_size"] == 3
    assert replica.loop.healthy


def test_repeated_engine_failures_make_health_fail(replica: Replica) -> None:
    with client_of(replica) as client:
        with failing_passes(replica):
            for _ in range(MAX_FAILURES):
                client.refusal(COMPLETIONS, LONG, status=500)
        assert client.get("/health").status_code == 503
        client.ask(COMPLETIONS, LONG)
        assert client.get("/health").json()["status"] == "ok"


def test_a_step_that_does_not_end_makes_health_fail(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, send: Send
) -> None:
    engine, resume_event = replica.loop.engine, threading.Event()
    score = engine._score

    def hang(batch: Batch) -> Scores:
        resume_event.wait(patient(20))
        return score(batch)

    monkeypatch.setattr(engine, "_score", hang)
    monkeypatch.setattr(engine_loop, "STALL_S", 0.2)
    app = app_of(replica)
    stuck = send(app, LONG | {"max_tokens": 3})
    until(lambda: not replica.loop.healthy)
    health = send(app, {}, "/health", "GET").finish()
    status = json.loads(health.text)["models"][replica.pair.id.target]["status"]
    assert (health.status, status) == (503, "stalled")
    with pytest.raises(RuntimeError, match="broken"):
        replica.check_health()
    resume_event.set()
    assert stuck.finish().status == 200
    assert replica.loop.healthy


def test_metrics_that_fail_end_no_request(replica: Replica, caplog: pytest.LogCaptureFixture) -> None:
    def fail(steps: Sequence[Step], seconds: float) -> None:
        raise OSError("the metrics agent is gone")

    replica.loop.on_step = fail
    with client_of(replica) as client:
        client.ask(COMPLETIONS, LONG | {"max_tokens": 5})
    assert replica.loop.healthy
    assert "the metrics agent is gone" in caplog.text


def test_requests_that_wait_in_the_loop_wait_for_nothing_else(replica: Replica) -> None:
    """Queued requests start without the wake-up of a closing stream; the engine takes no more than its slots."""

    async def scene() -> None:
        streams = [replica.loop.submit([Request((1, 2, 3), 3, stop_token_ids=frozenset())]) for _ in range(12)]
        for stream in streams:
            stream.close = lambda: None  # type: ignore[method-assign]
        async with asyncio.timeout(patient(10)):
            for stream in streams:
                while (await anext(stream))[1].finish_reason is None:
                    pass
        for stream in streams:
            del stream.close  # type: ignore[method-assign]
            stream.close()
        idle(replica)

    asyncio.run(scene())


def test_only_the_engines_thread_keeps_a_team_of_openmps(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary threads load models and time steps: with another OpenMP team waiting threads sleep immediately."""
    threads = list[threading.Thread]()

    def noted(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            threads.append(threading.current_thread())
            return work(*arguments)

        return run

    monkeypatch.setattr(policies, "kept_price", noted(policies.kept_price))
    replica = Replica(noted(lambda: tiny_pair))
    replica.reconfigure({"policy": "untrained"})
    replica.close()
    assert len(threads) == 2
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(ValueError, match="max_queue -1"):
        Replica(lambda: tiny_pair, max_queue=-1)


# --- draining ---


def test_a_server_that_drains_refuses_what_is_new_and_finishes_the_rest(replica: Replica, send: Send) -> None:
    app = app_of(replica)
    survivor = send(app, STREAMED)
    survivor.until("data: ")
    app.state.api.draining = True
    late, health = send(app, LONG), send(app, {}, "/health", "GET")
    finish((late, health))
    assert (late.status, health.status) == (503, 503)
    assert last_error(late)["code"] == "shutting_down"
    assert json.loads(health.text)["status"] == "draining"
    assert app.state.api.num_open == 1
    assert is_whole(survivor.finish())
    assert app.state.api.num_open == 0


@pytest.mark.parametrize("by", ["the drain's end", "closing the engine"])
def test_what_does_not_end_in_time_ends_with_an_error(replica: Replica, by: str, send: Send) -> None:
    app = app_of(replica)
    streamed, plain = send(app, STREAMED), send(app, LONG)
    streamed.until("data: ")
    until(lambda: replica.loop.num_in_flight == 2)
    if by == "the drain's end":
        plain.loop.call_soon_threadsafe(app.state.api.cut)
    else:
        replica.loop.close()
        assert send(app, LONG).finish().status == 503
    finish((streamed, plain))
    assert plain.status == 503
    assert [last_error(call)["code"] for call in (plain, streamed)] == ["shutting_down"] * 2
    until(lambda: replica.loop.num_in_flight == 0)


def test_a_cut_during_a_deadline_does_not_end_the_cut_of_others() -> None:
    """Work that is just cancelled by its deadline when all requests are cut."""

    async def scene() -> None:
        is_cancelled, resume_event = asyncio.Event(), asyncio.Event()

        async def slow_to_end() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                is_cancelled.set()
                await resume_event.wait()

        deadline = Deadline(0.01)
        call = asyncio.create_task(deadline.bound(slow_to_end()))
        await is_cancelled.wait()
        deadline.cut(shutting_down())
        resume_event.set()
        with pytest.raises(ApiError) as error:
            await call
        assert error.value.code == "shutting_down"

    asyncio.run(scene())


# --- deadlines, and reports ---


def test_a_request_has_until_its_deadline_and_then_frees_its_row(replica: Replica, send: Send) -> None:
    app = app_of(replica)
    plain, streamed = send(app, LONG | {"timeout_s": 0.1}), send(app, STREAMED | {"timeout_s": 0.3})
    survivor = send(app, LONG)
    assert plain.finish().status == 504
    assert "0.1 s" in last_error(plain, "timeout_s")["message"]
    assert streamed.finish().status == 200
    assert last_error(streamed)["code"] == "deadline_exceeded"
    assert not survivor.done
    until(lambda: replica.loop.engine.num_active == 1)
    assert is_whole(survivor.finish())


def test_a_request_that_waits_for_a_slot_has_the_servers_deadline_at_most(one_slot: Replica, send: Send) -> None:
    running_call = send(app_of(one_slot), LONG)
    until(lambda: one_slot.loop.engine.num_active == 1)
    waiting_call = send(app_of(one_slot, limits=Limits(timeout_s=0.1)), LONG | {"timeout_s": 60})
    assert waiting_call.finish().status == 504
    assert not running_call.done
    running_call.finish()
    idle(one_slot)


def test_every_exchange_is_reported_once_with_its_status(replica: Replica, send: Send) -> None:
    reported: list[Exchange] = []
    app = app_of(replica, on_exchange=reported.append)
    changes = ({"max_tokens": 5}, {"max_tokens": 5, "stream": True}, {"max_tokens": 0}, {"model": "gpt-9"})
    finish([send(app, LONG | change) for change in (*changes, {"timeout_s": 0.05}, STREAMED | {"timeout_s": 0.05})])
    gone, cut = send(app, LONG), send(app, STREAMED)
    cut.until("data: ")
    cut.vanish()
    gone.vanish()
    idle(replica)
    assert sorted(exchange.status for exchange in reported) == [200, 200, 400, 404, GONE, GONE, 504, 504]
    assert {exchange.path for exchange in reported} == {COMPLETIONS}
    models = {exchange.model for exchange in reported if exchange.status in (200, GONE, 504)}
    assert models == {replica.pair.id.target}
    assert all(exchange.seconds >= 0 for exchange in reported)
