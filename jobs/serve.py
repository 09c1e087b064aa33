"""OpenAI-compatible server on Ray Serve: every replica runs one engine, and a policy chooses its block sizes.

One gateway answers HTTP (gateway.py); each model has its replicas (replica.py). A new policy is loaded without
reloading the models and without interrupting requests. On SIGTERM and Ctrl-C the server accepts no more requests,
finishes those in flight, and exits.

For a permanent cluster, `--write-config serve.yaml` writes the file for `serve deploy`.
"""

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import ray
import tyro
import yaml
from pydantic import Field, field_validator
from ray import serve
from ray._private.ray_logging import stdout_deduplicator
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from rich.console import Console

from blockpilot.pairs.table import NO_DRAFT, WITHOUT_DRAFT, target_slug
from blockpilot.storage import whole
from jobs.common.cluster import actor_options, connect, num_threads
from jobs.common.config import main
from jobs.common.registry import AUTO, CHAMPION, tracking_uri
from jobs.serving.api import Limits
from jobs.serving.clients import api_keys
from jobs.serving.deployment import ReplicaDeployment
from jobs.serving.fields import RETRY_AFTER_S
from jobs.serving.gateway import Gateway, bound, close, is_loopback, netloc
from jobs.serving.models import ModelConfig, find_policy, models_by_name
from jobs.serving.placement import ReplicaCpus, check_enough, replica_cpus

APP, ROUTING = "blockpilot", "jobs.serving.routing"
# Serve's default delays (up 30 s, down 10 min) exceed what users wait for a first token or a replica takes to start.
SCALING = {"metrics_interval_s": 2.0, "look_back_period_s": 6.0, "upscale_delay_s": 4.0, "downscale_delay_s": 300.0}
SPARE_REQUESTS = 32  # capacity of a replica for calls that decode nothing: its status, and 429s
MAX_GATEWAY_REQUESTS = 100_000  # never reached: the gateway itself refuses excess requests, and still answers /health
PORT_PATIENCE_S = 5
HEALTH_EVERY_S = 3.0  # Serve replaces a replica that fails three checks in a row
REMOVAL_PATIENCE_S = 30
REPLICA_LIMITS = "num_slots", "max_length", "max_prefill_tokens", "prefix_tokens", "max_queue", "max_new_tokens"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1", "[::1]")  # in the Host header


class ServeConfig(ModelConfig):
    """The server: its models, address, keys and limits."""

    others: Annotated[tuple[ModelConfig, ...], tyro.conf.Suppress] = ()
    """Further models, which requests select by name; set in Python or in the file of --write-config."""
    host: str = Field(default="127.0.0.1", min_length=1)
    """IPv4 or IPv6 address to listen on; 0.0.0.0 for all interfaces, :: for all including IPv6."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port to listen on."""
    api_key_file: Path | None = None
    """File of accepted API keys, one per line; by default the key in BLOCKPILOT_API_KEY, or none."""
    needs_api_key: bool = False
    """Refuse to start without an API key; --write-config sets this if there is one."""
    allowed_hosts: tuple[str, ...] = ()
    """Accepted names in the Host header, such as example.com. By default the names of loopback if the server listens
    only there, otherwise all names."""
    max_body_bytes: int = Field(default=2**20, ge=1)
    """Maximum bytes of a request body; a larger one is answered 413."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Maximum seconds from a request's arrival to its last token; a request may set fewer (`timeout_s`)."""
    body_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds in which a request's body must arrive; otherwise it is answered 408."""
    registry_every_s: float = Field(default=20.0, gt=0)
    """Seconds between two polls of the registry for a new champion."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the Prometheus metrics (on all interfaces) if this command starts Ray; a cluster has its own port."""
    stream_interval_s: float = Field(default=0.05, ge=0)
    """Minimum seconds between two chunks of a stream; 0 for a chunk at every step. A chunk costs about a millisecond
    of CPU, so many open streams send fewer chunks each: 100 per second in total."""
    drain_s: float = Field(default=120.0, ge=0)
    """Seconds that requests in flight may take to finish when the server or a replica stops."""
    logs_prompts: bool = False
    """Also log the text of prompts."""
    output: Path = Path("runs/serve")
    """Directory for copies of champions, on every machine with a replica."""
    write_config: Path | None = None
    """Write a file for `serve deploy` to this path instead of serving."""

    @field_validator("host")
    @classmethod
    def _without_brackets(cls, host: str) -> str:
        return host.removeprefix("[").removesuffix("]")

    @property
    def models(self) -> tuple[ModelConfig, ...]:
        return (self, *self.others)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Accepted names in the Host header."""
        loopback_names = {*LOOPBACK_NAMES, self.host, f"[{self.host}]"}
        return self.allowed_hosts or (tuple(sorted(loopback_names)) if is_loopback(self.host) else ("*",))

    @property
    def deployments(self) -> dict[str, ModelConfig]:
        """Models by the name of their deployment: the target's slug, numbered if several models share it."""
        slugs = [target_slug(model.pair.models[0]) for model in self.models]
        names = [slug if slugs.index(slug) == i else f"{slug}_{i}" for i, slug in enumerate(slugs)]
        return dict(zip(names, self.models, strict=True))


