"""Measure a draft: tau by prompt set, temperature and block size, on prompts it was not trained on.

The target answers each prompt once. How many drafted tokens are accepted at every anchor of that text follows from
the draft alone, so one text gives tau for all block sizes, without decoding it again (blockpilot/sweep/replay.py).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import Field, field_validator
from rich.console import Console
from rich.table import Table

from blockpilot.draft_training.answers import Answer, generate_answers
from blockpilot.evaluation.statistics import Interval, ratio_of_totals
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Prompt, load_prompts, split
from blockpilot.storage import write_text
from blockpilot.sweep.candidates import check_candidates
from blockpilot.sweep.replay import Text, accepted_everywhere, know
from blockpilot.sweep.trees import emitted_along
from blockpilot.types import Sampling
from jobs.common.cluster import connect, num_threads, pooled
from jobs.common.config import Config, PairConfig, Resources, absolute_in_submitted_job, main
from jobs.common.progress import Progress

RESULT_FILE = "draft.json"


class MeasureDraftConfig(Config):
    """Draft, prompts and sampling of a measurement."""

    pair: PairConfig = PairConfig(dtype="bfloat16")
    prompts: tuple[str, ...] = ("chitchat", "gsm8k", "humaneval", "mt-bench")
    """Prompt sets by name, and files."""
    num_prompts: int = Field(default=64, ge=2)
    """Prompts of each set and file."""
    held_out: float | None = Field(default=None, gt=0, lt=1)
    """Only the prompts that a training with this `held_out` (and seed 0) leaves aside; for training sets."""
    block_sizes: tuple[int, ...] | None = None
    """Block sizes, ascending; by default the trained one."""
    temperatures: tuple[float, ...] = Field(default=(0.0, 1.0), min_length=1)
    """0 is greedy."""
    max_prompt_tokens: int = Field(default=1000, ge=1)
    """Longer prompts are left out."""
    max_new_tokens: int = Field(default=128, ge=2)
    """Tokens of an answer at most."""
    seed: int = Field(default=1, ge=0)
    """Of the sampler; the n-th prompt of a set has seed + n."""
    resources: Resources = Resources()
    """Of the actors; each takes one set and temperature at a time."""
    output: Path = Path("runs/measure_draft")
    """Directory of the result; an absolute path in a submitted job."""

    @field_validator("block_sizes")
    @classmethod
    def _check_block_sizes(cls, sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if sizes is not None:
            check_candidates(sizes)
        return sizes


class TauFigure(NamedTuple):
    """Tau of one block size on prompts of one set at one temperature."""

    prompt_set: str
    temperature: float
    block_size: int
    num_prompts: int
    num_tokens: int  # emitted by verify steps
    tau: Interval


class MeasureTask(NamedTuple):
    """Prompts of one set, and the temperature of their answers."""

    name: str
    prompts: tuple[Prompt, ...]
    temperature: float


def run(config: MeasureDraftConfig) -> list[TauFigure]:
    """Measure, print and write the figures; raises ValueError for bad input before Ray starts."""
    absolute_in_submitted_job(config.output, "output")
    config.pair.need_draft("jobs/measure_draft.py")
    prompts = {name: prompts_of(config, name) for name in config.prompts}
    tasks = [MeasureTask(name, prompts[name], t) for name in prompts for t in config.temperatures]
    connect()
    found = measure(config, tasks)
    rows = [m._asdict() | {"tau": m.tau._asdict()} for m in found]
    text = json.dumps({"config": config.model_dump(mode="json"), "measured": rows}, indent=2)
    write_text(config.output / RESULT_FILE, text + "\n")
    return found


def measure(config: MeasureDraftConfig, tasks: Sequence[MeasureTask]) -> list[TauFigure]:
    """Measure the tasks on Ray actors and print the tables; figures come in the order of the tasks."""
    found: list[TauFigure] = []
    progress = Progress("measured", len(tasks), "sets and temperatures")
    for measured in pooled(DraftWorker, config, tasks, "measure", config.resources):
        found += measured
        progress.advance()
    order = {(task.name, task.temperature): i for i, task in enumerate(tasks)}
    found.sort(key=lambda m: (order[m.prompt_set, m.temperature], m.block_size))
    for table in tables(found):
        Console().print(table)
    return found


def prompts_of(config: MeasureDraftConfig, name: str) -> tuple[Prompt, ...]:
    """The prompts of a set or file to measure on; raises ValueError for fewer than 2."""
    prompts = load_prompts(name)
    if config.held_out is not None:
        prompts = split(prompts, config.held_out)[1]
    if len(prompts) < 2:
        raise ValueError(f"prompts {name!r}: {len(prompts)} held out, at least 2 are needed")
    return tuple(prompts[: config.num_prompts])


def tables(found: Sequence[TauFigure]) -> list[Table]:
    """Tables by temperature: a row for each block size, a column for each set, and their unweighted mean."""
    return [
        _table([m for m in found if m.temperature == temperature], f"tau at T={temperature:g}")
        for temperature in sorted({m.temperature for m in found})
    ]


def _table(found: Sequence[TauFigure], title: str) -> Table:
    names = list(dict.fromkeys(m.prompt_set for m in found))
    numbers = {m.prompt_set: m.num_prompts for m in found}
    shown = Table("B", *(f"{name} ({numbers[name]})" for name in names), "mean", title=title)
    for size in sorted({m.block_size for m in found}):
        taus = {m.prompt_set: m.tau for m in found if m.block_size == size}
        cells = [f"{taus[name].value:.2f} ({taus[name].low:.2f}-{taus[name].high:.2f})" for name in names]
        mean = sum(tau.value for tau in taus.values()) / len(taus)
        shown.add_row(str(size), *cells, f"{mean:.2f}")
    return shown


class DraftWorker:
    """Ray actor with the pair."""

    def __init__(self, config: MeasureDraftConfig) -> None:
        torch.set_num_threads(num_threads(config.resources.num_cpus))
        self.config, self.pair = config, config.pair.load()

    def measure(self, task: MeasureTask) -> list[TauFigure]:
        """Tau of every block size on the prompts of a task."""
        config, pair = self.config, self.pair
        sampling = [Sampling(task.temperature, seed=config.seed + i) for i in range(len(task.prompts))]
        most = {"max_new_tokens": config.max_new_tokens, "max_prompt_tokens": config.max_prompt_tokens}
        answers = generate_answers(pair, task.prompts, sampling, **most)
        if not answers:
            raise ValueError(f"prompts {task.name!r}: all {len(task.prompts)} are left out, see the warning above")
        sizes = config.block_sizes or (pair.block_size,)
        counts: dict[int, list[tuple[int, int]]] = {size: [] for size in sizes}  # tokens emitted and verify steps
        for answer in answers:
            known = know(pair, [_text(pair, answer, config.max_new_tokens)])
            for size, of_size in counts.items():
                (accepted,) = accepted_everywhere(pair, known, size)
                of_size.append((len(accepted), len(emitted_along(accepted))))
        figures = []
        for size, of_size in counts.items():
            emitted, steps = [tokens for tokens, _ in of_size], [num for _, num in of_size]
            tau = ratio_of_totals(emitted, steps)
            figures.append(TauFigure(task.name, task.temperature, size, len(of_size), sum(emitted), tau))
        return figures


def _text(pair: Pair, answer: Answer, max_new_tokens: int) -> Text:
    limit = min(answer.num_prompt_tokens + max_new_tokens, pair.max_length)
    return Text(tuple(answer.tokens), answer.num_prompt_tokens, limit, Sampling(answer.temperature, seed=answer.seed))


if __name__ == "__main__":
    main(MeasureDraftConfig, run)
