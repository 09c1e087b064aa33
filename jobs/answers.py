"""Generate a target's answers to prompts: the training data of its draft.

Ray actors load the target and write Parquet shards. Held-out prompts have separate shards. A finished shard is never
rewritten, so the same command continues an interrupted run, and a command with more prompts adds shards. The target
can also write prompts (`--num-own-prompts`) when no suitable set exists.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import Field
from transformers.utils.logging import disable_progress_bar

from blockpilot.device import best_device
from blockpilot.draft_training.answers import AnswerSource, generate_answers, write_answers, write_prompts
from blockpilot.pairs.loading import Pair, load_pair
from blockpilot.pairs.table import EMBEDDED_TARGET
from blockpilot.prompts.files import Prompt, load_prompts, split
from blockpilot.storage import remove_unfinished, write_text
from blockpilot.types import Sampling
from jobs.common.cluster import connect, num_threads, pooled
from jobs.common.config import Config, LocalPath, Resources, absolute_in_submitted_job, main
from jobs.common.lease import Lease
from jobs.common.progress import show_progress

TRAINING_PROMPTS = ("asdiv", "signatures", "docstrings", "chitchat:3000", "chatterbot", "writingbench")
OWN_PROMPTS = "own-prompts"
# First words of the user's turn in prompts that the target writes. Half are empty; the others ask for kinds of
# answers that a small model rarely asks for without help.
OPENINGS = (
    *("", "Write a Python function", "", "Explain", "", "A shop sells", "", "Write a short"),
    *("", "How can I", "", "Imagine you are", "", "What is the difference between", "", "Complete this"),
    *("", "Summarize", "", "If", "", "Write code", "", "What are"),
)


class AnswersConfig(Config):
    """Target, prompts and sampling of the answers."""

    target: str = EMBEDDED_TARGET
    """Target by hub id or local directory."""
    prompts: tuple[str, ...] = Field(default=TRAINING_PROMPTS, min_length=1)
    """Training prompt sets and files, NAME or NAME:COUNT. Never a benchmark's test set."""
    num_own_prompts: int = Field(default=0, ge=0)
    """Additional prompts that the target writes; unusable ones are dropped, so there may be fewer."""
    held_out: float = Field(default=0.04, gt=0, lt=1)
    """Share of the prompts that is held out from training, selected by a hash of the text."""
    max_prompt_tokens: int = Field(default=500, ge=1)
    """Longer prompts are skipped."""
    max_new_tokens: int = Field(default=192, ge=2)
    """Maximum tokens of an answer."""
    temperatures: tuple[float, ...] = Field(default=(0.0, 0.0, 1.0), min_length=1)
    """Sampling temperatures; answers cycle through them."""
    prompts_per_shard: int = Field(default=256, ge=1)
    """Prompts answered together in one shard; a lost worker loses at most this many."""
    seed: int = Field(default=0, ge=0)
    """Seed of the selection of prompts, the held-out split and the answers."""
    resources: Resources = Resources()
    """Resources of the Ray actors."""
    answers: LocalPath = Path("runs/answers")
    """Output directory of the shards: `train/`, `held_out/`, and the prompts that the target wrote."""


class AnswerShard(NamedTuple):
    """Prompts answered together, the sampling of each, and the file of their answers."""

    path: Path
    prompts: tuple[Prompt, ...]
    sampling: tuple[Sampling, ...]


class AnswerShards(NamedTuple):
    """Training shards and held-out shards."""

    train: tuple[AnswerShard, ...]
    held_out: tuple[AnswerShard, ...]


def run(config: AnswersConfig) -> AnswerShards:
    """Write the missing shards; raises ValueError for bad input before Ray starts."""
    absolute_in_submitted_job(config.answers, "answers")
    plan(config, own_prompts=())
    with Lease(config.answers) as lease:
        for folder in (*AnswerShards._fields, OWN_PROMPTS):  # trainings write features into other folders meanwhile
            remove_unfinished(config.answers / folder)
        connect(include_dashboard=True)
        own_prompts = write_own_prompts(config, lease, range(config.num_own_prompts))
        shards = plan(config, own_prompts)
        # In a random order, so that an unfinished run has shards of every set.
        train = random.Random(config.seed).sample(shards.train, len(shards.train))
        missing = [shard for shard in (*shards.held_out, *train) if not shard.path.exists()]
        written = pooled(AnswerWorker, config, missing, "answer", config.resources)
        show_progress("answers", lease.while_held(written), len(missing))
        return shards


# --- selection of prompts ---


