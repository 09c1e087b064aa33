"""The node model: chances of a draft's choices, as they come out, in place of what the draft thinks of them.

A draft is too sure of some choices and not sure enough of others, and it does not know which choice above was made:
what follows a second choice is right less often than what follows a first one (arXiv 2604.12989 has trees of the
draft's own probabilities). Logistic regressions calibrate them, one for slots of temperature 0 and one for slots that
are drawn: a step waits for them, and a network brings no more (LOG.md).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from blockpilot.drafts.choices import own_chances
from blockpilot.types import Candidates

Array = NDArray[Any]

NUM_CONTEXTS = 3  # none, one, or more choices above that are no first ones
FEATURES = "own_logit", "log_prob", "to_first", "to_next", "inverse_depth"  # in this order
LEAST_SCORE, LEAST_CHANCE = -30.0, 1e-4
DECAY = 1e-4  # of squared weights, in nats
MAX_ITERATIONS = 200


def features(found: Candidates, depths: Tensor) -> Tensor:
    """FEATURES of every choice: [N, k, F]; depths [N] are those of the slots, from 0 on."""
    on_host = (values.numpy(force=True) for values in (found.scores, found.log_probs, found.drawn, depths))
    return torch.from_numpy(_features(*on_host))


def _features(scores: Array, log_probs: Array, drawn: Array, depths: Array) -> Array:
    found = np.empty((*scores.shape, len(FEATURES)), dtype=np.float32)
    scores, log_probs = (np.maximum(values, LEAST_SCORE, dtype=np.float32) for values in (scores, log_probs))
    shares = np.exp(scores - scores[:, :1])
    own = np.where(drawn[:, None], shares / shares.sum(axis=1, keepdims=True), np.exp(log_probs))
    own = own.clip(LEAST_CHANCE, 1 - LEAST_CHANCE)
    found[..., 0], found[..., 1], found[..., 2] = np.log(own / (1 - own)), log_probs, scores - scores[:, :1]
    found[:, :-1, 3], found[:, -1, 3] = scores[:, :-1] - scores[:, 1:], 0
    found[..., 4] = (1 / (1 + depths))[:, None]
    return found


def _logits(known: Any, kinds: Any, weight: Any, of_context: Any) -> Any:
    """[N, NUM_CONTEXTS, k] of FEATURES [N, k, F] of slots of these kinds [N]; arrays or tensors, as it is given."""
    learned = known[..., 0] + (known @ weight[kinds][:, :, None])[..., 0]
    by_context = of_context[kinds]
    found = learned[:, None] + by_context[..., 1:]
    found[..., 0] = learned[:, None, 0] + by_context[..., 0]
    return found


class NodeModel(nn.Module):
    """Logits of the chance that the target makes a choice where it has made those above.

    What it learns is added to the logit of the draft's own chance: weights of the features, and an addition by
    context for the first choice of a slot and for later ones. Both parameters have one row for slots of temperature 0
    and one for slots that are drawn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, len(FEATURES)))
        self.of_context = nn.Parameter(torch.zeros(2, NUM_CONTEXTS, 2))

    def forward(self, known: Tensor, drawn: Tensor) -> Tensor:
        """Logits [NUM_CONTEXTS, N, k] for `features` [N, k, F] of slots that are `drawn` [N], after none, one, or
        more choices that are no first ones.
        """
        found: Tensor = _logits(known, drawn.long(), self.weight, self.of_context).transpose(0, 1)
        return found

    def chances(self, found: Candidates, depths: Sequence[int]) -> Tensor:
        """[NUM_CONTEXTS, N, k] of what a draft proposes for depths[r] positions of each row: they fall along k.

        On the host, where they are wanted: twenty calls for a few hundred numbers cost torch ten times as much.
        """
        scores, log_probs, drawn = (each.numpy(force=True) for each in (found.scores, found.log_probs, found.drawn))
        places = np.array([i for depth in depths for i in range(depth)])
        parameters = self.weight.numpy(force=True), self.of_context.numpy(force=True)
        logits = _logits(_features(scores, log_probs, drawn, places), drawn.astype(int), *parameters)
        chances = 0.5 + 0.5 * np.tanh(0.5 * logits)  # the logistic function, which cannot overflow so
        chances = np.where((scores > -math.inf)[:, None], chances, 0)  # what cannot be drawn has none
        chances /= np.maximum(chances.sum(axis=-1, keepdims=True), 1)
        return torch.from_numpy(np.minimum.accumulate(chances, axis=-1).swapaxes(0, 1))


