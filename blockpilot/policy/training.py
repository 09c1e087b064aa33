"""Training of the network of a policy of kind `prompt`, in torch.

The network learns the best block size, by tau or by tau over step cost, with the cross entropy (arXiv 2606.31315,
section 3). Kind `step` has no network; `outcomes.py` fits it directly.

`Fit` is a resumable loop of epochs. For data parallelism the caller wraps the network and passes its rank and a
function that sums over ranks. Metrics are summed over batches and ranks, then divided once.

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
    """Settings of a policy's training. All but kind and seed apply to kind `prompt` only."""

    kind: Kind = "step"
    """step: a prior of the acceptance model, which chooses again at every step (needs a dense sweep). prompt: the
    paper's network, which chooses one block size per answer from the distribution after the prompt."""
    hidden: int = 256
    """Width of the network."""
    epochs: int = 8
    """Maximum number of passes over the examples."""
    batch_size: int = 512
    """Examples per optimizer step, over all workers."""
    lr: float = 1e-3
    """Learning rate of AdamW."""
    dropout: float = 0.5
    """Share of hidden units dropped in training."""
    seed: int = 0
    """Seed of the split, the initial weights, the order of examples and dropout."""
    anneal: bool = True
    """Decay the learning rate linearly to zero over the epochs; otherwise it is constant."""
    weight_decay: float = 0.05
    """Weight decay of AdamW; 0 is Adam."""
    patience: int | None = None
    """Early stopping: end after this many epochs without a lower validation loss and keep the best epoch. None: run
    all epochs and keep the last."""
    max_support: int = 3072
    """Maximum number of token ids in the first layer: those with the most probability mass."""

    def checked(self) -> "FitSettings":
        """These settings; raises ValueError, naming the setting, for a value out of range."""
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
    """Objective and candidates of a network, with its labels and loss."""

    objective: Objective
    candidates: tuple[int, ...]
    step_costs: Tensor
    """[K] float32: relative step cost of each candidate; all equal for the objective tau."""

    def table(self, taus: Tensor) -> Table:
        """Tokens and seconds [E, K] of every choice: per step for the objective tau, else per token.

        For the objective tau the rate is the mean of the requests' taus, as in published tables.
        """
        costs, ones = self.step_costs.expand_as(taus), torch.ones_like(taus)
        tokens, seconds = (taus, costs) if self.objective == "tau" else (ones, costs / taus)
        return Table(tokens.double().numpy(force=True), seconds.double().numpy(force=True))

    def labels(self, taus: Tensor) -> Tensor:
        """[E] int64: index of each example's best candidate; ties go to the smallest block size."""
        return (taus / self.step_costs).argmax(dim=1)

    def loss(self, outputs: Tensor, taus: Tensor) -> Tensor:
        """Cross entropy with the labels, summed over the examples."""
        return functional.cross_entropy(outputs, self.labels(taus), reduction="sum")

    def to(self, device: torch.device) -> "FitTask":
        """The task with its step costs on the device."""
        return replace(self, step_costs=self.step_costs.to(device))


def new_network(train: Examples, vocab_size: int, settings: FitSettings) -> PolicyNetwork:
    """An untrained network whose support comes from the training examples; equal for equal seeds."""
    shape = NetworkShape(vocab_size, train.all_taus.shape[1], settings.hidden)
    with _seeded(settings.seed):
        return PolicyNetwork(shape, train.support(vocab_size, settings.max_support), settings.dropout)


@contextmanager
def _seeded(*key: int) -> Iterator[None]:
    """Seed torch's global generator, which dropout and initial weights use, by `key` inside the block."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    with torch.random.fork_rng():
        torch.manual_seed(int.from_bytes(digest[:4], "big"))
        yield


class BatchRows(NamedTuple):
    """This rank's part of a global batch."""

    rows: Tensor
    """[n] int64; n differs between ranks and may be 0."""
    num_global: int
    """Number of rows of the batch over all ranks."""


