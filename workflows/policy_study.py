"""Learned policies on the embedded pair: sweeps, training, evaluations at several loads, and their comparison.

The policies are trained on prompts that the draft was not trained on: a draft has a higher acceptance on its
training answers, so a policy trained on those would expect too much. The embedded draft was trained on most prompts
of four sets (see its model card). Training prompts are the rest of these sets, further prompts written by the
target, and the unmeasured prompts of three benchmarks. The policy of kind `step` is measured on three benchmarks and
on conversation openings, all held out, at temperature 0 and 1, alone and in batches, and compared with the paper's
policy, fixed block sizes, untrained methods and an oracle. Its transfer is measured on code, without code among its
training prompts.

The study takes hours on two cores; `--stages` selects stages, and finished work is reused. Evaluations need only the
policies, and use those in `workflows/policies` if none were trained; the comparison likewise uses
`workflows/evaluations`. So another machine can continue.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Literal

from pydantic import Field

from blockpilot.evaluation.statistics import Interval
from blockpilot.evaluation.tables import markdown
from blockpilot.policy.training import FitSettings
from blockpilot.prompts.files import Prompt, load_prompts, save_prompts, split
from blockpilot.storage import write_bytes, write_text
from jobs import evaluate, sweep, train
from jobs.answers import AnswersConfig, write_own_prompts
from jobs.common import figures
from jobs.common.cluster import connect
from jobs.common.config import Config, PairConfig, Resources, main
from jobs.common.lease import Lease
from jobs.evaluation.inputs import AR, EvaluateConfig
from jobs.evaluation.result import RESULT_FILE, load_name, read_figures
from jobs.sweep import SweepConfig
from jobs.training.config import TrainConfig

Stage = Literal["prompts", "sweep", "train", "evaluate", "transfer", "compare"]
STAGES: tuple[Stage, ...] = ("prompts", "sweep", "train", "evaluate", "transfer", "compare")
KEPT = Path(__file__).parent / "policies"
KEPT_EVALUATIONS = Path(__file__).parent / "evaluations"
SEEN_BY_DRAFT = {"chatterbot": 600}  # first prompts
HELD_OUT_FROM_DRAFT = "docstrings", "signatures", "chitchat"  # trained on all but HELD_OUT of each
HELD_OUT = 0.04
NUM_MEASURED = 64  # first prompts of a benchmark; policies learn from later ones
NUM_PROMPTS = {
    **{"docstrings": 160, "signatures": 135, "chatterbot": 145},
    **{"gsm8k": 400, "humaneval": 100, "mbpp": 150},
}
CODE_SETS = ("docstrings", "signatures", "humaneval", "mbpp")
CANDIDATES = (1, 2, 3, 4, 6, 8)
TREE_SIZES = (3, 7, 15)
BASELINES = "control", "means", "verification", "budget", "untrained", "oracle"
OWN_SEEDS, SEEDS_PER_FILE = range(100_000, 100_800), 200  # the draft's training prompts have seeds from 0
OPENINGS = (
    *("", "A shop sells", "", "How many", "Explain", "", "If", "Write a short"),
    *("", "A farmer has", "", "Calculate", "What is", "", "There are", "Summarize"),
)
TEMPERATURES = (0.0, 1.0)


class StudyConfig(Config):
    """Output, stages and size of the study."""

    output: Path = Path("runs/study")
    """Output directory."""
    stages: tuple[Stage, ...] = STAGES
    """Stages to run, in this order; each needs the previous ones."""
    num_actors: int = Field(default=2, ge=1)
    """Actors of the sweep, with one CPU core each."""
    num_training_prompts: int = Field(default=2100, ge=3)
    """Maximum prompts to sweep: two thirds greedily, one third at temperature 1."""
    num_prompts: int = Field(default=NUM_MEASURED, ge=2, le=NUM_MEASURED)
    """Prompts of each of the four sets of the evaluation."""
    loads: tuple[int, ...] = (1, 4, 16)
    """Concurrent requests in the evaluations."""
    temperatures: tuple[float, ...] = TEMPERATURES
    """Sampling temperatures of the evaluations."""
    max_new_tokens: int = Field(default=48, ge=4)
    """Maximum tokens of an answer in the evaluations."""
    num_cpus: int = Field(default=2, ge=1)
    """CPU cores of each evaluation."""

    @property
    def pair(self) -> PairConfig:
        return PairConfig()

    def prompts(self, temperature: float) -> Path:
        return self.output / f"train-T{temperature:g}.jsonl"

    def sweep(self, temperature: float) -> str:
        return str(self.output / f"sweep-T{temperature:g}")

    def trained(self, name: str) -> Path:
        """Directory of a policy that this study trains."""
        return self.output / f"policy-{name}"

    def policy(self, name: str) -> str:
        """Directory of a policy: trained by this study, otherwise the one in the repository."""
        trained = self.trained(name)
        return str(trained if trained.exists() else KEPT / trained.name)

    @property
    def held_out_chitchat(self) -> Path:
        return self.output / "chitchat.jsonl"

    def evaluation(self, temperature: float, load: int) -> Path:
        return self.output / f"evaluate-T{temperature:g}-load{load}"


# --- prompts ---


def unseen(name: str, num: int) -> list[Prompt]:
    """Prompts of a set without the draft's training prompts and the measured ones."""
    if name in HELD_OUT_FROM_DRAFT:
        return held_out(name)[:num]
    return load_prompts(name)[SEEN_BY_DRAFT.get(name, NUM_MEASURED) :][:num]


