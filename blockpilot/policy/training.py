"""Training the network of a policy of kind `prompt`, in torch.

It learns by cross entropy which block size is the best (arXiv 2606.31315, section 3), by tau or by tau over the cost
of a step. Kind `step` has no network and is fitted at once (`outcomes.py`).

`Fit` is the whole training as a resumable loop of epochs; a caller that trains on several processes wraps
the network, says which rank it is and gives a function that sums over ranks. Metrics are sums and totals,
divided once.

The paper trains 100 epochs of Adam at a constant learning rate of 1e-5 on tens of thousands of prompts.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from blockpilot.evaluation.oracle import Table
from blockpilot.policy.dataset import Examples
from blockpilot.policy.learned import Kind, Objective
from blockpilot.policy.network import NetworkShape, PolicyNetwork

PREDICT_ROWS = 1024


@dataclass(frozen=True)
class FitSettings:
    """Settings of a policy's training. All but kind and seed are those of kind `prompt`."""

    kind: Kind = "step"
    """step: what the acceptance model of the choice at every step begins with (needs a dense sweep). prompt: the
    paper's, the best block size for an answer, from the distribution after the prompt."""
    hidden: int = 256
    """Width of the network."""
    epochs: int = 8
    """Passes over the examples at most."""
    batch_size: int = 512
    """Examples of an optimizer step, over all workers."""
    lr: float = 1e-3
    """Learning rate of AdamW."""
    dropout: float = 0.5
    """Share of hidden units dropped in training."""
    seed: int = 0
    """Of the split, the initial weights, the order of examples and dropout."""
    anneal: bool = True
    """Let the learning rate fall to zero over the epochs, in a line; otherwise it stays."""
    weight_decay: float = 0.05
    """Of AdamW; without it this is Adam."""
    patience: int | None = None
    """Stop after so many epochs without a lower validation loss and keep the best; None: run all, keep the last."""
    max_support: int = 3072
    """Token ids that the first layer knows, those with the most mass; it grows with them."""

    def checked(self) -> "FitSettings":
        """Itself. Raises ValueError for values that cannot be."""
        rules: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
            ("at least 1", lambda x: x >= 1, ("hidden", "epochs", "batch_size", "max_support", "patience")),
            ("at least 0 and below 1", lambda x: 0 <= x < 1, ("dropout",)),
            ("at least 0", lambda x: x >= 0, ("weight_decay", "seed")),
            ("above 0", lambda x: x > 0, ("lr",)),
        )
        for rule, allowed, names in rules:
            for name in names:
                if (value := getattr(self, name)) is not None and not allowed(value):
                    raise ValueError(f"{name} {value}: must be {rule}")
        return self


@dataclass(frozen=True)
class FitTask:
    """What a network has to learn, and what it is for."""

    objective: Objective
    candidates: tuple[int, ...]
    step_costs: Tensor
    """[K] float32, seconds of a step with each candidate in any unit; all alike for the objective tau."""

    def table(self, taus: Tensor) -> Table:
        """Tokens and seconds [E, K] of every choice: of a step for the objective tau, else of one token.

        By tau and 1 the rate is the mean of the requests' taus, as is published.
        """
        costs, ones = self.step_costs.expand_as(taus), torch.ones_like(taus)
        tokens, seconds = (taus, costs) if self.objective == "tau" else (ones, costs / taus)
        return Table(tokens.double().numpy(force=True), seconds.double().numpy(force=True))

    def labels(self, taus: Tensor) -> Tensor:
        """[E] int64, index of the best candidate of each example alone; the smallest block size of equals."""
        return (taus / self.step_costs).argmax(dim=1)

    def loss(self, outputs: Tensor, taus: Tensor) -> Tensor:
        """Summed over the examples."""
        return functional.cross_entropy(outputs, self.labels(taus), reduction="sum")

    def to(self, device: torch.device) -> "FitTask":
        """The same task with its costs on the device."""
        return replace(self, step_costs=self.step_costs.to(device))


def new_network(train: Examples, vocab_size: int, settings: FitSettings) -> PolicyNetwork:
    """An untrained network that knows the training rows' token ids; equal for equal seeds."""
    shape = NetworkShape(vocab_size, train.all_taus.shape[1], settings.hidden)
    with _seeded(settings.seed):
        return PolicyNetwork(shape, train.support(vocab_size, settings.max_support), settings.dropout)


@contextmanager
def _seeded(*key: int) -> Iterator[None]:
    """Inside it torch's global generator, which dropout and initial weights draw from, is seeded by `key`."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    with torch.random.fork_rng():
        torch.manual_seed(int.from_bytes(digest[:4], "big"))
        yield


class BatchRows(NamedTuple):
    """This rank's part of a global batch."""

    rows: Tensor
    """[n] int64; n differs by rank and may be 0."""
    num_global: int
    """Rows of the batch over all ranks."""


