"""Markov head of a draft: what a token says of the one after it (DSpark, arXiv 2607.05147).

The slots of a block-diffusion draft are drawn apart: none knows what the one before it has become. The head adds to a
slot's scores those of a bigram model of low rank, by the token before, and costs no pass of the draft.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from blockpilot.device import tensor_on
from blockpilot.drafts.choices import Linked
from blockpilot.native.ranking import LARGEST
from blockpilot.types import Candidates, Sampling

WIDTH = 32  # choices of a slot by itself, among which its choices after another one are looked for


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

    @torch.no_grad()
    def link(self, found: Candidates, before: Tensor, sampling: Sequence[Sampling], num: int) -> Linked:
        """The `num` best of the own choices [N, W] of N slots after each of the tokens before them [N, P].

        A slot's scores, at the temperature of its sampling [N], are lifted by the head's; what is no choice keeps its
        own.
        """
        temperatures = tensor_on(
            before.device, [1.0 if each.is_greedy else min(each.temperature, LARGEST) for each in sampling]
        )
        lifted = self.between(before, found.tokens).float() / temperatures[:, None, None]
        log_probs, scores = (values[:, None] + lifted for values in (found.log_probs, found.scores))
        of_rest = torch.log1p(-found.log_probs.exp().sum(dim=1).clamp(max=1 - 1e-6))
        total = torch.logaddexp(log_probs.logsumexp(dim=2), of_rest[:, None])[:, :, None]
        scores, places = (scores - total).topk(num, dim=2)
        tokens = found.tokens[:, None].expand_as(log_probs).gather(2, places)
        log_probs = (log_probs - total).gather(2, places)
        drawn = found.drawn.repeat_interleave(before.shape[1])
        return Linked(Candidates(tokens.flatten(0, 1), scores.flatten(0, 1), log_probs.flatten(0, 1), drawn), places)