def build_app(args: ServeConfig) -> Application:
    """The Serve application behind Serve's proxies, for `serve deploy`; connects to Ray.

    Raises ValueError for a model or a policy that cannot be served.
    """
    return _app(args, listens=False)


def _app(args: ServeConfig, *, listens: bool) -> Application:
    """`build_app`; with `listens` the gateway itself listens, on this machine."""
    names = models_by_name(args.models)
    keys = api_keys(args.api_key_file)
    if args.needs_api_key and not keys.digests:
        raise ValueError("needs_api_key: there is none in BLOCKPILOT_API_KEY, and no --api-key-file")
    for model in args.models:
        if model.policy_source != AUTO:  # replicas look for a champion themselves, and serve without one
            find_policy(model, args.output)
    connect(metrics_port=args.metrics_port)
    cpus = [replica_cpus(model, args.models, alone=listens) for model in args.models]
    options = [actor_options(m.resources.accelerator_type, c.num) for m, c in zip(args.models, cpus, strict=True)]
    if listens and not os.environ.get("RAY_ADDRESS"):  # a cluster may grow
        check_enough([model.resources.num_actors for model in args.models], options, ray.cluster_resources())
    here = {"label_selector": {"ray.io/node-id": ray.get_runtime_context().get_node_id()}} if listens else {}
    gateway: serve.Deployment = serve.deployment(
        name="gateway",
        ray_actor_options={"num_cpus": 0} | here,
        max_ongoing_requests=MAX_GATEWAY_REQUESTS,
        graceful_shutdown_timeout_s=args.drain_s,
    )(serve.ingress()(Gateway))
    return gateway.bind(
        {
            model.names[0]: _replicas(name, model, args, cpus[i], options[i])
            for i, (name, model) in enumerate(args.deployments.items())
        },
        names,
        keys,
        Limits(
            args.max_body_bytes,
            args.request_timeout_s,
            args.body_timeout_s,
            max_requests=sum(model.capacity for model in args.models) + SPARE_REQUESTS,
        ),
        args.hosts,
        (args.host, args.port) if listens else None,
    )


def _replicas(
    name: str, model: ModelConfig, args: ServeConfig, cpus: ReplicaCpus, options: dict[str, Any]
) -> Application:
    """The deployment of one model."""
    resources, num_requests = model.resources, model.num_slots + model.max_queue
    scaling: dict[str, Any] = {"num_replicas": resources.num_actors}
    if model.max_replicas > resources.num_actors:
        bounds = {"min_replicas": resources.num_actors, "max_replicas": model.max_replicas}
        waiting = {"num_slots": model.num_slots, "target_s": model.first_token_s}
        policy = AutoscalingPolicy(policy_function=f"{ROUTING}:WaitingScaling", policy_kwargs=waiting)
        scaling = {"autoscaling_config": bounds | SCALING | {"policy": policy}}
    if model.routing == "prefix" and model.most_replicas > 1:
        router: dict[str, Any] = {"request_router_class": f"{ROUTING}:PrefixRouter"}
        router["request_router_kwargs"] = {"num_slots": model.num_slots}
        scaling["request_router_config"] = RequestRouterConfig(**router)
    deployment: serve.Deployment = serve.deployment(
        name=name,
        ray_actor_options=options,
        health_check_period_s=HEALTH_EVERY_S,
        user_config=policy_config(model, args),
        max_ongoing_requests=num_requests + SPARE_REQUESTS,
        max_queued_requests=model.capacity + SPARE_REQUESTS,
        backpressure_config={"status_code": 429, "retry_after_s": RETRY_AFTER_S},
        graceful_shutdown_timeout_s=args.drain_s,
        max_constructor_retry_count=1,  # a retry with the same models and policy would fail, too
        **scaling,
    )(ReplicaDeployment)
    return deployment.bind(
        model.pair.load,
        name=model.names[0],
        num_threads=num_threads(cpus.num),
        why_threads=cpus.why,
        **model.model_dump(include=set(REPLICA_LIMITS)),
        **args.model_dump(include={"stream_interval_s", "logs_prompts"}),
    )


