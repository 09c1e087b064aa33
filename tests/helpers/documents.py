"""Documents and corpora that drafts are trained on."""

import io
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from blockpilot.draft_training.answers import Answer, AnswerSource, generate_answers, write_answers
from blockpilot.draft_training.batches import DraftBatch, collate, draw_anchors
from blockpilot.draft_training.features import (
    Document,
    FeatureShard,
    FeatureSource,
    StoredCorpus,
    TargetFeatures,
    target_features,
    write_features,
)
from blockpilot.models.target import Target
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Message, Prompt
from blockpilot.types import Sampling

WIDTH = 48  # hidden size of the tiny target
TEXTS = ("abc", "the cat", "12 + 3", "why")
PROMPTS = [Prompt("test", (Message("user", text),)) for text in TEXTS]
SOURCE = AnswerSource("tiny", "revision")


def random_documents(shapes: Iterable[tuple[int, int]], num_layers: int, seed: int = 0) -> list[Document]:
    """Documents with these numbers of tokens and prompt tokens, and random features of `num_layers` layers."""
    generator, documents = torch.Generator().manual_seed(seed), []
    for length, num_prompt_tokens in shapes:
        tokens = torch.randint(0, 260, (length,), generator=generator)
        features = torch.randn(length, (num_layers + 1) * WIDTH, generator=generator)
        documents.append(Document(tokens, num_prompt_tokens, features[:, WIDTH:], features[:, :WIDTH]))
    return documents


def batch_of(documents: Sequence[Document], num_anchors: int, seed: int) -> DraftBatch:
    """A batch with random anchors."""
    generator = torch.Generator().manual_seed(seed)
    return collate(documents, [draw_anchors(document, num_anchors, generator) for document in documents])


def write_shard(path: Path, documents: Sequence[Document]) -> FeatureShard:
    answers = [Answer("test", d.tokens.tolist(), d.num_prompt_tokens, 0.0, 0) for d in documents]
    features, hidden = (torch.cat([getattr(d, name) for d in documents]) for name in ("features", "hidden"))
    return _written(path, answers, TargetFeatures(features, hidden))


def greedy_answers(pair: Pair) -> list[Answer]:
    """The target's answers to PROMPTS."""
    settings = {"max_new_tokens": 24, "max_prompt_tokens": 64, "num_slots": 4}
    return generate_answers(pair, PROMPTS, [Sampling()] * len(PROMPTS), **settings)


def stored_corpus(pair: Pair, answers: Sequence[Answer], layer_ids: Sequence[int], directory: Path) -> StoredCorpus:
    """Answers with the target's features of these layers, in one shard."""
    features = target_features(Target(pair.target, tuple(layer_ids)), answers)
    return StoredCorpus([_written(directory / "0.parquet", answers, features)])


def check_resumed(whole: Any, first: Any, second: Any, num_steps: int) -> int:
    """Number of steps of a fit; asserts that a fit resumed after `num_steps` has the same losses and weights."""
    losses, state = [float(sums.loss) for sums in whole.steps()], io.BytesIO()
    assert [float(sums.loss) for sums in islice(first.steps(), num_steps)] == losses[:num_steps]
    torch.save(first.state_dict(), state)
    state.seek(0)
    second.load_state_dict(torch.load(state, weights_only=True))
    assert [float(sums.loss) for sums in second.steps()] == losses[num_steps:]
    expected, resumed = whole.state_dict(), second.state_dict()
    for trained in {"draft", "edges"} & expected.keys():
        assert expected[trained].keys() == resumed[trained].keys()
        assert all(resumed[trained][name].equal(value) for name, value in expected[trained].items())
    return len(losses)


def _written(path: Path, answers: Sequence[Answer], features: TargetFeatures) -> FeatureShard:
    shard = FeatureShard(path, path.with_suffix(".safetensors"))
    write_answers(shard.answers, answers, SOURCE)
    write_features(shard.features, features, FeatureSource("revision", (1, 3)))
    return shard
