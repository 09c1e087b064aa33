"""OpenAI's chat and completions API for several models: keys, limits, deadlines, errors, and the playground page.

A model is any object that answers a request body, in this process or in another one.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from fastapi import APIRouter, Depends, FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import Message, Send

from jobs.serving.clients import NO_KEYS, ApiKeys, has_room
from jobs.serving.fields import ApiError, short, shutting_down
from jobs.serving.schema import Body, ChatRequest, CompletionRequest, Objects, parse

STATUS_PATIENCE_S = 3.0
GONE = 499  # web servers log this status if the client closed the connection
PLAYGROUND = Path(__file__).with_name("playground.html")
PLAYGROUND_HEADERS = {  # no external content, and no embedding in other pages
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';"
    " connect-src 'self'; frame-ancestors 'none'"
}
LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}  # of Unicode: some clients split lines there
T = TypeVar("T")


class Model(Protocol):
    """A model as the API serves it under a name."""

    def answer(self, body: Body, client: str) -> Objects:
        """Objects of the response; closing it early frees its rows. `client` is "" unless there are several keys."""

    async def status(self) -> dict[str, Any]:
        """The model's entry in /health: `status` ("ok" or a problem) and details; raises ApiError."""


class Exchange(NamedTuple):
    """HTTP request and the status of its answer; model is None if unknown."""

    model: str | None
    path: str
    status: int
    seconds: float
    code: str | None


@dataclass(frozen=True)
class Limits:
    """Limits of a request, and of the number of requests."""

    max_body_bytes: int = 2**20
    timeout_s: float = 600.0
    """Maximum seconds from arrival to last token; a request may set fewer."""
    body_timeout_s: float = 10.0
    """Seconds in which the body must arrive."""
    max_requests: int = 1024
    """Maximum requests at a time, from the first byte to the last token; further ones are refused immediately."""


# --- answering ---


@dataclass
class Api:
    """Models by name, with limits. `aliases` maps other names to those names."""

    models: Mapping[str, Model]
    aliases: Mapping[str, str]
    keys: ApiKeys
    limits: Limits
    on_exchange: Callable[[Exchange], None]
    draining: bool = False
    """True to refuse new requests with 503; open requests continue."""
    _open: set["_Watch"] = field(default_factory=set)

    @property
    def num_open(self) -> int:
        """Number of open requests, from their first byte to their last token."""
        return len(self._open)

    def cut(self) -> None:
        """End all open requests, streams with an error event."""
        for watch in self._open:
            watch.deadline.cut(shutting_down())

    def find(self, name: str) -> tuple[str, Model]:
        """Main name of a model, and the model; raises ApiError 404 for an unknown name."""
        main_name = self.aliases.get(name, name)
        if main_name not in self.models:
            available = ", ".join(map(repr, self.models))
            message = f"model {short(name)} does not exist; this server has {available}"
            raise ApiError(404, message, "model", "model_not_found")
        return main_name, self.models[main_name]

    async def respond(self, http: HttpRequest, kind: type[ChatRequest] | type[CompletionRequest]) -> Response:
        """The response, or its stream when the first object is available. Raises ApiError."""
        client, deadline = self.keys.client(http), Deadline(self.limits.timeout_s)
        watch = _Watch(self._open, self.on_exchange, kind.path, client, deadline)
        try:
            if self.draining:
                raise shutting_down()
            if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                raise ApiError(415, "content-type: must be application/json", code="unsupported_media_type")
            self._check_room(client)
            body = parse(kind, await watch.deadline.bound(self._read(http)))
            watch.model, model = self.find(body.model)
            if body.timeout_s is not None and body.timeout_s < self.limits.timeout_s:
                watch.deadline = Deadline(body.timeout_s)
            objects = model.answer(body, client)
            work = _next(objects) if body.stream else _only(objects)
            # An error before the first object has its own status.
            first = await _unless_gone(http, watch.deadline.bound(work))
        except ApiError as error:
            watch.over(error.status, error.code)
            raise
        except BaseException as error:
            watch.over(500 if isinstance(error, Exception) else GONE)  # otherwise cancelled
            raise
        if body.stream:
            return _EventStream(_events(first, objects, watch), watch)
        watch.over(200)
        return JSONResponse(first)

    def _check_room(self, client: str) -> None:
        """Raise ApiError 429 if the latest request exceeds `max_requests` or the share of its client."""
        max_requests, num_held = self.limits.max_requests, sum(watch.client == client for watch in self._open) - 1
        if not has_room(num_held, 1, max_requests - (len(self._open) - 1), alone=not client):
            share = f", {num_held} of them yours" if client else ""
            message = (
                f"{len(self._open) - 1} requests are open{share}; at most {max_requests} are accepted; try again"
            )
            raise ApiError(429, message, code="queue_full")

    async def _read(self, http: HttpRequest) -> bytes:
        """The body of a request; raises ApiError 408 if it does not arrive in time, 413 if it is too large."""
        try:
            async with asyncio.timeout(self.limits.body_timeout_s):
                return await _body(http, self.limits.max_body_bytes)
        except TimeoutError:
            message = f"request body: it did not arrive within {self.limits.body_timeout_s:g} s"
            raise ApiError(408, message, code="request_timeout") from None


