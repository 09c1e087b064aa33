"""Train: fit a policy to the rows of sweeps with Ray Train, log it to MLflow and register it as a new version.

Rows are checked, split by prompt and written to flat files before Ray Train starts. Its workers memory-map the files,
so no process holds all rows (`blockpilot/policy/dataset.py`). A killed worker or driver costs at most the epochs
since the last checkpoint: the same command continues, with the same result.

Everything is written to disk before it is logged to MLflow; `--relog` logs it later if MLflow was not reachable.
"""

import functools
import hashlib

import ray.train
import ray.train.torch
import torch
from torch import Tensor

from blockpilot.policy.dataset import split_examples, split_steps
from blockpilot.policy.outcomes import fit_prior, outcomes_of
from blockpilot.policy.training import Fit, FitTask, new_network
from blockpilot.storage import remove_folder
from jobs.common.cluster import connect
from jobs.common.config import absolute_in_submitted_job, main
from jobs.common.lease import Lease
from jobs.common.ray_train import State, report, saved_state, scaling_config, train
from jobs.common.registry import Registry
from jobs.training.config import TrainConfig
from jobs.training.dataset import Dataset, check_sweeps, read_dataset
from jobs.training.record import TrainResult, log, save


def run(config: TrainConfig) -> TrainResult:
    """Train, save and register a policy; raises ValueError for bad input before Ray starts."""
    absolute_in_submitted_job(config.output, "output")
    if config.relog:
        return log(config.output, Registry.open())
    check_sweeps(config)
    storage = config.output.absolute() / "train"
    with Lease(config.output) as lease:
        data = read_dataset(config, storage / "examples")
        registry = Registry.open()
        connect(include_dashboard=True)
        scaling = scaling_config(config.num_workers, config.accelerator_type, config.num_cpus)
        work = functools.partial(_work, config, data)
        state, _ = train(work, scaling, storage, run_name(config, data), config.max_failures)
        lease.check()
        save(config, data, state)
        remove_folder(storage)  # from now on the same command trains from scratch
        return log(config.output, registry)


def run_name(config: TrainConfig, data: Dataset) -> str:
    """Name of the Ray Train run, by which Ray continues it: a hash of everything that the result depends on."""
    key = repr((config.fit, config.validation, data.task, config.num_workers, data.id, config.leave_out))
    return f"policy-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _work(config: TrainConfig, data: Dataset) -> None:
    """Train in a Ray Train worker."""
    saved = saved_state()
    if data.task is None:
        _fit_prior(config, data)
    else:
        _fit_network(config, data, data.task, saved)


def _fit_prior(config: TrainConfig, data: Dataset) -> None:
    """Kind `step`: rank 0 fits a few weights in seconds; the other ranks only report."""
    if ray.train.get_context().get_world_rank() > 0:
        report({}, None)
        return
    training, _ = split_steps(data.folder, config.validation, config.fit.seed)
    prior = fit_prior(outcomes := outcomes_of(training))
    report({"num_outcomes": len(outcomes)}, {"weights": torch.from_numpy(prior.weights)})


def _fit_network(config: TrainConfig, data: Dataset, task: FitTask, saved: State | None) -> None:
    """Kind `prompt`: data-parallel epochs."""
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    training, validation = split_examples(data.folder, config.validation, config.fit.seed)
    network = ray.train.torch.prepare_model(new_network(training, data.metadata.vocab_size, config.fit))
    reduction = {"reduce": _all_reduce} if world_size > 1 else {}
    fit = Fit(network, training, validation, config.fit, task, rank=rank, world_size=world_size, **reduction)
    if saved is not None:
        fit.load_state_dict(saved)
    while not fit.done:
        metrics = fit.run_epoch()
        if fit.done or fit.epoch % config.checkpoint_every == 0:
            report(metrics | {"epoch": fit.epoch}, fit.state_dict() if rank == 0 else None)


def _all_reduce(sums: Tensor) -> Tensor:
    torch.distributed.all_reduce(sums)
    return sums


if __name__ == "__main__":
    main(TrainConfig, run)
