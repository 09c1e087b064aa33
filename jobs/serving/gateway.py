"""HTTP gateway of the server: checks requests, and forwards them to a replica of the requested model.

It is a separate process without a model, so bad requests do not load the replicas, and it survives their crashes. If
a replica is lost before the first chunk, the request is retried once on another replica. An interrupted stream ends
with an error event.

With `jobs/serve.py` the gateway itself listens: Serve's proxies, which forward every chunk, cost about 4% of the
tokens per second on two cores. On a cluster Serve's proxies listen.
"""

import asyncio
import errno
import ipaddress
import logging
import socket
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple
from uuid import uuid4

import uvicorn
from fastapi import FastAPI
from ray.exceptions import RayActorError, RayError, TaskCancelledError
from ray.serve.context import _RequestContext, _serve_request_context
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jobs.serving.api import Exchange, Limits, make_app
from jobs.serving.clients import ApiKeys
from jobs.serving.fields import ApiError
from jobs.serving.metrics import GatewayMetrics
from jobs.serving.routing import affinity
from jobs.serving.schema import Body, Objects

log = logging.getLogger("ray.serve.blockpilot")
LOST = (RayActorError, ReplicaUnavailableError)
AWAY = (DeploymentUnavailableError, TaskCancelledError)


class Gateway:
    """Serve's ingress. `models` are handles by the main name of each model; `aliases` maps all names to main names.

    With an `address`, host and port, it listens there; otherwise Serve's proxies forward requests to it.
    """

    def __init__(
        self,
        models: Mapping[str, DeploymentHandle[Any]],
        aliases: Mapping[str, str],
        keys: ApiKeys,
        limits: Limits,
        hosts: Sequence[str],
        address: tuple[str, int] | None = None,
    ) -> None:
        self._metrics = GatewayMetrics()
        self._app = make_app(
            {name: RemoteModel(handle) for name, handle in models.items()},
            aliases=aliases,
            keys=keys,
            limits=limits,
            hosts=hosts,
            on_exchange=self._on_exchange,
        )
        self._http: asyncio.Task[None] | None = None
        if address is not None:  # Serve constructs this object on its event loop
            self._http = asyncio.get_running_loop().create_task(serve_http(self._app, bound(*address)))

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    def check_health(self) -> None:
        """Raise RuntimeError if it no longer listens; Serve then replaces it."""
        if self._http is not None and self._http.done():
            error = None if self._http.cancelled() else self._http.exception()
            raise RuntimeError(f"the gateway does not listen any more ({error})")

    async def drain(self) -> int:
        """Refuse new requests from now on; returns the number of open requests."""
        self._app.state.api.draining = True
        return int(self._app.state.api.num_open)

    async def cut(self) -> None:
        """End open requests, streams with an error event."""
        self._app.state.api.cut()

    def _on_exchange(self, exchange: Exchange) -> None:
        log.info("exchange", extra={"log_to_stderr": False, **exchange._asdict()})
        self._metrics.on_exchange(exchange)