def held_out(name: str) -> list[Prompt]:
    """Prompts of a set of HELD_OUT_FROM_DRAFT that the draft was not trained on."""
    return split(load_prompts(name), HELD_OUT)[1]


def held_out_chitchat() -> list[Prompt]:
    """Conversation openings that neither draft nor policy was trained on."""
    return held_out("chitchat")


def own_prompts(config: StudyConfig) -> list[Prompt]:
    """Prompts written by the target, about four for five seeds, from openings of word problems and questions."""
    connect()
    resources = Resources(num_actors=config.num_actors)
    writing = AnswersConfig(answers=config.output, prompts_per_shard=SEEDS_PER_FILE, resources=resources)
    with Lease(config.output) as lease:
        return write_own_prompts(writing, lease, OWN_SEEDS, OPENINGS)


def write_prompts(config: StudyConfig) -> None:
    """Write two thirds of the training prompts for T=0, one third for T=1."""
    mixed = [prompt for name, num in NUM_PROMPTS.items() for prompt in unseen(name, num)] + own_prompts(config)
    mixed.sort(key=lambda prompt: hashlib.sha256(prompt.text.encode()).digest())
    save_prompts(config.prompts(0.0), [prompt for i, prompt in enumerate(mixed) if i % 3 != 2])
    save_prompts(config.prompts(1.0), mixed[2::3])


# --- the stages ---


def sweep_config(config: StudyConfig, temperature: float) -> SweepConfig:
    return SweepConfig(
        pair=config.pair,
        prompts=(str(config.prompts(temperature)),),
        num_prompts=config.num_training_prompts // 3 * (1 if temperature else 2),
        candidates=(1, 2, 3, 4, 5, 6, 7, 8),
        method="dense",
        temperature=temperature,
        max_new_tokens=64,
        prompts_per_shard=32,
        slots=32,
        output=config.sweep(temperature),
        resources=Resources(num_actors=config.num_actors),
        price_rows=16,
        price_context=192,
    )


def policies(config: StudyConfig) -> dict[str, TrainConfig]:
    """Trainings of the default policy (kind step), the paper's, and one of kind step without code."""
    sweeps = tuple(map(config.sweep, TEMPERATURES))
    default = TrainConfig(sweep=sweeps, output=config.trained("step"), register_version=False)
    # A quarter of the paper's width: 7 MB instead of 42. The paper reports little difference from 1024 to 4096.
    paper = FitSettings("prompt", 512, epochs=100, batch_size=32, lr=3e-4, dropout=0.2, patience=20)
    paper = replace(paper, anneal=False, weight_decay=0.0)
    paper_update = {"fit": paper, "candidates": CANDIDATES, "output": config.trained("class")}
    return {
        "step": default,
        "class": default.model_copy(update=paper_update),
        "no-code": default.model_copy(update={"leave_out": CODE_SETS, "output": config.trained("no-code")}),
    }


