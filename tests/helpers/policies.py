"""Tiny learned policies, for tests that need one of a certain kind and do not care how it was trained."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from blockpilot.control.cost import StepPrice
from blockpilot.pairs.loading import Pair
from blockpilot.policy.learned import LearnedPolicy, PolicyInfo, Scalar
from blockpilot.policy.network import Kind, NetworkShape, PolicyNetwork
from blockpilot.sweep.rows import MIN_PROB
from blockpilot.types import CandidateSet, PairId


def tiny_policy(
    pair: PairId,
    vocab_size: int,
    candidates: Sequence[int],
    *,
    kind: Kind = "prompt",
    outputs: Sequence[float] | None = None,
    sizes: tuple[int, int] = (0, 0),
    price: StepPrice | None = None,
    training: Mapping[str, Scalar] | None = None,
    seed: int = 0,
) -> LearnedPolicy:
    """Random weights; with `outputs`, whatever it sees, the network says these.

    `sizes` are those of context and anchor, which kind `step` reads.
    """
    torch.manual_seed(seed)
    shape = NetworkShape(kind, vocab_size, *sizes, num_outputs=len(candidates), hidden=8)
    network = PolicyNetwork(shape, torch.arange(vocab_size if kind == "prompt" else 0))
    if kind == "prompt":
        torch.nn.init.normal_(network.rows)
    if outputs is not None:
        torch.nn.init.zeros_(network.head.weight)
        network.head.bias.data = torch.tensor(outputs, dtype=torch.float32)
    objective = "tau" if price is None else "throughput"
    info = PolicyInfo(pair, CandidateSet(tuple(candidates)), objective, shape, MIN_PROB, dict(training or {}))
    return LearnedPolicy(info, network, price)


def step_policy(pair: Pair, candidates: Sequence[int], **more: Any) -> LearnedPolicy:
    """A tiny policy of kind `step` for a pair."""
    sizes = pair.draft.config.hidden_size, pair.target.config.hidden_size
    return tiny_policy(pair.id, pair.vocab_size, candidates, kind="step", sizes=sizes, **more)


def reading_policy(pair: Pair, candidates: Sequence[int]) -> LearnedPolicy:
    """A step policy, untrained, with large weights: what it expects differs from step to step."""
    policy = step_policy(pair, candidates)
    policy.network.head.weight.mul_(20)
    policy.network.head.bias.sub_(3)
    return policy
