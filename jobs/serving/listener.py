"""HTTP of the gateway itself, where `jobs/serve.py` serves by itself: no proxy of Serve is in between, which every
chunk would pass and which costs some 4% of the tokens a second on two cores. On a cluster Serve's proxies listen.
"""

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import uvicorn
from ray.serve.context import _RequestContext, _serve_request_context
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

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
