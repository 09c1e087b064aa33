"""Edges of a draft: how much likelier a token makes each of the tokens after it.

The slots of a block-diffusion draft are drawn apart: none knows what the one before it has become. Edges say that at
the cost of a few dots and no further pass. All are products of low rank: a vector of a token's place in the block and
of the token before it, times one of the token itself. Which vectors is what differs.

| head | vector of slot and token before | over | source |
|---|---|---|---|
| `MarkovHead` | W1[before] | all tokens | DSpark, arXiv 2607.05147 |
| `GatedMarkovHead` | sigmoid(G [hidden; W1[before]] + b) * W1[before] | all tokens | DSpark |
| `CandidateSelector` | A[before] * (W hidden) | the slot's best | DFlash 2, z-lab/dflash |
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from blockpilot.device import tensor_on
from blockpilot.drafts.choices import Linked
from blockpilot.native.ranking import LARGEST
from blockpilot.types import Candidates, Sampling

MARKOV_WIDTH = 32


class Edges(nn.Module, ABC):
    """Scores to add to a slot's own. Parameters are named as in the published checkpoints; a fresh one adds nothing.

    width: choices of a slot by itself, among which its choices after another token are looked for.
    is_whole: all tokens have scores; otherwise a draft's distribution is over the choices alone.
    """

    width: int
    is_whole: bool

    @property
    @abstractmethod
    def successors(self) -> Tensor:
        """Vectors of the tokens themselves [vocab, rank]."""

    @abstractmethod
    def predecessors(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Vectors [..., rank] of slots with hidden states [..., hidden] and of the tokens before them [...]."""

    def forward(self, hidden: Tensor, before: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Scores [M, K] for slots [M, hidden] after the tokens `before` [M], of `tokens` [K] or all."""
        weight = self.successors if tokens is None else self.successors[tokens]
        return functional.linear(self.predecessors(hidden, before), weight)

    def between(self, hidden: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Scores [S, P, K] for slots [S, hidden], of the tokens after[s] [S, K] after each of before[s] [S, P]."""
        vectors = self.predecessors(hidden[:, None].expand(-1, before.shape[1], -1), before)
        scores: Tensor = torch.matmul(vectors, self.successors[after].transpose(1, 2))
        return scores

    @torch.no_grad()
    def link(
        self, found: Candidates, hidden: Tensor, before: Tensor, sampling: Sequence[Sampling], num: int
    ) -> Linked:
        """The `num` best of a slot's own choices [N, W] after each of the tokens before it [N, P].

        hidden [N, hidden]. A slot's scores are lifted by the edges, at the temperature of its sampling [N].
        """
        temperatures = tensor_on(
            before.device, [1.0 if each.is_greedy else min(each.temperature, LARGEST) for each in sampling]
        )
        lifted = self.between(hidden, before, found.tokens).float() / temperatures[:, None, None]
        log_probs, scores = (values[:, None] + lifted for values in (found.log_probs, found.scores))
        total = log_probs.logsumexp(dim=2)
        if self.is_whole:  # what is no choice keeps its own probability
            of_rest = torch.log1p(-found.log_probs.exp().sum(dim=1).clamp(max=1 - 1e-6))
            total = torch.logaddexp(total, of_rest[:, None])
        scores, places = (scores - total[:, :, None]).topk(min(num, scores.shape[2]), dim=2)
        tokens = found.tokens[:, None].expand_as(log_probs).gather(2, places)
        log_probs = (log_probs - total[:, :, None]).gather(2, places)
        drawn = found.drawn.repeat_interleave(before.shape[1])
        return Linked(Candidates(tokens.flatten(0, 1), scores.flatten(0, 1), log_probs.flatten(0, 1), drawn), places)


class MarkovHead(Edges):
    """A bigram model."""

    width, is_whole = MARKOV_WIDTH, True

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)

    @property
    def successors(self) -> Tensor:
        return self.markov_w2.weight

    def predecessors(self, hidden: Tensor, before: Tensor) -> Tensor:
        vectors: Tensor = self.markov_w1(before)
        return vectors


class GatedMarkovHead(MarkovHead):
    """A bigram model whose vectors the slot's hidden state gates."""

    def __init__(self, vocab_size: int, rank: int, width: int) -> None:
        super().__init__(vocab_size, rank)
        self.gate_proj = nn.Linear(width + rank, rank)

    def predecessors(self, hidden: Tensor, before: Tensor) -> Tensor:
        vectors = super().predecessors(hidden, before)
        gates: Tensor = self.gate_proj(torch.cat([hidden.to(vectors.dtype), vectors], dim=-1))
        return gates.sigmoid() * vectors


class CandidateSelector(Edges):
    """A bigram model through the slot's hidden state, which chooses among the slot's `top_k` best tokens."""

    is_whole = False

    def __init__(self, vocab_size: int, rank: int, width: int, top_k: int) -> None:
        super().__init__()
        self.width = top_k
        self.hidden_projection = nn.Linear(width, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank).normal_(std=rank**-0.5))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))

    @property
    def successors(self) -> Tensor:
        return self.successor_codebook

    def predecessors(self, hidden: Tensor, before: Tensor) -> Tensor:
        projected: Tensor = self.hidden_projection(hidden.to(self.predecessor_codebook.dtype))
        return self.predecessor_codebook[before] * projected
