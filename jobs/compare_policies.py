"""What a policy costs a request: the sparse first layer against the same layer dense, in turns, at any vocabulary.

Random weights: the cost does not depend on them. The distribution is as peaked as a prompt's (`--num-probable` token
ids share nearly all of the mass), and both forms are given the target's logits, as the engine does.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from blockpilot.engine import Prefill
from blockpilot.files import write_text
from blockpilot.network import PolicyNetwork, Shape
from blockpilot.pairs import PairId
from blockpilot.policy import CandidateSet, LearnedPolicy, PolicyInfo
from blockpilot.records import MIN_PROB
from blockpilot.report import markdown
from jobs.config import Config, main

CANDIDATES = CandidateSet((14, 15, 16, 17, 18))
CALLS_A_TURN = 20


class ComparePoliciesConfig(Config):
    """Sizes of the network and of its input."""

    vocab_size: int = Field(default=151_936, ge=2)
    """Token ids; by default those of Qwen3."""
    hidden: tuple[int, ...] = Field(default=(256, 2048), min_length=1)
    """Widths of the network; the paper's is 2048."""
    max_support: int = Field(default=3072, ge=1)
    """Token ids that the sparse first layer knows."""
    num_probable: int = Field(default=400, ge=1)
    """Token ids of the prompt's distribution above the threshold."""
    num_calls: int = Field(default=200, ge=1)
    """Timed calls of each form."""
    num_threads: int = Field(default=1, ge=1)
    """Torch threads."""
    device: str = "cpu"
    """cpu or cuda."""
    output: Path = Path("runs/compare_policies.json")


class Cost(NamedTuple):
    """Of one form: the time of a call, and what its weights take on the device."""

    hidden: int
    form: str
    median_ms: float
    p95_ms: float
    megabytes: float


class DensePolicy(nn.Module):
    """The paper's network as it is written down: the first layer reads the whole distribution."""

    def __init__(self, vocab_size: int, sparse: PolicyNetwork) -> None:
        super().__init__()
        self.first = nn.Linear(vocab_size, sparse.shape.hidden)
        with torch.no_grad():
            self.first.weight.zero_()
            self.first.weight[:, sparse.support] = sparse.rows.T
            self.first.bias.copy_(sparse.bias)
        self.mix, self.head = sparse.mix, sparse.head

    def forward(self, probs: Tensor) -> Tensor:
        hidden = torch.relu(self.first(probs))
        for layer in self.mix:
            hidden = hidden + layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def run(config: ComparePoliciesConfig) -> list[Cost]:
    """Measure both forms at every width, and show them; raises RuntimeError if they do not choose alike."""
    torch.set_num_threads(config.num_threads)
    costs = [cost for hidden in config.hidden for cost in compare(config, hidden)]
    print(markdown([_cells(cost) for cost in costs]))
    write_text(config.output, json.dumps([cost._asdict() for cost in costs], indent=1) + "\n")
    return costs


@torch.inference_mode()
def compare(config: ComparePoliciesConfig, hidden: int) -> tuple[Cost, Cost]:
    """(sparse, dense) at one width."""
    device, generator = torch.device(config.device), torch.Generator().manual_seed(0)
    support = torch.randperm(config.vocab_size, generator=generator)[: config.max_support].sort().values
    shape = Shape(("probs",), config.vocab_size, 0, 0, len(CANDIDATES), hidden)
    network = PolicyNetwork(shape, support)
    nn.init.normal_(network.rows)
    info = PolicyInfo(PairId("random", "", "random", ""), CANDIDATES, "class", "tau", "prefill", shape, MIN_PROB)
    dense = DensePolicy(config.vocab_size, network).to(device).eval()
    policy = LearnedPolicy(info, network.to(device))
    logits = torch.full((config.vocab_size,), -20.0)
    probable = support[torch.randperm(len(support), generator=generator)[: config.num_probable]]
    logits[probable] = 3 * torch.randn(len(probable), generator=generator)
    prefill = Prefill(logits.to(device), None, 100)

    def dense_call() -> int:
        return CANDIDATES[int(dense(prefill.probs).argmax())]

    if policy(prefill) != dense_call():
        raise RuntimeError(
            f"hidden {hidden}: the sparse form chooses {policy(prefill)}, the dense one {dense_call()}"
        )
    sparse_ms, dense_ms = _time(config, lambda: policy(prefill), dense_call)
    return (
        Cost(hidden, "sparse", *sparse_ms, _megabytes(network)),
        Cost(hidden, "dense", *dense_ms, _megabytes(dense)),
    )


def _time(config: ComparePoliciesConfig, *calls: Callable[[], object]) -> list[tuple[float, float]]:
    """Median and 95th percentile in milliseconds of each; calls end with a number on the host.

    They take turns of several calls, of which the first brings back what the other form's weights pushed out of the
    processor's cache, and is not counted.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(-(-config.num_calls // CALLS_A_TURN)):
        for call, of_call in zip(calls, times, strict=True):
            for number in range(CALLS_A_TURN + 1):
                started = time.perf_counter()
                call()
                if number:
                    of_call.append((time.perf_counter() - started) * 1000)
    return [(statistics.median(t), sorted(t)[int(0.95 * len(t))]) for t in times]


def _megabytes(network: nn.Module) -> float:
    tensors = [*network.parameters(), *network.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6


def _cells(cost: Cost) -> dict[str, str]:
    return {
        "hidden": str(cost.hidden),
        "first layer": cost.form,
        "ms a call": f"{cost.median_ms:.3f} (95%: {cost.p95_ms:.3f})",
        "MB": f"{cost.megabytes:.1f}",
    }


if __name__ == "__main__":
    main(ComparePoliciesConfig, run)
