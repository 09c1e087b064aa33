"""Tiny learned policies, for tests that need one of a certain kind and do not care how it was trained."""

from collections.abc import Mapping, Sequence

import torch

from blockpilot.control.price import StepCosts
from blockpilot.policy.learned import Head, LearnedPolicy, PolicyInfo, Reads, Scalar
from blockpilot.policy.network import Input, PolicyNetwork, Shape
from blockpilot.sweep.rows import MIN_PROB
from blockpilot.types import CandidateSet, PairId


def tiny_policy(
    pair: PairId,
    vocab_size: int,
    candidates: Sequence[int],
    *,
    head: Head = "class",
    reads: Reads = "prefill",
    outputs: Sequence[float] | None = None,
    sizes: tuple[int, int] = (0, 0),
    costs: StepCosts | None = None,
    training: Mapping[str, Scalar] | None = None,
    seed: int = 0,
) -> LearnedPolicy:
    """Random weights; with `outputs`, whatever it sees, the network says these.

    `sizes` are those of context and anchor, which it reads if they are known.
    """
    torch.manual_seed(seed)
    known = zip(("context", "anchor"), sizes, strict=True)
    inputs: tuple[Input, ...] = (*(name for name, size in known if size), "scalars")  # type: ignore[assignment]
    shape = Shape(inputs, vocab_size, *sizes, num_outputs=len(candidates), hidden=8)
    network = PolicyNetwork(shape, torch.zeros(0, dtype=torch.int64))
    if outputs is not None:
        torch.nn.init.zeros_(network.head.weight)
        network.head.bias.data = torch.tensor(outputs, dtype=torch.float32)
    objective = "tau" if costs is None else "throughput"
    info = PolicyInfo(
        pair, CandidateSet(tuple(candidates)), head, objective, reads, shape, MIN_PROB, dict(training or {})
    )
    return LearnedPolicy(info, network, costs)
