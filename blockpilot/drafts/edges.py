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
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

from blockpilot.device import tensor_on
from blockpilot.drafts.choices import Linked
from blockpilot.native.linking import EdgeTables, Followed, link_choices
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
    def codebooks(self) -> tuple[tuple[nn.Module, str], tuple[nn.Module, str]]:
        """Module and name of the vectors [vocab, rank] of tokens before a slot, and of those in it."""

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

        The shapes before the last one are broadcast.
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
        """All of it as C reads it, once nothing is trained any more; None for what C has not."""
        return None

    @torch.no_grad()
    def link(
        self, candidates: Candidates, hidden: Tensor, before: Tensor, sampling: Sequence[Sampling], num: int
    ) -> Linked:
        """The `num` best of a slot's own choices [N, W] after each of the tokens before it [N, P].

        hidden [N, hidden]. A slot's scores are lifted by the edges, at the temperature of its sampling [N].
        """
        scale = [1.0 if of_row.is_greedy else min(of_row.temperature, LARGEST) for of_row in sampling]
        temperatures, drawn = tensor_on(before.device, scale), candidates.drawn.repeat_interleave(before.shape[1])
        if before.device.type == "cpu" and self.tables is not None:
            given = self.tables, candidates, hidden, before, temperatures, num
            if (followed := link_choices(*given, is_whole=self.is_whole)) is not None:
                return _linked(followed, drawn)
        lifted = self.between(hidden, before, candidates.tokens).float() / temperatures[:, None, None]
        log_probs, scores = (values[:, None] + lifted for values in (candidates.log_probs, candidates.scores))
        total = log_probs.logsumexp(dim=2)
        if self.is_whole:  # what is no choice keeps its own probability
            of_rest = torch.log1p(-candidates.log_probs.exp().sum(dim=1).clamp(max=1 - 1e-6))
            total = torch.logaddexp(total, of_rest[:, None])
        scores, places = (scores - total[:, :, None]).topk(min(num, scores.shape[2]), dim=2)
        tokens = candidates.tokens[:, None].expand_as(log_probs).gather(2, places)
        log_probs = (log_probs - total[:, :, None]).gather(2, places)
        return _linked(Followed(tokens, log_probs, scores, places), drawn)


def _plain(weight: Tensor) -> Tensor:
    return weight.detach().float().contiguous()


def _linked(followed: Followed, drawn: Tensor) -> Linked:
    tokens, log_probs, scores = (values.flatten(0, 1) for values in followed[:3])
    return Linked(Candidates(tokens, scores, log_probs, drawn), followed.places)


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
    """A bigram model whose vectors the slot's hidden state gates."""

    def __init__(self, vocab_size: int, rank: int, width: int) -> None:
        super().__init__(vocab_size, rank)
        self.gate_proj = nn.Linear(width + rank, rank)

    @cached_property
    def tables(self) -> EdgeTables | None:
        return None

    def predecessors(self, hidden: Tensor, before: Tensor) -> Tensor:
        vectors = super().predecessors(hidden, before)
        of_slots = hidden.to(vectors.dtype).expand(*vectors.shape[:-1], -1)
        gates: Tensor = self.gate_proj(torch.cat([of_slots, vectors], dim=-1))
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
    def codebooks(self) -> tuple[tuple[nn.Module, str], tuple[nn.Module, str]]:
        return (self, "predecessor_codebook"), (self, "successor_codebook")

    @cached_property
    def tables(self) -> EdgeTables | None:
        codebooks = self.predecessor_codebook, self.successor_codebook
        return EdgeTables(*map(_plain, (*codebooks, self.hidden_projection.weight)))

    def predecessors(self, hidden: Tensor, before: Tensor) -> Tensor:
        projected: Tensor = self.hidden_projection(hidden.to(self.predecessor_codebook.dtype))
        return self.predecessor_codebook[before] * projected
