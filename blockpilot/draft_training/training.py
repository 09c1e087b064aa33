"""Training loop of a draft in plain torch (arXiv 2602.06036, section 4): batches, optimizer, schedule, state.

Anchors are drawn at random in the target's answers, and one draft pass handles all blocks of a document (batches.py).
A block attends to the context strictly before its anchor and to itself, never to another block and never to the
tokens that it has to predict.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from blockpilot.device import sent
from blockpilot.draft_training.batches import DraftBatch, collate, draw_anchors, possible_anchors
from blockpilot.draft_training.features import Corpus, Document
from blockpilot.draft_training.loss import DraftLoss, LossSums, Scores, Vocabulary, Weighting, sample_vocabulary
from blockpilot.sweep.trees import emitted_along

GRADIENT_CLIP = 1.0  # largest norm
LENGTH_WINDOW = 16  # batches per window; documents are sorted by length within a window
LENGTH_STEP = 64  # tokens: compiled steps pad their documents to a multiple


class Validation(NamedTuple):
    """Totals over held-out documents, and tau by temperature of the answers."""

    sums: LossSums
    tau: dict[float, float]

    def metrics(self) -> dict[str, float]:
        return self.sums.metrics("validation") | {f"validation_tau_T{t:g}": tau for t, tau in self.tau.items()}


@dataclass(frozen=True)
class DraftFitSettings:
    """Settings of a draft's training; defaults are the paper's where it gives them."""

    epochs: int = 6
    batch_size: int = 4
    """Documents per step and worker."""
    num_anchors: int = 16
    """Blocks per document and epoch, at random anchors."""
    lr: float = 6e-4
    """Peak learning rate of AdamW: linear warm-up over 4% of the steps, then cosine to zero."""
    weighting: Weighting = "decay"
    """Weights of the drafted positions: a fixed decay, or D-PACE, from the draft's current confidences."""
    distill: float = 0.0
    """Share of the cross entropy that is taken against the target's distribution instead of the answer's token."""
    overlap: float = 0.0
    """Share of the loss that is the LK loss, from the overlap of draft and target."""
    num_sampled: int = 1024
    """Sampled softmax: rare tokens sampled per step; 0 scores the whole vocabulary. A draft with its own vocabulary
    always scores all of its tokens."""
    autocast: bool = True
    """Run matrix products in bfloat16; weights stay float32."""
    compile: bool = False
    """Compile the draft's layers and its loss: takes minutes at the start, then steps are faster."""

    def check(self) -> None:
        """Raise ValueError, naming the setting, for a value out of range."""
        for name, minimum in {"epochs": 1, "batch_size": 1, "num_anchors": 1, "num_sampled": 0}.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least {minimum}")
        if not self.lr > 0:
            raise ValueError(f"lr {self.lr}: must be above 0")
        for name in ("distill", "overlap"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be from 0 to 1")


class TrainingFit(ABC):
    """Training loop with optimizer and schedule that can stop after any step and resume from its `state_dict`.

    `loss` is a module, or a distributed wrapper of one. Subclasses call `_begin` once the number of steps is known.
    """

    _inner: nn.Module
    """The loss without its distributed wrapper."""

    def __init__(self, loss: nn.Module, settings: DraftFitSettings, seed: int, rank: int, world_size: int) -> None:
        settings.check()
        self.loss, self.settings, self.seed, self.step = loss, settings, seed, 0
        self._inner = loss.module if isinstance(loss, nn.parallel.DistributedDataParallel) else loss
        self._rank, self._world_size = rank, world_size

    def _begin(self, trained: nn.Module, steps_per_epoch: int) -> None:
        settings, self.steps_per_epoch = self.settings, steps_per_epoch
        self.num_steps = settings.epochs * steps_per_epoch
        self._trained = trained
        parameters = [parameter for parameter in trained.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(parameters, lr=settings.lr, fused=parameters[0].is_cuda)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: learning_rate_factor(step, self.num_steps)
        )
        self._parts: dict[str, Any] = {
            "draft": trained,
            "optimizer": self._optimizer,
            "schedule": self._schedule,
        }

    @property
    def epoch(self) -> float:
        return self.step / self.steps_per_epoch

    @property
    def learning_rate(self) -> float:
        return float(self._schedule.get_last_lr()[0])

    @abstractmethod
    def steps(self) -> Iterator[LossSums]:
        """Train to the end, yielding this worker's totals after every optimizer step."""

    def advance(self, loss: Tensor) -> None:
        """One optimizer and schedule step with the clipped gradient of `loss`."""
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self._trained.parameters(), GRADIENT_CLIP)
        self._optimizer.step()
        self._schedule.step()
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer, schedule and step, as plain tensors and numbers."""
        return {name: part.state_dict() for name, part in self._parts.items()} | {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self.step = state["step"]


class DraftFit(TrainingFit):
    """Training of a draft on documents.

    `loss` is a DraftLoss, or a distributed wrapper of one; `frequent` are the tokens that every step scores. Batches
    and anchors depend only on (seed, step, rank), so a resumed training equals an uninterrupted one.
    """

    _inner: DraftLoss

    def __init__(
        self,
        loss: nn.Module,
        corpus: Corpus,
        frequent: Tensor,
        settings: DraftFitSettings,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(loss, settings, seed, rank, world_size)
        self._corpus, self._frequent = corpus, frequent
        assert isinstance(self._inner, DraftLoss)
        if settings.compile:
            self._inner.compile_parts()
        steps_per_epoch = len(corpus) // (settings.batch_size * world_size)
        if steps_per_epoch == 0:
            raise ValueError(
                f"batch_size {settings.batch_size} on {world_size} workers: there are only {len(corpus)} documents"
            )
        self._begin(self._inner.draft, steps_per_epoch)

    def steps(self) -> Iterator[LossSums]:
        lengths = [len(answer.tokens) for answer in self._corpus.answers]
        while self.step < self.num_steps:
            epoch, num_done = divmod(self.step, self.steps_per_epoch)
            batches = epoch_batches(lengths, self.settings.batch_size, self.seed, epoch)
            rank_batches = islice(batches, self._rank, self.steps_per_epoch * self._world_size, self._world_size)
            for indices in islice(rank_batches, num_done, None):
                yield self._train(self._corpus.read(indices))

    def _train(self, documents: list[Document]) -> LossSums:
        settings = self.settings
        rng_seed = (self.seed * 1_000_003 + self.step) * 1_009 + self._rank
        generator = torch.Generator().manual_seed(rng_seed)
        anchors = [draw_anchors(document, settings.num_anchors, generator) for document in documents]
        batch = collate(documents, anchors, *((settings.num_anchors, LENGTH_STEP) if settings.compile else ()))
        vocabulary = None
        if settings.num_sampled and self._inner.may_sample:
            vocab_size = len(self._inner.head)
            vocabulary = sample_vocabulary(self._frequent, batch.tokens, vocab_size, settings.num_sampled, generator)
        scores = self._scores(self.loss, batch, vocabulary)
        self.advance(scores.loss)
        return scores.sums

    @torch.no_grad()
    def validate(self, corpus: Corpus, indices: Sequence[int]) -> Validation:
        """Score the blocks at every position of the held-out answers `indices`, over the whole vocabulary.

        Tau therefore equals that of decoding these texts, up to numerical differences. One worker may run this alone.
        """
        total: LossSums | None = None
        emitted, steps = Counter[float](), Counter[float]()
        for i in indices:
            (document,), temperature = corpus.read([i]), corpus.answers[i].temperature
            anchors = possible_anchors(document)
            if not len(anchors):
                continue
            with torch.compiler.set_stance("force_eager"):  # every document has a different shape
                scores = self._scores(self._inner, collate([document], [anchors]), None)
            total = scores.sums if total is None else total + scores.sums
            emitted[temperature] += len(anchors)
            steps[temperature] += len(emitted_along(scores.num_accepted[0].tolist()))
        if total is None:
            raise ValueError("no held-out answer is long enough to validate on")
        return Validation(total, {t: emitted[t] / steps[t] for t in sorted(emitted)})

    def _scores(self, loss: nn.Module, batch: DraftBatch, vocabulary: Vocabulary | None) -> Scores:
        device = self._inner.head.device
        batch = DraftBatch(*(sent(tensor, device) for tensor in batch))
        if vocabulary is not None:
            vocabulary = Vocabulary(*(sent(tensor, device) for tensor in vocabulary if tensor is not None))
        if not self.settings.autocast:
            batch = batch._replace(features=batch.features.float(), hidden=batch.hidden.float())
        with torch.autocast(device.type, torch.bfloat16, enabled=self.settings.autocast):
            scores: Scores = loss(batch, vocabulary)
        return scores


def epoch_batches(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> Iterator[list[int]]:
    """Indices of documents in batches of similar length, in a random order that depends on (seed, epoch) only.

    An incomplete last batch is dropped.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    for start in range(0, len(order), LENGTH_WINDOW * batch_size):
        window = sorted(order[start : start + LENGTH_WINDOW * batch_size], key=lambda i: lengths[i])
        num_batches = len(window) // batch_size
        for batch in torch.randperm(num_batches, generator=generator).tolist():
            yield window[batch * batch_size : (batch + 1) * batch_size]


def learning_rate_factor(step: int, num_steps: int, warmup_share: float = 0.04) -> float:
    """Factor on the peak learning rate: linear warm-up, then cosine to zero."""
    warmup = max(1, round(warmup_share * num_steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))
