"""Loss of an EAGLE-3 draft with training-time test (arXiv 2503.01840, section 3.2).

Chains of drafted steps start at every position of the answers, in one pass per step. The first step reads the
target's features, later steps read the draft's own hidden states, as in decoding. Every step embeds the answer's
tokens.

The loss of a step is the cross entropy with the target's distribution over the draft vocabulary, mixed with the
cross entropy with the answer's token (`distill`). Tokens outside the draft vocabulary are left out. The k-th step has
weight decay^(k-1).
"""

import torch
from torch import Tensor
from torch.nn import functional

from blockpilot.draft_training.batches import DraftBatch
from blockpilot.draft_training.loss import DraftLoss, LossSums, Scores, Vocabulary, distilled
from blockpilot.drafts.eagle3 import Eagle3Model, UnrolledAttention
from blockpilot.models.decoder import capped

STEP_DECAY = 0.8  # as in the paper's code


class Eagle3Loss(DraftLoss):
    """Loss of the chains that an EAGLE-3 draft unrolls over the answers of a batch.

    `embedding` and `head` are the target's weights [vocab, hidden], `cap` is the soft cap of its logits, not of the
    draft's, which has its own LM head; see BlockLoss for `distill` and `overlap`. With
    `anchors_only`, only the chains at the batch's anchors are scored, which is less work for the LM head.
    """

    draft: Eagle3Model
    embedding: Tensor
    draft_head: Tensor
    draft_ids: Tensor
    may_sample = False

    def __init__(
        self,
        draft: Eagle3Model,
        embedding: Tensor,
        head: Tensor,
        *,
        distill: float = 1.0,
        overlap: float = 0.0,
        decay: float = STEP_DECAY,
        anchors_only: bool = False,
        cap: float | None = None,
    ) -> None:
        super().__init__()
        self.draft, self._cap = draft, cap
        self.block_size = draft.options.block_size
        self.distill, self.overlap = distill, overlap
        self.decay, self.anchors_only = decay, anchors_only
        vocabulary = draft.vocabulary.to(head.device)
        draft_ids = torch.full((len(head),), -1, device=head.device)
        draft_ids[vocabulary] = torch.arange(len(vocabulary), device=head.device)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("draft_head", head[vocabulary], persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    def forward(self, batch: DraftBatch, vocabulary: Vocabulary | None = None) -> Scores:
        """Unroll the chains and compare each step with the text.

        Chain t reads the features up to t and embeds tokens t+1, t+2, ...; its anchor is t+1, and its k-th step
        drafts token t+1+k. Raises ValueError for a sampled vocabulary.
        """
        if vocabulary is not None:
            raise ValueError("num_sampled: an EAGLE-3 draft has its own vocabulary, so it must be 0")
        num_steps, (num_documents, length) = self.block_size - 1, batch.tokens.shape
        positions = torch.arange(length, device=batch.tokens.device).expand(num_documents, -1)
        drafted_positions = positions[:, :, None] + torch.arange(2, num_steps + 2, device=positions.device)
        inside = drafted_positions < batch.lengths[:, None, None]  # [N, S, B-1]
        inside &= self._chains(batch, positions)[:, :, None]
        tokens = functional.pad(batch.tokens, (0, num_steps + 1))
        target_probs, rows = self._target_probs(batch, inside)
        correct = torch.zeros_like(inside)
        loss, weight = torch.zeros((2,), device=positions.device).unbind()
        hidden, attention = self.draft.fuse(batch.features), UnrolledAttention()
        for k in range(num_steps):
            embedded = functional.embedding(tokens[:, k + 1 : k + 1 + length], self._embedding)
            hidden = self.draft(embedded, hidden, positions + k, attention)
            labels = self.draft_ids[tokens[:, k + 2 : k + 2 + length]]
            has_label = inside[:, :, k] & (labels >= 0)
            log_probs = self.draft.logits(hidden[has_label]).log_softmax(-1, torch.float32)
            step_labels, step_probs = labels[has_label], None
            if self.distill or self.overlap:
                step_probs = target_probs[rows[:, k + 1 : k + 1 + length][has_label]]
            loss = loss + self.decay**k * self._cross_entropy(log_probs, step_labels, step_probs).sum()
            weight = weight + self.decay**k * len(step_labels)
            correct[:, :, k][has_label] = log_probs.detach().argmax(dim=-1) == step_labels
        counts = (values.sum(dim=(0, 1)).double() for values in (correct, inside))
        chains = (batch.anchors - 1).clamp_min(0)
        num_accepted = correct.cumprod(dim=-1).sum(dim=-1).gather(1, chains) * batch.valid
        return Scores(loss / weight.clamp_min(1e-9), LossSums(loss.detach(), weight, *counts), num_accepted)

    @property
    def _embedding(self) -> Tensor:
        return self.embedding if self.draft.embed_tokens is None else self.draft.embed_tokens.weight

    def _chains(self, batch: DraftBatch, positions: Tensor) -> Tensor:
        """Mask [N, S] of the chains to score: those at all possible anchors, or at the batch's anchors."""
        if not self.anchors_only:
            return positions >= batch.num_prompt_tokens[:, None] - 1
        chosen = torch.zeros_like(positions)
        return chosen.scatter_add_(1, (batch.anchors - 1).clamp_min(0), batch.valid.long()) > 0

    @torch.no_grad()
    def _target_probs(self, batch: DraftBatch, inside: Tensor) -> tuple[Tensor, Tensor]:
        """The target's distributions over the draft vocabulary [M, draft vocab], and rows [N, S + B].

        rows maps a position to the index of the distribution after its token. M is 0 without `distill` and `overlap`.
        """
        num_steps = inside.shape[2]
        needed = torch.zeros_like(functional.pad(inside[:, :, 0], (0, num_steps + 1)))
        if self.distill or self.overlap:
            for k in range(num_steps):  # step k of chain t drafts the token after t + 1 + k
                needed[:, k + 1 : k + 1 + inside.shape[1]] |= inside[:, :, k]
        hidden = batch.hidden[needed[:, : inside.shape[1]]]
        logits = capped(functional.linear(hidden, self.draft_head.to(hidden.dtype)), self._cap)
        rows = needed.flatten().cumsum(0).view_as(needed) - 1
        return logits.softmax(-1, torch.float32), rows

    def _cross_entropy(self, log_probs: Tensor, labels: Tensor, target_probs: Tensor | None) -> Tensor:
        """Losses [M] of log_probs [M, draft vocab] against the labels [M] mixed with the target's distributions."""
        if target_probs is None:
            return functional.nll_loss(log_probs, labels, reduction="none")
        return distilled(log_probs, labels, target_probs, self.distill, self.overlap)
