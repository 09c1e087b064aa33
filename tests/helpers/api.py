"""API helpers: a replica in this process, the app over it, its objects, and requests whose client may vanish."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from fastapi import FastAPI
from fastapi.testclient import TestClient

from blockpilot.pairs.loading import Pair
from helpers.patience import patient, wait_until
from jobs.serving.api import make_app
from jobs.serving.gateway import http_server
from jobs.serving.replica import Replica

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "What is a block?"}]
PROMPTS = {CHAT: {"messages": QUESTION}, COMPLETIONS: {"prompt": "Once"}}
LONG = {"model": "target", "prompt": "Once", "max_tokens": 250, "temperature": 0}
JsonObject = dict[str, Any]


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


@contextmanager
def client_of(replica: Replica, **settings: Any) -> Iterator[TestClient]:
    """A client whose requests must have left the engine at the end."""
    json_body = {"Content-Type": "application/json"}
    with TestClient(app_of(replica, **settings), raise_server_exceptions=False, headers=json_body) as client:
        yield client
        loop = replica.loop
        assert loop.num_in_flight == 0
        assert (loop.engine.num_active, loop.num_waiting) == (0, 0)


@contextmanager
def over_http(app: FastAPI) -> Iterator[str]:
    """The app over real HTTP as the gateway speaks it, without Ray Serve; the address of its root."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = http_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    for connection in tuple(server.server_state.connections):  # those that a test has left open
        connection.loop.call_soon_threadsafe(connection.transport.abort)
    server.should_exit = True
    thread.join(timeout=patient(10))


def ask(client: TestClient, path: str, body: JsonObject) -> JsonObject:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def text_of(answer: JsonObject) -> str:
    choice = answer["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def events(text: str) -> list[JsonObject]:
    """The objects of a finished stream."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def shown(choices: list[JsonObject]) -> str:
    """The text of a stream's choices."""
    return "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices)


def streamed(client: TestClient, path: str, body: JsonObject, **options: bool) -> tuple[list[JsonObject], JsonObject]:
    """All choices of a stream's chunks, and its usage."""
    asked = {"stream": True, "stream_options": {"include_usage": True} | options}
    *chunks, usage = events(client.post(path, json=body | asked).text)
    return [choice for chunk in chunks for choice in chunk["choices"]], usage["usage"]


def check_error(answer: JsonObject, *param: str | None) -> JsonObject:
    """Assert OpenAI's error shape, and the field it names."""
    assert set(answer) == {"error"}
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    if param:
        assert (error["param"],) == param
        assert str(param[0]).split(".")[0] in error["message"] or error["code"] == "context_length_exceeded"
    return error


class HttpCall:
    """One HTTP request to an ASGI app on an event loop that runs in another thread; its client may vanish."""

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
        if body is not None:  # else it never arrives
            self._inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
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
