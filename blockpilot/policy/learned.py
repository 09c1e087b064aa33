"""Learned policies, in two kinds.

`prompt` is BlockPilot's (arXiv 2606.31315): a network maps the distribution after the prompt to a logit for each
candidate, and the candidate with the largest logit is the block size of the whole answer. `step` is a prior of the
acceptance model: the controller chooses depths and nodes at every step by the current load, and the model keeps
learning from observed acceptance.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import torch

from blockpilot.control.acceptance import NUM_WEIGHTS, OF_CHOICE, Prior
from blockpilot.control.cost import StepPrice
from blockpilot.native.growing import NUM_CONTEXTS
from blockpilot.pairs.loading import Pair
from blockpilot.policy.network import NetworkShape, PolicyNetwork, sparse_probs
from blockpilot.types import MAX_BLOCK_SIZE, CandidateSet, PairId, Prefill

Kind = Literal["prompt", "step"]
Objective = Literal["tau", "throughput"]
Scalar = str | int | float | bool | None

WEIGHT_NAMES = (
    "own_logit",
    *OF_CHOICE,
    *(f"{rank}_after_{num}_later" for num in range(NUM_CONTEXTS) for rank in ("first", "later")),
)
"""Names of the weights of a prior, in their order. "later" means any choice of a slot but its first."""


@dataclass(frozen=True)
class PromptInfo:
    """The pair that a policy of kind `prompt` was trained for, its candidate set, network shape and provenance."""

    pair: PairId
    candidates: CandidateSet
    objective: Objective
    """Quantity that the choice maximises: tokens per step (tau) or tokens per second (throughput)."""
    shape: NetworkShape
    threshold: float
    """Smaller probabilities count as zero, in training and in decoding."""
    training: Mapping[str, Scalar] = field(default_factory=dict)
    """Provenance: seed, rows, sweep id, ... Not read by the policy."""

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            raise ValueError(f"objective {self.objective!r}: must be one of {', '.join(get_args(Objective))}")
        if self.shape.num_outputs != len(self.candidates):
            raise ValueError(f"{self.shape.num_outputs} outputs for {len(self.candidates)} candidates")

    @property
    def kind(self) -> Kind:
        return "prompt"

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size


@dataclass(frozen=True)
class StepInfo:
    """The pair that a policy of kind `step` was trained for, and its provenance."""

    pair: PairId
    vocab_size: int
    training: Mapping[str, Scalar] = field(default_factory=dict)
    """Provenance: seed, rows, sweep id, ... Not read by the policy."""

    def __post_init__(self) -> None:
        if type(self.vocab_size) is not int or self.vocab_size < 1:
            raise ValueError(f"vocab_size {self.vocab_size!r}: must be a whole number, at least 1")

    @property
    def kind(self) -> Kind:
        return "step"


class PromptPolicy:
    """Maps a prefill to a block size, on the device of the prefill's tensors.

    `price` is the step cost that the objective "throughput" was trained with, not that of the machine that decodes.
    """

    def __init__(self, info: PromptInfo, network: PolicyNetwork, price: StepPrice | None = None) -> None:
        if (price is None) == (info.objective == "throughput"):
            raise ValueError(f"objective {info.objective!r}: {'needs a' if price is None else 'has no'} step price")
        self.info, self.price = info, price
        self.network = network.eval().requires_grad_(False)
        self._layers = self.network.layers()

    @property
    def candidates(self) -> CandidateSet:
        return self.info.candidates

    @torch.inference_mode()
    def __call__(self, prefill: Prefill) -> int:
        """Block size for the request; raises ValueError for logits of another vocabulary size."""
        logits, vocab_size = prefill.logits, self.info.vocab_size
        if logits.shape != (vocab_size,):
            raise ValueError(f"logits {tuple(logits.shape)}: the policy's vocabulary is {vocab_size}")
        probs = sparse_probs(prefill.probs, self.info.threshold)
        if self._layers.head.device != logits.device:
            self._layers = self.network.to(logits.device).layers()
        outputs = self._layers.outputs(self._layers.hidden(probs))
        return self.candidates[int(outputs[0].argmax())]

    def check(self, pair: Pair) -> None:
        """Raise ValueError for a pair other than the trained one, or for a candidate above MAX_BLOCK_SIZE."""
        if self.candidates[-1] > MAX_BLOCK_SIZE:
            raise ValueError(f"policy with block size {self.candidates[-1]}: must be at most {MAX_BLOCK_SIZE}")
        _check_made_for(self.info, pair)


@dataclass(frozen=True, eq=False)
class StepPolicy(Prior):
    """A trained prior. `price` is the step cost measured together with its sweep, None if not measured."""

    info: StepInfo
    price: StepPrice | None = None

    def __post_init__(self) -> None:
        if self.weights.shape != (2, NUM_WEIGHTS):
            raise ValueError(f"weights {self.weights.shape}: must be {(2, NUM_WEIGHTS)}")
        if not np.isfinite(self.weights).all():
            raise ValueError("weights: must be finite")

    def check(self, pair: Pair) -> None:
        """Raise ValueError for a pair other than the trained one."""
        _check_made_for(self.info, pair)


LearnedPolicy = PromptPolicy | StepPolicy


def _check_made_for(info: PromptInfo | StepInfo, pair: Pair) -> None:
    if (info.pair, info.vocab_size) != (pair.id, pair.vocab_size):
        made_for = _describe(info.pair, info.vocab_size)
        raise ValueError(f"policy made for {made_for}; this pair is {_describe(pair.id, pair.vocab_size)}")


def _describe(pair: PairId, vocab_size: int) -> str:
    return (
        f"target {pair.target}@{pair.target_revision} with draft {pair.draft}@{pair.draft_revision} "
        f"(vocabulary {vocab_size})"
    )
