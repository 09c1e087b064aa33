"""Training a DFlash draft in plain torch (arXiv 2602.06036, section 4).

The target's own answers are the data. Anchors are drawn at random in an answer; the block after each anchor is
[anchor, MASK x (B-1)], and all blocks of a document go through the draft side by side: a block sees the context
strictly before its anchor and itself, never another block and never its own answers. The loss is the cross entropy
of slots 1 .. B-1 weighted by exp(-(slot - 1) / gamma), because a late slot only counts when all before it were right.

With a large vocabulary the LM head is most of the cost on a CPU, so a step may score a part of it: every frequent
token, and a fresh sample of the rest that stands for all of them (sampled softmax).
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from blockpilot.draft import DraftModel
from blockpilot.draft_data import Document, read_documents

GAMMA_PER_BLOCK_SIZE = 0.5  # gamma 4 at B=8; the paper has 7 at B=16


class Batch(NamedTuple):
    """N documents padded to S tokens, with A anchors each; `valid` is false for anchors that only fill up."""

    tokens: Tensor  # [N, S] int64
    lengths: Tensor  # [N]
    features: Tensor  # [N, S, F]
    anchors: Tensor  # [N, A] positions
    valid: Tensor  # [N, A] bool


class Vocabulary(NamedTuple):
    """The LM head rows of one step: ids [K] ascending, and what is added to their logits."""

    ids: Tensor
    correction: Tensor


@dataclass(frozen=True)
class Sums:
    """Totals over blocks, to be divided once: per-slot correct and count [B-1], accepted prefix lengths."""

    loss: Tensor
    weight: Tensor
    correct: Tensor
    count: Tensor
    num_emitted: Tensor
    num_blocks: Tensor

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[Tensor, ...]:
        return self.loss, self.weight, self.correct, self.count, self.num_emitted, self.num_blocks

    def metrics(self, prefix: str) -> dict[str, float]:
        """Loss per weight, accuracy of every slot, and emitted tokens per block at random anchors."""
        accuracy = self.correct / self.count.clamp_min(1)
        return {
            f"{prefix}_loss": float(self.loss / self.weight.clamp_min(1e-9)),
            f"{prefix}_num_emitted": float(self.num_emitted / self.num_blocks.clamp_min(1)),
        } | {f"{prefix}_accuracy_{slot}": float(a) for slot, a in enumerate(accuracy, start=1)}


class BlockLoss(nn.Module):
    """The draft with its loss as one module, so that a distributed wrapper sees a single forward pass."""

    embedding: Tensor
    head: Tensor

    def __init__(self, draft: DraftModel, embedding: Tensor, head: Tensor, gamma: float | None = None) -> None:
        super().__init__()
        self.draft = draft
        self.block_size = draft.options.block_size
        self.gamma = gamma or GAMMA_PER_BLOCK_SIZE * self.block_size
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)

    def forward(self, batch: Batch, vocabulary: Vocabulary | None = None) -> tuple[Tensor, Sums]:
        """Weighted mean loss to minimise, and the detached totals."""
        labels, weights = self._labels(batch)
        hidden = self._draft_blocks(batch)[:, :, 1:]
        kept = weights > 0
        logits = self._logits(hidden[kept], vocabulary)
        targets = labels[kept]
        if vocabulary is not None:
            targets = torch.searchsorted(vocabulary.ids, targets)
        losses = functional.cross_entropy(logits.float(), targets, reduction="none")
        weighted = (losses * weights[kept]).sum()
        sums = self._sums(weighted.detach(), weights, kept, logits.detach().argmax(dim=-1) == targets)
        return weighted / weights.sum(), sums

    def _labels(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Token and loss weight of slots 1 .. B-1: two [N, A, B-1]; weight 0 beyond the document's end."""
        slots = torch.arange(1, self.block_size, device=batch.tokens.device)
        positions = batch.anchors[:, :, None] + slots
        inside = (positions < batch.lengths[:, None, None]) & batch.valid[:, :, None]
        rows = torch.arange(len(batch.tokens), device=batch.tokens.device)[:, None, None]
        labels = batch.tokens[rows, positions.clamp_max(batch.tokens.shape[1] - 1)]
        return labels, torch.exp(-(slots - 1) / self.gamma) * inside

    def _draft_blocks(self, batch: Batch) -> Tensor:
        """Hidden states [N, A, B, hidden] of the blocks at every anchor."""
        num_rows, num_anchors = batch.anchors.shape
        device, size = batch.tokens.device, self.block_size
        block = torch.full((num_rows, num_anchors, size), self.draft.options.mask_token_id, device=device)
        block[:, :, 0] = batch.tokens.gather(1, batch.anchors)
        positions = (batch.anchors[:, :, None] + torch.arange(size, device=device)).flatten(1)
        columns = torch.arange(batch.tokens.shape[1], device=device).expand(num_rows, -1)
        embedded = functional.embedding(block.flatten(1), self.embedding).to(batch.features.dtype)
        visible = block_mask(batch.anchors, batch.tokens.shape[1], size)
        distance = positions[:, :, None] - torch.cat([columns, positions], dim=1)[:, None]
        masks = self.draft.layer_masks(visible, distance)
        store = JoinedContext(self.draft, self.draft.fuse(batch.features), columns)
        hidden: Tensor = self.draft(embedded, positions, masks, store)
        return hidden.view(num_rows, num_anchors, size, -1)

    def _logits(self, hidden: Tensor, vocabulary: Vocabulary | None) -> Tensor:
        if vocabulary is None:
            return functional.linear(hidden, self.head.to(hidden.dtype))
        logits = functional.linear(hidden, self.head[vocabulary.ids].to(hidden.dtype))
        return logits + vocabulary.correction.to(logits.dtype)

    @staticmethod
    def _sums(loss: Tensor, weights: Tensor, kept: Tensor, correct_kept: Tensor) -> Sums:
        correct = torch.zeros_like(kept)
        correct[kept] = correct_kept
        has_labels = kept[:, :, 0]
        accepted = correct.cumprod(dim=-1).sum(dim=-1)[has_labels]
        return Sums(
            loss,
            weights.sum(),
            correct.sum(dim=(0, 1)).double(),
            kept.sum(dim=(0, 1)).double(),
            (accepted + 1).sum().double(),
            has_labels.sum().double(),
        )


