"""Training a DFlash draft in plain torch (arXiv 2602.06036, section 4).

The target's own answers are the data. Anchors are drawn at random in an answer; the block after each anchor is
[anchor, MASK x (B-1)], and all blocks of a document go through the draft side by side: a block sees the context
strictly before its anchor and itself, never another block and never its own answers.

The loss of a slot is the cross entropy with the answer's token, mixed with the one against the target's whole
distribution there (`distill`). Slots are weighted by what they mean for the accepted length, since a late slot counts
only when all before it were right: a fixed decay exp(-(slot - 1) / gamma), or D-PACE (arXiv 2605.18810), which takes
the draft's present confidences.

With a large vocabulary the LM head is most of the cost on a CPU, so a step may score a part of it: every frequent
token, and a fresh sample of the rest that stands for all of them (sampled softmax).
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from blockpilot.draft_training.answers import Corpus, Document
from blockpilot.draft_training.batches import Batch, at, collate, draft_batch, possible_anchors, slots
from blockpilot.drafts.dflash import DraftModel
from blockpilot.sweep.replay import emitted_along

GAMMA_PER_BLOCK_SIZE = 0.5  # gamma 4 at B=8; the paper has 7 at B=16
DPACE_ALPHA = 0.5  # smoothing of the confidences, the paper's
LENGTH_WINDOW = 16  # batches whose documents are sorted by length together

Weighting = Literal["decay", "dpace"]


class Vocabulary(NamedTuple):
    """The LM head rows of one step: ids [K] ascending, and what is added to their logits."""

    ids: Tensor
    correction: Tensor


@dataclass(frozen=True)
class Sums:
    """Totals over blocks, to be divided once: weighted loss and weight, correct and counted slots [B-1]."""

    loss: Tensor
    weight: Tensor
    correct: Tensor
    count: Tensor

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[Tensor, ...]:
        return self.loss, self.weight, self.correct, self.count

    @property
    def num_blocks(self) -> int:
        """Blocks with at least one slot inside their document."""
        return int(self.count[0])

    def metrics(self, prefix: str) -> dict[str, float]:
        """Loss per weight, and accuracy of every slot."""
        accuracy = self.correct / self.count.clamp_min(1)
        return {f"{prefix}_loss": float(self.loss / self.weight.clamp_min(1e-9))} | {
            f"{prefix}_accuracy_{slot}": float(a) for slot, a in enumerate(accuracy, start=1)
        }


class Scores(NamedTuple):
    """What the drafted blocks are worth."""

    loss: Tensor  # weighted mean over slots, to minimise
    sums: Sums
    num_accepted: Tensor  # [N, A]: drafted tokens up to the first that differs from the text


class Validation(NamedTuple):
    """Totals over held-out documents, and tau of decoding their texts, by the temperature of the answer."""

    sums: Sums
    tau: dict[float, float]

    def metrics(self) -> dict[str, float]:
        return self.sums.metrics("validation") | {f"validation_tau_T{t:g}": tau for t, tau in self.tau.items()}


class BlockLoss(nn.Module):
    """The draft with its loss as one module, so that a distributed wrapper sees a single forward pass.

    `embedding` and `head` are the target's weights [vocab, hidden]. `distill` is the share of the loss that is taken
    against the target's distribution instead of the answer's token.
    """

    embedding: Tensor
    head: Tensor

    def __init__(
        self,
        draft: DraftModel,
        embedding: Tensor,
        head: Tensor,
        *,
        weighting: Weighting = "decay",
        distill: float = 0.0,
    ) -> None:
        super().__init__()
        self.draft = draft
        self.block_size = draft.options.block_size
        self.weighting, self.distill = weighting, distill
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)

    def forward(self, batch: Batch, vocabulary: Vocabulary | None = None) -> Scores:
        """Draft the block at every anchor and compare it with the text."""
        positions, inside = slots(batch, self.block_size)
        labels = at(batch.tokens, positions)
        hidden = draft_batch(self.draft, self.embedding, batch, self.block_size)[:, :, 1:]
        logits = self._logits(hidden[inside], vocabulary).float()
        targets = labels[inside] if vocabulary is None else torch.searchsorted(vocabulary.ids, labels[inside])
        log_probs = logits.log_softmax(dim=-1)
        losses = hard = -log_probs.gather(-1, targets[:, None])[:, 0]
        if self.distill:
            of_target = self._logits(at(batch.hidden, positions - 1)[inside], vocabulary).float()
            wanted = of_target.softmax(dim=-1).mul_(self.distill)
            wanted.scatter_add_(-1, targets[:, None], torch.full_like(wanted[:, :1], 1 - self.distill))
            losses = -(wanted * log_probs).sum(dim=-1)
        weights = self._weights(hard.detach(), inside)
        weighted = (losses * weights[inside]).sum()
        correct = torch.zeros_like(inside)
        correct[inside] = logits.detach().argmax(dim=-1) == targets
        sums = Sums(
            weighted.detach(), weights.sum(), correct.sum(dim=(0, 1)).double(), inside.sum(dim=(0, 1)).double()
        )
        return Scores(weighted / weights.sum(), sums, correct.cumprod(dim=-1).sum(dim=-1))

    def _weights(self, losses: Tensor, inside: Tensor) -> Tensor:
        """Loss weights [N, A, B-1], 0 outside; `losses` are those of the slots inside."""
        if self.weighting == "dpace":
            return dpace_weights(losses, inside)
        offsets = torch.arange(self.block_size - 1, device=inside.device)
        return torch.exp(-offsets / (GAMMA_PER_BLOCK_SIZE * self.block_size)) * inside

    def _logits(self, hidden: Tensor, vocabulary: Vocabulary | None) -> Tensor:
        if vocabulary is None:
            return functional.linear(hidden, self.head.to(hidden.dtype))
        logits = functional.linear(hidden, self.head[vocabulary.ids].to(hidden.dtype))
        return logits + vocabulary.correction.to(logits.dtype)


def dpace_weights(losses: Tensor, inside: Tensor) -> Tensor:
    """D-PACE: the weight of slot j is the sum over k >= j of the product of smoothed confidences up to k.

    losses [slots inside] are cross entropies with the answer's tokens; inside [N, A, B-1]; so is the result.
    """
    confidence = torch.zeros(inside.shape, device=losses.device)
    confidence[inside] = (1 - DPACE_ALPHA) * torch.exp(-losses) + DPACE_ALPHA
    reached = confidence.cumprod(dim=-1)
    return reached.flip(-1).cumsum(dim=-1).flip(-1) * inside


@torch.no_grad()
def start_from_target(draft: DraftModel, target: PreTrainedModel, text: Sequence[int]) -> int:
    """Start the draft as the end of its target; returns the number of weights copied.

    Its layers are the target's last ones, its norm the target's, and its context the deepest layer that it reads,
    scaled as the first copied layer would. Weights whose name or shape the draft does not share stay as they are,
    but the norms of queries and keys: where the target has none, they keep the mean size of the target's on `text`
    (token ids), and so the sharpness of its attention.
    """
    first = int(target.config.num_hidden_layers) - draft.config.num_hidden_layers
    source = {name.removeprefix("model."): value for name, value in target.state_dict().items()}
    source["hidden_norm.weight"] = source[f"layers.{first}.input_layernorm.weight"]
    sizes = _query_and_key_sizes(target, text, first)
    copied = 0
    for name, weight in draft.named_parameters():
        of_target = re.sub(r"^layers\.(\d+)", lambda m: f"layers.{int(m[1]) + first}", name)
        value = source.get(of_target)
        if value is not None and value.shape == weight.shape:
            weight.copy_(value)
            copied += 1
        elif of_target in sizes:
            weight.fill_(sizes[of_target])
    draft.fc.weight.zero_()
    draft.fc.weight[:, -draft.config.hidden_size :].fill_diagonal_(1.0)
    return copied


def _query_and_key_sizes(target: PreTrainedModel, text: Sequence[int], first: int) -> dict[str, float]:
    """Root mean square of queries and keys on a text, by the name of the norm that would give it.

    Of the layers from `first` on.
    """
    sizes: dict[str, float] = {}

    def measure(name: str, output: Tensor) -> None:
        sizes[name] = float(output.float().square().mean().sqrt())

    handles = [
        layer.self_attn.get_submodule(f"{kind}_proj").register_forward_hook(
            lambda _, __, output, name=f"layers.{i}.self_attn.{kind}_norm.weight": measure(name, output)
        )
        for i, layer in enumerate(target.model.layers[first:], start=first)
        for kind in "qk"
    ]
    target.model(torch.tensor([text], device=target.device), use_cache=False)
    for handle in handles:
        handle.remove()
    return sizes


def draw_anchors(document: Document, num_anchors: int, generator: torch.Generator) -> Tensor:
    """Up to `num_anchors` distinct random anchors of a document."""
    anchors = possible_anchors(document)
    return anchors[torch.randperm(len(anchors), generator=generator)[:num_anchors]]


def frequent_tokens(documents: Sequence[Sequence[int]], share: float = 0.9) -> Tensor:
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
    weighting: Weighting = "decay"
    """How a block's slots are weighted."""
    distill: float = 0.0
    """Share of the loss that is taken against the target's distribution instead of the answer's token."""
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
        corpus: Corpus,
        frequent: Tensor,
        settings: DraftFitSettings,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.loss, self.settings, self.step = loss, settings, 0
        self._corpus, self._frequent, self._rank, self._world_size = corpus, frequent, rank, world_size
        inner = loss.module if isinstance(loss, nn.parallel.DistributedDataParallel) else loss
        assert isinstance(inner, BlockLoss)
        self._inner = inner
        self.steps_per_epoch = len(corpus) // (settings.batch_size * world_size)
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"batch_size {settings.batch_size} on {world_size} workers: there are only {len(corpus)} documents"
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
        lengths = [len(answer.tokens) for answer in self._corpus.answers]
        while self.step < self.num_steps:
            epoch, done = divmod(self.step, self.steps_per_epoch)
            batches = epoch_batches(lengths, self.settings.batch_size, self.settings.seed, epoch)
            mine = islice(batches, self._rank, self.steps_per_epoch * self._world_size, self._world_size)
            for indices in islice(mine, done, None):
                yield self._train(self._corpus.read(indices))

    def _train(self, documents: list[Document]) -> Sums:
        settings = self.settings
        key = (settings.seed * 1_000_003 + self.step) * 1_009 + self._rank
        generator = torch.Generator().manual_seed(key)
        anchors = [draw_anchors(document, settings.num_anchors, generator) for document in documents]
        batch = collate(documents, anchors)
        vocabulary = None
        if settings.num_sampled:
            vocab_size = len(self._inner.head)
            vocabulary = sample_vocabulary(self._frequent, batch.tokens, vocab_size, settings.num_sampled, generator)
        scores = self._scores(self.loss, batch, vocabulary)
        self._optimizer.zero_grad(set_to_none=True)
        scores.loss.backward()
        nn.utils.clip_grad_norm_(self._inner.draft.parameters(), settings.clip)
        self._optimizer.step()
        self._schedule.step()
        self.step += 1
        return scores.sums

    @torch.no_grad()
    def validate(self, corpus: Corpus) -> Validation:
        """Score the block at every position of held-out answers, over the whole vocabulary.

        So tau is that of decoding these texts, in the arithmetic of training. One worker may do this alone.
        """
        total: Sums | None = None
        emitted, steps = Counter[float](), Counter[float]()
        for document, answer in zip(corpus, corpus.answers, strict=True):
            anchors = possible_anchors(document)
            if not len(anchors):
                continue
            scores = self._scores(self._inner, collate([document], [anchors]), None)
            total = scores.sums if total is None else total + scores.sums
            emitted[answer.temperature] += len(anchors)
            steps[answer.temperature] += len(emitted_along(scores.num_accepted[0].tolist()))
        if total is None:
            raise ValueError("no held-out answer is long enough to validate on")
        return Validation(total, {t: emitted[t] / steps[t] for t in sorted(emitted)})

    def _scores(self, loss: nn.Module, batch: Batch, vocabulary: Vocabulary | None) -> Scores:
        device = self._inner.head.device
        batch = Batch(*(tensor.to(device) for tensor in batch))
        if vocabulary is not None:
            vocabulary = Vocabulary(*(tensor.to(device) for tensor in vocabulary))
        if not self.settings.autocast:
            batch = batch._replace(features=batch.features.float(), hidden=batch.hidden.float())
        with torch.autocast(device.type, torch.bfloat16, enabled=self.settings.autocast):
            scores: Scores = loss(batch, vocabulary)
        return scores

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


def epoch_batches(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> Iterator[list[int]]:
    """Documents in a random order that depends on (seed, epoch) only, in batches of similar length.

    An incomplete last batch is left out.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    for start in range(0, len(order), LENGTH_WINDOW * batch_size):
        window = sorted(order[start : start + LENGTH_WINDOW * batch_size], key=lambda i: lengths[i])
        num_batches = len(window) // batch_size
        for batch in torch.randperm(num_batches, generator=generator).tolist():
            yield window[batch * batch_size : (batch + 1) * batch_size]


def learning_rate_factor(step: int, num_steps: int, warmup_share: float = 0.04) -> float:
    """Linear warm-up, then cosine to zero."""
    warmup = max(1, round(warmup_share * num_steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))
