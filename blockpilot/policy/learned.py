"""Learned policies: what chooses block sizes, out of a network (`network.py`), in two kinds.

`prompt` is BlockPilot's (arXiv 2606.31315): a logit for each candidate from the distribution after the prompt, and
the block size of the largest for the whole answer. `step` predicts the tokens of the next step with each candidate,
anew before every step, from what the draft is about to draft from: two thirds of the variance of acceptance is inside
an answer. The choice is made later, at the load there is then.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from blockpilot.control.calibration import TrackRecord
from blockpilot.control.cost import StepPrice
from blockpilot.drafts.choices import own_chances
from blockpilot.pairs.loading import Pair
from blockpilot.policy.network import (
    Kind,
    NetworkShape,
    PolicyFeatures,
    PolicyNetwork,
    SparseProbs,
    scalars,
    sparse_probs,
)
from blockpilot.policy.nodes import NodeModel
from blockpilot.types import MAX_BLOCK_SIZE, Candidates, CandidateSet, Forecast, PairId, Prefill

MAX_LOGIT = 8.0
POLICY_DOUBT, REQUEST_DOUBT = 100.0, 30.0  # expected tokens; of TrackRecord
MEMORY = 2000.0  # steps of requests

Objective = Literal["tau", "throughput"]
Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class PolicyInfo:
    """The pair a policy was trained for, its choices, and its provenance."""

    pair: PairId
    candidates: CandidateSet
    objective: Objective
    """What the choice makes the most of: tokens a step, or a second."""
    shape: NetworkShape
    threshold: float
    """Probabilities below it are taken as zero, in training and in use."""
    training: Mapping[str, Scalar] = field(default_factory=dict)
    """Provenance: seed, rows, sweep id, ... Not read by the policy."""

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            raise ValueError(f"objective {self.objective!r}: must be one of {', '.join(get_args(Objective))}")
        if self.shape.num_outputs != len(self.candidates):
            raise ValueError(f"{self.shape.num_outputs} outputs for {len(self.candidates)} candidates")

    @property
    def kind(self) -> Kind:
        return self.shape.kind


class LearnedPolicy:
    """A block size (kind `prompt`) or a forecast (kind `step`) for every prefill. Runs where its input lies.

    `price` is the step price that the objective "throughput" was trained with; that of the machine at hand is the
    engine's business. `nodes` gives the chances of what a draft proposes (kind `step`). `record` compares forecasts
    with acceptance wherever this object is used.
    """

    def __init__(
        self,
        info: PolicyInfo,
        network: PolicyNetwork,
        price: StepPrice | None = None,
        nodes: NodeModel | None = None,
    ) -> None:
        if (price is None) == (info.objective == "throughput"):
            raise ValueError(f"objective {info.objective!r}: {'needs a' if price is None else 'has no'} step price")
        self.info, self.price = info, price
        self.network = network.eval().requires_grad_(False)
        self.nodes = None if nodes is None else nodes.eval().requires_grad_(False)
        self._layers = self.network.layers()
        self.forget()

    def forget(self) -> None:
        """Start a new record of what came of forecasts."""
        self.record = TrackRecord(POLICY_DOUBT, MEMORY)

    @property
    def candidates(self) -> CandidateSet:
        return self.info.candidates

    @torch.inference_mode()
    def __call__(self, prefill: Prefill) -> int | Forecast:
        """Raises ValueError for another vocabulary, or vectors of another size."""
        features = self._features(prefill)
        outputs = self._run(features.probs, features.dense)
        if self.info.kind == "prompt":
            return self.candidates[int(outputs[0].argmax())]
        return LearnedForecast(self, features.scalars[0].tolist(), self._reaches(outputs)[0])

    @torch.inference_mode()
    def read(self, forecasts: Sequence["LearnedForecast"], contexts: Tensor, anchors: Tensor) -> None:
        """Predict the next steps of some requests: contexts [R, draft hidden], anchors [R, target hidden]."""
        scalars_of = torch.tensor([forecast.scalars for forecast in forecasts], device=contexts.device)
        outputs = self._run(None, torch.cat([contexts, anchors, scalars_of], dim=1))  # float32, as scalars are
        for forecast, expected in zip(forecasts, self._reaches(outputs), strict=True):
            forecast.expected = expected

    def chances(self, forecasts: Sequence["LearnedForecast"], found: Candidates, depths: Sequence[int]) -> Tensor:
        """By the node model; by the draft itself without one."""
        return own_chances(found) if self.nodes is None else self.nodes.chances(found, depths)

    def _run(self, probs: SparseProbs | None, dense: Tensor) -> Tensor:
        if self._layers.head.device != dense.device:
            self._layers = self.network.to(dense.device).layers()
        return self._layers.outputs(self._layers.hidden(probs, dense))

    def _reaches(self, outputs: Tensor) -> list[list[float]]:
        """Chance that each position is accepted, of each request: outputs [R, K] of kind `step`."""
        gaps, found = slot_gaps(self.candidates), list[list[float]]()
        for of_row in outputs.tolist():  # numbers of the host: each call of torch takes longer than all of this
            shares = (share for share, gap in zip(map(_share, of_row), gaps, strict=True) for _ in range(gap))
            found.append(list(accumulate(shares, min)))
        return found

    def _features(self, prefill: Prefill) -> PolicyFeatures:
        shape, device = self.info.shape, prefill.logits.device
        if prefill.logits.shape != (shape.vocab_size,):
            raise ValueError(f"logits {tuple(prefill.logits.shape)}: the policy's vocabulary is {shape.vocab_size}")
        probs = sparse_probs(prefill.probs, self.info.threshold)
        values = scalars(probs.probs, prefill.num_prompt_tokens, prefill.temperature)
        scalars_of = torch.tensor([values], device=device)
        if shape.kind == "prompt":
            nothing = torch.zeros(1, 0, device=device)
            return PolicyFeatures(probs, nothing, nothing, scalars_of)
        context = _vector("context", prefill.context, shape.context_size)
        anchor = _vector("anchor", prefill.anchor, shape.anchor_size)
        return PolicyFeatures(probs, context, anchor, scalars_of)

    def check(self, pair: Pair) -> None:
        """Raise ValueError unless `pair` is the one the policy was trained for, or for too large a block size."""
        if self.candidates[-1] > MAX_BLOCK_SIZE:
            raise ValueError(f"policy with block size {self.candidates[-1]}: must be at most {MAX_BLOCK_SIZE}")
        if (self.info.pair, self.info.shape.vocab_size) != (pair.id, pair.vocab_size):
            made_for = _describe(self.info.pair, self.info.shape.vocab_size)
            raise ValueError(f"policy made for {made_for}; this pair is {_describe(pair.id, pair.vocab_size)}")


def expected_taus(outputs: Tensor, candidates: Sequence[int]) -> Tensor:
    """Tokens of a step with each candidate, 1 to the block size: outputs [R, K] of kind `step` -> [R, K].

    An output is the logit of the share of its drafted positions, beyond those of the candidate before, that are
    accepted.
    """
    gaps = outputs.new_tensor(slot_gaps(candidates))
    return 1 + (gaps * outputs.clamp(-MAX_LOGIT, MAX_LOGIT).sigmoid()).cumsum(dim=1)


def _share(output: float) -> float:
    """The logistic function of what the network says; least for what is no number, which would spoil all records."""
    return 1 / (1 + math.exp(-min(MAX_LOGIT, max(-MAX_LOGIT, output))))  # max keeps the first of numbers and NaN


def slot_gaps(candidates: Iterable[int]) -> list[int]:
    """Positions of each candidate beyond those of the one before, [K]; the anchor is the first one's."""
    return [size - before for before, size in pairwise((1, *candidates))]


