"""Look-up diagnostic of a policy of kind `prompt`: its rate on the recorded outcomes of validation prompts.

This is not a result to report: nothing is decoded, and early stopping has used the same prompts. The evaluation on
held-out prompts decides.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from blockpilot.evaluation.oracle import gain, oracle, potential
from blockpilot.policy.dataset import Examples
from blockpilot.policy.network import PolicyNetwork
from blockpilot.policy.training import FitTask, predict


class LookupReport(NamedTuple):
    """Rates of a policy and of the alternatives over all examples, as `FitTask.table` defines them."""

    num_examples: int
    accuracy: float
    """Share of examples for which the policy selects the label."""
    accuracy_best_fixed: float
    policy: float
    best_fixed: float
    random: float
    """Rate of candidates chosen at random, once per example."""
    oracle: float
    """The largest possible rate, with hindsight."""
    best_fixed_block_size: int
    """The block size with the highest rate on the training examples."""
    gain: float
    """policy / best_fixed - 1, with its 95% interval over prompts."""
    gain_low: float
    gain_high: float
    share_captured: float
    """The policy's share of the oracle's gain over the best fixed block size."""

    @property
    def claims_gain(self) -> bool:
        return self.gain_low > 0


def lookup_report(network: PolicyNetwork, task: FitTask, train: Examples, validation: Examples) -> LookupReport:
    """Rates of the policy and of the alternatives on the validation prompts; needs at least two."""
    task = task.to(torch.device("cpu"))
    best_block_size = potential(task.table(train.taus), task.candidates).best_fixed
    table, fixed = task.table(validation.taus), np.full(len(validation), task.candidates.index(best_block_size))
    chosen, labels = predict(network, validation).cpu().argmax(dim=1).numpy(), task.labels(validation.taus).numpy()
    drawn = torch.randint(len(task.candidates), chosen.shape, generator=torch.Generator().manual_seed(0)).numpy()
    policy_rate, fixed_rate, oracle_rate = table.rate(chosen), table.rate(fixed), table.rate(oracle(table))
    interval = gain(table, chosen, fixed)
    return LookupReport(
        num_examples=len(validation),
        accuracy=float((chosen == labels).mean()),
        accuracy_best_fixed=float((labels == fixed).mean()),
        policy=policy_rate,
        best_fixed=fixed_rate,
        random=table.rate(drawn),
        oracle=oracle_rate,
        best_fixed_block_size=best_block_size,
        gain=interval.value,
        gain_low=interval.low,
        gain_high=interval.high,
        share_captured=(policy_rate - fixed_rate) / (oracle_rate - fixed_rate)
        if oracle_rate > fixed_rate
        else math.nan,
    )
