"""Routing of requests to the replicas of a model, and autoscaling of their number.

Requests with a common beginning go to the replica that has it in its prefix cache, while that replica has a free row:
consistent hashing with bounded loads (arXiv 1608.01350) on Ray Serve's hash ring. If a replica is lost, only its
share of the requests moves to other replicas.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

from ray.serve._private.request_router.common import PendingRequest, ReplicaQueueLengthCache
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve.config import AutoscalingContext
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from jobs.serving.fields import WAITING
from jobs.serving.schema import Body, ChatRequest

PREFIX_CHARACTERS = 1024  # of a completion's prompt
FEW_ROWS = 0.7  # share of the rows that remaining replicas may use after one is removed


def affinity(body: Body) -> str:
    """Hash key of a request: requests with the same key go to the same replica.

    Hash of the cache salt and the `prompt_cache_key`, otherwise the conversation up to the first user message, or the
    beginning of a completion's first prompt. Conversations with the same system prompt, which every replica has soon
    cached, differ in the first user message.
    """
    if body.prompt_cache_key:
        shared = body.prompt_cache_key
    elif isinstance(body, ChatRequest):
        roles = [message.role for message in body.messages]
        num_first = roles.index("user") + 1 if "user" in roles else len(roles)
        shared = "\n".join(f"{m.role}: {m.content}" for m in body.messages[:num_first])
    else:
        shared = str(body.prompt[0])[:PREFIX_CHARACTERS]
    return hashlib.sha256(f"{body.cache_salt}\n{shared}".encode()).hexdigest()


class PrefixRouter(ConsistentHashRouter):
    """Router by the hash of a handle's `session_id`; uses the least loaded replica if that replica has no free row.

    num_slots: rows of a replica.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        self._num_slots: int = kwargs.pop("num_slots")
        # Ray forgets numbers after 10 s without news, though the requests still run. The gateway is the only sender.
        self._replica_queue_len_cache = ReplicaQueueLengthCache(staleness_timeout_s=math.inf)
        super().initialize_state(**kwargs)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas to try, in order; Serve takes the least loaded replica of each list that accepts the request."""
        ranked: list[list[RunningReplica]] = await super().choose_replicas(candidate_replicas, pending_request)
        if not ranked:
            return ranked
        num_ongoing = self.replica_queue_len_cache.get(ranked[0][0].replica_id) or 0
        return [candidate_replicas] if num_ongoing >= self._num_slots else [*ranked, candidate_replicas]


class WaitingScaling:
    """Autoscaling policy of Serve: enough rows for all requests, plus one replica while requests wait too long.

    num_slots: rows of a replica. target_s: seconds that a request may wait for its first token.
    """

    def __init__(self, num_slots: int, target_s: float) -> None:
        self._num_slots, self._target_s = num_slots, target_s

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The desired number of replicas, and an empty state; Serve applies delays and bounds."""
        num, num_requests = context.current_num_replicas, float(context.total_num_requests)
        by_replica: Mapping[Any, float] = (context.aggregated_metrics or {}).get(WAITING, {})
        waiting_s = max(by_replica.values(), default=0.0)
        desired = math.ceil(num_requests / self._num_slots)
        if waiting_s > self._target_s:
            desired = max(desired, num + 1)
        elif desired < num and (waiting_s > self._target_s / 2 or num_requests > self._most_with(num - 1)):
            desired = num  # with one replica fewer, requests would wait
        return desired, {}

    def _most_with(self, num_replicas: int) -> float:
        return FEW_ROWS * num_replicas * self._num_slots
