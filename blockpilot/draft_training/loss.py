"""Loss of a draft's blocks (arXiv 2602.06036, section 4), over the whole vocabulary or a sample of it.

The loss of a drafted position is the cross entropy with the answer's token, mixed with the cross entropy with the
target's whole distribution there (`distill`), and with the negative log of the probability that both have in common
(`overlap`; LK loss, arXiv 2602.23881), which is what is accepted. Positions are weighted by what they mean for the
accepted length, since a late one counts only when all before it were right: by a fixed decay
exp(-(offset - 1) / gamma), or by D-PACE (arXiv 2605.18810) from the draft's present confidences. A candidate selector
adds the cross entropy of its choice among the slot's best tokens.

With a large vocabulary the LM head is most of the cost on a CPU. A draft with a vocabulary of its own scores that;
positions of other tokens carry no weight. For one without, a step may score every frequent token and a fresh sample
of the rest, which stands for all of them (sampled softmax).
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from blockpilot.draft_training.batches import DraftBatch, at, draft_batch, drafted_positions
from blockpilot.drafts.base import Draft
from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.edges import Edges

GAMMA_PER_BLOCK_SIZE = 0.5  # gamma 4 at B=8; the paper has 7 at B=16
DPACE_ALPHA = 0.5  # smoothing of the confidences, the paper's
SMALLEST_OVERLAP = 1e-4  # keeps the LK loss and its gradient finite

Weighting = Literal["decay", "dpace"]


class Vocabulary(NamedTuple):
    """LM head rows that a step scores: ids [K] ascending, and the correction [K] added to their logits."""

    ids: Tensor
    correction: Tensor


@dataclass(frozen=True)
class LossSums:
    """Totals over blocks, to be divided once: loss and weight, right and counted drafted positions [B-1]."""

    loss: Tensor
    weight: Tensor
    correct: Tensor
    count: Tensor

    def __add__(self, other: "LossSums") -> "LossSums":
        return LossSums(*map(operator.add, vars(self).values(), vars(other).values()))

    @property
    def num_blocks(self) -> int:
        """Blocks with at least one drafted position inside their document."""
        return int(self.count[0])

    def metrics(self, prefix: str) -> dict[str, float]:
        """Mean loss by weight, and accuracy of every drafted position."""
        accuracy = self.correct / self.count.clamp_min(1)
        return {f"{prefix}_loss": float(self.loss / self.weight.clamp_min(1e-9))} | {
            f"{prefix}_accuracy_{offset}": float(a) for offset, a in enumerate(accuracy, start=1)
        }


class Scores(NamedTuple):
    """Loss and acceptance of the drafted blocks of a batch."""

    loss: Tensor  # weighted mean over drafted positions, to minimise
    sums: LossSums
    num_accepted: Tensor  # [N, A]: drafted tokens up to the first that differs from the text


class DraftLoss(nn.Module):
    """Draft and loss as one module, so that a distributed wrapper sees a single forward pass.

    Called with a DraftBatch, and a Vocabulary or None, it returns Scores; `head` is the target's, [vocab, hidden].
    """

    draft: Draft
    head: Tensor
    block_size: int
    may_sample: bool
    """A step may score a sample of the vocabulary."""


class BlockLoss(DraftLoss):
    """Loss of the blocks that a DFlash draft fills at a batch's anchors.

    `embedding` and `head` are the target's weights [vocab, hidden]. `distill` is the share of the cross entropy that
    is taken against the target's distribution instead of the answer's token, `overlap` the share of the loss that is
    the LK loss instead of the cross entropy; of a candidate selector, too.
    """

    draft: DraftModel
    embedding: Tensor
    own_ids: Tensor | None
    """The draft's vocabulary, ascending."""

    def __init__(
        self,
        draft: DraftModel,
        embedding: Tensor,
        head: Tensor,
        *,
        weighting: Weighting = "decay",
        distill: float = 0.0,
        overlap: float = 0.0,
    ) -> None:
        super().__init__()
        self.draft = draft
        self.block_size = draft.options.block_size
        self.weighting, self.distill, self.overlap = weighting, distill, overlap
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        own_ids = None if draft.vocabulary is None else draft.vocabulary.sort().values.to(head.device)
        self.register_buffer("own_ids", own_ids, persistent=False)
        self.may_sample = own_ids is None

    def forward(self, batch: DraftBatch, vocabulary: Vocabulary | None = None) -> Scores:
        """Draft the block at every anchor and compare it with the text."""
        if self.own_ids is not None:
            vocabulary = Vocabulary(self.own_ids, torch.zeros_like(self.own_ids, dtype=torch.float32))
        positions, inside = drafted_positions(batch, self.block_size)
        labels = at(batch.tokens, positions)
        hidden = draft_batch(self.draft, self.embedding, batch, self.block_size)[:, :, 1:]
        hidden = hidden[inside]
        logits = self._logits(hidden, vocabulary).float()
        before = at(batch.tokens, positions - 1)[inside]  # which is right if a token counts
        edges = self.draft.edges
        if edges is not None and edges.is_whole:
            logits = logits + edges(hidden, before, None if vocabulary is None else vocabulary.ids).float()
        targets, is_known = numbered(labels[inside], vocabulary)
        log_probs = logits.log_softmax(dim=-1)
        losses = hard = -log_probs.gather(-1, targets[:, None])[:, 0]
        of_target = None
        if self.distill or self.overlap:
            of_target = self._logits(at(batch.hidden, positions - 1)[inside], vocabulary).float().softmax(dim=-1)
            losses = distilled(log_probs, targets, of_target, self.distill, self.overlap)
        chosen = logits.detach().argmax(dim=-1)
        if edges is not None and not edges.is_whole:
            best = best_tokens(edges, logits, hidden, before, vocabulary)
            chosen = best.chosen
            losses = losses + self._selection_losses(best, targets, of_target)
        weights = self._weights(hard.detach().masked_fill(~is_known, math.inf), inside)
        weights[inside] *= is_known
        weighted = (losses * weights[inside]).sum()
        correct = torch.zeros_like(inside)
        correct[inside] = is_known & (chosen == targets)
        sums = LossSums(
            weighted.detach(), weights.sum(), correct.sum(dim=(0, 1)).double(), inside.sum(dim=(0, 1)).double()
        )
        return Scores(weighted / weights.sum(), sums, correct.cumprod(dim=-1).sum(dim=-1))

    def _selection_losses(self, best: "BestTokens", targets: Tensor, of_target: Tensor | None) -> Tensor:
        """Losses [M] of the choice among the best tokens; 0 where the answer's token is none of them."""
        right = best.places == targets[:, None]
        places, wanted = right.int().argmax(dim=1), right.any(dim=1)
        log_probs = best.scores.log_softmax(dim=-1)
        if of_target is None:
            losses = -log_probs.gather(-1, places[:, None])[:, 0]
        else:
            of_best = of_target.gather(1, best.places)
            of_best = of_best / of_best.sum(dim=1, keepdim=True).clamp_min(SMALLEST_OVERLAP)
            losses = distilled(log_probs, places, of_best, self.distill, self.overlap)
        return losses * wanted

    def _weights(self, losses: Tensor, inside: Tensor) -> Tensor:
        """Loss weights [N, A, B-1], 0 outside; `losses` are those of the positions inside."""
        if self.weighting == "dpace":
            return dpace_weights(losses, inside)
        return decay_weights(self.block_size).to(inside.device) * inside

    def _logits(self, hidden: Tensor, vocabulary: Vocabulary | None) -> Tensor:
        head = self.head if vocabulary is None else self.head[vocabulary.ids]
        logits = functional.linear(hidden, head.to(hidden.dtype))
        return logits if vocabulary is None else logits + vocabulary.correction.to(logits.dtype)


