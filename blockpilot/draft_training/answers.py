"""Training data of a draft: answers that the target itself wrote, and its features of every token.

A shard is a Parquet file of answers (ANSWER_SCHEMA) and, for the layers that a draft reads, a safetensors file with
the target's features of all its tokens. Both are written whole or not at all.
"""

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from blockpilot.engine.engine import Engine
from blockpilot.models.target import Target
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Prompt
from blockpilot.storage import whole
from blockpilot.types import Request, Sampling

ANSWER_SCHEMA = pa.schema(
    [
        ("prompt_set", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("num_prompt_tokens", pa.int32()),
        ("temperature", pa.float32()),
        ("seed", pa.int64()),
    ]
)


class Shard(NamedTuple):
    """The two files of a shard."""

    answers: Path
    features: Path


class Features(NamedTuple):
    """What the target computes at S tokens, bf16: its chosen layers side by side, and the input of its LM head."""

    features: Tensor  # [S, F]
    hidden: Tensor  # [S, hidden]


class Document(NamedTuple):
    """A prompt with the target's answer: tokens [S] int64, and the target's Features of every token."""

    tokens: Tensor
    num_prompt_tokens: int
    features: Tensor
    hidden: Tensor


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
    answers = []
    for prompt, drawn in zip(prompts, sampling, strict=True):
        ids = prompt.encode(pair.tokenizer)
        if len(ids) <= max_prompt_tokens:
            answers.append(Answer(prompt.set, list(ids), len(ids), drawn.temperature, drawn.seed))
    # Prompts of one length together: less padding in prefill and attention.
    by_length = sorted(answers, key=lambda answer: answer.num_prompt_tokens)
    requests = [(answer.tokens, Sampling(answer.temperature, seed=answer.seed)) for answer in by_length]
    written = _generate(pair, requests, max_new_tokens, num_slots)
    for answer, tokens in zip(by_length, written, strict=True):
        answer.tokens.extend(tokens)
    return answers


def write_prompts(
    pair: Pair,
    seeds: Sequence[int],
    openings: Sequence[str] = ("",),
    *,
    max_new_tokens: int = 96,
    num_slots: int = 32,
) -> list[str]:
    """User turns that the target writes itself, one a seed at most (Magpie, arXiv 2406.08464).

    A chat model continues its template from where the user's turn begins, here with one of `openings` in turn.
    Turns that do not end within `max_new_tokens`, hold special tokens or are shorter than three words are left out.
    Raises ValueError for a target without a chat template.
    """
    if not pair.tokenizer.chat_template:
        raise ValueError("a target without a chat template cannot write prompts")
    marker = "\x00"
    template = pair.tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
    before, found, _ = str(template).partition(marker)
    if not found:
        raise ValueError("the chat template does not show the user's text")
    chosen = [openings[i % len(openings)] for i in range(len(seeds))]
    requests = []
    for opening, seed in zip(chosen, seeds, strict=True):
        ids: list[int] = pair.tokenizer(before + opening, add_special_tokens=False)["input_ids"]
        requests.append((ids, Sampling(1.0, top_p=0.9, seed=seed)))
    written = _generate(pair, requests, max_new_tokens, num_slots)
    texts, special = [], set(pair.tokenizer.all_special_ids)
    for opening, tokens in zip(chosen, written, strict=True):
        if tokens[-1] in pair.stop_token_ids and special.isdisjoint(tokens[:-1]):
            texts.append((opening + str(pair.tokenizer.decode(tokens[:-1]))).strip())
    return [text for text in texts if len(text.split()) >= 3]


def _generate(
    pair: Pair, requests: Sequence[tuple[list[int], Sampling]], max_new_tokens: int, num_slots: int
) -> list[list[int]]:
    """What the target writes after each (token ids, sampling), in order, without drafts."""
    longest = max((len(ids) for ids, _ in requests), default=1)
    engine = Engine(pair, num_slots=num_slots, max_length=min(longest + max_new_tokens, pair.max_length))
    written: dict[int, list[int]] = {}
    for ids, sampling in requests:
        request = Request(tuple(ids), max_new_tokens, sampling, block_size=1, stop_token_ids=pair.stop_token_ids)
        written[engine.add(request)] = []
    while not engine.idle:
        for step in engine.step():
            written[step.request_id].extend(step.tokens)
    return list(written.values())


@torch.inference_mode()
def target_features(target: Target, answers: Sequence[Answer], batch_size: int = 8) -> Features:
    """What the target computes at every token of every answer, one answer after the other."""
    width = target.model.config.hidden_size
    none = Features(torch.empty(0, len(target.layer_ids) * width), torch.empty(0, width))
    found = [none] * len(answers)
    by_length = sorted(range(len(answers)), key=lambda i: len(answers[i].tokens))
    for start in range(0, len(by_length), batch_size):
        chosen = by_length[start : start + batch_size]
        rows = [answers[i].tokens for i in chosen]
        longest = max(len(row) for row in rows)
        padded = [row + [0] * (longest - len(row)) for row in rows]
        tokens = torch.tensor(padded, device=target.model.device)
        positions = torch.arange(longest, device=tokens.device).expand(len(rows), -1)
        view = target.new_cache(len(rows), longest).view_rows(positions, longest)
        scored = target.score(tokens, positions, view, features=True)
        assert scored.features is not None
        for i, row, of_row, hidden_row in zip(chosen, rows, scored.features, scored.hidden, strict=True):
            found[i] = Features(of_row[: len(row)].cpu(), hidden_row[: len(row)].cpu())
    features, hidden = (torch.cat(tensors).to(torch.bfloat16) for tensors in zip(none, *found, strict=True))
    return Features(features, hidden)


class AnswerSource(NamedTuple):
    """Who answered: a target's name and its revision."""

    target: str
    target_revision: str


def write_answers(path: Path, answers: Sequence[Answer], source: AnswerSource) -> None:
    """Write ANSWER_SCHEMA Parquet with its source in the file's metadata, whole or not at all."""
    schema = ANSWER_SCHEMA.with_metadata({"source": json.dumps(source._asdict())})
    table = pa.Table.from_pylist([answer._asdict() for answer in answers], schema=schema)
    with whole(path) as unfinished:
        pq.write_table(table, unfinished, compression="zstd")


def answer_source(path: Path) -> AnswerSource:
    """Who wrote a Parquet shard, out of its metadata; raises ValueError where it does not say."""
    metadata = pq.read_schema(path).metadata or {}
    if b"source" not in metadata:
        raise ValueError(f"{path}: does not say which target wrote these answers")
    return AnswerSource(**json.loads(metadata[b"source"]))


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


def write_features(path: Path, features: Features, source: FeatureSource) -> None:
    """Write the features of a shard with where they came from, whole or not at all."""
    tensors = {name: tensor.contiguous() for name, tensor in features._asdict().items()}
    with whole(path) as unfinished:
        save_file(tensors, unfinished, metadata={"source": json.dumps(source)})


def feature_source(path: Path) -> FeatureSource:
    """Where a shard's features came from, out of the file's header; raises ValueError where it does not say."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    if "source" not in metadata:
        raise ValueError(f"{path}: does not say which target and layers its features came from")
    revision, layer_ids = json.loads(metadata["source"])
    return FeatureSource(revision, tuple(layer_ids))


class Corpus(ABC):
    """Documents to train on: answers in memory, and a way to their features."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = list(answers)

    def __len__(self) -> int:
        return len(self.answers)

    def __iter__(self) -> Iterator[Document]:
        return (document for i in range(len(self)) for document in self.read([i]))

    def read(self, indices: Sequence[int]) -> list[Document]:
        """The documents at these places."""
        found = self._features(indices)
        return [
            Document(torch.tensor(self.answers[i].tokens), self.answers[i].num_prompt_tokens, *features)
            for i, features in zip(indices, found, strict=True)
        ]

    def sample(self, num: int, seed: int = 0) -> Self:
        """A corpus of `num` of these documents, drawn at random, in their order; of all if there are not so many."""
        return self._chosen(sorted(random.Random(seed).sample(range(len(self)), min(num, len(self)))))

    @abstractmethod
    def _features(self, indices: Sequence[int]) -> list[Features]: ...

    def _chosen(self, indices: Sequence[int]) -> Self:
        chosen = copy(self)
        chosen.answers = [self.answers[i] for i in indices]
        return chosen


class StoredCorpus(Corpus):
    """Features stay on disk until a document is read."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        answers, self._places = [], list[tuple[Any, int]]()  # of each answer: file and first row there
        for shard in shards:
            of_shard = read_answers(shard.answers)
            ends = list(accumulate((len(answer.tokens) for answer in of_shard), initial=0))
            file = _open_features(shard.features, ends[-1])
            self._places += [(file, start) for start in ends[:-1]]
            answers += of_shard
        super().__init__(answers)

    def _features(self, indices: Sequence[int]) -> list[Features]:
        return [self._stored(*self._places[i], len(self.answers[i].tokens)) for i in indices]

    @staticmethod
    def _stored(file: Any, start: int, num_tokens: int) -> Features:
        return Features(*(file.get_slice(name)[start : start + num_tokens] for name in Features._fields))

    def _chosen(self, indices: Sequence[int]) -> Self:
        chosen = super()._chosen(indices)
        chosen._places = [self._places[i] for i in indices]
        return chosen


class StreamedCorpus(Corpus):
    """Features are computed when a document is read."""

    def __init__(self, answers: Sequence[Answer], target: Target) -> None:
        super().__init__(answers)
        self._target = target

    def _features(self, indices: Sequence[int]) -> list[Features]:
        answers = [self.answers[i] for i in indices]
        found = target_features(self._target, answers, batch_size=len(answers))
        lengths = [len(answer.tokens) for answer in answers]
        return [Features(*parts) for parts in zip(*(tensor.split(lengths) for tensor in found), strict=True)]


def _open_features(path: Path, num_tokens: int) -> Any:
    """A memory-mapped file of features; raises ValueError unless it holds exactly those of `num_tokens` tokens."""
    try:
        file: Any = safe_open(path, framework="pt")
        rows = [file.get_slice(name).get_shape()[0] for name in Features._fields]
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: not the features of a shard ({error})") from None
    if set(rows) != {num_tokens}:
        raise ValueError(f"{path}: {rows[0]} rows for {num_tokens} tokens")
    return file
