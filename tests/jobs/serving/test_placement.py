"""Placement of replicas: their CPU cores, and machines that lack the cores or GPUs of all replicas."""

import os
from pathlib import Path

import pytest

from helpers.processes import Job
from helpers.servers import ROOT, free_port
from jobs.common.cluster import actor_options
from jobs.common.config import ConfigError
from jobs.serve import ServeConfig
from jobs.serving import placement
from jobs.serving.models import ModelConfig, ReplicaResources
from jobs.serving.placement import check_enough, replica_cpus


def test_replicas_share_the_cores_of_a_machine_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(placement, "num_cores", lambda: 8)
    one, three = ModelConfig(), ModelConfig(resources=ReplicaResources(num_actors=2), max_replicas=3)
    two_cpus = ModelConfig(resources=ReplicaResources(num_cpus=2))
    assert replica_cpus(one, (one,), alone=True) == (8, "all 8 cores of this machine")
    assert replica_cpus(one, (one, three), alone=True) == (2, "1/4 of the 8 cores of this machine")
    assert replica_cpus(two_cpus, (two_cpus, three), alone=True) == (2, "num_cpus 2")
    assert replica_cpus(one, (one, *[three] * 3), alone=True).num == 1  # more replicas than cores
    assert replica_cpus(one, (one,), alone=False) == (1, "one core of a cluster")
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert replica_cpus(one, (one,), alone=True) == (1, "one core of a cluster")
    with pytest.raises(ConfigError, match="num_actors"):
        ServeConfig(policy="8", resources=ReplicaResources(num_actors=0))


def test_an_actor_uses_no_gpu_that_is_not_reserved_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a cluster has no GPUs yet when a job starts: Ray would leave those of a new node visible."""
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 4.0})
    variables = actor_options(None, 2.0)["runtime_env"]["env_vars"]
    assert (variables["CUDA_VISIBLE_DEVICES"], variables["OMP_NUM_THREADS"]) == ("", "2")
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 4.0, "GPU": 1.0})
    assert actor_options(None, 2.0) == {"num_gpus": 1, "num_cpus": 2.0}


def test_more_replicas_than_a_machine_has_cores_or_gpus_for_are_refused() -> None:
    on_cpu, on_gpu, machine = {"num_cpus": 2.0}, {"num_cpus": 1.0, "num_gpus": 1}, {"CPU": 4.0, "GPU": 1.0}
    check_enough([2], [on_cpu], machine)
    check_enough([1, 1], [on_cpu, on_gpu], machine)
    for nums, options, complaint in (
        ([3], [on_cpu], "num_actors: 3 replicas need 6 CPU cores; this machine has 4"),
        ([1, 1], [on_gpu, on_gpu], "num_actors: 2 replicas need 2 GPUs; this machine has 1"),
    ):
        with pytest.raises(ValueError, match=complaint):
            check_enough(nums, options, machine)


@pytest.mark.ray
def test_a_server_with_more_replicas_than_cores_ends_in_one_line(
    tiny_pair_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    target, draft = map(str, tiny_pair_dirs)
    command = [ROOT / "jobs/serve.py", "--target", target, "--draft", draft, "--policy", "3"]
    command += ["--num-actors", "300", "--num-cpus", "1", "--port", str(free_port())]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "RAY_prestart_worker_first_driver": "0"}
    job = Job(command, cwd=tmp_path, env=variables, output=tmp_path / "log")
    assert job.wait(120) == 2
    assert "error: num_actors: 300 replicas need 300 CPU cores; this machine has " in job.log
