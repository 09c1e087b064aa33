"""Serve a pair behind the OpenAI API: Ray Serve replicas of one engine each, block sizes chosen by a policy.

The policy is a file beside the models: another one is loaded in place (Serve's `user_config`), and the models
and the requests in flight stay. SIGTERM and Ctrl-C stop taking requests, finish those in flight, and leave.
"""

import logging
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI
from pydantic import Field
from ray import serve
from ray.serve import Application
from ray.serve.schema import LoggingConfig
from rich.console import Console

from blockpilot.costs import StepCosts, measured_up_to
from blockpilot.engine import Engine
from blockpilot.policy import FixedPolicy, LearnedPolicy, load_policy
from jobs.cluster import actor_options, connect, num_threads
from jobs.config import Config, PairConfig, Resources, main
from jobs.engine_loop import EngineLoop
from jobs.openai_api import RETRY_AFTER_S, Backend, make_app
from jobs.registry import Registry, model_name

APP = "blockpilot"
CHAMPION = "champion"
MAX_BLOCK_SIZE = 32
DEFAULT_MAX_LENGTH = 2048
# Requests that a replica answers without decoding them: /health, refusals, 429s.
SPARE_REQUESTS = 32
PORT_PATIENCE_S = 5
COSTS_CONTEXT, COSTS_STEPS = 256, 3  # of step costs that have to be measured at the start


class ServeConfig(Config):
    """What to serve, with which policy, where, and how much at once."""

    pair: PairConfig = PairConfig()
    policy: str = CHAMPION
    """What picks the block size: "champion" of the registry, the directory of a policy, or one block size."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all interfaces."""
    port: int = Field(default=8000, ge=1, le=65535)
    resources: Resources = Resources()
    """Of each replica; num_actors is the number of replicas."""
    num_slots: int = Field(default=8, ge=1)
    """Requests that a replica decodes together."""
    max_length: int | None = Field(default=None, ge=2)
    """Tokens of prompt and answer together; by default 2048, or the target's context if that is shorter."""
    max_prefill_tokens: int = Field(default=512, ge=1)
    """Prompt tokens of a step: a longer prompt takes several, and streams go on in between."""
    max_queue: int = Field(default=64, ge=0)
    """Requests that wait at a replica for a slot; more are answered 429."""
    drain_s: float = Field(default=120.0, ge=0)
    """Seconds that requests in flight have to finish when the server stops."""
    output: Path = Path("runs/serve")
    """Where the champion is copied to; all nodes of a cluster must see it."""


