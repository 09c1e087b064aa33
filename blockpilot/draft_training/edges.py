"""Training of edges alone, on a draft that stays as it is: its slots are computed once.

What a frozen draft says of a slot never changes, so an epoch is a few products of [slots, rank]: two CPU cores train
in minutes what takes them hours with the draft in the loop. The edges learn to choose among a slot's best tokens as
the target does, given the token before (the loss is over these tokens, as in DFlash 2).
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
from blockpilot.storage import whole


class DraftedSlots(NamedTuple):
    """M drafted positions of blocks at random anchors of answers, block by block; probabilities are logarithms."""

    hidden: Tensor  # [M, hidden] of the draft, bf16
    tokens: Tensor  # [M, K]: its best, the best first
    log_probs: Tensor  # [M, K] of these, by the draft
    of_target: Tensor  # [M, K], by the target at temperature 1
    before: Tensor  # [M]: tokens of the text before them
    labels: Tensor  # [M]: tokens of the text there
    offsets: Tensor  # [M], 1 for the one after the anchor
    temperatures: Tensor  # [M], of the answers

    def at(self, index: Tensor) -> "DraftedSlots":
        """Some of them."""
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
) -> DraftedSlots:
    """Those of `num_anchors` blocks of each document at most; embedding and head [vocab, hidden] are the target's."""
    block_size, width = draft.options.block_size, cast(Edges, draft.edges).width
    generator = torch.Generator().manual_seed(seed)
    batch = collate(documents, [draw_anchors(each, num_anchors, generator) for each in documents])
    batch = type(batch)(*(each.to(head.device) for each in batch))
    batch = batch._replace(features=batch.features.to(draft.dtype), hidden=batch.hidden.to(draft.dtype))
    positions, inside = drafted_positions(batch, block_size)
    ids = torch.arange(len(head)) if draft.vocabulary is None else draft.vocabulary.sort().values
    own, ids = head[ids.to(head.device)], ids.to(head.device)
    hidden = draft_batch(draft, embedding, batch, block_size)[:, :, 1:][inside]
    logits = hidden @ own.T
    best, places = logits.topk(min(width, len(ids)), dim=-1)
    of_target = at(batch.hidden, positions - 1)[inside] @ own.T
    offsets = torch.arange(1, block_size, device=head.device).expand_as(positions)[inside]
    of_rows = torch.tensor(temperatures, device=head.device)[:, None, None].expand_as(positions)[inside]
    found = DraftedSlots(
        hidden.bfloat16(),
        ids[places].int(),
        best.float() - logits.float().logsumexp(-1, keepdim=True),
        of_target.gather(1, places).float() - of_target.float().logsumexp(-1, keepdim=True),
        at(batch.tokens, positions - 1)[inside].int(),
        at(batch.tokens, positions)[inside].int(),
        offsets.byte(),
        of_rows,
    )
    return DraftedSlots(*(each.cpu() for each in found))


def joined(parts: Sequence[DraftedSlots]) -> DraftedSlots:
    """All of them, one part after the other."""
    return DraftedSlots(*map(torch.cat, zip(*parts, strict=True)))


def write_slots(path: Path, slots: DraftedSlots) -> None:
    """Write slots, whole or not at all."""
    with whole(path) as unfinished:
        save_file({name: values.contiguous() for name, values in slots._asdict().items()}, unfinished)


def read_slots(paths: Sequence[Path]) -> DraftedSlots:
    """Slots of files, one file after the other."""
    return joined([DraftedSlots(**load_file(path)) for path in paths])


# --- loss ---


