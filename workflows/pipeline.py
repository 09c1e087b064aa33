"""Stages that every workflow runs in order, timed: sweep -> train -> evaluate -> promote (-> serve)."""

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
    """A configuration for each stage; a stage reads what those before it wrote."""

    sweep: sweep.SweepConfig
    train: TrainConfig
    rivals: tuple[TrainConfig, ...] = ()
    """Further policies, for `evaluate` to measure beside it."""
    evaluate: EvaluateConfig
    promote: promote.PromoteConfig
    serve: serve.ServeConfig


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Announce a stage, and say how long it took."""
    print(f"\n--- {name} ---", flush=True)
    started = time.monotonic()
    yield
    print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)


def learn(pipeline: Pipeline) -> EvaluateResult:
    """Run every stage but serving: a new version is registered, measured, and promoted if it is fast enough."""
    with stage("ray"):
        Registry.open()  # one that is out of reach is known before anything is measured
        connect(include_dashboard=True)  # Ray Train asks the dashboard whether its controller lives
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