@torch.no_grad()
def copy_target_layers(draft: DraftModel, target: PreTrainedModel) -> int:
    """Start the draft's layers as the target's last ones, and its norm as the target's.

    Weights whose name or shape the draft does not share stay as they are; returns the number of weights copied.
    """
    first = int(target.config.num_hidden_layers) - draft.config.num_hidden_layers
    source, copied = target.state_dict(), 0
    for name, weight in draft.named_parameters():
        of_target = re.sub(r"^layers\.(\d+)", lambda m: f"layers.{int(m[1]) + first}", name)
        value = source.get(f"model.{of_target}")
        if value is not None and value.shape == weight.shape:
            weight.copy_(value)
            copied += 1
    return copied


class JoinedContext:
    """A key/value store for training: the context's keys, projected by each layer, before the blocks' own."""

    def __init__(self, draft: DraftModel, context: Tensor, positions: Tensor) -> None:
        self._draft, self._context = draft, context
        self._rotary = draft.rotary_emb(context, positions)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        of_context = self._draft.project(layer_idx, self._context, self._rotary)
        return torch.cat([of_context[0], keys], dim=2), torch.cat([of_context[1], values], dim=2)


def block_mask(anchors: Tensor, num_context: int, block_size: int) -> Tensor:
    """Block-diffusion mask [N, A*B, S + A*B]: context strictly before the own anchor, and the own block."""
    num_rows, num_anchors = anchors.shape
    of_query = anchors.repeat_interleave(block_size, dim=1)
    context = torch.arange(num_context, device=anchors.device) < of_query[:, :, None]
    block = torch.arange(num_anchors, device=anchors.device).repeat_interleave(block_size)
    own = (block[:, None] == block).expand(num_rows, -1, -1)
    return torch.cat([context, own], dim=2)


