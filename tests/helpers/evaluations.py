"""Evaluations of the tiny pair: prompts, policies, step prices, plans, and the actor as a plain class."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from blockpilot.control.cost import StepPrice
from blockpilot.device import device_name
from blockpilot.evaluation.measurement import RequestTiming
from blockpilot.evaluation.statistics import MethodRun
from blockpilot.pairs.loading import Pair
from blockpilot.policy.store import save_policy
from blockpilot.prompts.files import Prompt
from blockpilot.types import PairId
from helpers.policies import tiny_policy
from helpers.prices import price
from jobs.common.registry import Version
from jobs.evaluation.actor import Evaluator
from jobs.evaluation.inputs import AR, EvaluateConfig, Plan, Swept, group

QUESTIONS = [f"question {i}?" for i in range(8)]
SWEPT = [f"swept {i}?" for i in range(4)]
CANDIDATES = (2, 3, 4)
SIZES = (1, *CANDIDATES)
NUM_TOKENS = 12
FIXED = [AR, "B=2", "B=3", "B=4"]


def prompt_file(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def changed(config: EvaluateConfig, **changes: object) -> EvaluateConfig:
    return config.model_copy(update=changes)


def write_policy(directory: Path, pair: Pair, block_size: int = 3) -> Path:
    """A policy that always chooses one block size; without it the engine would use the trained size, 4."""
    outputs = [float(size == block_size) for size in CANDIDATES]
    save_policy(tiny_policy(pair.id, pair.vocab_size, CANDIDATES, outputs=outputs), directory)
    return directory


def retrained(pair: Pair) -> Pair:
    return dataclasses.replace(pair, id=pair.id._replace(draft_revision="other"))


def price_here(pair: PairId, **coefficients: float) -> StepPrice:
    """Step cost of a pair on this device."""
    return price(pair=pair, device=device_name(torch.device("cpu")), **coefficients)


def plan_of(
    config: EvaluateConfig,
    texts: Sequence[Prompt],
    policies: Mapping[str, Path] | None = None,
    sweep: Swept | None = None,
    version: Version | None = None,
    champion: int | None = None,
) -> Plan:
    groups = group(texts, config.group_size, config.mixed)
    return Plan(tuple(texts), groups, sweep, dict(policies or {}), version, champion)


class Watched(Evaluator):
    """The actor, recording what it decoded: by method, in the order in which they were interleaved."""

    def __init__(self, config: EvaluateConfig, plan: Plan) -> None:
        super().__init__(config, plan)
        self.decoded: list[dict[str, list[RequestTiming]]] = []
        self.setting = self.load()
        self.decoded.clear()

    def _decode(self, *arguments: object) -> dict[str, list[RequestTiming]]:
        measured = super()._decode(*arguments)  # type: ignore[arg-type]
        self.decoded.append(measured)
        return measured

    def call(self, method: str, *arguments: int) -> list[MethodRun]:
        """Result of a method, called as through `jobs.common.cluster.lone_actor`."""
        runs: list[MethodRun] = getattr(self, method)(*arguments)
        return runs