def policy_config(model: ModelConfig, args: ServeConfig) -> dict[str, Any]:
    """Serve's user_config of a replica: its policy. Serve applies a change without a restart."""
    user_config: dict[str, Any] = {"policy": model.policy_source}
    if model.policy not in (AUTO, CHAMPION):
        return user_config
    return user_config | {
        "store": tracking_uri(),
        "follow_s": args.registry_every_s,
        "folder": str(args.output.absolute()),
    }


def is_open(config: ServeConfig) -> bool:
    """True if other machines can reach the server and no API key is required."""
    return not is_loopback(config.host) and not (config.needs_api_key or api_keys(config.api_key_file).digests)


# --- a file for `serve deploy` ---


def deploy_config(config: ServeConfig) -> dict[str, Any]:
    """Content of the file for `serve deploy`, without API keys; policies are in user_config."""
    config = _with_absolute_paths(config)
    arguments = config.model_dump(
        mode="json", exclude={"port", "metrics_port", "write_config"}, exclude_defaults=True
    )
    if api_keys(config.api_key_file).digests:
        arguments["needs_api_key"] = True
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": config.host, "port": config.port},
        "logging_config": {"encoding": "JSON", "enable_access_log": False},
        "applications": [
            {
                "name": APP,
                "route_prefix": "/",
                "import_path": "jobs.serve:build_app",
                "runtime_env": {"env_vars": {"MLFLOW_TRACKING_URI": tracking_uri()}},
                "args": arguments,
                "deployments": [
                    {"name": name, "user_config": policy_config(model, config)}
                    for name, model in config.deployments.items()
                ],
            }
        ],
    }


def _with_absolute_paths(config: ServeConfig) -> ServeConfig:
    """The configuration for another working directory. Names of models stay, since policies are made for them."""
    policies = [{"policy": str(model.policy_source)} for model in config.models]
    others = tuple(model.model_copy(update=u) for model, u in zip(config.others, policies[1:], strict=True))
    key_file = config.api_key_file and config.api_key_file.absolute()
    return config.model_copy(update=policies[0] | {"others": others, "api_key_file": key_file})


# --- serving until a signal ---


def start(config: ServeConfig) -> str:
    """Start the server, until `stop`; returns the base URL for OpenAI clients when the models are loaded."""
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        raise ValueError(
            "RAY_AUTH_MODE disabled: Ray listens on all interfaces, and anyone who reaches it can run code here;"
            " leave it unset, or set it to token"
        )
    app = _app(config, listens=True)
    _wait_for_port(config.host, config.port)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    quiet = LoggingConfig(encoding="JSON", log_level="WARNING", enable_access_log=False)
    to_files = LoggingConfig(encoding="JSON", enable_access_log=False)
    serve.start(proxy_location="Disabled", logging_config=quiet)
    try:
        serve.run(app, name=APP, route_prefix="/", logging_config=to_files)
    except RuntimeError as error:
        reason = _failure() or str(error)
        stop(drain_s=0)
        raise ValueError(f"the server did not start: {reason}") from error
    return f"http://{netloc(config.host, config.port)}/v1"


def stop(drain_s: float = 120.0, hurry: Callable[[], bool] = lambda: False) -> None:
    """Refuse new requests, wait for open ones up to `drain_s` seconds or until `hurry()`, and remove the server."""
    if drain_s > 0:
        _drain(serve.get_app_handle(APP), drain_s, hurry)
    serve.delete(APP, _blocking=False)
    deadline = time.monotonic() + REMOVAL_PATIENCE_S
    while APP in serve.status().applications and time.monotonic() < deadline:
        time.sleep(0.2)
    if not serve.status().applications:
        _expect_killed_controller()
        serve.shutdown()