def collate(documents: Sequence[Document], num_anchors: int, block_size: int, generator: torch.Generator) -> Batch:
    """Pad documents and draw up to `num_anchors` distinct anchors in each answer, per document."""
    length = max(len(d.tokens) for d in documents)
    tokens = torch.stack([functional.pad(d.tokens, (0, length - len(d.tokens))) for d in documents])
    features = torch.stack([functional.pad(d.features, (0, 0, 0, length - len(d.features))) for d in documents])
    anchors = torch.zeros(len(documents), num_anchors, dtype=torch.long)
    valid = torch.zeros(len(documents), num_anchors, dtype=torch.bool)
    for row, document in enumerate(documents):
        drawn = draw_anchors(document, num_anchors, generator)
        anchors[row, : len(drawn)] = drawn
        valid[row, : len(drawn)] = True
    return Batch(tokens, torch.tensor([len(d.tokens) for d in documents]), features, anchors, valid)


def draw_anchors(document: Document, num_anchors: int, generator: torch.Generator) -> Tensor:
    """Distinct random positions in the answer that have at least one token after them."""
    first, last = document.num_prompt_tokens, len(document.tokens) - 2
    if last < first:
        return torch.empty(0, dtype=torch.long)
    anchors: Tensor = first + torch.randperm(last - first + 1, generator=generator)[:num_anchors]
    return anchors


def frequent_tokens(documents: Sequence[Sequence[int]], share: float = 0.995) -> Tensor:
    """The fewest token ids, ascending, that make up `share` of all tokens."""
    ids, counts = torch.cat([torch.as_tensor(d) for d in documents]).long().unique(return_counts=True)
    order = counts.argsort(descending=True, stable=True)
    num_kept = int((counts[order].cumsum(0) < share * counts.sum()).sum()) + 1
    kept: Tensor = ids[order[:num_kept]].sort().values
    return kept


def sample_vocabulary(
    frequent: Tensor, labels: Tensor, vocab_size: int, num_sampled: int, generator: torch.Generator
) -> Vocabulary:
    """All frequent tokens and labels, and `num_sampled` of the others, each standing for its share of them."""
    certain = torch.cat([frequent, labels.flatten()]).unique()
    others = torch.ones(vocab_size, dtype=torch.bool)
    others[certain] = False
    rest = others.nonzero()[:, 0]
    sampled = rest[torch.randperm(len(rest), generator=generator)[:num_sampled]]
    correction = torch.zeros(vocab_size)
    correction[sampled] = math.log(len(rest) / max(1, len(sampled)))
    ids = torch.cat([certain, sampled]).sort().values
    return Vocabulary(ids, correction[ids])


@dataclass(frozen=True)
class DraftFitSettings:
    """How a draft is trained; the defaults are the paper's where it says."""

    epochs: int = 6
    batch_size: int = 4
    """Documents of one worker's step."""
    num_anchors: int = 16
    """Blocks drawn from a document at each visit."""
    lr: float = 6e-4
    """Peak learning rate of AdamW: linear warm-up over 4% of the steps, then cosine to zero."""
    clip: float = 1.0
    num_sampled: int = 0
    """LM head rows drawn at each step for the rare tokens; 0 scores the whole vocabulary."""
    autocast: bool = False
    """Multiply matrices in bfloat16; weights stay float32."""
    seed: int = 0


