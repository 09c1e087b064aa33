"""Loss of a draft's blocks (arXiv 2602.06036, section 4), over the whole vocabulary or a sample of it.

The loss of a drafted position is the cross entropy with the answer's token, mixed with the cross entropy with the
target's distribution (`distill`), and with the negative log of the overlap of draft and target (`overlap`; LK loss,
arXiv 2602.23881), which is the acceptance probability. Positions are weighted by their effect on the accepted length,
since a token is accepted only if all before it are: by a fixed decay exp(-(offset - 1) / gamma), or by D-PACE (arXiv
2605.18810) from the draft's current confidences. A candidate selector adds the cross entropy of its choice among the
slot's best tokens.

With a large vocabulary the LM head is most of the cost on a CPU. A draft with its own vocabulary scores only that,
and positions of other tokens have weight 0. Other drafts may use a sampled softmax: a step scores every frequent
token and a new sample of the rest.
"""

import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from blockpilot.draft_training.batches import DraftBatch, at, draft_batch, drafted_positions
from blockpilot.drafts.base import Draft
from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.edges import Edges
from blockpilot.models.decoder import capped

GAMMA_PER_BLOCK_SIZE = 0.5  # gamma 4 at B=8; the paper uses 7 at B=16
DPACE_ALPHA = 0.5  # smoothing of the confidences, as in the paper
SMALLEST_OVERLAP = 1e-4  # keeps the LK loss and its gradient finite

Weighting = Literal["decay", "dpace"]


class Vocabulary(NamedTuple):
    """LM head rows that a step scores: ids [K], ascending, and the correction [K] added to the logits of a sample."""

    ids: Tensor
    correction: Tensor | None = None


@dataclass(frozen=True)
class LossSums:
    """Sums over blocks, divided once at the end: loss, weight, and correct and counted drafted positions [B-1]."""

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
        """Weighted mean loss, and accuracy of every drafted position."""
        accuracy = self.correct / self.count.clamp_min(1)
        return {f"{prefix}_loss": float(self.loss / self.weight.clamp_min(1e-9))} | {
            f"{prefix}_accuracy_{offset}": float(a) for offset, a in enumerate(accuracy, start=1)
        }


class Scores(NamedTuple):
    """Loss and acceptance of the drafted blocks of a batch."""

    loss: Tensor  # weighted mean over drafted positions, to minimise
    sums: LossSums
    num_accepted: Tensor  # [N, A]: drafted tokens before the first that differs from the text


class DraftLoss(nn.Module):
    """Draft and loss as one module, so that a distributed wrapper has a single forward pass.

    Maps a DraftBatch, and a Vocabulary or None, to Scores; `head` is the target's LM head [vocab, hidden].
    """

    draft: Draft
    head: Tensor
    block_size: int
    may_sample: bool
    """A step may score a sample of the vocabulary."""

    def compile_parts(self) -> None:
        """Compile the expensive parts; the first steps then take minutes."""
        for layer in self.draft.decoder_layers:
            layer.compile(dynamic=True)


