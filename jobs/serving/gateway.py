"""The server's front: it speaks HTTP, checks requests, and hands each to a replica of the model that it asks for.

It holds no model. A bad request therefore costs the replicas nothing, and the gateway outlives them. A request whose
replica is lost before anything was sent goes to another replica, once. A stream that is cut ends in an error event.

`jobs/serve.py` alone listens here: a proxy of Serve, which every chunk would pass, costs some 4% of the tokens a
second on two cores. On a cluster Serve's proxies listen.
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
from jobs.serving.schema import Body, Objects

log = logging.getLogger("ray.serve.blockpilot")
LOST = (RayActorError, ReplicaUnavailableError)
AWAY = (DeploymentUnavailableError, TaskCancelledError)


class Gateway:
    """Ingress that Serve runs. `models` are handles by the first name of each; `aliases` gives it for all names.

    With an `address`, host and port, it listens there; without one Serve's proxies hand it what they receive.
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
        if address is not None:  # Serve makes this object on the event loop that it runs it on
            self._http = asyncio.get_running_loop().create_task(serve_http(self._app, bound(*address)))

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    def check_health(self) -> None:
        """Raise RuntimeError if it does not listen any more; Serve then replaces it."""
        if self._http is not None and self._http.done():
            error = None if self._http.cancelled() else self._http.exception()
            raise RuntimeError(f"the gateway does not listen any more ({error})")

    async def drain(self) -> int:
        """Refuse what comes from now on; returns how many requests are still open."""
        self._app.state.api.draining = True
        return int(self._app.state.api.num_open)

    async def cut(self) -> None:
        """End what is still open, streams with an error event."""
        self._app.state.api.cut()

    def _on_exchange(self, exchange: Exchange) -> None:
        log.info("exchange", extra={"log_to_stderr": False, **exchange._asdict()})
        self._metrics.on_exchange(exchange)


class RemoteModel:
    """A model whose replicas are in other processes."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def status(self) -> dict[str, Any]:
        """Of one of the replicas; raises ApiError."""
        async with aclosing(self._objects("status")) as objects:
            status = await anext(objects)
        if isinstance(status, ApiError):
            raise status
        return status

    def answer(self, body: Body, client: str) -> Objects:
        """The objects of the response, from a replica."""
        return self._objects("answer", body, client)

    async def _objects(self, method: str, *arguments: object) -> Objects:
        """What a replica gives; all from another one, once, if it is lost before it gave anything."""
        handle = self._handle.options(method_name=method, stream=method == "answer")
        for tries_left in (1, 0):
            response, given = handle.remote(*arguments), False
            try:
                async for found in _each(response):
                    given = True
                    yield found
                return
            except (*LOST, *AWAY, BackPressureError, RayError) as error:
                retried = isinstance(error, LOST) and not given and tries_left > 0
                if not retried:
                    yield _api_error(error)
                    return
                log.warning("replica lost, another one is asked: %s", error)
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


async def _each(response: DeploymentResponse[Any] | DeploymentResponseGenerator[Any]) -> Objects:
    if isinstance(response, DeploymentResponse):
        yield await response
    else:
        async for found in response:
            yield found


REQUEST_ID = b"x-request-id"
LONGEST_ID = 128
KEEP_ALIVE_S = 90  # as Serve's proxies
LOOK_S = 15.0  # between two looks at a connection, whose client has moved meanwhile or is cut off
MAX_HEAD_BYTES = 2**15  # of a request's line and headers
BACKLOG = 2048
ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine reaches."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def netloc(host: str, port: int) -> str:
    """Host and port as in a URL, where an IPv6 address has brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bound(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen there, one for each address of the host: `localhost` has one of IPv4 and one of IPv6. `::`
    takes IPv4, too. Raises OSError where it cannot.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners, absent = list[socket.socket](), None
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                listeners.append(_listener(family, address))
            except OSError as error:
                if error.errno not in ABSENT:
                    raise
                absent = error  # a name may have addresses that this machine has not
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
    both = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)


async def serve_http(app: ASGIApp, listeners: Sequence[socket.socket]) -> None:
    """Answer what comes there until the process ends."""
    await http_server(identified(app)).serve(sockets=list(listeners))


def http_server(app: ASGIApp) -> uvicorn.Server:
    """The application's HTTP, with bounds for what clients hold open."""
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
    """HTTP connection that is cut where a client sends no whole head, or reads nothing, for LOOK_S to twice that."""

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
        idle = self.timeout_keep_alive_task is not None  # kept for another request: uvicorn closes it in time
        in_head = not idle and (self.cycle is None or self.cycle.response_complete)
        return _State(self.cycle, in_head, self.transport.get_write_buffer_size())


class _State(NamedTuple):
    """State of a connection that its client can change."""

    request: object  # the latest one
    in_head: bool  # of the next one
    num_unsent: int  # bytes of the answer


def identified(app: ASGIApp) -> ASGIApp:
    """The application with an id for each request, its own or a new one, as Serve's proxies give it: the response has
    it, and the logs of this process and of replicas.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        own = dict(scope.get("headers", ())).get(REQUEST_ID, b"")[:LONGEST_ID] or str(uuid4()).encode()
        _serve_request_context.set(_RequestContext(request_id=own.decode("latin-1")))  # type: ignore[arg-type]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, own)]
            await send(message)

        await app(scope, receive, send_with_id)

    return answer