def evaluate_config(config: StudyConfig, temperature: float, load: int) -> EvaluateConfig:
    return EvaluateConfig(
        pair=config.pair,
        prompts=("gsm8k", "humaneval", "mt-bench", str(config.held_out_chitchat)),
        num_prompts=config.num_prompts,
        policy=config.policy("step"),
        rivals=(config.policy("class"),),
        baselines=BASELINES,
        block_sizes=CANDIDATES[1:],
        tree_sizes=TREE_SIZES,
        num_cpus=config.num_cpus,
        max_new_tokens=config.max_new_tokens,
        temperature=temperature,
        concurrency=load,
        output=config.evaluation(temperature, load),
    )


def transfer_config(config: StudyConfig) -> EvaluateConfig:
    """Evaluation on code of the policy trained without code, and of the default one."""
    return EvaluateConfig(
        pair=config.pair,
        prompts=("humaneval", "mbpp"),
        num_prompts=config.num_prompts,
        policy=config.policy("no-code"),
        rivals=(config.policy("step"),),
        baselines=(),
        block_sizes=(3, 4, 6),
        num_cpus=config.num_cpus,
        max_new_tokens=config.max_new_tokens,
        output=config.output / "evaluate-transfer",
    )


def evaluations(config: StudyConfig) -> Sequence[EvaluateConfig]:
    return [evaluate_config(config, t, load) for t in config.temperatures for load in config.loads]


def finished(output: Path) -> Path | None:
    """Directory of the result of an evaluation: its output, otherwise the one in the repository."""
    directories = (output, KEPT_EVALUATIONS / output.name)
    return next((directory for directory in directories if (directory / RESULT_FILE).exists()), None)


def compare(config: StudyConfig) -> str:
    """Print, write and plot the speed-ups of all finished evaluations.

    Methods that are in all evaluations also get a geometric mean. Raises ValueError without any evaluation.
    """
    speed_ups = dict[str, dict[str, Interval]]()
    for directory in filter(None, (finished(evaluation.output) for evaluation in evaluations(config))):
        content = json.loads((directory / RESULT_FILE).read_text(encoding="utf-8"))
        rows = [row for row in map(read_figures, content["figures"]) if row.method != AR]
        name = load_name(f"{content['config']['temperature']:g}", content["config"]["concurrency"])
        speed_ups[name] = {row.method: row.speedup for row in rows}
    if not speed_ups:
        raise ValueError(f"{config.output}: no evaluation is finished, there is nothing to compare")
    table = markdown([_across(method, speed_ups) for method in next(iter(speed_ups.values()))])
    write_text(config.output / "compared.md", table + "\n")
    write_bytes(config.output / "speed_ups.png", figures.speed_ups(speed_ups))
    print(table)
    return table


def _across(method: str, speed_ups: Mapping[str, Mapping[str, Interval]]) -> dict[str, str]:
    """Cells of a method: its speed-up over plain decoding by load, and their geometric mean."""
    values = {load: row[method].value for load, row in speed_ups.items() if method in row}
    mean = f"{geometric_mean(values.values()):.3f}" if len(values) == len(speed_ups) else "-"
    by_load = {load: f"{values[load]:.2f}" if load in values else "-" for load in speed_ups}
    return {"method": method, **by_load, "geometric mean": mean}


def run(config: StudyConfig) -> None:
    """Run the configured stages."""
    if "prompts" in config.stages:
        write_prompts(config)
    if "sweep" in config.stages:
        for temperature in TEMPERATURES:
            sweep.run(sweep_config(config, temperature))
    if "train" in config.stages:
        for training in policies(config).values():
            train.run(training)
    if "evaluate" in config.stages:
        save_prompts(config.held_out_chitchat, held_out_chitchat())
        for evaluation in evaluations(config):
            evaluate.run(evaluation)
    if "transfer" in config.stages:
        evaluate.run(transfer_config(config))
    if "compare" in config.stages:
        compare(config)


if __name__ == "__main__":
    main(StudyConfig, run)
