"""The node model: chances of a draft's choices, as they come out, in place of what the draft thinks of them.

A draft is too sure of some choices and not sure enough of others, and it does not know which choice above was made:
what follows a second choice is right less often than what follows a first one (arXiv 2604.12989 has trees of the
draft's own probabilities). The model sees of a choice its scores, their distances to the first and the next, the
entropy of the slot, rank and depth, and how many choices above are no first ones.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from blockpilot.drafts.choices import own_chances
from blockpilot.types import Candidates

NUM_CONTEXTS = 3  # none, one, or more choices above that are no first ones
NUM_FEATURES, OWN_LOGIT = 15, 0  # and the place of the logit of the draft's own chance
LEAST_STEPS = 360
LEAST_SCORE, LEAST_CHANCE = -30.0, 1e-4


def features(found: Candidates, depths: Tensor) -> Tensor:
    """What is known of every choice: [N, k, NUM_FEATURES]; depths [N] are those of the slots, from 0 on."""
    scores, log_probs = (values.float().clamp(min=LEAST_SCORE) for values in (found.scores, found.log_probs))
    own = own_chances(found._replace(scores=scores, log_probs=log_probs))[0].clamp(LEAST_CHANCE, 1 - LEAST_CHANCE)
    probs = log_probs.exp()
    ranks = torch.arange(scores.shape[1], device=scores.device).float().expand_as(scores)
    of_slot = (
        -(probs * log_probs).sum(dim=1),
        probs.sum(dim=1),
        scores[:, 0] - scores[:, min(1, scores.shape[1] - 1)],
        depths.float(),
        1 / (1 + depths.float()),
        (depths == 0).float(),
        found.drawn.float(),
    )
    of_choice = (
        own.logit(),
        own.log(),
        scores,
        log_probs,
        scores - scores[:, :1],
        functional.pad(scores[:, :-1] - scores[:, 1:], (0, 1)),
        ranks,
        (ranks == 0).float(),
    )
    return torch.stack([*of_choice, *(values[:, None].expand_as(scores) for values in of_slot)], dim=-1)


class NodeModel(nn.Module):
    """Logits of the chance that the target makes a choice where it has made those above.

    What it learns is added to the logit of the draft's own chance.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.hidden = hidden
        self.layers = nn.Sequential(
            nn.Linear(NUM_FEATURES + NUM_CONTEXTS, hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
            nn.SiLU(),
            nn.Linear(hidden, 1),
        )
        last = self.layers[-1]
        for parameter in last.parameters():
            nn.init.zeros_(parameter)  # before it has learned anything the draft's own chances
        self.register_buffer("mean", torch.zeros(NUM_FEATURES))
        self.register_buffer("scale", torch.ones(NUM_FEATURES))

    def forward(self, known: Tensor, num_passed: Tensor) -> Tensor:
        """Of `features` [N, k, F], after num_passed [N] choices that are no first ones: [N, k]."""
        return self._outputs(known, self._of_contexts[num_passed.clamp(max=NUM_CONTEXTS - 1)][:, None])

    @property
    def _of_contexts(self) -> Tensor:
        """Addition of every context to the first layer, [NUM_CONTEXTS, hidden]."""
        return self._first.weight[:, NUM_FEATURES:].T

    @property
    def _first(self) -> nn.Linear:
        return cast(nn.Linear, self.layers[0])

    def _outputs(self, known: Tensor, of_context: Tensor) -> Tensor:
        """[..., k], of all shapes that of_context [..., k or 1, hidden] spans with `known` [N, k, F]."""
        weight, bias = self._first.weight[:, :NUM_FEATURES], self._first.bias
        hidden = functional.linear((known - self.mean) / self.scale, weight, bias)
        outputs: Tensor = self.layers[1:](hidden + of_context)
        return known[..., OWN_LOGIT] + outputs[..., 0]

    def chances(self, found: Candidates, depths: Sequence[int]) -> Tensor:
        """[NUM_CONTEXTS, N, k] of what a draft proposes for depths[r] positions of each row: they fall along k."""
        places = torch.tensor([i for depth in depths for i in range(depth)], device=found.scores.device)
        chances = self._outputs(features(found, places), self._of_contexts[:, None, None]).sigmoid()
        chances = chances.where(found.scores > -math.inf, 0.0)  # of what cannot be drawn
        return (chances / chances.sum(dim=-1, keepdim=True).clamp(min=1)).cummin(dim=-1).values


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


def outcomes_of(ranks: Tensor, scores: Tensor, log_probs: Tensor, drawn: Tensor) -> Outcomes:
    """Of steps whose draft proposed scores and log_probs [E, D, k], where ranks [E, D] int8 were right.

    A rank of -1 is none of the k, -2 unknown; what follows either of them was never reached. drawn [E] says of which
    steps tokens are drawn.
    """
    right = (ranks >= 0).long().cumprod(dim=1)
    reached = functional.pad(right, (1, 0), value=1)[:, :-1].bool() & (ranks >= -1)
    passed = functional.pad((ranks > 0).long().cumsum(dim=1), (1, 0))[:, :-1]
    example, place = reached.nonzero(as_tuple=True)
    no_tokens = torch.zeros(len(place), 0, dtype=torch.int64)
    found = Candidates(no_tokens, scores[reached].float(), log_probs[reached].float(), drawn[example])
    return Outcomes(found, place, passed[reached], ranks[reached].long())


def fit_nodes(
    outcomes: Outcomes, *, hidden: int = 32, epochs: int = 20, batch_size: int = 512, lr: float = 3e-3, seed: int = 0
) -> NodeModel:
    """A node model by the cross entropy of every choice's being right; equal for equal seeds. On the CPU.

    Few outcomes are seen more often, for LEAST_STEPS steps of the optimizer.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = NodeModel(hidden)
        known = features(outcomes.found, outcomes.depths)
        model.mean, model.scale = known.mean(dim=(0, 1)), known.std(dim=(0, 1)) + 1e-3
        rights = _rights(outcomes, known.shape[1])
        optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=1e-2)
        each = -(-len(outcomes) // batch_size)
        epochs = max(epochs, -(-LEAST_STEPS // each))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=epochs * each)
        for _ in range(epochs):
            for index in torch.randperm(len(outcomes)).split(batch_size):
                logits = model(known[index], outcomes.num_passed[index])
                optimizer.zero_grad()
                functional.binary_cross_entropy_with_logits(logits, rights[index]).backward()
                optimizer.step()
                schedule.step()
    return model.eval().requires_grad_(False)


@torch.no_grad()
def node_losses(model: NodeModel, outcomes: Outcomes) -> tuple[float, float]:
    """Nats a slot of the model, and of the draft's own probabilities."""
    known = features(outcomes.found, outcomes.depths)
    learned = model(known, outcomes.num_passed).sigmoid()
    rights = _rights(outcomes, known.shape[1])
    own = own_chances(outcomes.found)[0].clamp(LEAST_CHANCE, 1 - LEAST_CHANCE)
    ours, theirs = (
        float(functional.binary_cross_entropy(p, rights, reduction="sum")) / max(len(outcomes), 1)
        for p in (learned, own)
    )
    return ours, theirs


def _rights(outcomes: Outcomes, num_choices: int) -> Tensor:
    """[S, k]: 1 for the choice that was right."""
    return (outcomes.ranks[:, None] == torch.arange(num_choices)).float()
