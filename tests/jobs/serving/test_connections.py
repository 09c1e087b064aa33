"""Isolation of clients: no key, silent connection or stalled reader takes the places of others."""

import asyncio
import json
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpilot.pairs.loading import Pair
from helpers.api import Send, app_of, client_of, finish, idle, over_http, replica_of, until
from helpers.bodies import COMPLETIONS, LONG
from helpers.patience import patient
from helpers.servers import free_port
from jobs.serving import gateway
from jobs.serving.api import Exchange, Limits, make_app
from jobs.serving.clients import ApiKeys, FairQueue, has_room, most_of_client
from jobs.serving.gateway import Gateway
from jobs.serving.schema import Body

KEYS = ApiKeys.of(("greedy", "modest"))
BODY = {"model": "fast", "prompt": "Once", "stream": True}


class FastModel:
    """Model that answers with megabytes as fast as they are read, like log probabilities of a fast model."""

    def __init__(self) -> None:
        self.num_open = 0

    async def answer(self, body: Body, client: str) -> AsyncIterator[dict[str, Any]]:
        self.num_open += 1
        try:
            for _ in range(body.num_tokens_asked or 1):
                yield {"text": "x" * 50_000}
        finally:
            self.num_open -= 1

    async def status(self) -> dict[str, Any]:
        return {"status": "ok"}


Open = Callable[[str, bytes], socket.socket]


@pytest.fixture
def opened() -> Iterator[Open]:
    """`opened(url, sent)` opens a connection with a small buffer and sends bytes over it."""
    with ExitStack() as stack:

        def open_(url: str, sent: bytes) -> socket.socket:
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            connection.sendall(sent)
            connection.settimeout(patient(10))
            return connection

        yield open_


def request_of(body: dict[str, Any], key: str) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {key}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def drip(connection: socket.socket) -> None:
    """Send a byte at a time, for long; raises ConnectionError once the server cuts the connection."""
    for _ in range(int(patient(400))):
        connection.send(b"y")
        time.sleep(0.025)


