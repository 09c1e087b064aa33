"""Tiny policies of each kind, for tests that do not depend on their training."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from blockpilot.control.acceptance import NUM_WEIGHTS
from blockpilot.control.cost import StepPrice
from blockpilot.policy.learned import PromptInfo, PromptPolicy, Scalar, StepInfo, StepPolicy
from blockpilot.policy.network import NetworkShape, PolicyNetwork
from blockpilot.sweep.rows import MIN_PROB
from blockpilot.types import CandidateSet, PairId
from jobs.common.registry import Registry, Version


def tiny_policy(
    pair: PairId,
    vocab_size: int,
    candidates: Sequence[int],
    *,
    outputs: Sequence[float] | None = None,
    price: StepPrice | None = None,
    training: Mapping[str, Scalar] | None = None,
    seed: int = 0,
) -> PromptPolicy:
    """Policy of kind `prompt` with random weights; with `outputs`, the network always returns these."""
    torch.manual_seed(seed)
    network = PolicyNetwork(NetworkShape(vocab_size, len(candidates), hidden=8), torch.arange(vocab_size))
    torch.nn.init.normal_(network.rows)
    if outputs is not None:
        torch.nn.init.zeros_(network.head.weight)
        network.head.bias.data = torch.tensor(outputs, dtype=torch.float32)
    objective = "tau" if price is None else "throughput"
    shape, sizes = network.shape, CandidateSet(tuple(candidates))
    return PromptPolicy(PromptInfo(pair, sizes, objective, shape, MIN_PROB, dict(training or {})), network, price)


def step_policy(
    pair: PairId,
    vocab_size: int,
    *,
    scale: float = 0.5,
    bias: float = 0.0,
    price: StepPrice | None = None,
    training: Mapping[str, Scalar] | None = None,
    seed: int = 0,
) -> StepPolicy:
    """Policy of kind `step` with random weights of this scale; `bias` is added to the logit of every choice."""
    weights = np.random.default_rng(seed).normal(0, scale, (2, NUM_WEIGHTS))
    weights[:, 5:11] += bias
    return StepPolicy(weights, StepInfo(pair, vocab_size, dict(training or {})), price)


def choosy_policy(pair: PairId, vocab_size: int, at: tuple[float, float]) -> StepPolicy:
    """Policy of kind `step`: the acceptance probability of first choices rises steeply where the draft's logit is
    near `at`, of greedy and of sampled slots.
    """
    weights = np.zeros((2, NUM_WEIGHTS))
    weights[:, 0] = 20.0
    weights[:, 5] = weights[:, 7] = weights[:, 9] = -21.0 * np.array(at)
    return StepPolicy(weights, StepInfo(pair, vocab_size))


def register(registry: Registry, directory: str | Path, pair: PairId, **tags: object) -> Version:
    """The next version of a target's model: the policy in a directory, with the pair and these as tags."""
    with registry.log_run("train") as record:
        return registry.register_policy(
            directory, target=pair.target, run_id=record.id, tags={**pair._asdict(), **tags}
        )
