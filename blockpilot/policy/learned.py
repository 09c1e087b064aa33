"""Policies: what picks a request's block size from its prefill.

A learned policy is a network (`network.py`) with one of two heads. `class` is BlockPilot's (arXiv 2606.31315): a
logit for each candidate, and the largest is taken. `tau` predicts the tokens of a step with each candidate; the
choice is made later, at the load there is then.

The paper's policy reads the prefill and chooses for the whole answer. One that reads every step predicts anew before
each, from what the draft is about to draft from: two thirds of the variance of acceptance is inside an answer.

A policy travels as a directory: `policy.safetensors`, `policy.json`, and for the objective "throughput" the step
costs that it was trained with, `costs.json`. Nothing is unpickled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from blockpilot.adaptive.calibration import TrackRecord
from blockpilot.control.price import StepCosts
from blockpilot.pairs.loading import Pair
from blockpilot.policy.network import (
    Features,
    FoldedNetwork,
    Input,
    PolicyNetwork,
    Shape,
    no_probs,
    scalars,
    sparse_probs,
)
from blockpilot.types import CandidateSet, Forecast, PairId, Prefill

MAX_LOGIT = 8.0
POLICY_DOUBT, REQUEST_DOUBT = 100.0, 30.0  # expected tokens; of TrackRecord
MEMORY = 2000.0  # steps of requests

Head = Literal["class", "tau"]
Objective = Literal["tau", "throughput"]
Reads = Literal["prefill", "step"]
Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class PolicyInfo:
    """What a policy knows about itself: the pair it was trained for, its choices, and where it comes from."""

    pair: PairId
    candidates: CandidateSet
    head: Head
    objective: Objective
    """What the choice makes the most of: tokens a step, or a second."""
    reads: Reads
    shape: Shape
    threshold: float
    """Probabilities below it are taken as zero, in training and in use."""
    training: Mapping[str, Scalar] = field(default_factory=dict)
    """Provenance: seed, rows, sweep id, ... Not read by the policy."""

    def __post_init__(self) -> None:
        for name, kind in (("head", Head), ("objective", Objective), ("reads", Reads)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} {getattr(self, name)!r}: must be one of {', '.join(get_args(kind))}")
        if self.shape.num_outputs != len(self.candidates):
            raise ValueError(f"{self.shape.num_outputs} outputs for {len(self.candidates)} candidates")
        check_reads(self.reads, self.head, self.shape.inputs)


def check_reads(reads: Reads, head: Head, inputs: Sequence[Input]) -> None:
    """Raise ValueError for what a policy of this kind cannot predict or read."""
    if reads == "step" and head != "tau":
        raise ValueError(f"head {head!r} with reads 'step': must be 'tau', a step's choice depends on its cost")
    if reads == "step" and "probs" in inputs:
        raise ValueError("input 'probs' with reads 'step': the distribution is known after the prefill only")
    if reads == "prefill" and "anchor" in inputs:
        raise ValueError("input 'anchor' with reads 'prefill': must be of reads 'step'")


class LearnedPolicy:
    """A block size (head `class`) or a forecast (head `tau`) for every prefill. Runs where its input lies.

    `costs` are the step costs that the objective "throughput" was trained with; those of the machine at hand are the
    engine's business. `record` is what came of its forecasts wherever this object is used.
    """

    def __init__(self, info: PolicyInfo, network: PolicyNetwork, costs: StepCosts | None = None) -> None:
        if (costs is None) == (info.objective == "throughput"):
            raise ValueError(f"objective {info.objective!r}: {'needs' if costs is None else 'has no'} step costs")
        self.info, self.costs = info, costs
        self.network = network.eval().requires_grad_(False)
        self._folded: FoldedNetwork | None = None
        self.forget()

    def forget(self) -> None:
        """Start a new record of what came of forecasts."""
        self.record = TrackRecord(POLICY_DOUBT, MEMORY)

    @property
    def candidates(self) -> CandidateSet:
        return self.info.candidates

    def __call__(self, prefill: Prefill) -> int | Forecast:
        features = self._features(prefill)
        outputs = self._run(features)[0]
        if self.info.head == "class":
            return self.candidates[int(outputs.argmax())]
        return LearnedForecast(self, features.scalars[0].tolist(), self._taus(outputs[None])[0])

    @torch.inference_mode()
    def outputs(self, prefill: Prefill) -> Tensor:
        """The network's outputs [K]. Raises ValueError for another vocabulary, or vectors of another size."""
        return self._run(self._features(prefill))[0]

    @torch.inference_mode()
    def read(self, forecasts: Sequence["LearnedForecast"], contexts: Tensor, anchors: Tensor) -> None:
        """Predict the next steps of some requests: contexts [R, draft hidden], anchors [R, target hidden]."""
        device = contexts.device
        scalars_of = torch.tensor([forecast.scalars for forecast in forecasts], device=device)
        probs = no_probs(len(forecasts), device)
        taus = self._taus(self._run(Features(probs, contexts.float(), anchors.float(), scalars_of)))
        for forecast, of_one in zip(forecasts, taus, strict=True):
            forecast.expected = of_one

    def _run(self, features: Features) -> Tensor:
        device = features.scalars.device
        if self._folded is None or self._folded.device != device:
            self._folded = self.network.to(device).folded()
        return self._folded(features)

    def _taus(self, outputs: Tensor) -> list[tuple[float, ...]]:
        """What is expected of each request: outputs [R, K] of a head `tau`."""
        return [tuple(row) for row in expected_taus(outputs, tuple(self.candidates), self.info.reads).tolist()]

    def _features(self, prefill: Prefill) -> Features:
        shape, device = self.info.shape, prefill.logits.device
        if prefill.logits.shape != (shape.vocab_size,):
            raise ValueError(f"logits {tuple(prefill.logits.shape)}: the policy's vocabulary is {shape.vocab_size}")
        for name, vector, wanted in (
            ("context", prefill.context, shape.context_size),
            ("anchor", prefill.anchor, shape.anchor_size),
        ):
            if name in shape.inputs and (vector is None or len(vector) != wanted):
                found = "no vector" if vector is None else f"size {len(vector)}"
                raise ValueError(f"{name}: {found}; the policy's has size {wanted}")
        probs = sparse_probs(prefill.probs, self.info.threshold)
        values = scalars(probs.probs, prefill.num_prompt_tokens, prefill.temperature)
        nothing = torch.zeros(0, device=device)
        context, anchor = (nothing if x is None else x.float() for x in (prefill.context, prefill.anchor))
        return Features(probs, context[None], anchor[None], torch.tensor([values], device=device))

    def check(self, pair: Pair) -> None:
        """Raise ValueError, naming both, unless `pair` is the one the policy was trained for."""
        if (self.info.pair, self.info.shape.vocab_size) != (pair.id, pair.vocab_size):
            made_for = _describe(self.info.pair, self.info.shape.vocab_size)
            raise ValueError(f"policy made for {made_for}; this pair is {_describe(pair.id, pair.vocab_size)}")


