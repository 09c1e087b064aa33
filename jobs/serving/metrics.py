"""Prometheus metrics through Ray: every node exports them on its metrics port.

Serve adds the labels application, deployment and replica. `grafana.json` is a dashboard for them.
"""

import threading
from collections import Counter as CountBy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ray.serve.metrics import Counter, Gauge, Histogram

from blockpilot.types import SOURCE_NAMES
from jobs.serving.api import Exchange

if TYPE_CHECKING:  # the gateway needs no torch
    from blockpilot.types import Step
    from jobs.serving.engine_loop import EngineLoop
    from jobs.serving.replies import Answered

STEP_S = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
GAUGES = {
    "blockpilot_active_rows": "Requests that are decoded.",
    "blockpilot_waiting_requests": "Requests that wait for a slot.",
    "blockpilot_slots": "Maximum of requests decoded together.",
    "blockpilot_kept_tokens": "Tokens in the prefix cache.",
    "blockpilot_policy_version": "Version of the champion in use; 0 for none.",
    "blockpilot_policy_kept": "1 while the registry's champion cannot be used.",
}
GAUGES_EVERY_S = 2.0
M = TypeVar("M", Counter, Gauge, Histogram)
LATENCY_S = [0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0]


class GatewayMetrics:
    """Metrics of the gateway: requests by model, path and status, and their seconds."""

    def __init__(self) -> None:
        labels: Any = ("model", "path", "status")  # Serve declares a tuple of one element
        self._requests = Counter("blockpilot_requests", "Answered requests, including refused ones.", labels)
        self._seconds = Histogram(
            "blockpilot_request_seconds", "Seconds from arrival to the end.", LATENCY_S, ("model",)
        )

    def on_exchange(self, exchange: Exchange) -> None:
        model = exchange.model or "none"
        self._requests.inc(1, {"model": model, "path": exchange.path, "status": str(exchange.status)})
        if exchange.status == 200:
            self._seconds.observe(exchange.seconds, {"model": model})


class ReplicaMetrics:
    """Metrics of one replica: counters and histograms of its steps and answers, gauges of its state.

    `name` is the model's. `policy` returns the version of the champion in use (0 for none), and True if the
    registry's champion cannot be used.
    """

    def __init__(self, name: str, loop: "EngineLoop", policy: Callable[[], tuple[int, bool]]) -> None:
        def tagged(metric: M) -> M:
            metric.set_default_tags({"model": name})
            return metric

        by_model: Any = ("model",)
        by_size, by_outcome = cast(Any, ("model", "block_size", "layout")), cast(Any, ("model", "outcome"))
        by_source = cast(Any, ("model", "source"))
        self._loop, self._policy = loop, policy
        self._gauges = [tagged(Gauge(name, description, by_model)) for name, description in GAUGES.items()]
        self._blocks = tagged(Counter("blockpilot_blocks", "Verified blocks by size and layout.", by_size))
        self._tokens = tagged(Counter("blockpilot_tokens", "Emitted tokens.", by_model))
        self._accepted = tagged(Counter("blockpilot_accepted_tokens", "Accepted tokens by source.", by_source))
        self._verified = tagged(Counter("blockpilot_verified_tokens", "Tokens emitted by verify steps.", by_model))
        self._prompts = tagged(Counter("blockpilot_prompt_tokens", "Prompt tokens of finished requests.", by_model))
        self._cached = tagged(
            Counter("blockpilot_cached_tokens", "Prompt tokens found in the prefix cache.", by_model)
        )
        self._step = tagged(
            Histogram("blockpilot_step_seconds", "Seconds of a step of the whole batch.", STEP_S, by_model)
        )
        self._first = tagged(
            Histogram("blockpilot_first_token_seconds", "Seconds until the first token.", LATENCY_S, by_model)
        )
        self._over = tagged(Counter("blockpilot_answers", "Finished requests by outcome.", by_outcome))
        self._leave = threading.Event()
        threading.Thread(target=self._keep_gauges, name="gauges", daemon=True).start()

    def stop(self) -> None:
        """Stop setting the gauges."""
        self._leave.set()

    def on_step(self, steps: "Sequence[Step]", seconds: float) -> None:
        """Count a step; called on the engine's thread."""
        self._step.observe(seconds)
        blocks = [step for step in steps if step.block_size]
        _add(self._tokens, sum(len(step.tokens) for step in steps))
        _add(self._verified, sum(len(step.tokens) for step in blocks))
        for source, num in CountBy(source for step in blocks for source in step.accepted_sources).items():
            self._accepted.inc(num, {"source": SOURCE_NAMES[source]})
        for (size, is_chain), num in CountBy((step.block_size, step.tree.is_chain) for step in blocks).items():
            self._blocks.inc(num, {"block_size": str(size), "layout": "chain" if is_chain else "tree"})

    def on_answer(self, answered: "Answered") -> None:
        """Count a finished request."""
        self._over.inc(1, {"outcome": answered.outcome})
        _add(self._prompts, answered.num_prompt_tokens)
        _add(self._cached, answered.num_cached_tokens)
        if answered.first_token_s is not None:
            self._first.observe(answered.first_token_s)

    def _keep_gauges(self) -> None:
        """Set the gauges periodically, since Ray exports a gauge only once after it is set."""
        while True:
            engine, policy = self._loop.engine, self._policy()
            state = engine.num_active, self._loop.num_waiting, engine.num_slots, engine.num_kept_tokens, *policy
            for gauge, value in zip(self._gauges, state, strict=True):  # in the order of GAUGES
                gauge.set(value)
            if self._leave.wait(GAUGES_EVERY_S):
                return


def _add(counter: Counter, amount: int) -> None:
    """Add to a counter; Ray's counters refuse 0."""
    if amount:
        counter.inc(amount)
