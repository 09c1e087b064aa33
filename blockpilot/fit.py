"""Training a policy in plain torch: cross entropy on the block size with the largest tau (arXiv 2606.31315,
section 3).

`Fit` is the whole training as a resumable loop of epochs; a caller that trains on several processes wraps
the network, says which rank it is and gives a function that sums over ranks. Metrics are sums and totals,
divided once.

The paper trains 100 epochs of Adam at a learning rate of 1e-5 on tens of thousands of prompts. Adam moves a
weight by about the learning rate a step, and the tens to thousands of rows of a laptop's sweep make few
steps, so the default rate is 3e-4, and training stops by itself when the loss on held-back prompts no
longer falls.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from blockpilot.policy import CandidateSet, ProbsMLP, SparseProbs
from blockpilot.records import SweepRow


@dataclass(frozen=True)
class FitSettings:
    """How a policy is trained."""

    hidden: int = 2048
    epochs: int = 100
    batch_size: int = 32
    lr: float = 3e-4
    dropout: float = 0.2
    patience: int | None = 20
    """Stop after so many epochs without a lower validation loss and keep the best; None: keep the last."""
    seed: int = 0


@dataclass(frozen=True)
class Examples:
    """R rows of a sweep as tensors."""

    probs: SparseProbs
    taus: Tensor
    """[R, K] float32, acceptance length by candidate."""

    def __len__(self) -> int:
        return len(self.taus)

    @property
    def labels(self) -> Tensor:
        """[R] int64, index of the candidate with the largest tau; the smallest block size of equals."""
        return self.taus.argmax(dim=1)

    def to(self, device: torch.device) -> "Examples":
        return Examples(SparseProbs(*(t.to(device) for t in self.probs)), self.taus.to(device))

    def take(self, index: Tensor) -> "Examples":
        """The rows `index` [n] int64, in that order."""
        ends = torch.cat([self.probs.offsets[1:], torch.tensor([len(self.probs.ids)])])
        starts, lengths = self.probs.offsets[index], (ends - self.probs.offsets)[index]
        offsets = lengths.cumsum(0) - lengths
        entries = torch.repeat_interleave(starts - offsets, lengths) + torch.arange(int(lengths.sum()))
        return Examples(SparseProbs(self.probs.ids[entries], self.probs.probs[entries], offsets), self.taus[index])


def examples(rows: Sequence[SweepRow]) -> Examples:
    """Rows of one sweep -> tensors."""
    lengths = torch.tensor([len(row.probs_ids) for row in rows])
    ids = torch.tensor([i for row in rows for i in row.probs_ids], dtype=torch.int64)
    probs = torch.tensor([p for row in rows for p in row.probs], dtype=torch.float32)
    taus = torch.tensor([row.taus for row in rows], dtype=torch.float32)
    return Examples(SparseProbs(ids, probs, lengths.cumsum(0) - lengths), taus)


def split_rows(rows: Sequence[SweepRow], held_out: float, seed: int) -> tuple[list[SweepRow], list[SweepRow]]:
    """(training, validation): `held_out` of the prompts, at least one, with all their rows.

    Depends on the prompts' texts and the seed, not on their order. Needs two different prompts.
    """

    def rank(prompt: str) -> bytes:
        return hashlib.sha256(f"{seed}\n{prompt}".encode()).digest()

    prompts = sorted({row.prompt for row in rows}, key=rank)
    if len(prompts) < 2:
        raise ValueError(f"{len(prompts)} different prompts: at least 2 are needed to hold some back")
    chosen = set(prompts[: min(max(1, round(held_out * len(prompts))), len(prompts) - 1)])
    ordered = sorted(rows, key=lambda row: row.prompt_id)
    return [r for r in ordered if r.prompt not in chosen], [r for r in ordered if r.prompt in chosen]


def new_network(train: Examples, vocab_size: int, settings: FitSettings) -> ProbsMLP:
    """An untrained network whose support is the token ids of the training rows; equal for equal seeds."""
    with _seeded(settings.seed):
        support = train.probs.ids.unique()
        return ProbsMLP(support, vocab_size, train.taus.shape[1], settings.hidden, settings.dropout)


@contextmanager
def _seeded(*key: int) -> Iterator[None]:
    """Inside it torch's global generator, which dropout and initial weights draw from, is seeded by `key`."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    with torch.random.fork_rng():
        torch.manual_seed(int.from_bytes(digest[:4], "big"))
        yield


class Batch(NamedTuple):
    """This rank's part of a global batch."""

    rows: Tensor
    """[n] int64; n differs by rank and may be 0."""
    num_global: int
    """Rows of the batch over all ranks."""


