"""The whole pipeline on the embedded pair, in minutes on two CPU cores: `make demo`.

The demo's prompts are split by a hash of their text. On the training prompts every candidate block size is swept, and
a policy and the paper's policy are trained on the rows. On the held-out prompts all methods decode, in the fastest
dtype that is exact on this machine. The policy is registered, measured, and promoted if it beats the untrained
choice. The champion (or the untrained choice while there is none) is served in float32, and its answer must equal
exactly what the target writes one token at a time. A second run reuses the sweep's rows and registers a new version.
"""

import socket
from pathlib import Path
from typing import Any

import torch
from openai import OpenAI
from pydantic import Field

from blockpilot.policy.training import FitSettings
from blockpilot.prompts.files import Message, Prompt, load_prompts, save_prompts, split
from jobs import serve
from jobs.common.config import Config, PairConfig, Resources, main
from jobs.common.registry import CHAMPION, model_name
from jobs.evaluation.inputs import NEWEST, EvaluateConfig
from jobs.promote import PromoteConfig
from jobs.serve import ServeConfig
from jobs.sweep import SweepConfig
from jobs.training.config import TrainConfig
from workflows.pipeline import Pipeline, learn, stage

PAPER = FitSettings("prompt", 128, epochs=50, batch_size=16, dropout=0.2)
"""Settings of the paper's policy: one block size per answer, from the distribution after the prompt."""
QUESTION = "Write a short list of three things to pack for a day at the beach."


class DemoConfig(Config):
    """Pair, prompts and size of the demo."""

    pair: PairConfig = PairConfig()
    prompts: str = "demo"
    """Prompt set or file; a part of it is held out."""
    held_out: float = Field(default=0.15, gt=0, lt=1)
    """Share of the prompts that is held out for the evaluation."""
    num_training_prompts: int = Field(default=48, ge=8)
    """Maximum prompts to sweep."""
    num_prompts: int = Field(default=12, ge=2)
    """Maximum prompts of the evaluation."""
    candidates: tuple[int, ...] = (2, 4, 6, 8)
    """Candidate block sizes of the paper's policy, and the fixed block sizes of the evaluation."""
    max_new_tokens: int = Field(default=48, ge=2)
    """Maximum tokens of an answer."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the server, which ends with the demo; by default a free one."""
    output: Path = Path("runs/demo")
    """Output directory."""


def pipeline(config: DemoConfig) -> Pipeline:
    """Configurations of the stages, for two CPU cores."""
    output = config.output
    exact = config.pair.model_copy(update={"dtype": "float32"})
    sweep = SweepConfig(
        pair=config.pair,
        prompts=(str(output / "train.jsonl"),),
        num_prompts=config.num_training_prompts,
        candidates=config.candidates,
        method="dense",
        max_new_tokens=config.max_new_tokens,
        prompts_per_shard=12,
        output=str(output / "sweep"),
        resources=Resources(num_actors=2),
    )
    train = TrainConfig(sweep=(sweep.output,), output=output / "policy")
    paper_update = {"output": output / "paper-policy", "fit": PAPER, "register_version": False}
    evaluate = EvaluateConfig(
        pair=config.pair,
        prompts=(str(output / "held_out.jsonl"),),
        num_prompts=config.num_prompts,
        policy=NEWEST,
        rivals=(CHAMPION, str(output / "paper-policy")),
        baselines=("untrained", "oracle"),
        block_sizes=tuple(size for size in config.candidates if size > 1),
        sweep=(sweep.output,),
        max_new_tokens=config.max_new_tokens,
        warm_up=4,
        output=output / "evaluate",
    )
    return Pipeline(
        sweep=sweep,
        train=train,
        rivals=(train.model_copy(update=paper_update),),
        evaluate=evaluate,
        promote=PromoteConfig(model=model_name(evaluate.pair.models[0])),
        serve=ServeConfig(pair=exact, port=config.port or free_port(), max_length=512, output=output / "serve"),
    )


def free_port() -> int:
    """A currently free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def split_prompts(config: DemoConfig) -> None:
    """Write the disjoint files train.jsonl and held_out.jsonl."""
    train, held_out = split(load_prompts(config.prompts), config.held_out)
    save_prompts(config.output / "train.jsonl", train)
    save_prompts(config.output / "held_out.jsonl", held_out)
    print(f"{len(train)} training and {len(held_out)} held-out prompts in {config.output}")


def ask(url: str, question: str, max_tokens: int, block_size: str | int = "auto") -> str:
    """Stream the answer to a question through the OpenAI client; prints and returns it."""
    client = OpenAI(base_url=url, api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"block_size": block_size},
    )
    answer = ""
    print(f"{question} (block_size: {block_size})\n> ", end="")
    for chunk in stream:
        piece = (chunk.choices[0].delta.content or "") if chunk.choices else ""
        print(piece, end="", flush=True)
        answer += piece
        if chunk.usage:
            print(f"\nusage: {chunk.usage.model_dump(exclude_none=True)}")
    return answer


@torch.inference_mode()
def plain_answer(pair_config: PairConfig, question: str, max_tokens: int) -> str:
    """Greedy answer of the target alone, by the one-token-at-a-time loop of transformers."""
    pair = pair_config.load()
    prompt_ids = Prompt("demo", (Message("user", question),)).encode(pair.tokenizer)
    inputs = torch.tensor([prompt_ids], device=pair.target.device)
    target: Any = pair.target
    output = target.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=pair.tokenizer.pad_token_id,
    )
    return str(pair.tokenizer.decode(output[0, len(prompt_ids) :], skip_special_tokens=True))


def run(config: DemoConfig) -> None:
    """Run all stages; raises RuntimeError if a served answer differs from the target's."""
    stages = pipeline(config)
    split_prompts(config)
    measured = learn(stages)
    with stage("serve"):
        url = serve.start(stages.serve)
        for name in stages.serve.deployments:
            print(f"{url}: {serve.what_runs(name)}")
    with stage("ask"):
        try:
            sizes = ("auto", max(config.candidates))
            answers = {size: ask(url, QUESTION, config.max_new_tokens, size) for size in sizes}
        finally:
            serve.stop()
    with stage("check"):
        plain = plain_answer(stages.serve.pair, QUESTION, config.max_new_tokens)
        for size, answer in answers.items():
            if answer != plain:
                raise RuntimeError(
                    f"served with block size {size}: {answer!r}; one token at a time the target writes {plain!r}"
                )
        print("Both served answers are bit for bit what the target writes one token at a time (float32).")
    print(f"\n{measured.table}")


if __name__ == "__main__":
    main(DemoConfig, run)
