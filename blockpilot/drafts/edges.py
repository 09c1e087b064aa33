"""Edges of a draft: bigram scores of a token given the token before it, in one slot of a block.

The slots of a block-diffusion draft are independent: none sees the token chosen in the slot before. Edges condition
each slot on that token by a few inner products, without another pass. The score is a low-rank product: a vector of
the slot and the token before, times a vector of the token. The heads differ in the first vector.

| head | vector of slot and token before | over | source |
|---|---|---|---|
| `MarkovHead` | W1[before] | all tokens | DSpark, arXiv 2607.05147 |
| `GatedMarkovHead` | sigmoid(G [hidden; W1[before]] + b) * W1[before] | all tokens | DSpark |
| `CandidateSelector` | A[before] * (W hidden) | the slot's best tokens | DFlash 2, z-lab/dflash |
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

from blockpilot.device import tensor_on
from blockpilot.drafts.choices import ConditionalCandidates
from blockpilot.native.linking import EdgeTables, LinkedChoices, link_choices
from blockpilot.native.ranking import LARGEST
from blockpilot.types import Candidates, Sampling

MARKOV_WIDTH = 32


class Edges(nn.Module, ABC):
    """Scores to add to those of a slot. Parameters are named as in published checkpoints; initially all scores are 0.

    width: number of a slot's best tokens that edges rescore.
    is_whole: the distribution is over all tokens; otherwise over the rescored tokens only.
    """

    width: int
    is_whole: bool

    @property
    @abstractmethod
    def codebooks(self) -> tuple[tuple[nn.Module, str], tuple[nn.Module, str]]:
        """Module and attribute of the vectors [vocab, rank] of the token before, and of the token itself."""

    @property
    def successors(self) -> Tensor:
        """Vectors of the tokens themselves [vocab, rank]."""
        vectors: Tensor = getattr(*self.codebooks[1])
        return vectors

    @property
    def rank(self) -> int:
        return self.successors.shape[1]

    @abstractmethod
    def predecessors(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Vectors [..., rank] of slots with hidden states [..., hidden] and of the tokens before them [...].

        Leading dimensions are broadcast.
        """

    def forward(self, hidden: Tensor, before: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Scores [M, K] for slots [M, hidden] after the tokens `before` [M], of `tokens` [K] or all."""
        weight = self.successors if tokens is None else self.successors[tokens]
        return functional.linear(self.predecessors(hidden, before), weight)

    def between(self, hidden: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Scores [S, P, K] for slots [S, hidden], of the tokens after[s] [S, K] after each of before[s] [S, P]."""
        vectors = self.predecessors(hidden[:, None], before)
        scores: Tensor = torch.matmul(vectors, self.successors[after].transpose(1, 2))
        return scores

    @cached_property
    def tables(self) -> EdgeTables | None:
        """Cached weights for C, to be read only after training; None for a head that is not implemented in C."""
        return None

    @torch.no_grad()
    def link(
        self, candidates: Candidates, hidden: Tensor, before: Tensor, sampling: Sequence[Sampling], num: int
    ) -> ConditionalCandidates:
        """The `num` best of a slot's candidates [N, W] after each of the tokens before it [N, P].

        hidden [N, hidden]. Edge scores are divided by the temperature of the slot's sampling [N].
        """
        scale = [
            1.0 if row_sampling.is_greedy else min(row_sampling.temperature, LARGEST) for row_sampling in sampling
        ]
        temperatures, drawn = tensor_on(before.device, scale), candidates.drawn.repeat_interleave(before.shape[1])
        if before.device.type == "cpu" and self.tables is not None:
            inputs = self.tables, candidates, hidden, before, temperatures, num
            if (linked := link_choices(*inputs, is_whole=self.is_whole)) is not None:
                return _linked(linked, drawn)
        lifted = self.between(hidden, before, candidates.tokens).float() / temperatures[:, None, None]
        log_probs, scores = (values[:, None] + lifted for values in (candidates.log_probs, candidates.scores))
        total = log_probs.logsumexp(dim=2)
        if self.is_whole:  # other tokens keep their probability mass
            log_rest = torch.log1p(-candidates.log_probs.exp().sum(dim=1).clamp(max=1 - 1e-6))
            total = torch.logaddexp(total, log_rest[:, None])
        scores, indices = (scores - total[:, :, None]).topk(min(num, scores.shape[2]), dim=2)
        tokens = candidates.tokens[:, None].expand_as(log_probs).gather(2, indices)
        log_probs = (log_probs - total[:, :, None]).gather(2, indices)
        return _linked(LinkedChoices(tokens, log_probs, scores, indices), drawn)


def _plain(weight: Tensor) -> Tensor:
    return weight.detach().float().contiguous()


def _linked(linked: LinkedChoices, drawn: Tensor) -> ConditionalCandidates:
    tokens, log_probs, scores = (values.flatten(0, 1) for values in linked[:3])
    return ConditionalCandidates(Candidates(tokens, scores, log_probs, drawn), linked.indices)


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
    def codebooks(self) -> tuple[tuple[nn.Module, str], tuple[nn.Module, str]]:
        return (self.markov_w1, "weight"), (self.markov_w2, "weight")

    @cached_property
    def tables(self) -> EdgeTables | None:
        return EdgeTables(_plain(self.markov_w1.weight), _plain(self.markov_w2.weight), None)

    def predecessors(self, hidden: Tensor, before: Tensor) -> Tensor:
        vectors: Tensor = self.markov_w1(before)
        return vectors


class GatedMarkovHead(MarkovHead):
    """A bigram model whose vectors are gated by the slot's hidden state."""

    def __init__(self, vocab_size: int, rank: int, width: int) -> None:
        super().__init__(vocab_size, rank)
        self.gate_proj = nn.Linear(width + rank, rank)

    @cached_property
    def tables(self) -> EdgeTables | None:
        return None

    def predecessors(self, hidden: Tensor, before: Tensor) -> Tensor:
        vectors = super().predecessors(hidden, before)
        slot_hidden = hidden.to(vectors.dtype).expand(*vectors.shape[:-1], -1)
        gates: Tensor = self.gate_proj(torch.cat([slot_hidden, vectors], dim=-1))
        return gates.sigmoid() * vectors


class CandidateSelector(Edges):
    """A bigram model weighted by the slot's hidden state, over the `top_k` best tokens of the slot."""

    is_whole = False

    def __init__(self, vocab_size: int, rank: int, width: int, top_k: int) -> None:
        super().__init__()
        self.width = top_k
        self.hidden_projection = nn.Linear(width, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank).normal_(std=rank**-0.5))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))

    @property
    def codebooks(self) -> tuple[tuple[nn.Module, str], tuple[nn.Module, str]]:
        return (self, "predecessor_codebook"), (self, "successor_codebook")

    @cached_property
    def tables(self) -> EdgeTables | None:
        codebooks = self.predecessor_codebook, self.successor_codebook
        return EdgeTables(*map(_plain, (*codebooks, self.hidden_projection.weight)))

    def predecessors(self, hidden: Tensor, before: Tensor) -> Tensor:
        projected: Tensor = self.hidden_projection(hidden.to(self.predecessor_codebook.dtype))
        return self.predecessor_codebook[before] * projected
