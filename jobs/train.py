"""Train: the rows of sweeps -> a policy, through Ray Train, recorded in MLflow and registered as a new version.

Rows are checked, split by prompt and written to flat files before Ray Train starts; its workers map those, so nobody
holds all rows in memory (`blockpilot/policy/dataset.py`). A killed worker costs the epochs since the last checkpoint,
a killed driver nothing more: the same command goes on, and the result depends on neither.

Everything is on disk before MLflow is told. Where it cannot be reached, `--relog` tells it later.
"""

import functools
import shutil

import ray.train
import ray.train.torch
import torch
from torch import Tensor

from blockpilot.policy.training import Fit, new_network
from jobs.common.cluster import connect
from jobs.common.config import absolute_in_submitted_job, main
from jobs.common.ray_train import report, saved_state, scaling_config, train
from jobs.common.registry import Registry
from jobs.training.config import TrainConfig
from jobs.training.dataset import read_dataset
from jobs.training.plan import FitPlan, plan, run_name
from jobs.training.record import TrainResult, log, save


def run(config: TrainConfig) -> TrainResult:
    """Train, save and register a policy; raises ValueError for bad input before Ray starts."""
    absolute_in_submitted_job(config.output, "output")
    if config.relog:
        return log(config.output, Registry.open())
    storage = config.output.absolute() / "train"
    data = read_dataset(config, storage / "examples")
    registry = Registry.open()
    connect(include_dashboard=True)
    scaling = scaling_config(config.num_workers, config.accelerator_type, config.num_cpus)
    planned = plan(config, data)
    name = run_name(config, data, planned)
    state, _ = train(functools.partial(_work, planned), scaling, storage, name, config.max_failures)
    save(config, data, planned, state)
    shutil.rmtree(storage)  # the same command trains anew from here on
    return log(config.output, registry)


def _work(planned: FitPlan) -> None:
    """What every Ray Train worker does."""
    saved = saved_state()
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    training, validation = planned.examples()
    network = ray.train.torch.prepare_model(new_network(training, planned.vocab_size, planned.settings))
    reduce = _all_reduce if world_size > 1 else _same
    data, how = (network, training, validation), (planned.settings, planned.task)
    fit = Fit(*data, *how, rank=rank, world_size=world_size, reduce=reduce)
    if saved is not None:
        fit.load_state_dict(saved)
    while not fit.done:
        metrics = fit.run_epoch().metrics
        if fit.done or fit.epoch % planned.checkpoint_every == 0:
            report(metrics | {"epoch": fit.epoch}, fit.state_dict() if rank == 0 else None)


def _all_reduce(sums: Tensor) -> Tensor:
    torch.distributed.all_reduce(sums)
    return sums


def _same(sums: Tensor) -> Tensor:
    return sums


if __name__ == "__main__":
    main(TrainConfig, run)