def batches(
    num_rows: int, batch_size: int, seed: int, epoch: int, rank: int = 0, world_size: int = 1
) -> Iterator[Batch]:
    """One epoch: every row once over all ranks, in an order that depends on (seed, epoch) only."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    for index in torch.randperm(num_rows, generator=generator).split(batch_size):
        yield Batch(index[rank::world_size], len(index))


class Sums(NamedTuple):
    """Over rows: add those of batches and ranks, divide once."""

    loss: float
    num_correct: float
    num_rows: float

    @property
    def mean_loss(self) -> float:
        return self.loss / self.num_rows

    @property
    def accuracy(self) -> float:
        return self.num_correct / self.num_rows


def train_epoch(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: Examples,
    epoch: Iterator[Batch],
    world_size: int = 1,
) -> Tensor:
    """One pass over this rank's batches -> its Sums as a tensor [3] float64.

    The gradient averaged over ranks is that of the mean loss of the global batch, for any number of ranks.
    """
    network.train()
    device = _device(network)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in epoch:
        part = rows.take(batch.rows).to(device)
        logits = network(*part.probs)
        loss = functional.cross_entropy(logits, part.labels, reduction="sum")
        optimizer.zero_grad()
        (loss * (world_size / batch.num_global)).backward()
        optimizer.step()
        sums += _sums(loss, logits, part.labels)
    return sums


@torch.no_grad()
def evaluate(network: nn.Module, rows: Examples) -> Tensor:
    """Sums over the rows as a tensor [3] float64."""
    network.eval()
    rows = rows.to(_device(network))
    logits = network(*rows.probs)
    return _sums(functional.cross_entropy(logits, rows.labels, reduction="sum"), logits, rows.labels)


def _device(network: nn.Module) -> torch.device:
    return next(network.parameters()).device


def _sums(loss: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    correct = (logits.argmax(dim=1) == labels).sum()
    return torch.stack([loss.detach(), correct, torch.full_like(correct, len(labels))]).double()


class EpochResult(NamedTuple):
    """What one epoch did, over all ranks."""

    epoch: int
    train: Sums
    validation: Sums


class Fit:
    """Training as a loop: `while not fit.done: fit.run_epoch()`, then `fit.best_weights()`.

    `network` may be wrapped for data parallelism; `reduce` sums a tensor over ranks. Equal seeds give equal
    results, also through `state_dict` and `load_state_dict` in between.
    """

    def __init__(
        self,
        network: nn.Module,
        train: Examples,
        validation: Examples,
        settings: FitSettings,
        *,
        rank: int = 0,
        world_size: int = 1,
        reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
    ) -> None:
        self.network, self.train, self.settings = network, train, settings
        self.validation = validation.take(torch.arange(len(validation))[rank::world_size])
        self.rank, self.world_size, self.reduce = rank, world_size, reduce
        self.optimizer = torch.optim.Adam(network.parameters(), lr=settings.lr, fused=True)
        self.epoch = 0
        self.best_epoch = 0
        self.best_loss = math.inf
        self.best: dict[str, Tensor] = {}

    @property
    def done(self) -> bool:
        """All epochs are run, or `patience` of them without a lower validation loss."""
        patience = self.settings.patience
        stale = patience is not None and self.epoch - self.best_epoch >= patience
        return self.epoch >= self.settings.epochs or stale

    def run_epoch(self) -> EpochResult:
        """One epoch of training, then validation."""
        settings, self.epoch = self.settings, self.epoch + 1
        order = batches(len(self.train), settings.batch_size, settings.seed, self.epoch, self.rank, self.world_size)
        with _seeded(settings.seed, self.epoch, self.rank):
            sums = train_epoch(self.network, self.optimizer, self.train, order, self.world_size)
        trained = Sums(*self.reduce(sums).tolist())
        validated = Sums(*self.reduce(evaluate(self._bare, self.validation)).tolist())
        if settings.patience is None or validated.mean_loss < self.best_loss:
            self.best_epoch, self.best_loss = self.epoch, validated.mean_loss
            self.best = {name: tensor.clone() for name, tensor in self._bare.state_dict().items()}
        return EpochResult(self.epoch, trained, validated)

    @property
    def _bare(self) -> nn.Module:
        """The network without its data-parallel wrapper."""
        return self.network.module if hasattr(self.network, "module") else self.network  # type: ignore[return-value]

    def best_weights(self) -> dict[str, Tensor]:
        """Weights of the best epoch so far."""
        return self.best

    def state_dict(self) -> dict[str, Any]:
        """All that continues this training: tensors and plain numbers."""
        return {
            "network": self._bare.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": {"epoch": self.epoch, "best_epoch": self.best_epoch, "best_loss": self.best_loss},
            "best": self.best,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self._bare.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.best = state["best"]
        self.epoch, self.best_epoch = state["progress"]["epoch"], state["progress"]["best_epoch"]
        self.best_loss = state["progress"]["best_loss"]


class LookupReport(NamedTuple):
    """What the recorded taus of the validation prompts say of a policy.

    A diagnostic only, never a result: taus are looked up and nothing is run, and early stopping has seen the
    prompts. The evaluation on held-out prompts decides.
    """

    num_rows: int
    accuracy: float
    """Share of rows where the policy picks the label."""
    accuracy_best_fixed: float
    tau_policy: float
    tau_best_fixed: float
    tau_oracle: float
    best_fixed: int
    """The block size with the largest mean tau on the training rows."""
    gain_low: float
    gain_high: float
    """95% interval of mean tau(policy) - tau(best fixed), paired by row (normal approximation)."""

    @property
    def claims_gain(self) -> bool:
        return self.gain_low > 0


@torch.no_grad()
def lookup_report(
    network: nn.Module, candidates: CandidateSet, train: Examples, validation: Examples
) -> LookupReport:
    """Look up in two or more validation rows what the policy and the best fixed block size would get."""
    network.eval()
    chosen = network(*validation.probs).argmax(dim=1)
    fixed = int(train.taus.mean(dim=0).argmax())
    tau_policy = validation.taus.gather(1, chosen[:, None])[:, 0].double()
    tau_fixed = validation.taus[:, fixed].double()
    gain = tau_policy - tau_fixed
    margin = 1.96 * float(gain.std()) / math.sqrt(len(gain))
    return LookupReport(
        num_rows=len(validation),
        accuracy=float((chosen == validation.labels).double().mean()),
        accuracy_best_fixed=float((validation.labels == fixed).double().mean()),
        tau_policy=float(tau_policy.mean()),
        tau_best_fixed=float(tau_fixed.mean()),
        tau_oracle=float(validation.taus.max(dim=1).values.double().mean()),
        best_fixed=candidates[fixed],
        gain_low=float(gain.mean()) - margin,
        gain_high=float(gain.mean()) + margin,
    )
