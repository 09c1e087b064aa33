"""HTTP of the gateway itself, where `jobs/serve.py` serves by itself: no proxy of Serve is in between, which every
chunk would pass and which costs some 4% of the tokens a second on two cores. On a cluster Serve's proxies listen.
"""

import socket
from uuid import uuid4

import uvicorn
from ray.serve.context import _RequestContext, _serve_request_context
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = b"x-request-id"
LONGEST_ID = 128
KEEP_ALIVE_S = 90  # as Serve's proxies
BACKLOG = 2048


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there; raises OSError where it cannot."""
    return socket.create_server((host, port), backlog=BACKLOG)


async def serve_http(app: ASGIApp, listener: socket.socket) -> None:
    """Answer what comes there until the process ends."""
    config = uvicorn.Config(
        identified(app), log_config=None, access_log=False, lifespan="off", timeout_keep_alive=KEEP_ALIVE_S
    )
    await uvicorn.Server(config).serve(sockets=[listener])


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
