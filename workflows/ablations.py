"""What matters in a policy, by measurement: fits that differ in one thing each, on the same sweeps and splits.

First the paper's policy (kind `prompt`) with the paper's own ablations and the other objective, then a choice at
every step (kind `step`), and fewer training prompts of both. Every fit is repeated with other seeds, which draw the
split, too. What is shown is looked up on held-back prompts: a diagnostic that compares fits. What a policy is worth
is for jobs/evaluate.py.
"""

import json
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from pydantic import Field

from blockpilot.evaluation.statistics import markdown
from blockpilot.policy.training import FitSettings
from blockpilot.storage import write_text
from jobs.common.cluster import connect
from jobs.common.config import Config, Place, absolute_in_submitted_job, main
from jobs.training.config import TrainConfig
from jobs.training.dataset import Dataset, read_dataset
from jobs.training.plan import Fitted, fit, plan

PAPER = FitSettings(
    kind="prompt",
    hidden=2048,
    lr=3e-4,
    anneal=False,
    dropout=0.2,
    weight_decay=0.0,
    patience=20,
    epochs=100,
    batch_size=32,
)
STEP = FitSettings()  # the defaults of jobs/train.py
CENTRE = 5  # of the candidate sets by k: the draft's tau is flat beyond 6


def variants(sizes: tuple[int, ...], num_prompts: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Fields of TrainConfig for every fit, by name."""
    found: dict[str, dict[str, Any]] = {"paper's: prompt, width 2048": {"fit": PAPER}}
    found |= {f"width {width}": {"fit": replace(PAPER, hidden=width)} for width in (512, 1024, 4096)}
    for k in (1, 2, 3):
        around = tuple(size for size in sizes if abs(size - CENTRE) <= k)
        found[f"k={k}: B={around[0]}..{around[-1]}, tau"] = {"fit": PAPER, "candidates": around, "objective": "tau"}
    found["objective tau"] = {"fit": PAPER, "objective": "tau"}
    found["every step"] = {"fit": STEP}
    found |= {f"every step, width {width}": {"fit": replace(STEP, hidden=width)} for width in (64, 1024)}
    found["every step, constant rate"] = {"fit": replace(STEP, anneal=False)}
    found |= {f"every step, shrunk by {share:g}": {"fit": replace(STEP, shrink=share)} for share in (0.0, 0.4)}
    found |= {f"paper's, {num} prompts": {"fit": PAPER, "num_prompts": num} for num in num_prompts}
    found |= {f"every step, {num} prompts": {"fit": STEP, "num_prompts": num} for num in num_prompts}
    return found


class AblationsConfig(Config):
    """On which sweeps, and how often."""

    sweep: tuple[Place, ...] = Field(default=("runs/sweep",), min_length=1)
    """Dense sweeps, as for jobs/train.py."""
    output: Path = Path("runs/ablations")
    """Directory of the table; fits that are in it are not repeated."""
    seeds: int = Field(default=3, ge=1)
    """Splits and fits of each variant."""
    num_prompts: tuple[int, ...] = (100, 300, 1000)
    """Numbers of training prompts to learn from."""
    variants: tuple[str, ...] | None = None
    """Those to run, by name; all by default."""
    max_running: int = Field(default=2, ge=1)
    """Fits at a time, a CPU core each."""


def run(config: AblationsConfig) -> str:
    """Fit every variant that is not there yet; returns the table. Raises ValueError for unknown variants."""
    absolute_in_submitted_job(config.output, "output")
    base = TrainConfig(sweep=config.sweep, output=config.output)
    data = Datasets(config.output.absolute())
    of_all = data.of(base)
    every = variants(tuple(of_all.metadata.candidates), config.num_prompts)
    if unknown := [name for name in config.variants or () if name not in every]:
        raise ValueError(f"variants {unknown[0]!r}: must be of {', '.join(every)}")
    names = {
        name: [f"{name}, seed {seed}, sweep {of_all.id}" for seed in range(config.seeds)]
        for name in config.variants or every
    }
    jobs = {
        fit_name: base.model_copy(update=every[name] | {"fit": replace(every[name]["fit"], seed=seed)})
        for name, of_seeds in names.items()
        for seed, fit_name in enumerate(of_seeds)
    }
    fits = _fit_all(jobs, data, config.max_running, config.output / "fits.json")
    text = markdown([row(name, [fits[fit_name] for fit_name in of_seeds]) for name, of_seeds in names.items()])
    write_text(config.output / "table.md", text + "\n")
    print(f"\n{text}")
    return text


class Datasets:
    """Examples by what they are made of, written once: fits that run together read the same files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known = dict[str, Dataset]()

    def of(self, config: TrainConfig) -> Dataset:
        sizes = "-".join(map(str, config.candidates or ()))
        name = f"examples-{config.fit.kind}-{config.objective}-{sizes or 'all'}"
        if name not in self._known:
            self._known[name] = read_dataset(config, self.folder / name)
        return self._known[name]


def _fit_all(jobs: Mapping[str, TrainConfig], data: Datasets, max_running: int, file: Path) -> dict[str, Any]:
    """Reports of all fits; those in `file` are not repeated, and each that ends is added to it."""
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    waiting = [name for name in jobs if name not in known]
    connect()
    task: Any = ray.remote(num_cpus=1)(_fit)
    running: dict[Any, str] = {}
    while waiting or running:
        while waiting and len(running) < max_running:
            name = waiting.pop(0)
            running[task.remote(jobs[name], data.of(jobs[name]))] = name
            print(f"ablations: {name}; {len(waiting)} to come", flush=True)
        (done,), _ = ray.wait(list(running))
        fitted: Fitted = ray.get(done)
        known[running.pop(done)] = {"epoch": fitted.epoch, "loss": fitted.loss, **fitted.report._asdict()}
        write_text(file, json.dumps(known, indent=1))
    return known


def _fit(config: TrainConfig, data: Dataset) -> Fitted:
    return fit(plan(config, data))


def row(name: str, fits: list[dict[str, float]]) -> dict[str, str]:
    """What is told of a variant: means over seeds, of the ends of the intervals over prompts, too."""

    def mean(field: str) -> float:
        return statistics.mean(each[field] for each in fits)

    return {
        "variant": name,
        "epochs": f"{mean('epoch'):.0f}",
        "accuracy": f"{mean('accuracy'):.2f} (fixed {mean('accuracy_best_fixed'):.2f})",
        "R2": "-" if mean("r2") != mean("r2") else f"{mean('r2'):.2f}",
        "rate of best fixed": f"{mean('best_fixed'):.3f}",
        "gain over it": f"{mean('gain'):+.2%} ({mean('gain_low'):+.2%} to {mean('gain_high'):+.2%})",
        "oracle": f"{mean('oracle') / mean('best_fixed') - 1:+.1%}",
    }


if __name__ == "__main__":
    main(AblationsConfig, run)
