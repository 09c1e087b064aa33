"""Training data of a draft: answers that the target itself wrote, and its features of every token.

A shard is two files: `X.parquet` (ANSWER_SCHEMA) and `X.safetensors` with "features" [tokens of all documents, F].
Both are written whole or not at all, features last, so a shard exists once its features do.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockpilot.engine import Engine, Request
from blockpilot.pairs import Pair
from blockpilot.prompts import Prompt
from blockpilot.target import Target
from blockpilot.verify import Sampling

ANSWER_SCHEMA = pa.schema(
    [
        ("prompt_set", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("num_prompt_tokens", pa.int32()),
        ("temperature", pa.float32()),
        ("seed", pa.int64()),
    ]
)


class Document(NamedTuple):
    """A prompt with the target's answer: tokens [S] int64, and the target's features [S, F] of every token."""

    tokens: Tensor
    num_prompt_tokens: int
    features: Tensor


class Answer(NamedTuple):
    """A row of ANSWER_SCHEMA; `tokens` are the prompt's and the answer's."""

    prompt_set: str
    tokens: list[int]
    num_prompt_tokens: int
    temperature: float
    seed: int


def generate_answers(
    pair: Pair,
    prompts: Sequence[Prompt],
    sampling: Sequence[Sampling],
    *,
    max_new_tokens: int,
    max_prompt_tokens: int,
    num_slots: int = 32,
) -> list[Answer]:
    """Answers of the target to the prompts, in order; longer prompts than `max_prompt_tokens` are left out."""
    engine = Engine(pair, num_slots=num_slots, max_length=max_prompt_tokens + max_new_tokens)
    answers: dict[int, Answer] = {}
    for prompt, drawn in zip(prompts, sampling, strict=True):
        ids = prompt.encode(pair.tokenizer)
        if len(ids) > max_prompt_tokens:
            continue
        request = Request(ids, max_new_tokens, drawn, block_size=1, stop_token_ids=pair.stop_token_ids)
        answer = Answer(prompt.set, list(ids), len(ids), drawn.temperature, drawn.seed)
        answers[engine.add(request)] = answer
    while not engine.idle:
        for step in engine.step():
            answers[step.request_id].tokens.extend(step.tokens)
    return list(answers.values())


@torch.inference_mode()
def target_features(pair: Pair, answers: Sequence[Answer], batch_size: int = 8) -> Tensor:
    """The target's features of every token of every answer, one after the other: [sum of tokens, F] bf16."""
    target = Target(pair.target, pair.draft.options.target_layer_ids)
    features = []
    for start in range(0, len(answers), batch_size):
        rows = [answer.tokens for answer in answers[start : start + batch_size]]
        longest = max(len(row) for row in rows)
        padded = [row + [0] * (longest - len(row)) for row in rows]
        tokens = torch.tensor(padded, device=pair.target.device)
        positions = torch.arange(longest, device=tokens.device).expand(len(rows), -1)
        view = target.new_cache(len(rows), longest).view(0, positions, longest)
        scored = target.score(tokens, positions, view, features=True).features
        assert scored is not None
        features += [scored[i, : len(row)].to("cpu", torch.bfloat16) for i, row in enumerate(rows)]
    return torch.cat(features)


def write_answers(path: Path, answers: Sequence[Answer]) -> None:
    """Write ANSWER_SCHEMA Parquet, whole or not at all."""
    partial = path.with_suffix(".tmp")
    table = pa.Table.from_pylist([answer._asdict() for answer in answers], schema=ANSWER_SCHEMA)
    pq.write_table(table, partial, compression="zstd")
    partial.rename(path)


def read_answers(path: Path) -> list[Answer]:
    """The answers of a Parquet shard; raises ValueError for another schema."""
    table = pq.read_table(path)
    if not table.schema.equals(ANSWER_SCHEMA):
        raise ValueError(f"{path}: columns {table.column_names}, expected {ANSWER_SCHEMA.names}")
    return [Answer(**row) for row in table.to_pylist()]


class FeatureSource(NamedTuple):
    """Where features came from: a revision of the target, and which of its layers."""

    target_revision: str
    layer_ids: tuple[int, ...]


def write_features(path: Path, features: Tensor, source: FeatureSource) -> None:
    """Write the features of a shard with where they came from, whole or not at all."""
    partial = path.with_suffix(".tmp")
    save_file({"features": features.contiguous()}, partial, metadata={"source": json.dumps(source)})
    partial.rename(path)


def feature_source(path: Path) -> FeatureSource:
    """Where a shard's features came from, out of the file's header; raises ValueError where it does not say."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    if "source" not in metadata:
        raise ValueError(f"{path}: does not say which target and layers its features came from")
    revision, layer_ids = json.loads(metadata["source"])
    return FeatureSource(revision, tuple(layer_ids))


def read_documents(answers: Path) -> list[Document]:
    """One shard with its features; raises ValueError where the two files do not belong together."""
    features = load_file(answers.with_suffix(".safetensors"))["features"]
    documents, start = [], 0
    for answer in read_answers(answers):
        end = start + len(answer.tokens)
        tokens = torch.tensor(answer.tokens, dtype=torch.long)
        documents.append(Document(tokens, answer.num_prompt_tokens, features[start:end]))
        start = end
    if start != len(features):
        raise ValueError(f"{answers.with_suffix('.safetensors')}: {len(features)} rows for {start} tokens")
    return documents