class LearnedForecast:
    """Expected acceptance of a request's steps, corrected by the acceptance in this request and in all.

    `expected` are the chances that each position of the next step is accepted, by the network; `policy.read` sets
    them anew.
    """

    def __init__(self, policy: LearnedPolicy, scalars_of: Sequence[float], expected: Sequence[float]) -> None:
        self.reader = policy
        self.scalars = scalars_of
        self.expected = expected
        self._record = TrackRecord(REQUEST_DOUBT, prior=policy.record)

    @property
    def reach(self) -> Sequence[float]:
        ratio = self._record.ratio
        return [min(1.0, ratio * chance) for chance in self.expected]

    def observe(self, depth: int, num_verified: int, num_accepted: int) -> None:
        self._record.add(sum(self.expected[:depth]), num_accepted)


def _vector(name: str, vector: Tensor | None, wanted: int) -> Tensor:
    """A vector of the prefill as a batch of one, [1, wanted]."""
    if vector is None or len(vector) != wanted:
        found = "no vector" if vector is None else f"size {len(vector)}"
        raise ValueError(f"{name}: {found}; the policy's has size {wanted}")
    return vector.float()[None]


def _describe(pair: PairId, vocab_size: int) -> str:
    return (
        f"target {pair.target}@{pair.target_revision} with draft {pair.draft}@{pair.draft_revision} "
        f"(vocabulary {vocab_size})"
    )
