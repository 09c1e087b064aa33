"""Markov head of a draft: what a token says of the one after it (DSpark, arXiv 2607.05147).

The slots of a block-diffusion draft are drawn apart: none knows what the one before it has become. The head adds to a
slot's scores those of a bigram model of low rank, by the token before, and costs no pass of the draft.
"""

import torch
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """Scores of every token after each of some tokens; parameters are named as in the published checkpoints.

    A fresh head adds nothing: the second factor is 0.
    """

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, before: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Scores [M, K] after the tokens `before` [M], of `tokens` [K] or all."""
        weight = self.markov_w2.weight if tokens is None else self.markov_w2.weight[tokens]
        return nn.functional.linear(self.markov_w1(before), weight)

    def between(self, before: Tensor, after: Tensor) -> Tensor:
        """Scores [S, P, K] of the tokens after[s] [S, K] after each of before[s] [S, P]."""
        scores: Tensor = torch.matmul(self.markov_w1(before), self.markov_w2.weight[after].transpose(1, 2))
        return scores