def batches(
    num_rows: int, batch_size: int, seed: int, epoch: int, rank: int = 0, world_size: int = 1
) -> Iterator[BatchRows]:
    """One epoch: every row once over all ranks, in an order that depends on (seed, epoch) only."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    for index in torch.randperm(num_rows, generator=generator).split(batch_size):
        yield BatchRows(index[rank::world_size], len(index))


class EpochSums(NamedTuple):
    """Over rows: add those of batches and ranks, divide once."""

    loss: float
    num_correct: float
    num_rows: float

    @property
    def mean_loss(self) -> float:
        return self.loss / self.num_rows

    def metrics(self, prefix: str) -> dict[str, float]:
        return {f"{prefix}_loss": self.mean_loss, f"{prefix}_accuracy": self.num_correct / self.num_rows}


def train_epoch(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: Examples,
    task: FitTask,
    epoch: Iterator[BatchRows],
    world_size: int = 1,
) -> Tensor:
    """One pass over this rank's batches -> its EpochSums as a tensor [3] float64.

    The gradient averaged over ranks is that of the mean loss of the global batch, for any number of ranks.
    """
    network.train()
    device = _device(network)
    task = task.to(device)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in epoch:
        part = rows.take(batch.rows)
        taus = part.taus.to(device)
        outputs = network(part.features.to(device))
        loss = task.loss(outputs, taus)
        optimizer.zero_grad()
        (loss * (world_size / batch.num_global)).backward()
        optimizer.step()
        sums += _sums(task, loss, outputs, taus)
    return sums


@torch.no_grad()
def evaluate(network: PolicyNetwork, rows: Examples, task: FitTask) -> Tensor:
    """EpochSums of the rows as a tensor [3] float64."""
    outputs, device = predict(network, rows), _device(network)
    taus, task = rows.taus.to(device), task.to(device)
    return _sums(task, task.loss(outputs, taus), outputs, taus)


@torch.no_grad()
def predict(network: PolicyNetwork, rows: Examples) -> Tensor:
    """Outputs [R, K] on the network's device, a batch of rows at a time."""
    network.eval()
    device = _device(network)
    index = torch.arange(len(rows)).split(PREDICT_ROWS)
    parts = [network(rows.take(some).features.to(device)) for some in index if len(some)]
    return torch.cat([torch.zeros(0, network.shape.num_outputs, device=device), *parts])


def bare(network: nn.Module) -> PolicyNetwork:
    """The network without its data-parallel wrapper."""
    return cast(PolicyNetwork, getattr(network, "module", network))


def _device(network: nn.Module) -> torch.device:
    return next(network.parameters()).device


def _sums(task: FitTask, loss: Tensor, outputs: Tensor, taus: Tensor) -> Tensor:
    correct = (outputs.argmax(dim=1) == task.labels(taus)).sum()
    return torch.stack([loss.detach(), correct, torch.full_like(correct, len(taus))]).double()


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
        task: FitTask,
        *,
        rank: int = 0,
        world_size: int = 1,
        reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
    ) -> None:
        self.network, self.train, self.settings, self.task = network, train, settings, task
        self.validation = validation.take(torch.arange(len(validation))[rank::world_size])
        self.rank, self.world_size, self.reduce = rank, world_size, reduce
        self.optimizer = torch.optim.AdamW(
            network.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, fused=True
        )
        self.epoch = 0
        self.best_epoch = 0
        self.best_loss = math.inf
        self.best: dict[str, Tensor] = {}
        self.history: list[dict[str, float]] = []

    @property
    def done(self) -> bool:
        """All epochs are run, or `patience` of them without a lower validation loss."""
        patience = self.settings.patience
        stale = patience is not None and self.epoch - self.best_epoch >= patience
        return self.epoch >= self.settings.epochs or stale

    def run_epoch(self) -> dict[str, float]:
        """One epoch of training, then validation; its metrics over all ranks."""
        settings, self.epoch = self.settings, self.epoch + 1
        if settings.anneal:
            for parameters in self.optimizer.param_groups:
                parameters["lr"] = settings.lr * (1 - (self.epoch - 1) / settings.epochs)
        order = batches(len(self.train), settings.batch_size, settings.seed, self.epoch, self.rank, self.world_size)
        with _seeded(settings.seed, self.epoch, self.rank):
            sums = train_epoch(self.network, self.optimizer, self.train, self.task, order, self.world_size)
        trained = EpochSums(*self.reduce(sums).tolist())
        validated = EpochSums(*self.reduce(evaluate(self._bare, self.validation, self.task)).tolist())
        if settings.patience is None or validated.mean_loss < self.best_loss:
            self.best_epoch, self.best_loss = self.epoch, validated.mean_loss
            self.best = {name: tensor.clone() for name, tensor in self._bare.state_dict().items()}
        metrics = trained.metrics("train") | validated.metrics("validation")
        self.history.append(metrics)
        return metrics

    @property
    def _bare(self) -> PolicyNetwork:
        return bare(self.network)

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
            "history": self.history,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self._bare.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.best, self.history = state["best"], list(state["history"])
        self.epoch, self.best_epoch = state["progress"]["epoch"], state["progress"]["best_epoch"]
        self.best_loss = state["progress"]["best_loss"]
