"""Training of edges (bigram scores, drafts/edges.py) on a frozen draft, whose outputs at all slots are computed once.

A frozen draft's outputs never change, so an epoch is a few matrix products of size [slots, rank]: minutes on two CPU
cores instead of hours with the draft in the loop. Given the previous token, the edges learn to choose among a slot's
best tokens as the target does. The loss is over these tokens only, as in DFlash 2.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from blockpilot.draft_training.batches import at, collate, draft_batch, drafted_positions, draw_anchors
from blockpilot.draft_training.features import Document
from blockpilot.draft_training.loss import SMALLEST_OVERLAP, LossSums, Weighting, decay_weights, dpace_weights
from blockpilot.draft_training.training import DraftFitSettings, TrainingFit, Validation
from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.edges import Edges
from blockpilot.models.decoder import capped
from blockpilot.storage import whole


class DraftedSlots(NamedTuple):
    """M drafted positions of blocks at random anchors of answers, block by block."""

    hidden: Tensor  # [M, hidden] of the draft, bf16
    tokens: Tensor  # [M, K]: the draft's best tokens, best first
    log_probs: Tensor  # [M, K]: their log probabilities by the draft
    target_log_probs: Tensor  # [M, K]: their log probabilities by the target at temperature 1
    before: Tensor  # [M]: the text's token before the position
    labels: Tensor  # [M]: the text's token at the position
    offsets: Tensor  # [M]: distance from the anchor, from 1
    temperatures: Tensor  # [M]: temperature of the answer

    def at(self, index: Tensor) -> "DraftedSlots":
        """The slots at `index`."""
        return DraftedSlots(*(values[index] for values in self))


@torch.no_grad()
def slots_of(
    draft: DraftModel,
    embedding: Tensor,
    head: Tensor,
    documents: Sequence[Document],
    temperatures: Sequence[float],
    num_anchors: int,
    seed: int,
    cap: float | None = None,
) -> DraftedSlots:
    """Slots of at most `num_anchors` blocks per document; embedding and head [vocab, hidden] are the target's, and so
    is the soft cap of its logits.
    """
    block_size, width = draft.options.block_size, cast(Edges, draft.edges).width
    generator = torch.Generator().manual_seed(seed)
    batch = collate(documents, [draw_anchors(document, num_anchors, generator) for document in documents])
    batch = type(batch)(*(tensor.to(head.device) for tensor in batch))
    batch = batch._replace(features=batch.features.to(draft.dtype), hidden=batch.hidden.to(draft.dtype))
    positions, inside = drafted_positions(batch, block_size)
    ids = torch.arange(len(head)) if draft.vocabulary is None else draft.vocabulary.sort().values
    draft_head, ids = head[ids.to(head.device)], ids.to(head.device)
    hidden = draft_batch(draft, embedding, batch, block_size)[:, :, 1:][inside]
    logits = capped(hidden @ draft_head.T, cap)
    best, best_indices = logits.topk(min(width, len(ids)), dim=-1)
    target_logits = capped(at(batch.hidden, positions - 1)[inside] @ draft_head.T, cap)
    offsets = torch.arange(1, block_size, device=head.device).expand_as(positions)[inside]
    slot_temperatures = torch.tensor(temperatures, device=head.device)[:, None, None].expand_as(positions)[inside]
    slots = DraftedSlots(
        hidden.bfloat16(),
        ids[best_indices].int(),
        best.float() - logits.float().logsumexp(-1, keepdim=True),
        target_logits.gather(1, best_indices).float() - target_logits.float().logsumexp(-1, keepdim=True),
        at(batch.tokens, positions - 1)[inside].int(),
        at(batch.tokens, positions)[inside].int(),
        offsets.byte(),
        slot_temperatures,
    )
    return DraftedSlots(*(tensor.cpu() for tensor in slots))


def joined(parts: Sequence[DraftedSlots]) -> DraftedSlots:
    """Concatenated slots of all parts."""
    return DraftedSlots(*map(torch.cat, zip(*parts, strict=True)))


def write_slots(path: Path, slots: DraftedSlots) -> None:
    """Write slots atomically."""
    with whole(path) as unfinished:
        save_file({name: values.contiguous() for name, values in slots._asdict().items()}, unfinished)


def read_slots(paths: Sequence[Path]) -> DraftedSlots:
    """Concatenated slots of several files."""
    return joined([DraftedSlots(**load_file(path)) for path in paths])


# --- loss ---


class EdgeLoss(nn.Module):
    """Edges with their loss as one module, for `EdgeFit` and distributed wrappers.

    A token's vectors are the sum of a table row and a projection of the target's `embedding` [vocab, hidden], so rare
    tokens share statistics with similar ones. `plain_state` has the sums, under the published names.
    """

    def __init__(self, edges: Edges, embedding: Tensor, distill: float = 0.0, overlap: float = 0.0) -> None:
        super().__init__()
        self.edges, self.distill, self.overlap = edges, distill, overlap
        scaled = embedding.float() * (embedding.shape[1] ** 0.5 / embedding.float().norm(dim=1).mean())
        before, after = edges.codebooks
        with torch.no_grad():
            is_fresh = not getattr(*after).any()
            if is_fresh:
                getattr(*before).zero_()
        for (module, name), std in ((before, (scaled.shape[1] * edges.rank) ** -0.5 * is_fresh), (after, 0.0)):
            parametrize.register_parametrization(module, name, _PlusEmbeddings(scaled, edges.rank, std))

    def plain_state(self) -> dict[str, Tensor]:
        """The edges' weights in the checkpoint format."""
        state = {n: v for n, v in self.edges.state_dict().items() if "parametrizations." not in n}
        prefixes = {module: f"{path}." if path else "" for path, module in self.edges.named_modules()}
        for module, name in self.edges.codebooks:
            state[prefixes[module] + name] = getattr(module, name).detach().clone()
        return state

    def scores(self, slots: DraftedSlots) -> Tensor:
        """Scores [M, K] of the slots' best tokens, given the tokens before the slots."""
        with parametrize.cached():
            lifts = self.edges.between(slots.hidden.float(), slots.before.long()[:, None], slots.tokens.long())[:, 0]
        return slots.log_probs + lifts

    def forward(self, slots: DraftedSlots) -> tuple[Tensor, Tensor]:
        """Losses [M] and scores [M, K].

        Probability mass outside the slot's best tokens is ignored. In a block's first slot `goal` is the draft's
        distribution: the draft has already attended to the token before (the anchor), so edges could only add noise.
        """
        scores = self.scores(slots)
        log_probs, right = scores.log_softmax(dim=-1), slots.tokens == slots.labels[:, None]
        goal = self.distill * slots.target_log_probs.exp() + (1 - self.distill) * right
        goal = torch.where(slots.offsets[:, None] == 1, slots.log_probs.softmax(dim=-1), goal)
        losses = -(goal * log_probs).sum(dim=-1)
        if self.overlap:
            mass = goal.sum(dim=-1)
            shares = goal / mass[:, None].clamp_min(SMALLEST_OVERLAP)
            common = torch.minimum(shares, log_probs.exp()).sum(dim=-1)
            losses = (1 - self.overlap) * losses - self.overlap * mass * torch.log(common + SMALLEST_OVERLAP)
        return losses, scores


