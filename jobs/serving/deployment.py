"""Serve deployment of a model, which imports the replica only in the replica's process.

The deploying process then needs neither torch nor transformers, which take seconds to import.
"""

from contextlib import aclosing
from typing import Any

from jobs.serving.fields import WAITING
from jobs.serving.schema import Body, Objects


class ReplicaDeployment:
    """A Replica (replica.py) with the same arguments."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        from jobs.serving.replica import Replica

        self._replica = Replica(*arguments, **settings)

    async def answer(self, body: Body, client: str = "") -> Objects:
        """Objects of the response; closing the generator early frees its rows."""
        async with aclosing(self._replica.answer(body, client)) as objects:
            async for response in objects:
                yield response

    async def status(self) -> dict[str, Any]:
        """The model's entry in /health."""
        return await self._replica.status()

    def check_health(self) -> None:
        """Raise RuntimeError if the engine is broken; Serve then replaces the replica."""
        self._replica.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve hook: metrics of the replica for the autoscaling policy (routing.WaitingScaling)."""
        return {WAITING: self._replica.loop.waiting_s}

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Use another policy; Serve calls this once before the first request."""
        self._replica.reconfigure(user_config)