class Proposed(NamedTuple):
    """Steps of a draft that proposed k choices for D slots, and which of them were right.

    ranks [E, D] int8: -1 is none of the k, -2 unknown; what follows either of them was never reached. scores and
    log_probs [E, D, k]. drawn [E] says of which steps tokens are drawn.
    """

    ranks: Tensor
    scores: Tensor
    log_probs: Tensor
    drawn: Tensor

    def __len__(self) -> int:
        return len(self.ranks)


class Outcomes(NamedTuple):
    """Slots whose path was right up to them, and which choice then was.

    ranks [S] int64 is its place among the k that were proposed, -1 for none of them; depths, num_passed [S].
    """

    found: Candidates
    depths: Tensor
    num_passed: Tensor
    ranks: Tensor

    def __len__(self) -> int:
        return len(self.ranks)


def outcomes_of(steps: Proposed) -> Outcomes:
    """Slots of the steps that were reached."""
    ranks, scores, log_probs, drawn = steps
    right = (ranks >= 0).long().cumprod(dim=1)
    reached = functional.pad(right, (1, 0), value=1)[:, :-1].bool() & (ranks >= -1)
    passed = functional.pad((ranks > 0).long().cumsum(dim=1), (1, 0))[:, :-1]
    example, place = reached.nonzero(as_tuple=True)
    no_tokens = torch.zeros(len(place), 0, dtype=torch.int64)
    found = Candidates(no_tokens, scores[reached].float(), log_probs[reached].float(), drawn[example])
    return Outcomes(found, place, passed[reached], ranks[reached].long())


def fit_nodes(outcomes: Outcomes) -> NodeModel:
    """The node model of the least cross entropy of every choice's being right. On the CPU."""
    model = NodeModel().double()
    known, rights = features(outcomes.found, outcomes.depths).double(), _rights(outcomes).double()
    parameters = list(model.parameters())
    optimizer = torch.optim.LBFGS(parameters, max_iter=MAX_ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = _after_contexts(model, known, outcomes)
        total = functional.binary_cross_entropy_with_logits(logits, rights)
        total = total + DECAY * sum(parameter.square().sum() for parameter in parameters)
        total.backward()
        return total

    optimizer.step(loss)
    return model.float().eval().requires_grad_(False)


@torch.no_grad()
def node_losses(model: NodeModel, outcomes: Outcomes) -> tuple[float, float]:
    """Nats a slot of the model, and of the draft's own probabilities."""
    known = features(outcomes.found, outcomes.depths)
    learned = _after_contexts(model, known, outcomes).sigmoid()
    rights = _rights(outcomes)
    own = own_chances(outcomes.found)[0].clamp(LEAST_CHANCE, 1 - LEAST_CHANCE)
    ours, theirs = (
        float(functional.binary_cross_entropy(p, rights, reduction="sum")) / max(len(outcomes), 1)
        for p in (learned, own)
    )
    return ours, theirs


def _after_contexts(model: NodeModel, known: Tensor, outcomes: Outcomes) -> Tensor:
    """[S, k], each slot's in its context."""
    contexts = outcomes.num_passed.clamp(max=NUM_CONTEXTS - 1)
    logits: Tensor = model(known, outcomes.found.drawn)[contexts, torch.arange(len(outcomes))]
    return logits


def _rights(outcomes: Outcomes) -> Tensor:
    """[S, k]: 1 for the choice that was right."""
    return (outcomes.ranks[:, None] == torch.arange(outcomes.found.scores.shape[1])).float()