class DraftFit:
    """A training run that can stop after any step and go on from its state.

    `loss` is a BlockLoss, or a distributed wrapper of one; `frequent` are the tokens that every step scores. Batches
    and anchors depend only on (seed, step, rank), so a resumed run repeats what an undisturbed one would have done.
    """

    def __init__(
        self,
        loss: nn.Module,
        shards: Sequence[Path],
        frequent: Tensor,
        settings: DraftFitSettings,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.loss, self.settings, self.step = loss, settings, 0
        self._shards, self._frequent, self._rank, self._world_size = list(shards), frequent, rank, world_size
        inner = loss.module if isinstance(loss, nn.parallel.DistributedDataParallel) else loss
        assert isinstance(inner, BlockLoss)
        self._inner = inner
        self.steps_per_epoch = count_batches(shards, settings.batch_size) // world_size
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"batch_size {settings.batch_size} on {world_size} workers: no shard holds that many documents"
            )
        self.num_steps = settings.epochs * self.steps_per_epoch
        self._optimizer = torch.optim.AdamW(inner.draft.parameters(), lr=settings.lr)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: learning_rate_factor(step, self.num_steps)
        )

    @property
    def epoch(self) -> float:
        return self.step / self.steps_per_epoch

    @property
    def learning_rate(self) -> float:
        return float(self._schedule.get_last_lr()[0])

    def steps(self) -> Iterator[Sums]:
        """Train to the end, yielding this worker's totals after every optimizer step."""
        while self.step < self.num_steps:
            epoch, done = divmod(self.step, self.steps_per_epoch)
            batches = epoch_batches(self._shards, self.settings.batch_size, self.settings.seed, epoch)
            mine = islice(batches, self._rank, self.steps_per_epoch * self._world_size, self._world_size)
            for documents in islice(mine, done, None):
                yield self._train(documents)

    def _train(self, documents: list[Document]) -> Sums:
        settings = self.settings
        key = (settings.seed * 1_000_003 + self.step) * 1_009 + self._rank
        generator = torch.Generator().manual_seed(key)
        batch = collate(documents, settings.num_anchors, self._inner.block_size, generator)
        vocabulary = None
        if settings.num_sampled:
            vocab_size = len(self._inner.head)
            vocabulary = sample_vocabulary(self._frequent, batch.tokens, vocab_size, settings.num_sampled, generator)
        self.loss.train()
        loss, sums = self._forward(batch, vocabulary)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self._inner.draft.parameters(), settings.clip)
        self._optimizer.step()
        self._schedule.step()
        self.step += 1
        return sums

    @torch.no_grad()
    def validate(self, documents: Sequence[Document]) -> Sums:
        """Totals on held-out documents at fixed anchors, over the whole vocabulary."""
        self.loss.eval()
        generator = torch.Generator().manual_seed(0)
        size = self.settings.batch_size
        total: Sums | None = None
        for start in range(0, len(documents), size):
            batch = collate(
                documents[start : start + size], self.settings.num_anchors, self._inner.block_size, generator
            )
            sums = self._forward(batch, None)[1]
            total = sums if total is None else total + sums
        if total is None:
            raise ValueError("no held-out documents to validate on")
        return total

    def _forward(self, batch: Batch, vocabulary: Vocabulary | None) -> tuple[Tensor, Sums]:
        device = self._inner.head.device
        batch = Batch(*(tensor.to(device) for tensor in batch))
        if vocabulary is not None:
            vocabulary = Vocabulary(*(tensor.to(device) for tensor in vocabulary))
        if not self.settings.autocast:
            batch = batch._replace(features=batch.features.float())
        with torch.autocast(device.type, torch.bfloat16, enabled=self.settings.autocast):
            result: tuple[Tensor, Sums] = self.loss(batch, vocabulary)
        return result

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer, schedule and position; plain tensors and numbers."""
        return {
            "draft": self._inner.draft.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inner.draft.load_state_dict(state["draft"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self.step = state["step"]


def count_batches(shards: Sequence[Path], batch_size: int) -> int:
    """Batches of one epoch over the shards; a shard's last incomplete batch is left out."""
    return sum(pq.read_metadata(shard).num_rows // batch_size for shard in shards)


def epoch_batches(shards: Sequence[Path], batch_size: int, seed: int, epoch: int) -> Iterator[list[Document]]:
    """All documents of the shards in a random order that depends on (seed, epoch) only, one shard in memory."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    for shard in torch.randperm(len(shards), generator=generator).tolist():
        documents = read_documents(shards[shard])
        order = torch.randperm(len(documents), generator=generator).tolist()
        for start in range(0, len(order) - batch_size + 1, batch_size):
            yield [documents[i] for i in order[start : start + batch_size]]


def learning_rate_factor(step: int, num_steps: int, warmup_share: float = 0.04) -> float:
    """Linear warm-up, then cosine to zero."""
    warmup = max(1, round(warmup_share * num_steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))
