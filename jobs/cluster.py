"""Joining a Ray cluster, and what to ask of it."""

import os
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    import ray.train


def connect(include_dashboard: bool = False) -> None:
    """Join the cluster of `ray job submit` (or RAY_ADDRESS); otherwise start a local one for this process.

    A local cluster has at least four logical CPUs: Ray Train and Ray Data need a free one beside their workers.
    Ray Train asks the dashboard whether its controller lives and complains every second where there is none.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=True)
    else:
        cpus = max(4, os.cpu_count() or 1)
        ray.init(address="local", num_cpus=cpus, include_dashboard=include_dashboard, log_to_driver=True)


def actor_options(accelerator_type: str | None, num_cpus: float) -> dict[str, Any]:
    """Options of an actor that holds a pair: one GPU where there are any, else CPU cores.

    Raises ValueError when `accelerator_type` is asked for and the cluster has none of it.
    """
    resources = ray.cluster_resources()
    if accelerator_type is not None:
        known = sorted(k.split(":", 1)[1] for k in resources if k.startswith("accelerator_type:"))
        if accelerator_type not in known:
            raise ValueError(
                f"accelerator_type {accelerator_type!r}: the cluster has {', '.join(known) or 'no accelerators'}"
            )
        return {"num_gpus": 1, "num_cpus": num_cpus, "accelerator_type": accelerator_type}
    if resources.get("GPU", 0) >= 1:
        return {"num_gpus": 1, "num_cpus": num_cpus}
    threads = str(max(1, int(num_cpus)))
    return {"num_cpus": num_cpus, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": threads}}}


def scaling_config(num_workers: int, accelerator_type: str | None, num_cpus: float) -> "ray.train.ScalingConfig":
    """Ray Train workers that hold what `actor_options` gives an actor.

    Raises ValueError where a cluster of fixed size can never place them: Ray would wait for ever.
    """
    import ray.train  # a second of imports that other jobs need not wait for

    options = actor_options(accelerator_type, num_cpus)
    need = {"CPU": num_cpus} | ({"GPU": 1.0} if "num_gpus" in options else {})
    for kind, each in need.items():
        there = ray.cluster_resources().get(kind, 0)
        if num_workers * each > there and not os.environ.get("RAY_ADDRESS"):
            raise ValueError(f"num_workers {num_workers} of {each:g} {kind} each: there are {there:g}")
    return ray.train.ScalingConfig(
        num_workers=num_workers,
        use_gpu="GPU" in need,
        resources_per_worker=need,
        accelerator_type=accelerator_type,
    )