class _PlusEmbeddings(nn.Module):
    """A table of vectors plus a projection of embeddings [vocab, hidden]."""

    def __init__(self, embedding: Tensor, rank: int, std: float) -> None:
        super().__init__()
        self.register_buffer("embedding", embedding, persistent=False)
        self.projection = nn.Linear(embedding.shape[1], rank, bias=False)
        nn.init.normal_(self.projection.weight, std=std)

    def forward(self, table: Tensor) -> Tensor:
        vectors: Tensor = table + self.projection(self.embedding)
        return vectors


def by_block(slots: DraftedSlots, flags: Tensor, block_size: int) -> Tensor:
    """Flags [M] of slots arranged by block [num_blocks, B-1]; False for slots missing from a block."""
    blocks = slots.offsets.eq(1).cumsum(0) - 1
    flags_by_block = torch.zeros(int(blocks[-1]) + 1, block_size - 1, dtype=torch.bool)
    flags_by_block[blocks, slots.offsets.long() - 1] = flags
    return flags_by_block


def weights_of(slots: DraftedSlots, block_size: int, weighting: Weighting) -> Tensor:
    """Loss weights [M] of slots by their effect on the accepted length, as in the loss of a draft."""
    if weighting == "decay":
        return decay_weights(block_size)[slots.offsets.long() - 1]
    inside = by_block(slots, torch.ones_like(slots.labels, dtype=torch.bool), block_size)[:, None]
    right = slots.tokens == slots.labels[:, None]
    losses = torch.zeros(inside.shape)
    losses[inside] = -slots.log_probs.masked_fill(~right, -math.inf).amax(dim=1)
    return dpace_weights(losses, inside)[inside]


