"""Routing by prefix beside requests that run for long."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest

from jobs.serving.routing import PrefixRouter

NUM_SLOTS = 2
DEPLOYMENT = DeploymentID(name="model")


@dataclass
class IdleReplica:
    """A replica as the router knows it."""

    replica_id: ReplicaID
    max_ongoing_requests: int = 100
    node_id: str = "node"
    availability_zone: str | None = None
    multiplexed_model_ids: frozenset[str] = frozenset()

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def test_a_full_replica_stays_full_however_long_its_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Number of requests of a replica, without news for longer than the 10 s after which Ray forgets it."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)

    async def scene() -> None:
        nonlocal now
        router = PrefixRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
        router.initialize_state(num_slots=NUM_SLOTS)
        replicas: list[Any] = [IdleReplica(ReplicaID(f"replica-{i}", DEPLOYMENT)) for i in range(3)]
        router.update_replicas(replicas)
        while router.replica_queue_len_cache.get(replicas[-1].replica_id) is None:  # Ray asks them at first
            await asyncio.sleep(0.001)
        request = PendingRequest([], {}, RequestMetadata("1", "1", session_id="a session"))

        async def own_replica() -> Any:
            """The replica of the session; None if all replicas are equal."""
            first, *others = await router.choose_replicas(replicas, request)
            return first[0] if others else None

        preferred = await own_replica()
        for _ in range(NUM_SLOTS):
            assert await own_replica() is preferred
            router.on_send_request(preferred.replica_id)
        now += 60.0
        assert await own_replica() is None
        router.decrement_queue_len_cache(preferred.replica_id)
        assert await own_replica() is preferred

    asyncio.run(scene())
