"""Resources of replicas: the CPU cores of each, and the check that this machine has enough for all of them."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jobs.common.cluster import num_cores
from jobs.serving.models import ModelConfig


class ReplicaCpus(NamedTuple):
    """CPU cores of each replica of a model, and the reason for this number."""

    num: float
    why: str


def replica_cpus(model: ModelConfig, models: Sequence[ModelConfig], *, alone: bool) -> ReplicaCpus:
    """The configured cores, otherwise an equal share of the machine's, or one core in a cluster.

    alone: this process starts Ray, unless RAY_ADDRESS names a cluster; False for `serve deploy`.
    """
    num_cpus = model.resources.num_cpus
    if num_cpus is not None:
        return ReplicaCpus(num_cpus, f"num_cpus {num_cpus:g}")
    if os.environ.get("RAY_ADDRESS") or not alone:
        return ReplicaCpus(1, "one core of a cluster")
    num_replicas, cores = sum(other.most_replicas for other in models), num_cores()
    share = "all" if num_replicas == 1 else f"1/{num_replicas} of the"
    return ReplicaCpus(max(1, cores // num_replicas), f"{share} {cores} cores of this machine")


def check_enough(num_replicas: Sequence[int], options: Sequence[Mapping[str, Any]], has: Mapping[str, float]) -> None:
    """Raise ValueError if this machine lacks the cores or GPUs of all replicas, which would wait for them forever.

    num_replicas, options: of each model, as `actor_options` returns them. has: resources of Ray's cluster.
    """
    for option, resource, unit in (("num_cpus", "CPU", "CPU cores"), ("num_gpus", "GPU", "GPUs")):
        needed = sum(num * float(o.get(option, 0)) for num, o in zip(num_replicas, options, strict=True))
        if needed > has.get(resource, 0):
            have = f"this machine has {has.get(resource, 0):g}"
            raise ValueError(f"num_actors: {sum(num_replicas)} replicas need {needed:g} {unit}; {have}")