class _Watch:
    """Record of one exchange, which is in the set `open_` until it is reported, exactly once."""

    def __init__(
        self, open_: set["_Watch"], report: Callable[[Exchange], None], path: str, client: str, deadline: "Deadline"
    ) -> None:
        self.model: str | None = None
        self.client, self.deadline = client, deadline
        self._report, self._path, self._started = report, path, time.monotonic()
        self._open = open_
        self._open.add(self)

    def over(self, status: int, code: str | None = None) -> None:
        """Remove it from the open exchanges and report it; later calls do nothing."""
        if self in self._open:
            self._open.remove(self)
            self._report(Exchange(self.model, self._path, status, time.monotonic() - self._started, code))


class Deadline:
    """Deadline of a request, `timeout_s` seconds from now."""

    def __init__(self, timeout_s: float) -> None:
        message = f"timeout_s: the answer was not complete after {timeout_s:g} s"
        self._error = ApiError(504, message, "timeout_s", "deadline_exceeded")
        self._at = asyncio.get_running_loop().time() + timeout_s
        self._scope: asyncio.Timeout | None = None

    async def bound(self, work: Awaitable[T]) -> T:
        """The result of `work`; at the deadline, cancel it and raise ApiError 504 or the error given to `cut`."""
        try:
            async with asyncio.timeout_at(self._at) as self._scope:
                return await work
        except TimeoutError:
            raise self._error from None
        finally:
            self._scope = None

    def cut(self, error: ApiError) -> None:
        """Set the deadline to now, with this error."""
        self._error, self._at = error, asyncio.get_running_loop().time()
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(self._at)


async def _next(objects: Objects) -> dict[str, Any] | None:
    """The next object, None after the last one; raises the ApiError if the generator yields one."""
    response = await anext(objects, None)
    if isinstance(response, ApiError):
        await objects.aclose()
        raise response
    return response


async def _only(objects: Objects) -> dict[str, Any] | None:
    """The only object; runs the generator to its end."""
    response = await _next(objects)
    await _next(objects)
    return response


async def _events(first: dict[str, Any] | None, chunks: Objects, watch: _Watch) -> AsyncGenerator[str]:
    """Server-sent events: the chunks, then [DONE] or an error event."""
    status, code = GONE, None  # unless the stream ends normally
    try:
        async with aclosing(chunks):
            chunk = first
            while chunk is not None:
                yield _event(chunk)
                chunk = await watch.deadline.bound(_next(chunks))
        status = 200
        yield "data: [DONE]\n\n"
    except ApiError as error:
        status, code = error.status, error.code
        yield _event(error.body())
    except Exception:
        status = 500
        raise
    finally:
        watch.over(status, code)


class _EventStream(StreamingResponse):
    """Stream of events that also ends at the deadline if the client does not read."""

    def __init__(self, events: AsyncGenerator[str], watch: _Watch) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._events, self._watch = events, watch

    async def stream_response(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            await self._watch.deadline.bound(send(message))

        async with aclosing(self._events):
            try:
                await super().stream_response(send_in_time)
            except ApiError as error:  # without a last chunk the server closes the connection
                self._watch.over(error.status, error.code)


def _event(data: Mapping[str, object]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False).translate(LINE_ENDS)}\n\n"


