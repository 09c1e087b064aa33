"""Target features at every token of its answers: the input and labels of draft training, stored or streamed.

A shard is a Parquet file of answers and a safetensors file with the features of all their tokens, for the layers that
a draft reads. A corpus reads documents of many shards.
"""

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from blockpilot.device import Device, sent
from blockpilot.draft_training.answers import Answer, read_answers
from blockpilot.models.target import Target
from blockpilot.storage import first_line, whole


class FeatureShard(NamedTuple):
    """The two files of a shard."""

    answers: Path
    features: Path


class TargetFeatures(NamedTuple):
    """Hidden states of the target at S tokens, bf16: of selected layers (concatenated), and before the LM head."""

    features: Tensor  # [S, F]
    hidden: Tensor  # [S, hidden]


class Document(NamedTuple):
    """A prompt with the target's answer: tokens [S] int64 on the host, and the target's features of every token."""

    tokens: Tensor
    num_prompt_tokens: int
    features: Tensor
    hidden: Tensor


@torch.inference_mode()
def target_features(
    target: Target, answers: Sequence[Answer], batch_size: int = 8, device: Device = "cpu"
) -> TargetFeatures:
    """Features of every token of every answer on a device, concatenated in the order of the answers."""
    width = target.model.config.hidden_size
    sizes = len(target.layer_ids) * width, width
    empty = TargetFeatures(*(torch.empty(0, size, dtype=torch.bfloat16, device=device) for size in sizes))
    by_answer = [empty] * len(answers)
    by_length = sorted(range(len(answers)), key=lambda i: len(answers[i].tokens))
    for start in range(0, len(by_length), batch_size):
        group = by_length[start : start + batch_size]
        rows = [torch.tensor(answers[i].tokens) for i in group]
        tokens = sent(pad_sequence(rows, batch_first=True), target.model.device)
        cache = target.new_cache(*tokens.shape)
        scored = target.score_rows(tokens, 0, cache, torch.arange(len(rows), device=tokens.device))
        assert scored.features is not None
        for i, row, feature_row, hidden_row in zip(group, rows, scored.features, scored.hidden, strict=True):
            by_answer[i] = TargetFeatures(feature_row[: len(row)].to(device), hidden_row[: len(row)].to(device))
    features, hidden = (torch.cat(tensors).to(torch.bfloat16) for tensors in zip(empty, *by_answer, strict=True))
    return TargetFeatures(features, hidden)


class FeatureSource(NamedTuple):
    """Revision of the target that computed the features, and the layers."""

    target_revision: str
    layer_ids: tuple[int, ...]


def write_features(path: Path, features: TargetFeatures, source: FeatureSource) -> None:
    """Write the features of a shard atomically, with their source in the header."""
    tensors = {name: tensor.contiguous() for name, tensor in features._asdict().items()}
    with whole(path) as unfinished:
        save_file(tensors, unfinished, metadata={"source": json.dumps(source)})


def feature_source(path: Path) -> FeatureSource:
    """Source in the header of a file of features; raises ValueError if there is none."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        revision, layer_ids = json.loads(metadata["source"])
        return FeatureSource(revision, tuple(layer_ids))
    except KeyError:
        raise ValueError(f"{path}: does not say which target and layers its features came from") from None
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: not the features of a shard ({first_line(error)})") from None


class Corpus(ABC):
    """Training documents, with answers in memory and features read or computed on demand.

    Answers without an anchor are left out: a batch of such answers would have nothing to score.
    """

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = list(answers)

    def __len__(self) -> int:
        return len(self.answers)

    def read(self, indices: Sequence[int]) -> list[Document]:
        """Documents by index, in the order of the indices."""
        features_by_document = self._features(indices)
        return [
            Document(torch.tensor(self.answers[i].tokens), self.answers[i].num_prompt_tokens, *features)
            for i, features in zip(indices, features_by_document, strict=True)
        ]

    def sample(self, num: int, seed: int = 0) -> list[int]:
        """Indices of `num` random documents (all if there are fewer), ascending."""
        return sorted(random.Random(seed).sample(range(len(self)), min(num, len(self))))

    @abstractmethod
    def _features(self, indices: Sequence[int]) -> list[TargetFeatures]: ...


class StoredCorpus(Corpus):
    """Documents whose features are read from disk on demand."""

    def __init__(self, shards: Sequence[FeatureShard]) -> None:
        answers, self._locations = [], list[tuple[Any, int]]()  # per answer: file and first row
        for shard in shards:
            shard_answers = read_answers(shard.answers)
            ends = list(accumulate((len(answer.tokens) for answer in shard_answers), initial=0))
            file = _open_features(shard.features, ends[-1])
            usable = [
                (answer, start) for answer, start in zip(shard_answers, ends, strict=False) if answer.has_anchor
            ]
            self._locations += [(file, start) for _, start in usable]
            answers += [answer for answer, _ in usable]
        super().__init__(answers)

    def _features(self, indices: Sequence[int]) -> list[TargetFeatures]:
        features_by_document = []
        for i in indices:
            file, start = self._locations[i]
            rows = slice(start, start + len(self.answers[i].tokens))
            features_by_document.append(
                TargetFeatures(*(file.get_slice(name)[rows] for name in TargetFeatures._fields))
            )
        return features_by_document


class StreamedCorpus(Corpus):
    """Documents whose features are computed on demand, and stay on the target's device."""

    def __init__(self, answers: Sequence[Answer], target: Target) -> None:
        super().__init__([answer for answer in answers if answer.has_anchor])
        self._target = target

    def _features(self, indices: Sequence[int]) -> list[TargetFeatures]:
        answers = [self.answers[i] for i in indices]
        device = self._target.model.device
        batch_features = target_features(self._target, answers, batch_size=len(answers), device=device)
        lengths = [len(answer.tokens) for answer in answers]
        return [
            TargetFeatures(*parts)
            for parts in zip(*(tensor.split(lengths) for tensor in batch_features), strict=True)
        ]


def _open_features(path: Path, num_tokens: int) -> Any:
    """A memory-mapped file of features; raises ValueError unless it has features of exactly `num_tokens` tokens."""
    try:
        file: Any = safe_open(path, framework="pt")
        rows = [file.get_slice(name).get_shape()[0] for name in TargetFeatures._fields]
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: not the features of a shard ({error})") from None
    if set(rows) != {num_tokens}:
        raise ValueError(f"{path}: {rows[0]} rows for {num_tokens} tokens")
    return file
