"""API helpers: a replica in this process, its app and clients, and requests whose client may disconnect."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from fastapi import FastAPI
from fastapi.testclient import TestClient
from httpx import Response

from blockpilot.pairs.loading import Pair
from helpers.bodies import COMPLETIONS, MODEL, JsonObject, check_error, events, shown, text_of
from helpers.patience import patient, wait_until
from jobs.serving.api import make_app
from jobs.serving.gateway import http_server
from jobs.serving.replica import Replica


@contextmanager
def replica_of(pair: Pair, **settings: Any) -> Iterator[Replica]:
    """A replica of a loaded pair in this process, without Ray Serve."""
    replica = Replica(lambda: pair, **settings)
    yield replica
    replica.close()


def app_of(replica: Replica, **settings: Any) -> FastAPI:
    """The API over one replica, whose model is also known as `target`."""
    name = replica.pair.id.target
    return make_app({name: replica}, aliases={"target": name}, **settings)


class ApiClient(TestClient):
    """A client that requests the target if a body names no model."""

    def send_body(self, path: str, body: JsonObject) -> Response:
        return self.post(path, json=MODEL | body)

    def ask(self, path: str, body: JsonObject) -> JsonObject:
        """JSON of a successful answer."""
        response = self.send_body(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def refusal(self, path: str, body: JsonObject, *param: str | None, status: int = 400) -> JsonObject:
        """Error of a refused body; param: the field that it must name."""
        response = self.send_body(path, body)
        assert response.status_code == status, response.text
        return check_error(response.json(), *param)

    def streamed(self, path: str, body: JsonObject, **options: bool) -> tuple[list[JsonObject], JsonObject]:
        """All choices of a stream's chunks, and its usage."""
        stream_fields = {"stream": True, "stream_options": {"include_usage": True} | options}
        *chunks, usage = events(self.send_body(path, body | stream_fields).text)
        return [choice for chunk in chunks for choice in chunk["choices"]], usage["usage"]


@contextmanager
def client_of(replica: Replica, **settings: Any) -> Iterator[ApiClient]:
    """A client; asserts at the end that no request is left in the engine."""
    json_body = {"Content-Type": "application/json"}
    with ApiClient(app_of(replica, **settings), raise_server_exceptions=False, headers=json_body) as client:
        yield client
        loop = replica.loop
        assert loop.num_in_flight == 0
        assert (loop.engine.num_active, loop.num_waiting) == (0, 0)


@contextmanager
def neighbour(client: ApiClient, body: JsonObject) -> Iterator[None]:
    """Another client that streams a completion repeatedly; asserts that each text is that of a whole answer."""
    stop, texts = threading.Event(), list[str]()

    def ask_again() -> None:
        while not stop.wait(0.05):
            texts.append(shown(client.streamed(COMPLETIONS, body)[0]))

    thread = threading.Thread(target=ask_again)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert len(texts) > 3
    assert set(texts) == {text_of(client.ask(COMPLETIONS, body))}


@contextmanager
def over_http(app: FastAPI) -> Iterator[str]:
    """Root URL of the app, served by the gateway's HTTP server without Ray Serve."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = http_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    for connection in tuple(server.server_state.connections):  # those that a test has left open
        connection.loop.call_soon_threadsafe(connection.transport.abort)
    server.should_exit = True
    thread.join(timeout=patient(10))


@contextmanager
def served(pair: Pair, **settings: Any) -> Iterator[ApiClient]:
    """A client of a new replica."""
    with replica_of(pair, **settings) as replica, client_of(replica) as client:
        yield client


class HttpCall:
    """One HTTP request to an ASGI app on an event loop in another thread; its client may disconnect (`vanish`)."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        app: FastAPI,
        body: JsonObject | None,
        path: str = COMPLETIONS,
        method: str = "POST",
        key: str = "",
    ) -> None:
        self.status, self.text = 0, ""
        self.loop, self._inbox = loop, asyncio.Queue[JsonObject]()
        if body is not None:  # else the body never arrives
            self._inbox.put_nowait({"type": "http.request", "body": json.dumps(MODEL | body).encode()})
        headers = [(b"content-type", b"application/json")]
        headers += [(b"authorization", f"Bearer {key}".encode())] if key else []
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": method, "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "headers": headers, "client": None, "server": None,
        }  # fmt: skip
        self._answered = asyncio.run_coroutine_threadsafe(app(scope, self._inbox.get, self._send), loop)

    async def _send(self, message: JsonObject) -> None:
        self.status = message.get("status", self.status)
        self.text += message.get("body", b"").decode()

    @property
    def done(self) -> bool:
        return self._answered.done()

    def until(self, text: str) -> None:
        until(lambda: text in self.text)

    def finish(self) -> Self:
        self._answered.result(patient(60))
        return self

    def vanish(self) -> None:
        self.loop.call_soon_threadsafe(self._inbox.put_nowait, {"type": "http.disconnect"})
        self.finish()


def finish(calls: Iterable[HttpCall]) -> None:
    for call in calls:
        call.finish()


Send = Callable[..., HttpCall]


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def until(condition: Callable[[], bool]) -> None:
    wait_until(condition, 10, poll_s=0.005)


def idle(replica: Replica) -> None:
    until(lambda: replica.loop.num_in_flight == 0 and replica.loop.engine.idle)