class BestTokens(NamedTuple):
    """The best K tokens of M slots as numbers of scored ones [M, K], and their scores [M, K] with edges."""

    places: Tensor
    scores: Tensor

    @property
    def chosen(self) -> Tensor:
        """The choice of each slot [M]."""
        return self.places.gather(1, self.scores.argmax(dim=-1, keepdim=True))[:, 0]


def best_tokens(
    edges: Edges, logits: Tensor, hidden: Tensor, before: Tensor, vocabulary: Vocabulary | None
) -> BestTokens:
    """The best tokens of slots with logits [M, V] and hidden states [M, hidden], after the true tokens before them,
    `before` [M].
    """
    own = logits if vocabulary is None else logits - vocabulary.correction
    scores, places = own.topk(edges.width, dim=-1)
    tokens = places if vocabulary is None else vocabulary.ids[places]
    return BestTokens(places, scores + edges.between(hidden, before[:, None], tokens)[:, 0].float())


def numbered(tokens: Tensor, vocabulary: Vocabulary | None) -> tuple[Tensor, Tensor]:
    """Numbers [M] of tokens [M] among the scored ones, and which of them are scored; the number of others is void."""
    if vocabulary is None:
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    places = torch.searchsorted(vocabulary.ids, tokens).clamp_max(len(vocabulary.ids) - 1)
    return places, vocabulary.ids[places] == tokens


