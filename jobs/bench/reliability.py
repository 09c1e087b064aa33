"""Reliability of acceptance probabilities in decoding: expected and observed acceptance by decile.

Counted are the draft's verified tokens whose parent was accepted, each with its acceptance probability in that step.
The untrained model and a policy of kind step decode the same prompts, greedily and sampled; both are updated while
decoding. The last column is the mean error, weighted by tokens.

    python jobs/bench/reliability.py --policy workflows/policies/policy-step
"""

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from blockpilot.control.acceptance import UNTRAINED, AcceptanceModel, Prior
from blockpilot.control.controller import Controller, StepOutcome
from blockpilot.control.cost import StepPrice
from blockpilot.engine.engine import Engine
from blockpilot.evaluation.pricing import measure_price
from blockpilot.evaluation.tables import markdown
from blockpilot.native.growing import NUM_CONTEXTS
from blockpilot.pairs.loading import Pair
from blockpilot.policy.reliability import NUM_BINS, Bin, mean_error
from blockpilot.policy.store import load_step_policy
from blockpilot.prompts.files import load_prompts
from blockpilot.types import Request, Sampling
from jobs.common.cluster import num_cores
from jobs.common.config import Config, PairConfig, Place, main

CONTEXT = 192  # tokens of a row, for the step cost


class ReliabilityConfig(Config):
    """Pair, policy and workload."""

    pair: PairConfig = PairConfig()
    policy: Place | None = None
    """A policy of kind step, to measure in addition to the untrained model."""
    prompts: tuple[str, ...] = ("gsm8k", "humaneval", "mt-bench", "mbpp")
    """Prompt sets and files."""
    num_prompts: int = Field(default=16, ge=1)
    """Maximum prompts of each set."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Sampling temperatures; 0 is greedy."""
    rows: int = Field(default=1, ge=1)
    """Requests that decode together."""
    max_new_tokens: int = Field(default=48, ge=2)
    """Maximum tokens of an answer."""


class RecordingController(Controller):
    """Controller that counts verified and accepted tokens by decile of their acceptance probability."""

    def __init__(self, model: AcceptanceModel, price: StepPrice) -> None:
        super().__init__(model, price)
        self._sums: NDArray[np.float64] = np.zeros((3, NUM_BINS))  # tokens, their probabilities, accepted ones

    @property
    def bins(self) -> list[Bin]:
        """The deciles that have tokens."""
        return [Bin(int(num), expected / num, right / num) for num, expected, right in self._sums.T.tolist() if num]

    def learn(self, outcome: StepOutcome, seconds: float) -> None:
        super().learn(outcome, seconds)
        if outcome.proposal is None or outcome.verified is None:
            return
        verified = outcome.verified()
        contexts = np.minimum(verified.num_later, NUM_CONTEXTS - 1)
        chances = outcome.proposal.chances.reshape(NUM_CONTEXTS, -1)[contexts, verified.choice_index]
        deciles = np.minimum((chances * NUM_BINS).astype(int), NUM_BINS - 1)
        for total, weights in zip(self._sums, (None, chances, verified.right), strict=True):
            total += np.bincount(deciles, weights, NUM_BINS)


def run(config: ReliabilityConfig) -> dict[str, list[Bin]]:
    """Print a table; returns the bins of its rows. Raises ValueError for a policy of another pair or kind."""
    torch.set_num_threads(num_cores())
    pair = config.pair.load()
    pair.need_draft("acceptance probabilities of drafted tokens")
    priors = {"untrained": UNTRAINED}
    if config.policy is not None:
        priors["trained"] = policy = load_step_policy(config.policy)
        policy.check(pair)
    texts = [p.encode(pair.tokenizer) for name in config.prompts for p in load_prompts(name, config.num_prompts)]
    price = measure_price(pair, config.rows, CONTEXT)
    bins = {
        f"{name}, T={temperature:g}": _decoded(config, pair, texts, prior, price, temperature)
        for temperature in config.temperatures
        for name, prior in priors.items()
    }
    print(f"{len(texts)} prompts, {config.rows} at a time:\n\n{markdown([_cells(*item) for item in bins.items()])}")
    return bins


def _decoded(
    config: ReliabilityConfig,
    pair: Pair,
    texts: list[tuple[int, ...]],
    prior: Prior,
    price: StepPrice,
    temperature: float,
) -> list[Bin]:
    controller = RecordingController(AcceptanceModel(pair.block_size - 1, prior), price)
    max_length = min(max(map(len, texts)) + config.max_new_tokens, pair.max_length)
    engine = Engine(pair, num_slots=config.rows, max_length=max_length, controller=controller)
    for seed, text in enumerate(texts):
        sampling = Sampling(temperature, seed=seed)
        engine.add(Request(text, config.max_new_tokens, sampling, stop_token_ids=pair.stop_token_ids, lookup=False))
    while not engine.idle:
        engine.step()
    return controller.bins


def _cells(name: str, bins: list[Bin]) -> dict[str, str]:
    by_decile = {int(b.expected * NUM_BINS): f"{b.expected:.2f} {b.accepted:.2f}" for b in bins}
    deciles = {f"{decile / NUM_BINS:.1f}": by_decile.get(decile, "-") for decile in range(NUM_BINS)}
    error = f"{mean_error(bins):.3f}" if bins else "-"
    return {"expected, accepted": name} | deciles | {"tokens": str(sum(b.num_nodes for b in bins)), "error": error}


if __name__ == "__main__":
    main(ReliabilityConfig, run)
