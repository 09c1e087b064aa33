"""Routing by prefix where Ray's cache of queue lengths has expired."""

import asyncio
from dataclasses import dataclass
from typing import Any

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest

from jobs.serving.routing import PrefixRouter

NUM_SLOTS = 2
DEPLOYMENT = DeploymentID(name="model")


@dataclass
class CountingReplica:
    """A replica as the router knows it, with this number of requests."""

    replica_id: ReplicaID
    num_ongoing: int = 0
    max_ongoing_requests: int = 100
    node_id: str = "node"
    availability_zone: str | None = None
    multiplexed_model_ids: frozenset[str] = frozenset()

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.num_ongoing


def test_a_full_replica_is_full_also_when_the_router_has_not_heard_of_it_for_long() -> None:
    """Long requests fill the replica of a session; after Ray's limit of 10 s its queue length is unknown."""

    async def scene() -> None:
        now = 0.0
        router = PrefixRouter(
            DEPLOYMENT,
            DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
            get_curr_time_s=lambda: now,
        )
        router.initialize_state(num_slots=NUM_SLOTS)
        replicas: list[Any] = [CountingReplica(ReplicaID(f"replica-{i}", DEPLOYMENT)) for i in range(3)]
        router.update_replicas(replicas)
        request = PendingRequest([], {}, RequestMetadata("1", "1", session_id="a session"))

        async def own_replica() -> Any:
            """The replica of the session; None if all replicas are equal."""
            first, *others = await router.choose_replicas(replicas, request)
            return first[0] if others else None

        preferred = await own_replica()
        for num_ongoing, expected in ((NUM_SLOTS - 1, preferred), (NUM_SLOTS, None), (0, preferred)):
            now, preferred.num_ongoing = now + 60.0, num_ongoing
            assert await own_replica() is expected

    asyncio.run(scene())