class EdgeLoss(nn.Module):
    """Edges with their loss, as one module: what `EdgeFit` and a distributed wrapper see.

    The vectors of tokens are tables of their own plus projections of the target's `embedding` [vocab, hidden]: tokens
    that few texts hold take after those that are like them. `plain_state` has the sums, in the published names.
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
        """The edges' weights as a checkpoint has them."""
        state = {n: v for n, v in self.edges.state_dict().items() if "parametrizations." not in n}
        named = {module: f"{path}." if path else "" for path, module in self.edges.named_modules()}
        for module, name in self.edges.codebooks:
            state[named[module] + name] = getattr(module, name).detach().clone()
        return state

    def scores(self, slots: DraftedSlots) -> Tensor:
        """Scores [M, K] of the slots' best tokens after the tokens before them."""
        with parametrize.cached():
            lifts = self.edges.between(slots.hidden.float(), slots.before.long()[:, None], slots.tokens.long())[:, 0]
        return slots.log_probs + lifts

    def forward(self, slots: DraftedSlots) -> tuple[Tensor, Tensor]:
        """Losses [M] and scores [M, K].

        Where the answer's token, or part of the target's distribution, is among none of the best tokens, nothing is
        learned of that part. The first slot knows the token before it, so edges could only blur it: there its own
        distribution is the goal.
        """
        scores = self.scores(slots)
        log_probs, right = scores.log_softmax(dim=-1), slots.tokens == slots.labels[:, None]
        goal = self.distill * slots.of_target.exp() + (1 - self.distill) * right
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
    """Flags [M] of slots, block by block [num, B-1]; False where a block has no slot."""
    blocks = slots.offsets.eq(1).cumsum(0) - 1
    found = torch.zeros(int(blocks[-1]) + 1, block_size - 1, dtype=torch.bool)
    found[blocks, slots.offsets.long() - 1] = flags
    return found


def weights_of(slots: DraftedSlots, block_size: int, weighting: Weighting) -> Tensor:
    """Weights [M] of slots by what they mean for the accepted length, as those of a draft's loss."""
    if weighting == "decay":
        return decay_weights(block_size)[slots.offsets.long() - 1]
    inside = by_block(slots, torch.ones_like(slots.labels, dtype=torch.bool), block_size)[:, None]
    right = slots.tokens == slots.labels[:, None]
    return dpace_weights(-slots.log_probs.masked_fill(~right, -math.inf).amax(dim=1), inside)[inside]


# --- fit ---


class EdgeFit(TrainingFit):
    """A fit of edges on slots; a step takes as many as `batch_size` documents with `num_anchors` blocks each have.

    `loss` is an EdgeLoss, or a distributed wrapper of one. Batches depend only on (seed, step, rank).
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
        self._batch = min(settings.batch_size * settings.num_anchors * (block_size - 1), len(slots.labels))
        self._weights = weights_of(slots, block_size, settings.weighting)
        self._begin(self._inner, max(1, len(slots.labels) // (self._batch * world_size)))

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
        """Loss, accuracy and tau of chains on held-out slots: accepted are the first tokens of a block that the edges
        choose as the text has them, given the text before each.
        """
        losses, scores = self._inner(held_out)
        weights = weights_of(held_out, self.block_size, self.settings.weighting)
        raced = scores + noise_of(held_out)
        sums = self._sums(held_out, losses, raced, weights)
        right = by_block(held_out, _chosen(held_out, raced) == held_out.labels, self.block_size)
        accepted = right.int().cumprod(dim=1).sum(dim=1)
        of_blocks = held_out.temperatures[held_out.offsets == 1]
        tau = {float(t): 1 + float(accepted[of_blocks == t].float().mean()) for t in of_blocks.unique()}
        return Validation(sums, tau)

    def _sums(self, slots: DraftedSlots, losses: Tensor, scores: Tensor, weights: Tensor) -> LossSums:
        places, right = slots.offsets.long() - 1, _chosen(slots, scores) == slots.labels
        counts = [torch.bincount(some, minlength=self.block_size - 1).double() for some in (places[right], places)]
        return LossSums((losses * weights).sum(), weights.sum(), *counts)

    def state_dict(self) -> dict[str, object]:
        return super().state_dict() | {"edges": self._inner.plain_state()}


def _chosen(slots: DraftedSlots, scores: Tensor) -> Tensor:
    return slots.tokens.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]


def noise_of(slots: DraftedSlots, seed: int = 0) -> Tensor:
    """Noise [M, K] of the keyed sampler under which the target drew the text's tokens: zero at temperature 0.

    Given that the label won the target's race, its value has the distribution of the greatest of all, and the others
    are below it. A draft's tokens race with the same noise.
    """
    generator = torch.Generator().manual_seed(seed)

    def gumbel(*shape: int) -> Tensor:
        return -torch.log(-torch.log(torch.rand(shape, generator=generator).clamp(1e-9, 1 - 1e-7)))

    num, width = slots.tokens.shape
    won, others = gumbel(num, 1), slots.of_target + gumbel(num, width)
    raced = -torch.logaddexp(-won, -others).clamp_min(-1e30)
    raced = torch.where(slots.tokens == slots.labels[:, None], won, raced)
    return (raced - slots.of_target) * (slots.temperatures > 0)[:, None]