def _expect_killed_controller() -> None:
    """Suppress Ray's error messages about calls to Serve's controller, which ends by killing itself.

    RAY_DEDUP_LOGS_SKIP_REGEX does the same, but is read when Ray is imported.
    """
    if stdout_deduplicator.skip_re is None:
        stdout_deduplicator.skip_re = re.compile(r"Task ServeController\.\w+ failed\..* was killed by `ray\.kill`")


def _drain(gateway: DeploymentHandle[Any], drain_s: float, hurry: Callable[[], bool]) -> None:
    """Refuse new requests with 503; requests that do not finish in time end with an error."""
    deadline = time.monotonic() + drain_s
    try:
        while gateway.drain.remote().result(timeout_s=5):
            if hurry() or time.monotonic() > deadline:
                gateway.cut.remote().result(timeout_s=5)
                time.sleep(0.5)  # for the last events
                return
            time.sleep(0.1)
    except (RayError, TimeoutError) as error:  # it has ended or hangs
        logging.getLogger(__name__).warning("the gateway does not answer: %s", error)


def _failure() -> str:
    """Last line of each error that the replicas raised."""
    app = serve.status().applications.get(APP)
    messages = [deployment.message for deployment in app.deployments.values()] if app else []
    lines = [message.strip().splitlines()[-1] for message in messages if message.strip()]
    return "; ".join(line.removeprefix("ValueError: ") for line in lines)


def _wait_for_port(host: str, port: int) -> None:
    """Wait for the port, which a server that exited may hold briefly; raises ValueError if it stays taken."""
    deadline = time.monotonic() + PORT_PATIENCE_S
    while True:
        try:
            return close(bound(host, port))
        except OSError as error:
            if time.monotonic() > deadline:
                message = f"cannot listen on {netloc(host, port)} ({error}); choose another --host or --port"
                raise ValueError(message) from None
        time.sleep(0.1)


def what_runs(deployment: str) -> str:
    """One line on a model's policy, dtype and threads, with the reasons of defaults, and on a missing draft."""
    handle: DeploymentHandle[Any] = serve.get_deployment_handle(deployment, APP)
    status = handle.status.remote().result(timeout_s=REMOVAL_PATIENCE_S)
    policy, reasons = status["policy"], status["chosen"]
    reason = f" ({policy['error']})" if policy.get("error") else ""
    draft = "" if status["draft"] != NO_DRAFT else f"no draft ({WITHOUT_DRAFT}; --draft names one), "
    threads = f"{status['num_threads']} thread{'s' if status['num_threads'] > 1 else ''}"
    dtype = f"in {status['dtype']} ({reasons['dtype']})"
    return f"{draft}policy {policy['name']}{reason}, {dtype} on {threads} ({reasons['num_threads']})"


def run(config: ServeConfig) -> None:
    """Serve until SIGTERM or Ctrl-C, or write the file of `serve deploy`."""
    console = Console()
    if is_open(config):
        address = netloc(config.host, config.port)
        warning = f"anybody who reaches {address} may use this server: set BLOCKPILOT_API_KEY"
        console.print(f"[bold red]warning[/]: {warning} or --api-key-file", soft_wrap=True)
    if config.write_config is not None:
        with whole(config.write_config) as file:
            file.touch(mode=0o600)  # the address of the store may contain a password
            file.write_text(yaml.safe_dump(deploy_config(config), sort_keys=False))
        return
    url = start(config)
    stopping, hurry = threading.Event(), threading.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: hurry.set() if stopping.is_set() else stopping.set())
    for deployment, model in config.deployments.items():
        names = " or ".join(model.names)
        console.print(f"serving {names} at {url} with {what_runs(deployment)}; Ctrl-C to stop", soft_wrap=True)
    stopping.wait()
    console.print("finishing the requests in flight; press Ctrl-C again to end them")
    stop(config.drain_s, hurry.is_set)


if __name__ == "__main__":
    main(ServeConfig, run)