def expected_taus(outputs: Tensor, candidates: Sequence[int], reads: Reads) -> Tensor:
    """Tokens of a step with each candidate, 1 to the block size: outputs [R, K] of a head `tau` -> [R, K].

    Of an answer they are the outputs themselves. Of a step an output is the logit of the share of its slots, beyond
    those of the candidate before, that are accepted.
    """
    if reads == "step":
        return 1 + (slot_gaps(candidates).to(outputs) * outputs.clamp(-MAX_LOGIT, MAX_LOGIT).sigmoid()).cumsum(dim=1)
    return outputs.clamp(min=1).minimum(torch.tensor(candidates).to(outputs))


def slot_gaps(candidates: Sequence[int]) -> Tensor:
    """Slots that each candidate has beyond those of the one before, [K] float32; the anchor is the first one's."""
    return _gaps(tuple(candidates))


@lru_cache
@torch.inference_mode(False)
def _gaps(candidates: tuple[int, ...]) -> Tensor:
    return torch.tensor([1, *candidates], dtype=torch.float32).diff()


class LearnedForecast:
    """What a learned policy expects of a request, corrected by what came of it in this request and in all.

    `expected` are the tokens of the next step with each candidate by the policy's word; one that reads every step
    sets them anew.
    """

    def __init__(self, policy: LearnedPolicy, scalars_of: Sequence[float], expected: tuple[float, ...]) -> None:
        self.candidates = policy.candidates
        self.reader = policy if policy.info.reads == "step" else None
        self.scalars = scalars_of
        self.expected = expected
        self._record = TrackRecord(REQUEST_DOUBT, prior=policy.record)

    @property
    def taus(self) -> tuple[float, ...]:
        ratio = self._record.ratio
        return tuple(
            min(1 + ratio * (tokens - 1), size) for size, tokens in zip(self.candidates, self.expected, strict=True)
        )

    def observe(self, block_size: int, num_accepted: int) -> None:
        if block_size in self.candidates.sizes:  # the last block of an answer may be cut short
            self._record.add(self.expected[self.candidates.sizes.index(block_size)] - 1, num_accepted)


def _describe(pair: PairId, vocab_size: int) -> str:
    return (
        f"target {pair.target}@{pair.target_revision} with draft {pair.draft}@{pair.draft_revision} "
        f"(vocabulary {vocab_size})"
    )


# --- save and load ---
