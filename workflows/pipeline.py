"""Stages that every workflow runs in order: sweep -> train -> evaluate -> promote (-> serve)."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from jobs import evaluate, promote, serve, sweep, train
from jobs.common.cluster import connect
from jobs.common.config import Config
from jobs.common.registry import Registry
from jobs.evaluation.inputs import EvaluateConfig
from jobs.evaluation.result import EvaluateResult
from jobs.training.config import TrainConfig


class Pipeline(Config):
    """Configuration of each stage; a stage reads the output of the previous ones."""

    sweep: sweep.SweepConfig
    train: TrainConfig
    rivals: tuple[TrainConfig, ...] = ()
    """Trainings of further policies, which `evaluate` also measures."""
    evaluate: EvaluateConfig
    promote: promote.PromoteConfig
    serve: serve.ServeConfig


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Print the name of a stage, and its duration at the end."""
    print(f"\n--- {name} ---", flush=True)
    started = time.monotonic()
    yield
    print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)


def learn(pipeline: Pipeline) -> EvaluateResult:
    """Run every stage except serving: register a new version, measure it, and promote it if it is fast enough."""
    with stage("ray"):
        Registry.open()  # fails early if the store is not reachable
        connect(include_dashboard=True)  # Ray Train checks its controller through the dashboard
    with stage("sweep"):
        sweep.run(pipeline.sweep)
    with stage("train"):
        for policy in (pipeline.train, *pipeline.rivals):
            train.run(policy)
    with stage("evaluate"):
        measured = evaluate.run(pipeline.evaluate)
    with stage("promote"):
        promote.run(pipeline.promote)
    return measured
