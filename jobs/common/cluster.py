"""Ray cluster: connection, actors and their resources."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util import ActorPool

from jobs.common.config import Resources

STARTED_LATE = "timed out during startup"
NUM_STARTS = 3
log = logging.getLogger(__name__)
TOKEN_FILE = Path.home() / ".ray" / "auth_token"  # Ray writes it readable for all users


def connect(include_dashboard: bool = False, metrics_port: int | None = None) -> None:
    """Connect to the cluster of `ray job submit` (or RAY_ADDRESS); otherwise start a local one for this process.

    A local cluster has at least four logical CPUs, since Ray Train and Ray Data need a free one in addition to
    their workers. Ray Train needs the dashboard to check its controller, and warns every second without one. A local
    cluster exports its metrics on `metrics_port` (by default a free one) on all interfaces. Only this user can read
    its files.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local: dict[str, Any] = {"address": "local", "num_cpus": max(4, os.cpu_count() or 1)}
    local |= {"include_dashboard": include_dashboard, "_metrics_export_port": metrics_port}
    with _private_files():
        _init(**({} if os.environ.get("RAY_ADDRESS") else local))


def _init(**options: Any) -> None:
    """`ray.init` with retries: on a busy machine a node may exceed Ray's 30 s, but then its files are cached."""
    for starts_left in reversed(range(NUM_STARTS)):
        try:
            ray.init(log_to_driver=True, **options)
            return
        except Exception as error:  # Ray raises no more specific type
            if STARTED_LATE not in str(error) or not starts_left:
                raise
            log.warning("Ray did not start in time on this busy machine; trying again")


@contextmanager
def _private_files() -> Iterator[None]:
    """Make files of this process and its children, and Ray's token, readable for this user only."""
    if TOKEN_FILE.exists():
        TOKEN_FILE.chmod(0o600)
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_threads(num_cpus: float) -> int:
    """Torch threads of a process with this many CPU cores."""
    return max(1, int(num_cpus))


def actor_options(accelerator_type: str | None, num_cpus: float) -> dict[str, Any]:
    """Options of an actor that loads a pair: one GPU if the cluster has any, otherwise CPU cores.

    Raises ValueError for an `accelerator_type` or CPU cores that a cluster of fixed size does not have.
    """
    resources, may_grow = ray.cluster_resources(), bool(os.environ.get("RAY_ADDRESS"))
    if num_cpus > resources.get("CPU", 0) and not may_grow:
        raise ValueError(f"num_cpus {num_cpus:g}: this machine has {resources.get('CPU', 0):g}")
    if accelerator_type is not None:
        types = sorted(k.split(":", 1)[1] for k in resources if k.startswith("accelerator_type:"))
        if accelerator_type not in types and not may_grow:
            raise ValueError(
                f"accelerator_type {accelerator_type!r}: the cluster has {', '.join(types) or 'no accelerators'}"
            )
        return {"num_gpus": 1, "num_cpus": num_cpus, "accelerator_type": accelerator_type}
    if resources.get("GPU", 0) >= 1:
        return {"num_gpus": 1, "num_cpus": num_cpus}
    # Ray leaves GPUs visible that it has not reserved.
    variables = {"OMP_NUM_THREADS": str(num_threads(num_cpus)), "CUDA_VISIBLE_DEVICES": ""}
    if "GLIBC_TUNABLES" not in os.environ:  # huge pages at the first access: merging small ones takes seconds
        variables["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    return {"num_cpus": num_cpus, "runtime_env": {"env_vars": variables}}


def new_actor(worker: Callable[..., object], resources: Resources, *arguments: object, **options: object) -> Any:
    """An actor `worker(*arguments)`, which starts as soon as the cluster has these resources."""
    remote: Any = ray.remote(worker)
    resource_options = actor_options(resources.accelerator_type, resources.num_cpus)
    return remote.options(**resource_options | options).remote(*arguments)


def cause_of(error: RayTaskError) -> Exception:
    """Exception to raise for an actor's error: the actor's ValueError (bad input), otherwise Ray's error."""
    return error.cause if isinstance(error.cause, ValueError) else error


def result(reference: Any) -> Any:
    """Result of an actor's method; raises the actor's ValueErrors unwrapped."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise cause_of(error) from None


@contextmanager
def lone_actor(
    worker: Callable[..., object], resources: Resources, *arguments: object, **options: object
) -> Iterator[Any]:
    """Start an actor for the block; yields a function that calls one of its methods and returns the `result`."""
    actor = new_actor(worker, resources, *arguments, **options)
    try:
        yield lambda method, *values: result(getattr(actor, method).remote(*values))
    finally:
        ray.kill(actor)


def pooled(
    worker: Callable[[Any], object], argument: Any, tasks: Sequence[Any], method: str, resources: Resources
) -> Iterator[Any]:
    """Results of `worker(argument).method(task)` in the order of completion; lost actors are restarted."""
    if not tasks:
        return
    retries = {"max_restarts": -1, "max_task_retries": 3}
    num_actors = min(resources.num_actors, len(tasks))
    pool: Any = ActorPool([new_actor(worker, resources, argument, **retries) for _ in range(num_actors)])
    try:
        yield from pool.map_unordered(lambda a, task: getattr(a, method).remote(task), tasks)
    except RayTaskError as error:
        raise cause_of(error) from None