async def _body(http: HttpRequest, limit: int) -> bytes:
    """The body of a request; raises ApiError 413 as soon as it exceeds the limit."""
    declared = http.headers.get("content-length", "")
    body = bytearray()
    if not (declared.isascii() and declared.isdecimal() and int(declared[:20]) > limit):
        try:
            async for part in http.stream():
                body += part
                if len(body) > limit:
                    break
            else:
                return bytes(body)
        except ClientDisconnect:
            raise ApiError(GONE, "the client closed the connection") from None
    raise ApiError(413, f"request body: more than {limit} bytes", code="request_too_large")


async def _unless_gone(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; when the client closes the connection, cancel it and raise ApiError."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_client_gone(http))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(GONE, "the client closed the connection")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _client_gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


# --- the app ---


def make_app(
    models: Mapping[str, Model],
    *,
    aliases: Mapping[str, str] | None = None,
    keys: ApiKeys = NO_KEYS,
    limits: Limits = Limits(),
    hosts: Sequence[str] = ("*",),
    on_exchange: Callable[[Exchange], None] = lambda exchange: None,
) -> FastAPI:
    """The API as an ASGI application, independent of Ray; its `state.api` is the Api.

    hosts: accepted names in the Host header; others are answered 400, which prevents DNS rebinding.
    """
    api = Api(models, aliases or {}, keys, limits, on_exchange)
    on_errors: dict[int | type[Exception], Any] = dict.fromkeys((ApiError, HTTPException, Exception), _answer_error)
    app = FastAPI(title="BlockPilot", openapi_url=None, redirect_slashes=False, exception_handlers=on_errors)
    app.state.api = api
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)

    async def check_key(http: HttpRequest) -> None:
        try:
            keys.check(http)
        except ApiError as error:
            on_exchange(Exchange(None, http.scope["route"].path, error.status, 0.0, error.code))
            raise

    v1 = APIRouter(prefix="/v1", dependencies=[Depends(check_key)])

    @v1.post("/chat/completions")
    async def chat(http: HttpRequest) -> Response:
        return await api.respond(http, ChatRequest)

    @v1.post("/completions")
    async def completions(http: HttpRequest) -> Response:
        return await api.respond(http, CompletionRequest)

    @v1.get("/models")
    async def list_models() -> dict[str, object]:
        entries = await asyncio.gather(*map(_described, models, models.values()))
        return {"object": "list", "data": entries}

    @v1.get("/models/{name:path}")
    async def retrieve_model(name: str) -> dict[str, object]:
        return await _described(*api.find(name))

    @app.get("/health")
    async def health(http: HttpRequest) -> JSONResponse:
        statuses = await asyncio.gather(*map(_status, models.values()))
        all_ok = all(status["status"] == "ok" for status in statuses)
        report: dict[str, object] = {"status": "draining" if api.draining else "ok" if all_ok else "failed"}
        if keys.admit(http):
            report["models"] = dict(zip(models, statuses, strict=True))
        return JSONResponse(report, 200 if report["status"] == "ok" else 503)

    @app.get("/")
    async def playground() -> Response:
        return HTMLResponse(PLAYGROUND.read_text(), headers=PLAYGROUND_HEADERS)

    app.include_router(v1)
    return app


async def _status(model: Model) -> dict[str, Any]:
    try:
        async with asyncio.timeout(STATUS_PATIENCE_S):
            return await model.status()
    except (ApiError, TimeoutError) as error:
        return {"status": str(error) or "no answer"}


async def _described(name: str, model: Model) -> dict[str, object]:
    """OpenAI's entry of a model, with vLLM's additional fields (`root` and limits) if the model answers."""
    status = await _status(model)
    fields = {"root": "target", "max_model_len": "max_model_len", "max_completion_tokens": "max_completion_tokens"}
    details = {field: status[key] for field, key in fields.items() if key in status}
    return {"id": name, "object": "model", "created": 0, "owned_by": "blockpilot"} | details


async def _answer_error(http: HttpRequest, error: Exception) -> JSONResponse:
    """Response to an exception, in OpenAI's error format."""
    headers = error.headers if isinstance(error, ApiError | HTTPException) else None
    if isinstance(error, HTTPException):  # unknown route or method
        error = ApiError(error.status_code, f"{http.method} {http.url.path}: {error.detail}")
    elif not isinstance(error, ApiError):
        error = ApiError(500, f"internal error ({type(error).__name__})")
    return JSONResponse(error.body(), error.status, headers)
