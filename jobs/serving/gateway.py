"""The server's front: it speaks HTTP, checks what comes in, and hands it to a replica of the model that is asked for.

It holds no model, so what is wrong with a request costs the decoders nothing, and it outlives them: a request whose
replica is lost before anything was sent is put once more, to another replica; a stream that is cut ends in an error
event.
"""

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from ray.exceptions import RayActorError, RayError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from jobs.serving.api import ApiKeys, Exchange, Limits, make_app
from jobs.serving.metrics import GatewayMetrics
from jobs.serving.schema import ApiError, Body

log = logging.getLogger("ray.serve.blockpilot")
LOST = (RayActorError, ReplicaUnavailableError)
AWAY = (DeploymentUnavailableError, TaskCancelledError)


class Gateway:
    """What Serve runs. `models` are the decoders by the name of their target; `aliases` are further names."""

    def __init__(
        self, models: Mapping[str, DeploymentHandle[Any]], aliases: Mapping[str, str], keys: ApiKeys, limits: Limits
    ) -> None:
        self._metrics = GatewayMetrics()
        self._app = make_app(
            {name: RemoteModel(handle) for name, handle in models.items()},
            aliases=aliases,
            keys=keys,
            limits=limits,
            on_exchange=self._on_exchange,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    def _on_exchange(self, exchange: Exchange) -> None:
        log.info("exchange", extra={"log_to_stderr": False, **exchange._asdict()})
        self._metrics.on_exchange(exchange)


class RemoteModel:
    """A model whose replicas are elsewhere."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def whole(self, body: Body) -> dict[str, Any]:
        """The response in one piece; raises ApiError."""
        async with aclosing(self._answers("whole", body)) as answers:
            return await anext(answers)

    async def status(self) -> dict[str, Any]:
        """Of one of the replicas; raises ApiError."""
        async with aclosing(self._answers("status")) as answers:
            return await anext(answers)

    async def chunks(self, body: Body) -> AsyncGenerator[dict[str, Any], None]:
        """The objects of a streamed response; raises ApiError."""
        async with aclosing(self._answers("chunks", body)) as answers:
            async for answer in answers:
                yield answer

    async def _answers(self, method: str, *arguments: object) -> AsyncGenerator[dict[str, Any], None]:
        """What a replica gives; all from another one, once, if it is lost before it gave anything."""
        handle = self._handle.options(method_name=method, stream=method == "chunks")
        for tries_left in (1, 0):
            response, given = handle.remote(*arguments), False
            try:
                async for answer in _each(response):
                    given = True
                    if isinstance(answer, ApiError):
                        raise answer
                    yield answer
                return
            except LOST as error:
                log.warning("replica lost: %s", error, extra={"retried": not given and tries_left > 0})
                if given or not tries_left:
                    raise ApiError(503, "the replica with this request was lost", code="replica_lost") from None
            except BackPressureError as error:
                raise ApiError(429, str(error), code="queue_full") from None
            except AWAY as error:
                raise ApiError(503, f"not available ({type(error).__name__})", code="unavailable") from None
            except RayError as error:
                log.exception("a replica failed")
                raise ApiError(500, f"internal error ({type(error).__name__})", code="engine_error") from None
            finally:
                response.cancel()  # type: ignore[no-untyped-call]


async def _each(response: DeploymentResponse[Any] | DeploymentResponseGenerator[Any]) -> AsyncGenerator[Any, None]:
    if isinstance(response, DeploymentResponse):
        yield await response
    else:
        async for part in response:
            yield part