def batches(
    num_rows: int, batch_size: int, seed: int, epoch: int, rank: int = 0, world_size: int = 1
) -> Iterator[BatchRows]:
    """Batches of one epoch: every row once over all ranks, in an order that depends on (seed, epoch) only."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    for index in torch.randperm(num_rows, generator=generator).split(batch_size):
        yield BatchRows(index[rank::world_size], len(index))


class EpochSums(NamedTuple):
    """Sums over rows: add those of batches and ranks, then divide once."""

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
    """Train on this rank's batches of one epoch; returns its EpochSums as a tensor [3] float64.

    The gradient averaged over ranks equals that of the global batch's mean loss, for any number of ranks.
    """
    network.train()
    device = _device(network)
    task = task.to(device)
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in epoch:
        examples = rows.take(batch.rows)
        taus = examples.taus.to(device)
        outputs = network(examples.features.to(device))
        loss = task.loss(outputs, taus)
        optimizer.zero_grad()
        (loss * (world_size / batch.num_global)).backward()
        optimizer.step()
        totals += _sums(task, loss, outputs, taus)
    return totals


@torch.no_grad()
def evaluate(network: PolicyNetwork, rows: Examples, task: FitTask) -> Tensor:
    """EpochSums of the rows as a tensor [3] float64."""
    outputs, device = predict(network, rows), _device(network)
    taus, task = rows.taus.to(device), task.to(device)
    return _sums(task, task.loss(outputs, taus), outputs, taus)


@torch.no_grad()
def predict(network: PolicyNetwork, rows: Examples) -> Tensor:
    """Logits [R, K] on the network's device, computed a batch of rows at a time."""
    network.eval()
    device = _device(network)
    index = torch.arange(len(rows)).split(PREDICT_ROWS)
    outputs = [network(rows.take(batch_index).features.to(device)) for batch_index in index if len(batch_index)]
    return torch.cat([torch.zeros(0, network.shape.num_outputs, device=device), *outputs])


def bare(network: nn.Module) -> PolicyNetwork:
    """The network without its data-parallel wrapper."""
    return cast(PolicyNetwork, getattr(network, "module", network))


def _device(network: nn.Module) -> torch.device:
    return next(network.parameters()).device


def _sums(task: FitTask, loss: Tensor, outputs: Tensor, taus: Tensor) -> Tensor:
    correct = (outputs.argmax(dim=1) == task.labels(taus)).sum()
    return torch.stack([loss.detach(), correct, torch.full_like(correct, len(taus))]).double()


class Fit:
    """Training loop: `while not fit.done: fit.run_epoch()`, then `fit.best`.

    `network` may be wrapped for data parallelism; `reduce` sums a tensor over ranks. Equal seeds give equal results,
    also when the training is interrupted and resumed by `state_dict` and `load_state_dict`.
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
        """Weights of the best epoch so far, or of the last one without `patience`."""
        self.history: list[dict[str, float]] = []

    @property
    def done(self) -> bool:
        """True after all epochs, or after `patience` epochs without a lower validation loss."""
        patience = self.settings.patience
        stale = patience is not None and self.epoch - self.best_epoch >= patience
        return self.epoch >= self.settings.epochs or stale

    def run_epoch(self) -> dict[str, float]:
        """Train one epoch, then validate; returns the epoch's metrics over all ranks."""
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

    def state_dict(self) -> dict[str, Any]:
        """State to resume the training from: tensors and plain numbers."""
        return {
            "network": self._bare.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": {"epoch": self.epoch, "best_epoch": self.best_epoch, "best_loss": self.best_loss},
            "best": self.best,
            "history": self.history,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`."""
        self._bare.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.best, self.history = state["best"], list(state["history"])
        self.epoch, self.best_epoch = state["progress"]["epoch"], state["progress"]["best_epoch"]
        self.best_loss = state["progress"]["best_loss"]
