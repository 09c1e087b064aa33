"""The vocabulary of a draft: the most frequent tokens of its target's answers."""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def by_frequency(answers: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """All token ids [vocab_size], the most frequent of the answers first; what none of them has comes by its number.

    Tokenizers number their tokens by merges, so that among the unseen ones, too, the frequent ones come first.
    """
    counts = Counter[int]()
    for tokens in answers:
        counts.update(tokens)
    return torch.tensor(sorted(range(vocab_size), key=lambda token: (-counts[token], token)))
