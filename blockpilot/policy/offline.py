"""Look-up of a policy of kind `prompt` in the recorded outcomes of held-back prompts: is it worth decoding with?

A diagnostic and never a result: outcomes are looked up, nothing is run, and early stopping has seen the prompts. The
evaluation on held-out prompts decides.
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
    """Rates are tokens per cost of a step (`FitTask.table`), over all examples."""

    num_examples: int
    accuracy: float
    """Share of examples where the policy picks the label."""
    accuracy_best_fixed: float
    policy: float
    best_fixed: float
    random: float
    """Of candidates drawn at random, once."""
    oracle: float
    """The largest rate there is, in hindsight."""
    best_fixed_block_size: int
    """The block size with the highest rate on the training examples."""
    gain: float
    """policy / best_fixed - 1, with its 95% interval over prompts."""
    gain_low: float
    gain_high: float
    share_captured: float
    """Of the oracle's headroom over the best fixed block size."""

    @property
    def claims_gain(self) -> bool:
        return self.gain_low > 0


def lookup_report(network: PolicyNetwork, task: FitTask, train: Examples, validation: Examples) -> LookupReport:
    """Look up what decoding the validation prompts, two or more, with the policy and without it would have cost."""
    task = task.to(torch.device("cpu"))
    best = potential(task.table(train.taus), task.candidates).best_fixed
    table, fixed = task.table(validation.taus), np.full(len(validation), task.candidates.index(best))
    chosen, labels = predict(network, validation).cpu().argmax(dim=1).numpy(), task.labels(validation.taus).numpy()
    drawn = torch.randint(len(task.candidates), chosen.shape, generator=torch.Generator().manual_seed(0)).numpy()
    policy, best_fixed, most = table.rate(chosen), table.rate(fixed), table.rate(oracle(table))
    gained = gain(table, chosen, fixed)
    return LookupReport(
        num_examples=len(validation),
        accuracy=float((chosen == labels).mean()),
        accuracy_best_fixed=float((labels == fixed).mean()),
        policy=policy,
        best_fixed=best_fixed,
        random=table.rate(drawn),
        oracle=most,
        best_fixed_block_size=best,
        gain=gained.value,
        gain_low=gained.low,
        gain_high=gained.high,
        share_captured=(policy - best_fixed) / (most - best_fixed) if most > best_fixed else math.nan,
    )
