"""The chain that every workflow runs, and what it took: sweep -> train -> evaluate -> promote (-> serve)."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from blockpilot.evaluation.statistics import markdown
from jobs import evaluate, promote, serve, sweep, train
from jobs.common.cluster import connect
from jobs.common.config import Config
from jobs.evaluation.inputs import EvaluateConfig
from jobs.evaluation.result import EvaluateResult
from jobs.training.config import TrainConfig


class Pipeline(Config):
    """One configuration a stage; each reads what the one before it wrote."""

    sweep: sweep.SweepConfig
    train: TrainConfig
    evaluate: EvaluateConfig
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


class Learned(NamedTuple):
    """What came of the stages before serving."""

    measured: EvaluateResult
    promotion: promote.PromoteResult


def learn(pipeline: Pipeline, watch: Stopwatch) -> Learned:
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
        promotion = promote.run(pipeline.promote)
    return Learned(measured, promotion)


def to_serve(pipeline: Pipeline, learned: Learned) -> serve.ServeConfig:
    """The champion; where no version has earned that, the best fixed block size."""
    if learned.promotion.champion is not None:
        return pipeline.serve
    print(f"no champion yet: serving block size {learned.measured.best_fixed}, the best fixed one")
    return pipeline.serve.model_copy(update={"policy": str(learned.measured.best_fixed)})