# --- fit ---


class EdgeFit(TrainingFit):
    """Training of edges on slots; a step takes as many slots as `batch_size` documents of `num_anchors` blocks have.

    `loss` is an EdgeLoss, or a distributed wrapper of one. Batches depend only on (seed, step, rank). With few slots
    they are smaller, so that every worker has one.
    """

    _inner: EdgeLoss

    def __init__(
        self,
        loss: nn.Module,
        slots: DraftedSlots,
        block_size: int,
        settings: DraftFitSettings,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(loss, settings, seed, rank, world_size)
        self.block_size, self._slots = block_size, slots
        assert isinstance(self._inner, EdgeLoss)
        most = len(slots.labels) // world_size
        if not most:
            raise ValueError(f"{world_size} workers: there are only {len(slots.labels)} drafted positions")
        self._batch = min(settings.batch_size * settings.num_anchors * (block_size - 1), most)
        self._weights = weights_of(slots, block_size, settings.weighting)
        self._begin(self._inner, len(slots.labels) // (self._batch * world_size))

    def steps(self) -> Iterator[LossSums]:
        while self.step < self.num_steps:
            epoch, done = divmod(self.step, self.steps_per_epoch)
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self._slots.labels), generator=generator)
            batches = order.split(self._batch)[self._rank :: self._world_size]
            for index in batches[done : self.steps_per_epoch]:
                slots, weights = self._slots.at(index), self._weights[index]
                losses, scores = self.loss(slots)
                self.advance((losses * weights).sum() / weights.sum())
                yield self._sums(slots, losses.detach(), scores.detach(), weights)

    @torch.no_grad()
    def validate(self, held_out: DraftedSlots) -> Validation:
        """Loss, accuracy and tau of chains on held-out slots.

        A block's tokens are accepted until the first slot where the edges' choice, given the text before it, differs
        from the text.
        """
        losses, scores = self._inner(held_out)
        weights = weights_of(held_out, self.block_size, self.settings.weighting)
        noisy_scores = scores + noise_of(held_out)
        sums = self._sums(held_out, losses, noisy_scores, weights)
        right = by_block(held_out, _chosen(held_out, noisy_scores) == held_out.labels, self.block_size)
        accepted = right.int().cumprod(dim=1).sum(dim=1)
        temperatures = held_out.temperatures[held_out.offsets == 1]
        tau = {float(t): 1 + float(accepted[temperatures == t].float().mean()) for t in temperatures.unique()}
        return Validation(sums, tau)

    def _sums(self, slots: DraftedSlots, losses: Tensor, scores: Tensor, weights: Tensor) -> LossSums:
        slot_index, is_right = slots.offsets.long() - 1, _chosen(slots, scores) == slots.labels
        counts = [
            torch.bincount(indices, minlength=self.block_size - 1).double()
            for indices in (slot_index[is_right], slot_index)
        ]
        return LossSums((losses * weights).sum(), weights.sum(), *counts)

    def state_dict(self) -> dict[str, object]:
        return super().state_dict() | {"edges": self._inner.plain_state()}


def _chosen(slots: DraftedSlots, scores: Tensor) -> Tensor:
    return slots.tokens.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]


def noise_of(slots: DraftedSlots, seed: int = 0) -> Tensor:
    """Gumbel noise [M, K] with which the target's keyed sampler chooses the text's tokens; 0 at temperature 0.

    Sampled on condition that the label has the largest noisy score: this has the distribution of the maximum, and
    all others are below it. The draft's tokens get the same noise.
    """
    generator = torch.Generator().manual_seed(seed)

    def gumbel(*shape: int) -> Tensor:
        return -torch.log(-torch.log(torch.rand(shape, generator=generator).clamp(1e-9, 1 - 1e-7)))

    num_slots, width = slots.tokens.shape
    winner, rest = gumbel(num_slots, 1), slots.target_log_probs + gumbel(num_slots, width)
    noisy_scores = -torch.logaddexp(-winner, -rest).clamp_min(-1e30)
    noisy_scores = torch.where(slots.tokens == slots.labels[:, None], winner, noisy_scores)
    return (noisy_scores - slots.target_log_probs) * (slots.temperatures > 0)[:, None]
