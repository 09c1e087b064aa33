"""What matters in a policy, by measurement: fits that differ in one thing each, on the same sweeps and splits.

The first block is the paper's policy (head `class`, distribution after the prompt, one choice for an answer) with the
paper's own ablations; then what it might read instead, the other head, the other objective, a choice at every step,
and fewer training prompts. Every fit is repeated with other seeds, which draw the split, too. What is shown is looked
up on held-back prompts: a diagnostic that compares fits. What a policy is worth is for jobs/evaluate.py.
"""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from pydantic import Field

from blockpilot.files import write_text
from blockpilot.network import FORMS
from blockpilot.report import markdown
from jobs.cluster import connect
from jobs.config import Config, Place, absolute_in_submitted_job, main
from jobs.train import Dataset, Fitted, TrainConfig, fit, plan, read_dataset

PAPER: dict[str, Any] = {
    **{"head": "class", "reads": "prefill", "inputs": ("probs",), "hidden": 2048, "lr": 3e-4, "anneal": False},
    **{"dropout": 0.2, "weight_decay": 0.0, "patience": 20, "epochs": 100, "batch_size": 32},
}
STEP: dict[str, Any] = {}  # the defaults of jobs/train.py
CENTRE = 5  # of the candidate sets by k: the draft's tau is flat beyond 6


def variants(sizes: tuple[int, ...], num_prompts: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Settings of every fit, by name."""
    found: dict[str, dict[str, Any]] = {"paper's: class, probs, 2048 x 2": PAPER}
    found |= {f"width {width}": PAPER | {"hidden": width} for width in (512, 1024, 4096)}
    found |= {f"depth {depth}": PAPER | {"depth": depth} for depth in (1, 3)}
    for k in (1, 2, 3):
        around = tuple(size for size in sizes if abs(size - CENTRE) <= k)
        found[f"k={k}: B={around[0]}..{around[-1]}, tau"] = PAPER | {"candidates": around, "objective": "tau"}
    found |= {f"input {form}": PAPER | {"form": form} for form in FORMS if form != "softmax"}
    reading = {"context": ("context",), "probs and context": ("probs", "context"), "scalars": ("scalars",)}
    found |= {f"reads {name}": PAPER | {"inputs": inputs} for name, inputs in reading.items()}
    found["objective tau"] = PAPER | {"objective": "tau"}
    found["head tau"] = PAPER | {"head": "tau"}
    found["head tau, reads context"] = PAPER | {"head": "tau", "inputs": ("context", "scalars")}
    found["every step: context, anchor, scalars"] = STEP
    found["every step: context"] = STEP | {"inputs": ("context",)}
    found["every step: anchor"] = STEP | {"inputs": ("anchor",)}
    found["every step: scalars"] = STEP | {"inputs": ("scalars",)}
    found |= {f"every step, width {width}": STEP | {"hidden": width} for width in (64, 1024)}
    found["every step, constant rate"] = STEP | {"anneal": False}
    found |= {f"paper's, {num} prompts": PAPER | {"num_prompts": num} for num in num_prompts}
    found |= {f"every step, {num} prompts": STEP | {"num_prompts": num} for num in num_prompts}
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
    data = {reads: _dataset(config, base, reads) for reads in ("prefill", "step")}
    every = variants(tuple(data["prefill"].candidates), config.num_prompts)
    if unknown := [name for name in config.variants or () if name not in every]:
        raise ValueError(f"variants {unknown[0]!r}: must be of {', '.join(every)}")
    connect()
    file = config.output / "fits.json"
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    chosen = {name: every[name] for name in config.variants or every}
    jobs = {
        (name, seed): base.model_copy(update=changes | {"seed": seed})
        for name, changes in chosen.items()
        for seed in range(config.seeds)
    }
    waiting = [(key, _key(*key, data), settings) for key, settings in jobs.items() if _key(*key, data) not in known]
    task: Any = ray.remote(num_cpus=1)(_fit)
    running: dict[Any, str] = {}
    while waiting or running:
        while waiting and len(running) < config.max_running:
            (name, seed), key, settings = waiting.pop(0)
            running[task.remote(settings, data[settings.reads])] = key
            print(f"ablations: {name}, seed {seed}; {len(waiting)} to come", flush=True)
        (done,), _ = ray.wait(list(running))
        fitted: Fitted = ray.get(done)
        known[running.pop(done)] = {"epoch": fitted.epoch, "loss": fitted.loss, **fitted.report._asdict()}
        write_text(file, json.dumps(known, indent=1))
    text = markdown([row(name, [known[_key(name, s, data)] for s in range(config.seeds)]) for name in chosen])
    write_text(config.output / "table.md", text + "\n")
    print(f"\n{text}")
    return text


def _dataset(config: AblationsConfig, base: TrainConfig, reads: str) -> Dataset:
    head = {"reads": reads, "inputs": ("context",)}
    return read_dataset(base.model_copy(update=head), config.output.absolute() / f"examples-{reads}")


def _fit(config: TrainConfig, data: Dataset) -> Fitted:
    """One fit; another candidate set or objective has examples of its own."""
    if config.candidates is not None or config.objective == "tau":
        data = read_dataset(config, data.folder.with_name(f"examples-{config.objective}-{config.candidates}"))
    return fit(plan(config, data))


def _key(name: str, seed: int, data: Mapping[str, Dataset]) -> str:
    return f"{name}, seed {seed}, sweep {data['prefill'].id}"


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
