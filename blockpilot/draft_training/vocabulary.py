"""Vocabulary of a draft: the most frequent tokens of its target's answers."""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def by_frequency(answers: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """All token ids [vocab_size] by descending frequency in the answers; unseen tokens last, by ascending id.

    Tokenizers number tokens in the order of their merges, so low ids are more frequent among unseen tokens, too.
    """
    counts = Counter[int]()
    for tokens in answers:
        counts.update(tokens)
    return torch.tensor(sorted(range(vocab_size), key=lambda token: (-counts[token], token)))