def plan(config: AnswersConfig, own_prompts: Sequence[Prompt]) -> AnswerShards:
    """Shards of all prompts, without repeated texts.

    Each prompt set has separate shards, so an additional set leaves the existing shards unchanged. Raises
    ValueError if there are no training prompts or no held-out prompts.
    """
    seen: set[str] = set()
    shards = AnswerShards((), ())
    for prompts in (*(load_counted(name, config.seed) for name in config.prompts), own_prompts):
        train, held_out = split(_unseen(prompts, seen), config.held_out, config.seed)
        shards = AnswerShards(
            (*shards.train, *_cut(config, "train", train)), (*shards.held_out, *_cut(config, "held_out", held_out))
        )
    if not all(shards):
        raise ValueError(
            f"prompts {' '.join(config.prompts)}: {len(seen)} in all leave none for training or held out"
        )
    return shards


def _unseen(prompts: Sequence[Prompt], seen: set[str]) -> list[Prompt]:
    """Prompts whose text is not in `seen`; adds their texts to `seen`."""
    unseen = []
    for prompt in prompts:
        # Greetings often differ only in case and punctuation; one of them is enough.
        key = "".join(filter(str.isalnum, prompt.text.lower()))
        if key not in seen:
            seen.add(key)
            unseen.append(prompt)
    return unseen


def load_counted(name: str, seed: int) -> list[Prompt]:
    """Load the prompts of NAME or NAME:COUNT; raises ValueError for another form."""
    base, colon, count = name.rpartition(":")
    if colon and not count.isdecimal():
        raise ValueError(f"prompts {name!r}: must be NAME or NAME:COUNT")
    return load_prompts(base, int(count), seed) if colon else load_prompts(name, seed=seed)


def _cut(config: AnswersConfig, folder: str, prompts: Sequence[Prompt]) -> list[AnswerShard]:
    """Shards of one set in `folder`. The file name contains a hash of everything that the answers depend on."""
    shards = []
    for start in range(0, len(prompts), config.prompts_per_shard):
        shard_prompts = tuple(prompts[start : start + config.prompts_per_shard])
        sampling = tuple(
            Sampling(config.temperatures[i % len(config.temperatures)], seed=config.seed + i)
            for i in range(start, start + len(shard_prompts))
        )
        # Only the first turn is sent.
        turns = [(prompt.set, [(m.role, m.content) for m in prompt.messages]) for prompt in shard_prompts]
        key = repr((config.target, config.max_prompt_tokens, config.max_new_tokens, turns, sampling))
        digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        path = config.answers.absolute() / folder / f"{shard_prompts[0].set}-{start:06d}-{digest}.parquet"
        shards.append(AnswerShard(path, shard_prompts, sampling))
    return shards


# --- the workers ---


class AnswerWorker:
    """Ray actor with the target in bf16: the answers are training data, so exactness is not needed."""

    def __init__(self, config: AnswersConfig) -> None:
        torch.set_num_threads(num_threads(config.resources.num_cpus))
        disable_progress_bar()
        self.config = config
        self.pair: Pair = load_pair(target=config.target, dtype="bfloat16", device=best_device())

    def answer(self, shard: AnswerShard) -> int:
        """Write a shard; returns the number of answer tokens."""
        config = self.config
        answers = generate_answers(
            self.pair,
            shard.prompts,
            shard.sampling,
            max_new_tokens=config.max_new_tokens,
            max_prompt_tokens=config.max_prompt_tokens,
        )
        write_answers(shard.path, answers, AnswerSource(config.target, self.pair.id.target_revision))
        return sum(len(answer.tokens) - answer.num_prompt_tokens for answer in answers)

    def write_prompts(self, task: tuple[Path, range, Sequence[str]]) -> int:
        """Write a file of prompts, at most one per seed; returns their number."""
        path, seeds, openings = task
        texts = write_prompts(self.pair, seeds, openings)
        lines = (json.dumps({"prompt": text, "set": OWN_PROMPTS}, ensure_ascii=False) + "\n" for text in texts)
        write_text(path, "".join(lines))
        return len(texts)


def write_own_prompts(
    config: AnswersConfig, lease: Lease, seeds: range, openings: Sequence[str] = OPENINGS
) -> list[Prompt]:
    """Prompts written by the target, at most one per seed, file by file; existing files are reused."""
    folder, size = config.answers.absolute() / OWN_PROMPTS, config.prompts_per_shard
    parts = [seeds[i : i + size] for i in range(0, len(seeds), size)]
    files = {folder / f"part-{config.seed}-{part.start:06d}-{len(part)}.jsonl": part for part in parts}
    missing = [(path, part, openings) for path, part in files.items() if not path.exists()]
    written = pooled(AnswerWorker, config, missing, "write_prompts", config.resources)
    show_progress("own prompts", lease.while_held(written), len(missing), "prompts")
    return [prompt for path in files if path.stat().st_size for prompt in load_prompts(str(path), None, config.seed)]


if __name__ == "__main__":
    main(AnswersConfig, run)
