"""The chain that every workflow runs, and what it took: sweep -> train -> evaluate -> promote (-> serve)."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from blockpilot.report import markdown
from jobs import evaluate, promote, serve, sweep, train
from jobs.cluster import connect
from jobs.config import Config


class Pipeline(Config):
    """One configuration a stage; each reads what the one before it wrote."""

    sweep: sweep.SweepConfig
    train: train.TrainConfig
    evaluate: evaluate.EvaluateConfig
    promote: promote.PromoteConfig
    serve: serve.ServeConfig


class Stopwatch:
    """Seconds of each stage, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Announce a stage and time it."""
        print(f"\n--- {name} ---", flush=True)
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started

    def table(self) -> str:
        """Seconds of each stage and of all."""
        timed = self.seconds | {"all": sum(self.seconds.values())}
        return markdown([{"stage": name, "seconds": f"{seconds:.0f}"} for name, seconds in timed.items()])


def learn(pipeline: Pipeline, watch: Stopwatch) -> evaluate.EvaluateResult:
    """Every stage but serving: ends with a new version, measured, and promoted if it earned that."""
    with watch.stage("ray"):
        connect(include_dashboard=True)  # Ray Train asks the dashboard whether its controller lives
    with watch.stage("sweep"):
        sweep.run(pipeline.sweep)
    with watch.stage("train"):
        train.run(pipeline.train)
    with watch.stage("evaluate"):
        measured = evaluate.run(pipeline.evaluate)
    with watch.stage("promote"):
        promote.run(pipeline.promote)
    return measured
