"""The server's front: it speaks HTTP, checks requests, and hands each to a replica of the model that it asks for.

It holds no model. A bad request therefore costs the replicas nothing, and the gateway outlives them. A request whose
replica is lost before anything was sent goes to another replica, once. A stream that is cut ends in an error event.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from ray.exceptions import RayActorError, RayError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from jobs.serving.api import Exchange, Limits, make_app
from jobs.serving.errors import ApiError
from jobs.serving.keys import ApiKeys
from jobs.serving.listener import bound, serve_http
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