class BlockLoss(DraftLoss):
    """Loss of the blocks that a DFlash draft fills at a batch's anchors.

    `embedding` and `head` are the target's weights [vocab, hidden]. `distill` is the share of the cross entropy that
    is taken against the target's distribution instead of the answer's token. `overlap` is the share of the loss that
    is the LK loss instead of the cross entropy. Both also apply to a candidate selector. `cap` is the soft cap of the
    target's logits, which are the draft's, too.
    """

    draft: DraftModel
    embedding: Tensor
    draft_ids: Tensor | None
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
        cap: float | None = None,
    ) -> None:
        super().__init__()
        self.draft, self._cap = draft, cap
        self.block_size = draft.options.block_size
        self.weighting, self.distill, self.overlap = weighting, distill, overlap
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        draft_ids = None if draft.vocabulary is None else draft.vocabulary.sort().values.to(head.device)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.may_sample = draft_ids is None
        self._slot_scores = self.slot_scores

    def compile_parts(self) -> None:
        super().compile_parts()
        if self.draft_ids is not None:  # the shape of a sampled vocabulary changes at every step
            self._slot_scores = torch.compile(self.slot_scores)

    def forward(self, batch: DraftBatch, vocabulary: Vocabulary | None = None) -> Scores:
        """Draft the block at every anchor and compare it with the text.

        Slots outside their document are computed with weight 0: leaving them out would make the host wait for the
        device, and shapes would vary.
        """
        if self.draft_ids is not None:
            vocabulary = Vocabulary(self.draft_ids)
        positions, inside = drafted_positions(batch, self.block_size)
        hidden = draft_batch(self.draft, self.embedding, batch, self.block_size)[:, :, 1:]
        before, labels = (at(batch.tokens, texts).flatten() for texts in (positions - 1, positions))
        labels, is_known = numbered(labels, vocabulary)
        target_hidden = at(batch.hidden, positions - 1).flatten(0, 2) if self.distill or self.overlap else None
        slots = self._slot_scores(hidden.flatten(0, 2), target_hidden, before, labels, vocabulary)
        losses, label_losses, chosen = (values.view_as(inside) for values in slots)
        is_known = is_known.view_as(inside) & inside
        weights = self._weights(label_losses.detach().masked_fill(~is_known, math.inf), inside) * is_known
        weighted = losses.masked_fill(~is_known, 0).mul(weights).sum()
        correct = (chosen == labels.view_as(inside)) & is_known
        sums = LossSums(
            weighted.detach(), weights.sum(), correct.sum(dim=(0, 1)).double(), inside.sum(dim=(0, 1)).double()
        )
        return Scores(weighted / weights.sum().clamp_min(1e-9), sums, correct.cumprod(dim=-1).sum(dim=-1))

    def slot_scores(
        self,
        hidden: Tensor,
        target_hidden: Tensor | None,
        before: Tensor,
        labels: Tensor,
        vocabulary: Vocabulary | None,
    ) -> "SlotScores":
        """Scores of M slots.

        hidden and target_hidden [M, hidden]: of the draft and the target. before [M]: the text's tokens before the
        slots. labels [M]: the text's tokens at the slots, as indices into the scored vocabulary.
        """
        logits = self._logits(hidden, vocabulary).float()
        edges = self.draft.edges
        if edges is not None and edges.is_whole:
            logits = logits + edges(hidden, before, None if vocabulary is None else vocabulary.ids).float()
        log_probs = logits.log_softmax(dim=-1)
        losses = label_losses = -log_probs.gather(-1, labels[:, None])[:, 0]
        target_probs = None
        if target_hidden is not None:
            target_probs = self._logits(target_hidden, vocabulary).float().softmax(dim=-1)
            losses = distilled(log_probs, labels, target_probs, self.distill, self.overlap)
        if edges is None or edges.is_whole:
            return SlotScores(losses, label_losses, logits.detach().argmax(dim=-1))
        best = best_tokens(edges, logits, hidden, before, vocabulary)
        return SlotScores(losses + self._selection_losses(best, labels, target_probs), label_losses, best.chosen)

    def _selection_losses(self, best: "BestTokens", labels: Tensor, target_probs: Tensor | None) -> Tensor:
        """Losses [M] of the choice among the best tokens; 0 if the answer's token is not among them."""
        is_label = best.indices == labels[:, None]
        label_index, has_label = is_label.int().argmax(dim=1), is_label.any(dim=1)
        log_probs = best.scores.log_softmax(dim=-1)
        if target_probs is None:
            losses = -log_probs.gather(-1, label_index[:, None])[:, 0]
        else:
            best_probs = target_probs.gather(1, best.indices)
            best_probs = best_probs / best_probs.sum(dim=1, keepdim=True).clamp_min(SMALLEST_OVERLAP)
            losses = distilled(log_probs, label_index, best_probs, self.distill, self.overlap)
        return losses * has_label

    def _weights(self, losses: Tensor, inside: Tensor) -> Tensor:
        """Loss weights [N, A, B-1], 0 outside documents; `losses` [N, A, B-1] are those of the text's tokens."""
        if self.weighting == "dpace":
            return dpace_weights(losses, inside)
        return decay_weights(self.block_size).to(inside.device) * inside

    def _logits(self, hidden: Tensor, vocabulary: Vocabulary | None) -> Tensor:
        head = self.head if vocabulary is None else self.head[vocabulary.ids]
        logits = capped(functional.linear(hidden, head.to(hidden.dtype)), self._cap)
        correction = None if vocabulary is None else vocabulary.correction
        return logits if correction is None else logits + correction.to(logits.dtype)


class SlotScores(NamedTuple):
    """Losses of M slots, those of the text's token alone, and chosen tokens as indices into the scored vocabulary."""

    losses: Tensor
    label_losses: Tensor
    chosen: Tensor


class BestTokens(NamedTuple):
    """The best K tokens of M slots, as indices [M, K] into the scored vocabulary, and their scores with edges."""

    indices: Tensor
    scores: Tensor

    @property
    def chosen(self) -> Tensor:
        """The choice of each slot [M]."""
        return self.indices.gather(1, self.scores.argmax(dim=-1, keepdim=True))[:, 0]