def distilled(log_probs: Tensor, labels: Tensor, of_target: Tensor, share: float, overlap: float = 0.0) -> Tensor:
    """Losses [M] of log_probs [M, V]: cross entropies with the target's distributions [M, V], a `share`, and labels
    [M], mixed with an `overlap` of the negative log of what draft and target have in common.
    """
    goal = of_target
    if share < 1:
        rest = torch.full_like(log_probs[:, :1], 1 - share)
        goal = (of_target * share).scatter_add_(-1, labels[:, None], rest)
    cross_entropy = -(goal * log_probs).sum(dim=-1)
    if not overlap:
        return cross_entropy
    common = torch.minimum(of_target, log_probs.exp()).sum(dim=-1)
    return (1 - overlap) * cross_entropy - overlap * torch.log(common + SMALLEST_OVERLAP)


def decay_weights(block_size: int) -> Tensor:
    """Weights [B-1] of drafted positions that fall by a fixed factor."""
    return torch.exp(-torch.arange(block_size - 1) / (GAMMA_PER_BLOCK_SIZE * block_size))


def dpace_weights(losses: Tensor, inside: Tensor) -> Tensor:
    """D-PACE: the weight of drafted position j is the sum over k >= j of the product of smoothed confidences up to k.

    losses [positions inside] are cross entropies with the answer's tokens. inside and the weights are [N, A, B-1].
    """
    confidence = torch.zeros(inside.shape, device=losses.device)
    confidence[inside] = (1 - DPACE_ALPHA) * torch.exp(-losses) + DPACE_ALPHA
    reached = confidence.cumprod(dim=-1)
    return reached.flip(-1).cumsum(dim=-1).flip(-1) * inside


def frequent_tokens(documents: Sequence[Sequence[int]], share: float = 0.9) -> Tensor:
    """Ids, ascending, of the fewest tokens that make up `share` of the documents."""
    ids, counts = torch.cat([torch.as_tensor(d) for d in documents]).long().unique(return_counts=True)
    order = counts.argsort(descending=True, stable=True)
    num_kept = int((counts[order].cumsum(0) < share * counts.sum()).sum()) + 1
    kept: Tensor = ids[order[:num_kept]].sort().values
    return kept


def sample_vocabulary(
    frequent: Tensor, labels: Tensor, vocab_size: int, num_sampled: int, generator: torch.Generator
) -> Vocabulary:
    """Frequent tokens and labels, and `num_sampled` others drawn at random, each corrected to stand for its share."""
    certain = torch.cat([frequent, labels.flatten()]).unique()
    others = torch.ones(vocab_size, dtype=torch.bool)
    others[certain] = False
    rest = others.nonzero()[:, 0]
    sampled = rest[torch.randperm(len(rest), generator=generator)[:num_sampled]]
    correction = torch.zeros(vocab_size)
    correction[sampled] = math.log(len(rest) / max(1, len(sampled)))
    ids = torch.cat([certain, sampled]).sort().values
    return Vocabulary(ids, correction[ids])