class Decoder:
    """A replica: one pair, one engine, and the API over it."""

    def __init__(
        self,
        pair: PairConfig,
        *,
        num_threads: int,
        num_slots: int,
        max_length: int | None,
        max_prefill_tokens: int,
        max_queue: int,
    ) -> None:
        torch.set_num_threads(num_threads)
        loaded = pair.load()
        engine = Engine(
            loaded,
            num_slots=num_slots,
            max_length=max_length or min(DEFAULT_MAX_LENGTH, loaded.max_length),
            max_block_size=MAX_BLOCK_SIZE,
            max_prefill_tokens=max_prefill_tokens,
        )
        self._backend = Backend(EngineLoop(engine, max_queue=max_queue))
        self._measured: StepCosts | None = None

    def __serve_build_asgi_app__(self) -> FastAPI:
        return make_app(self._backend)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Use `policy`, a block size or a directory, from the next prefill on.

        Raises ValueError for a policy of another pair.
        """
        policy = user_config["policy"]
        if isinstance(policy, int):
            self._backend.set_policy(FixedPolicy(policy), f"block size {policy}")
            return
        learned = load_policy(policy)
        learned.check(self._backend.pair)
        self._backend.set_policy(learned, str(policy), self._costs_for(learned))

    def _costs_for(self, policy: LearnedPolicy) -> StepCosts | None:
        """Those that the policy was trained with, if they are of such a device; else measured here, once."""
        if policy.costs is None:
            return None
        pair, num_slots, sizes = self._backend.pair, self._backend.loop.engine.num_slots, tuple(policy.candidates)
        for costs in (policy.costs, self._measured):
            if costs is not None and costs.fits(pair, sizes, num_slots):
                return costs
        self._measured = measured_up_to(pair, sizes, num_slots, COSTS_CONTEXT, num_steps=COSTS_STEPS)
        return self._measured

    def check_health(self) -> None:
        """Raise if the engine is broken; Serve then replaces the replica."""
        if not self._backend.loop.healthy:
            raise RuntimeError("the engine is broken")


def build_app(args: ServeConfig) -> Application:
    """The Serve application; joins Ray. Raises ValueError for what cannot be served."""
    policy = find_policy(args)
    connect()
    resources = args.resources
    deployment: serve.Deployment = serve.deployment(
        num_replicas=resources.num_actors,
        ray_actor_options=actor_options(resources.accelerator_type, resources.num_cpus),
        user_config={"policy": policy},
        max_ongoing_requests=args.num_slots + args.max_queue + SPARE_REQUESTS,
        max_queued_requests=resources.num_actors * (args.num_slots + args.max_queue) + SPARE_REQUESTS,
        backpressure_config={"status_code": 429, "retry_after_s": RETRY_AFTER_S},
        graceful_shutdown_timeout_s=args.drain_s,
        max_constructor_retry_count=1,  # the same models and policy would fail again
    )(serve.ingress()(Decoder))
    return deployment.bind(
        args.pair,
        num_threads=num_threads(resources.num_cpus),
        num_slots=args.num_slots,
        max_length=args.max_length,
        max_prefill_tokens=args.max_prefill_tokens,
        max_queue=args.max_queue,
    )


def find_policy(config: ServeConfig) -> int | str:
    """A block size, or the directory of a policy; ValueError if there is none or it is for other models."""
    target, draft = config.pair.models
    if config.policy.isdecimal():
        if not 1 <= int(config.policy) <= MAX_BLOCK_SIZE:
            raise ValueError(f"policy {config.policy}: a block size must be 1 to {MAX_BLOCK_SIZE}")
        return int(config.policy)
    directory = _champion(config, target) if config.policy == CHAMPION else Path(config.policy).absolute()
    made_for = load_policy(directory).info.pair
    if (made_for.target, made_for.draft) != (target, draft):
        raise ValueError(
            f"policy {directory}: made for target {made_for.target} with draft {made_for.draft};"
            f" to be served: target {target} with draft {draft}"
        )
    return str(directory)


def _champion(config: ServeConfig, target: str) -> Path:
    registry = Registry.open()
    try:
        version = registry.champion(model_name(target))
    except ValueError as error:
        raise ValueError(
            f"{error}. Make one with jobs/sweep.py, jobs/train.py and jobs/promote.py,"
            " or serve one block size with --policy 8"
        ) from None
    return registry.download(version, config.output / f"{version.name}-{version.number}")


def start(config: ServeConfig) -> str:
    """Serve until `stop`; returns the base URL for OpenAI clients once the models are loaded."""
    app = build_app(config)
    _wait_for_port(config.host, config.port)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    serve.start(http_options={"host": config.host, "port": config.port}, logging_config=quiet)
    try:
        serve.run(app, name=APP, route_prefix="/", logging_config=quiet)
    except RuntimeError as error:
        reason = _failure() or str(error)
        stop(drain_s=0)
        raise ValueError(f"the server did not start: {reason}") from error
    return f"http://{config.host}:{config.port}/v1"


def stop(drain_s: float = 120.0) -> None:
    """Take no more requests, give those in flight `drain_s` seconds to finish, and remove the server."""
    serve.delete(APP, _blocking=False)
    deadline = time.monotonic() + drain_s + 10
    while APP in serve.status().applications and time.monotonic() < deadline:
        time.sleep(0.2)
    if not serve.status().applications:
        serve.shutdown()


def _failure() -> str:
    """The last line of what the replicas raised."""
    app = serve.status().applications.get(APP)
    messages = [deployment.message for deployment in app.deployments.values()] if app else []
    lines = [message.strip().splitlines()[-1] for message in messages if message.strip()]
    return "; ".join(line.removeprefix("ValueError: ") for line in lines)


def _wait_for_port(host: str, port: int) -> None:
    """Raise ValueError unless the port is free or becomes so: a server that left may hold it a moment."""
    deadline = time.monotonic() + PORT_PATIENCE_S
    while error := _try_port(host, port):
        if time.monotonic() > deadline:
            raise ValueError(f"cannot listen on {host}:{port} ({error}); choose another --host or --port")
        time.sleep(0.1)


def _try_port(host: str, port: int) -> str | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return str(error)
    return None


def run(config: ServeConfig) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    url = start(config)
    leave = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: leave.set())
    console = Console()
    target, _ = config.pair.models
    console.print(f"serving {target} at {url} with policy {config.policy}; Ctrl-C to stop", soft_wrap=True)
    leave.wait()
    console.print("finishing the requests in flight")
    stop(config.drain_s)


if __name__ == "__main__":
    main(ServeConfig, run)
