"""The node model: chances of a draft's choices, as they come out, in place of what the draft thinks of them.

A draft is too sure of some choices and not sure enough of others, and it does not know which choice above was made:
what follows a second choice is right less often than what follows a first one (arXiv 2604.12989 has trees of the
draft's own probabilities). Logistic regressions calibrate them, one for slots of temperature 0 and one for slots that
are drawn: a step waits for them, and a network brings no more (LOG.md).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from blockpilot.drafts.choices import own_chances
from blockpilot.types import Candidates

NUM_CONTEXTS = 3  # none, one, or more choices above that are no first ones
FEATURES = "own_logit", "log_prob", "to_first", "to_next", "inverse_depth"
LEAST_SCORE, LEAST_CHANCE = -30.0, 1e-4
DECAY = 1e-4  # of squared weights, in nats
MAX_ITERATIONS = 200


def features(found: Candidates, depths: Tensor) -> Tensor:
    """FEATURES of every choice: [N, k, F]; depths [N] are those of the slots, from 0 on."""
    scores, log_probs = (values.float().clamp(min=LEAST_SCORE) for values in (found.scores, found.log_probs))
    own = own_chances(found._replace(scores=scores, log_probs=log_probs))[0].logit(LEAST_CHANCE)
    to_next = torch.zeros_like(scores)
    to_next[:, :-1] = scores[:, :-1] - scores[:, 1:]
    inverse_depth = (1 + depths).reciprocal()[:, None].expand_as(scores)
    return torch.stack([own, log_probs, scores - scores[:, :1], to_next, inverse_depth], dim=-1)


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
        kinds = drawn.long()
        logits = known[..., FEATURES.index("own_logit")] + torch.matmul(known, self.weight[kinds][:, :, None])[..., 0]
        first, later = self.of_context[kinds].transpose(0, 1).split(1, dim=-1)
        found: Tensor = logits + torch.cat([first, later.expand(-1, -1, known.shape[1] - 1)], dim=-1)
        return found

    def chances(self, found: Candidates, depths: Sequence[int]) -> Tensor:
        """[NUM_CONTEXTS, N, k] of what a draft proposes for depths[r] positions of each row: they fall along k."""
        places = torch.tensor([i for depth in depths for i in range(depth)], device=found.scores.device)
        chances = self.forward(features(found, places), found.drawn).sigmoid()
        chances = chances.where(found.scores > -math.inf, 0.0)  # of what cannot be drawn
        return (chances / chances.sum(dim=-1, keepdim=True).clamp(min=1)).cummin(dim=-1).values


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
        logits = _logits(model, known, outcomes)
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
    learned = _logits(model, known, outcomes).sigmoid()
    rights = _rights(outcomes)
    own = own_chances(outcomes.found)[0].clamp(LEAST_CHANCE, 1 - LEAST_CHANCE)
    ours, theirs = (
        float(functional.binary_cross_entropy(p, rights, reduction="sum")) / max(len(outcomes), 1)
        for p in (learned, own)
    )
    return ours, theirs


def _logits(model: NodeModel, known: Tensor, outcomes: Outcomes) -> Tensor:
    """[S, k], each slot's in its context."""
    contexts = outcomes.num_passed.clamp(max=NUM_CONTEXTS - 1)
    logits: Tensor = model(known, outcomes.found.drawn)[contexts, torch.arange(len(outcomes))]
    return logits


def _rights(outcomes: Outcomes) -> Tensor:
    """[S, k]: 1 for the choice that was right."""
    return (outcomes.ranks[:, None] == torch.arange(outcomes.found.scores.shape[1])).float()