def best_tokens(
    edges: Edges, logits: Tensor, hidden: Tensor, before: Tensor, vocabulary: Vocabulary | None
) -> BestTokens:
    """Best tokens of slots with logits [M, V] and hidden states [M, hidden], given the previous tokens [M]."""
    correction = None if vocabulary is None else vocabulary.correction
    scores, indices = (logits if correction is None else logits - correction).topk(edges.width, dim=-1)
    tokens = indices if vocabulary is None else vocabulary.ids[indices]
    return BestTokens(indices, scores + edges.between(hidden, before[:, None], tokens)[:, 0].float())


def numbered(tokens: Tensor, vocabulary: Vocabulary | None) -> tuple[Tensor, Tensor]:
    """Indices [M] of tokens [M] in the scored vocabulary, and a mask of those in it (others are meaningless)."""
    if vocabulary is None:
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    index = torch.searchsorted(vocabulary.ids, tokens).clamp_max(len(vocabulary.ids) - 1)
    return index, vocabulary.ids[index] == tokens


def distilled(log_probs: Tensor, labels: Tensor, target_probs: Tensor, share: float, overlap: float = 0.0) -> Tensor:
    """Losses [M] of log_probs [M, V]: (1 - overlap) * cross entropy + overlap * LK loss.

    The cross entropy is with the mixture share * target_probs [M, V] + (1 - share) * one-hot labels [M].
    """
    mixture = target_probs
    if share < 1:
        label_share = torch.full_like(log_probs[:, :1], 1 - share)
        mixture = (target_probs * share).scatter_add_(-1, labels[:, None], label_share)
    cross_entropy = -(mixture * log_probs).sum(dim=-1)
    if not overlap:
        return cross_entropy
    common = torch.minimum(target_probs, log_probs.exp()).sum(dim=-1)
    return (1 - overlap) * cross_entropy - overlap * torch.log(common + SMALLEST_OVERLAP)


def decay_weights(block_size: int) -> Tensor:
    """Weights [B-1] of drafted positions with exponential decay."""
    return torch.exp(-torch.arange(block_size - 1) / (GAMMA_PER_BLOCK_SIZE * block_size))


def dpace_weights(losses: Tensor, inside: Tensor) -> Tensor:
    """D-PACE: the weight of drafted position j is the sum over k >= j of the product of smoothed confidences up to k.

    losses are cross entropies with the answer's tokens. losses, inside and the weights are [N, A, B-1].
    """
    confidence = ((1 - DPACE_ALPHA) * torch.exp(-losses) + DPACE_ALPHA) * inside
    reached = confidence.cumprod(dim=-1)
    return reached.flip(-1).cumsum(dim=-1).flip(-1) * inside


def frequent_tokens(documents: Sequence[Sequence[int]], share: float = 0.9) -> Tensor:
    """Ascending ids of the smallest set of tokens that covers `share` of the documents' tokens."""
    ids, counts = torch.cat([torch.as_tensor(d) for d in documents]).long().unique(return_counts=True)
    order = counts.argsort(descending=True, stable=True)
    num_frequent = int((counts[order].cumsum(0) < share * counts.sum()).sum()) + 1
    frequent: Tensor = ids[order[:num_frequent]].sort().values
    return frequent


def by_frequency(answers: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """All token ids [vocab_size] by descending frequency in the answers; unseen tokens last, by ascending id.

    Tokenizers number tokens in the order of their merges, so low ids are more frequent among unseen tokens, too.
    """
    counts = Counter[int]()
    for tokens in answers:
        counts.update(tokens)
    return torch.tensor(sorted(range(vocab_size), key=lambda token: (-counts[token], token)))


def sample_vocabulary(
    frequent: Tensor, labels: Tensor, vocab_size: int, num_sampled: int, generator: torch.Generator
) -> Vocabulary:
    """Frequent tokens, labels, and `num_sampled` random others with a logit correction to represent all others."""
    certain = torch.cat([frequent, labels.flatten()]).unique()
    others = torch.ones(vocab_size, dtype=torch.bool)
    others[certain] = False
    rare = others.nonzero()[:, 0]
    sampled = rare[torch.randperm(len(rare), generator=generator)[:num_sampled]]
    correction = torch.zeros(vocab_size)
    correction[sampled] = math.log(len(rare) / max(1, len(sampled)))
    ids = torch.cat([certain, sampled]).sort().values
    return Vocabulary(ids, correction[ids])