def is_cut(connection: socket.socket) -> bool:
    """True if the server has closed a connection; reads the rest of it."""
    try:
        while connection.recv(2**16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def status_of(url: str, key: str) -> int:
    """Status of a request with a short answer, which is read."""
    headers = {"Authorization": f"Bearer {key}"}
    body = BODY | {"max_tokens": 1}
    return httpx.post(url + COMPLETIONS, json=body, headers=headers, timeout=patient(10)).status_code


def test_streams_that_nobody_reads_hold_their_key_s_places_until_their_deadline(opened: Open) -> None:
    model, exchanges, deadline_s = FastModel(), list[Exchange](), patient(0.7)
    limits = Limits(max_requests=4, timeout_s=deadline_s)
    app = make_app({"fast": model}, keys=KEYS, limits=limits, on_exchange=exchanges.append)
    with over_http(app) as url:
        for _ in range(6):
            opened(url, request_of(BODY | {"max_tokens": 900}, "greedy"))
        until(lambda: len(exchanges) == 4)
        assert [exchange.status for exchange in exchanges] == [429] * 4
        assert (app.state.api.num_open, model.num_open) == (2, 2)
        assert status_of(url, "modest") == 200
        assert status_of(url, "greedy") == 429
        until(lambda: app.state.api.num_open == 0)
        assert model.num_open == 0
        assert status_of(url, "greedy") == 200
    late = [exchange for exchange in exchanges if exchange.code == "deadline_exceeded"]
    assert [exchange.status for exchange in late] == [504] * 2
    assert all(exchange.seconds < deadline_s + patient(1) for exchange in late)


def test_slow_bodies_of_a_key_leave_places_to_others(send: Send) -> None:
    """Key refused (429) beyond its places, while others and /health are answered; places free after the timeout."""
    exchanges, late_s = list[Exchange](), patient(0.5)
    limits = Limits(max_requests=8, body_timeout_s=late_s)
    app = make_app({"fast": FastModel()}, keys=KEYS, limits=limits, on_exchange=exchanges.append)
    slow = [send(app, None, key="greedy") for _ in range(14)]
    refused = "4 requests are open, 4 of them yours; at most 8"
    until(lambda: sum(refused in call.text for call in slow) == 10)
    assert send(app, BODY, key="modest").finish().status == 200
    assert send(app, {}, "/health", "GET").finish().status == 200
    assert sum(call.status == 0 for call in slow) == 4
    finish(slow)
    assert sum(f"within {late_s:g} s" in call.text for call in slow) == 4
    assert send(app, BODY, key="greedy").finish().status == 200
    assert sorted(exchange.status for exchange in exchanges) == [200] * 2 + [408] * 4 + [429] * 10


def test_a_connection_without_a_whole_head_is_cut(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections cut: silent ones, those that send a byte at a time, and those whose head does not end."""
    monkeypatch.setattr(gateway, "LOOK_S", 0.3)
    head = b"GET /health HTTP/1.1\r\nHost: here\r\nX: "
    with over_http(make_app({"fast": FastModel()})) as url:
        silent = [opened(url, sent) for sent in (b"", head)]
        with pytest.raises(ConnectionError):
            drip(opened(url, head))
        assert all(map(is_cut, silent))
        with pytest.raises(ConnectionError):
            opened(url, head).sendall(b"y" * 2**24)
        assert httpx.get(f"{url}/health", timeout=patient(10)).status_code == 200


def test_a_connection_that_is_kept_for_the_next_request_outlives_many_looks(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections not cut: one kept for the next request, and one that waits for its answer or reads it slowly."""
    monkeypatch.setattr(gateway, "LOOK_S", 0.05)
    with over_http(make_app({"fast": FastModel()})) as url:
        get = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"
        connection = opened(url, get)
        assert connection.recv(2**16).startswith(b"HTTP/1.1 200")
        time.sleep(0.5)
        connection.sendall(get)
        assert connection.recv(2**16).startswith(b"HTTP/1.1 200")
        received, slow = b"", opened(url, request_of(BODY | {"max_tokens": 8}, ""))
        while not received.endswith(b"0\r\n\r\n"):
            received += slow.recv(2**15)
            time.sleep(0.003)
        assert received.count(b"x" * 1000) == 8 * 50


def test_a_connection_that_does_not_read_is_cut(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "LOOK_S", 0.3)
    app = make_app({"fast": FastModel()})
    with over_http(app) as url:
        unread = opened(url, request_of(BODY | {"max_tokens": 900}, ""))
        until(lambda: app.state.api.num_open == 1)
        until(lambda: app.state.api.num_open == 0)
        assert is_cut(unread)


def test_a_gateway_that_does_not_listen_any_more_is_not_healthy() -> None:
    """Failed health check, after which Serve replaces the gateway."""

    async def scene() -> None:
        port = free_port()
        gateway = Gateway({}, {}, KEYS, Limits(), ("*",), ("127.0.0.1", port))
        async with httpx.AsyncClient(timeout=patient(10)) as client:
            await asyncio.sleep(0.2)
            assert (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200
        gateway.check_health()
        assert gateway._http is not None
        gateway._http.cancel()
        await asyncio.wait([gateway._http])
        with pytest.raises(RuntimeError, match="does not listen"):
            gateway.check_health()

    asyncio.run(scene())


# --- fairness between keys ---


@given(st.lists(st.one_of(st.sampled_from("abc"), st.none()), max_size=60))
def test_clients_are_served_one_after_another_and_each_keeps_its_order(events: list[str | None]) -> None:
    """Round-robin between clients. Events: a letter puts that client's next item, None takes an item."""
    queue, waiting = FairQueue[tuple[str, int]](), {name: deque[int]() for name in "abc"}
    for number, name in enumerate(events):
        if name is not None:
            waiting[name].append(number)
            queue.put(name, (name, number))
        elif any(waiting.values()):
            client, item = queue.take()
            assert item == waiting[client].popleft()
        assert len(queue) == sum(map(len, waiting.values()))
    order = [queue.take()[0] for _ in range(len(queue))]
    for index, client in enumerate(order):  # no client is served twice while another waits
        other_clients = {name for name in order[index:] if name != client}
        next_index = order.index(client, index + 1) if client in order[index + 1 :] else len(order)
        assert other_clients <= set(order[index + 1 : next_index]) or next_index == len(order)
    with pytest.raises(KeyError):
        queue.take()


@given(st.integers(1, 40), st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 5)), max_size=60))
def test_no_client_of_several_holds_more_than_half(capacity: int, requests: list[tuple[str, int]]) -> None:
    num_held = dict.fromkeys("abcd", 0)
    for name, num in requests:
        free = capacity - sum(num_held.values())
        if has_room(num_held[name], num, free, alone=False):
            num_held[name] += num
        assert has_room(0, 1, free, alone=False) == (free > 0)  # a client that has none gets one
    assert max(num_held.values()) <= max(capacity // 2, 1)
    assert sum(num_held.values()) <= capacity
    assert has_room(0, capacity, capacity, alone=True)
    most = most_of_client(capacity, alone=False)
    assert has_room(0, most, capacity, alone=False)
    assert not has_room(0, most + 1, capacity, alone=False)
    assert most_of_client(capacity, alone=True) == capacity
    assert not has_room(0, capacity + 1, capacity, alone=True)


def test_one_greedy_client_leaves_places_and_the_next_slot_to_others(tiny_pair: Pair, send: Send) -> None:
    body = LONG | {"max_tokens": 120}
    with replica_of(tiny_pair, num_slots=1, max_length=300, max_queue=7) as replica:
        app = app_of(replica, keys=ApiKeys.of(("key-a", "key-b", "key-c")))
        greedy = [send(app, body, key="key-a") for _ in range(6)]
        refused = "4 requests are in flight, 4 of them yours; at most 8"
        until(lambda: sum(refused in call.text for call in greedy) == 2)
        assert send(app, body, key="key-b").finish().status == 200
        assert sum(call.status == 200 for call in greedy) <= 2  # the one in the slot, and one more at most
        finish(greedy)
        assert sorted(call.status for call in greedy) == [200, 200, 200, 200, 429, 429]
        idle(replica)


def test_a_request_for_more_than_a_key_may_have_is_400(tiny_pair: Pair) -> None:
    """Status 400, since a retry after 429 could never succeed: one key among several has half of the places."""
    with replica_of(tiny_pair, num_slots=1, max_length=300, max_queue=5) as replica:
        for keys, most in ((("key-a", "key-b"), 3), (("key-a",), 6)):
            with client_of(replica, keys=ApiKeys.of(keys)) as client:
                client.headers["Authorization"] = "Bearer key-a"
                refused = client.refusal(COMPLETIONS, LONG | {"n": most + 1}, "n")
                assert f"at most {most} " in refused["message"]
                assert len(client.ask(COMPLETIONS, LONG | {"n": most, "max_tokens": 1})["choices"]) == most


def test_a_single_key_may_take_all_places(tiny_pair: Pair, send: Send) -> None:
    with replica_of(tiny_pair, num_slots=1, max_length=300, max_queue=3) as replica:
        app = app_of(replica, keys=ApiKeys.of(("key-a",)))
        calls = [send(app, LONG | {"max_tokens": 60}, key="key-a") for _ in range(5)]
        finish(calls)
        assert sorted(call.status for call in calls) == [200, 200, 200, 200, 429]