class RemoteModel:
    """A model whose replicas are in other processes."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def status(self) -> dict[str, Any]:
        """Status of one of the replicas; raises ApiError."""
        async with aclosing(self._objects("status")) as objects:
            status = await anext(objects)
        if isinstance(status, ApiError):
            raise status
        return status

    def answer(self, body: Body, client: str) -> Objects:
        """Objects of the response, from a replica."""
        return self._objects("answer", body, client, session_id=affinity(body))

    async def _objects(self, method: str, *arguments: object, session_id: str = "") -> Objects:
        """Objects of a replica; retries once on another replica if it is lost before the first object."""
        handle = self._handle.options(method_name=method, stream=method == "answer", session_id=session_id)
        for tries_left in (1, 0):
            response, has_yielded = handle.remote(*arguments), False
            try:
                async for result in _results(response):
                    has_yielded = True
                    yield result
                return
            except (*LOST, *AWAY, BackPressureError, RayError) as error:
                retried = isinstance(error, LOST) and not has_yielded and tries_left > 0
                if not retried:
                    yield _api_error(error)
                    return
                log.warning("replica lost, trying another one: %s", error)
            finally:
                response.cancel()  # type: ignore[no-untyped-call]


def _api_error(error: Exception) -> ApiError:
    if isinstance(error, LOST):
        log.warning("replica lost: %s", error)
        return ApiError(503, "the replica with this request was lost", code="replica_lost")
    if isinstance(error, BackPressureError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, AWAY):
        return ApiError(503, f"not available ({type(error).__name__})", code="unavailable")
    log.error("a replica failed", exc_info=error)
    return ApiError(500, f"internal error ({type(error).__name__})", code="engine_error")


async def _results(response: DeploymentResponse[Any] | DeploymentResponseGenerator[Any]) -> Objects:
    if isinstance(response, DeploymentResponse):
        yield await response
    else:
        async for result in response:
            yield result


REQUEST_ID = b"x-request-id"
LONGEST_ID = 128
KEEP_ALIVE_S = 90  # like Serve's proxies
LOOK_S = 15.0  # between two checks of a connection; it is aborted if there was no progress
MAX_HEAD_BYTES = 2**15  # of request line and headers
BACKLOG = 2048
ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine can reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def netloc(host: str, port: int) -> str:
    """Host and port as in a URL, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bound(host: str, port: int) -> list[socket.socket]:
    """Listening sockets, one per address of the host: `localhost` has an IPv4 and an IPv6 address. `::` also accepts
    IPv4. Raises OSError if it cannot listen.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners, absent = list[socket.socket](), None
    try:
        for family, _, _, _, address in dict.fromkeys(addresses):
            try:
                listeners.append(_listener(family, address))
            except OSError as error:
                if error.errno not in ABSENT:
                    raise
                absent = error  # a name may have addresses that this machine lacks
        if absent is not None and not listeners:
            raise absent
    except OSError:
        close(listeners)
        raise
    return listeners


def close(listeners: Sequence[socket.socket]) -> None:
    for listener in listeners:
        listener.close()


def _listener(family: socket.AddressFamily, address: tuple[Any, ...]) -> socket.socket:
    dual_stack = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=dual_stack)


async def serve_http(app: ASGIApp, listeners: Sequence[socket.socket]) -> None:
    """Serve requests on these sockets until the process ends."""
    await http_server(identified(app)).serve(sockets=list(listeners))


def http_server(app: ASGIApp) -> uvicorn.Server:
    """HTTP server of the application, with limits on idle and slow clients."""
    config = uvicorn.Config(
        app,
        http=HttpConnection,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )
    return uvicorn.Server(config)


class HttpConnection(H11Protocol):
    """HTTP connection, aborted if the client sends no complete head, or reads nothing, for LOOK_S to 2 LOOK_S."""

    _look_again: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look_again = self.loop.call_later(LOOK_S, self._look, self._state())

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._look_again is not None:
            self._look_again.cancel()

    def _look(self, before: "_State") -> None:
        now = self._state()
        if now == before and (now.in_head or now.num_unsent):
            self.transport.abort()
        else:
            self._look_again = self.loop.call_later(LOOK_S, self._look, now)

    def _state(self) -> "_State":
        idle = self.timeout_keep_alive_task is not None  # waiting for another request; uvicorn closes it
        in_head = not idle and (self.cycle is None or self.cycle.response_complete)
        return _State(self.cycle, in_head, self.transport.get_write_buffer_size())


class _State(NamedTuple):
    """Progress of a connection's client."""

    request: object  # the latest one
    in_head: bool  # receiving the head of the next request
    num_unsent: int  # bytes of the response


def identified(app: ASGIApp) -> ASGIApp:
    """Middleware that gives every request an id, its x-request-id header or a new one, as Serve's proxies do.

    The id is in the response's headers, and in the logs of this process and of replicas.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        request_id = dict(scope.get("headers", ())).get(REQUEST_ID, b"")[:LONGEST_ID] or str(uuid4()).encode()
        _serve_request_context.set(_RequestContext(request_id=request_id.decode("latin-1")))  # type: ignore[arg-type]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, request_id)]
            await send(message)

        await app(scope, receive, send_with_id)

    return answer
