"""What the recorded outcomes of held-back prompts say of a policy: whether it is worth decoding with.

A diagnostic and never a result: outcomes are looked up, nothing is run, and early stopping has seen the prompts. The
evaluation on held-out prompts decides.

Of kind `step` it is the decoding that is looked up: what is accepted at a place does not depend on
how decoding came there, so a policy can be walked through a recorded answer. One that goes further where it is easy
comes to hard places more often, which an average over places would hide.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockpilot.evaluation.oracle import Array, Table, gain
from blockpilot.evaluation.ratio import largest_ratio
from blockpilot.policy.dataset import Examples
from blockpilot.policy.network import PolicyNetwork
from blockpilot.policy.training import FitTask, predict


class LookupReport(NamedTuple):
    """Rates are tokens per cost of a step (`FitTask.table`), over whole decodings."""

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
    r2: float
    """Share of the variance of taus that is predicted, mean over candidates; not a number for kind `prompt`."""

    @property
    def claims_gain(self) -> bool:
        return self.gain_low > 0


def lookup_report(network: PolicyNetwork, task: FitTask, train: Examples, validation: Examples) -> LookupReport:
    """Look up what decoding the validation prompts, two or more, with the policy and without it would have cost."""
    task = task.to(torch.device("cpu"))
    num = len(task.candidates)
    fixed = max(range(num), key=lambda c: (_rate(decode(task, train, _always(train, c))), -c))
    outputs, taus = predict(network, validation).cpu(), validation.taus
    chosen, labels = task.chosen(outputs), task.labels(taus)
    by_policy, by_fixed = (decode(task, validation, columns) for columns in (chosen, _always(validation, fixed)))
    drawn = torch.randint(num, chosen.shape, generator=torch.Generator().manual_seed(0))
    policy, best_fixed = _rate(by_policy), _rate(by_fixed)
    oracle = _rate(decode(task, validation, hindsight(task, validation)))
    both = Table(*(np.stack(pair, axis=1) for pair in zip(by_fixed, by_policy, strict=True)))
    zeros = np.zeros(len(both.tokens), dtype=np.int64)
    gained = gain(both, zeros + 1, zeros)
    return LookupReport(
        num_examples=len(validation),
        accuracy=float((chosen == labels).double().mean()),
        accuracy_best_fixed=float((labels == fixed).double().mean()),
        policy=policy,
        best_fixed=best_fixed,
        random=_rate(decode(task, validation, drawn)),
        oracle=oracle,
        best_fixed_block_size=task.candidates[fixed],
        gain=gained.value,
        gain_low=gained.low,
        gain_high=gained.high,
        share_captured=(policy - best_fixed) / (oracle - best_fixed) if oracle > best_fixed else math.nan,
        r2=_explained(task.taus(outputs), taus) if task.kind == "step" else math.nan,
    )


def decode(task: FitTask, examples: Examples, chosen: Tensor) -> tuple[Array, Array]:
    """(tokens, seconds) [P] of decoding the examples' prompts, taking candidate chosen[e] where example e is met."""
    prompts = examples.prompt_of
    following = examples.following(chosen)
    met = torch.zeros(len(examples), dtype=torch.bool)
    at = (prompts.diff(prepend=torch.tensor([-1])) != 0).nonzero()[:, 0]
    while len(at):
        met[at] = True
        at = following[at]
        at = at[at < len(examples)]
    sums = torch.zeros(2, int(prompts[-1]) + 1, dtype=torch.float64)
    for of_prompts, values in zip(sums, task.table(examples.taus), strict=True):
        of_prompts.index_add_(0, prompts[met], values.gather(1, chosen[:, None])[met, 0].double())
    tokens, seconds = sums.numpy()
    return tokens, seconds


def hindsight(task: FitTask, examples: Examples) -> Tensor:
    """The choices [E] whose decoding has the highest rate of all."""
    tokens, seconds = (values.double().numpy() for values in task.table(examples.taus))
    num, size = tokens.shape
    following = np.stack([examples.following(_always(examples, c)).numpy() for c in range(size)], axis=1)

    def maximise(rate: float) -> tuple[Tensor, float]:
        worth = tokens - rate * seconds
        chosen, onward = np.zeros(num, dtype=np.int64), np.zeros(num + 1)
        for e in range(num - 1, -1, -1):  # onward: the most that is to be had from there to the prompt's end
            of_options = worth[e] + onward[following[e]]
            chosen[e] = best = of_options.argmax()
            onward[e] = of_options[best]
        return (found := torch.from_numpy(chosen)), _rate(decode(task, examples, found))

    return largest_ratio(maximise)[0]


def _always(examples: Examples, candidate: int) -> Tensor:
    return torch.full((len(examples),), candidate)


def _rate(decoded: tuple[Array, Array]) -> float:
    tokens, seconds = decoded
    return float(tokens.sum() / seconds.sum())


def _explained(outputs: Tensor, taus: Tensor) -> float:
    """R2 of the candidates that vary, averaged."""
    spread = taus.var(dim=0, correction=0)
    error = (outputs - taus).square().mean(dim=0)
    return float((1 - error / spread)[spread > 0].mean())
