"""Baselines: rules of published and shipped systems, in the same engine with the same step costs and exact text."""

import numpy as np

from blockpilot.control.acceptance import AcceptanceModel, Array, ObservedChoices, Proposal, logistic
from blockpilot.control.choose import Trees, seconds_of_more
from blockpilot.control.controller import Controller, DepthPlan, Planned
from blockpilot.control.cost import Load, StepPrice, passes
from blockpilot.drafts.choices import draft_probs
from blockpilot.native.growing import NUM_CONTEXTS
from blockpilot.types import Candidates


class DepthController(Controller):
    """Verifies every drafted token of a chain; running means choose the depth, as in Ollama and llama-server.

    For requests of layout "chain".
    """

    def select(self, trees: Trees, rates: Array, drafted: Load) -> Array:
        super().select(trees, rates, drafted)
        return trees.nodes.num


class WholeDraft(Controller):
    """Drafts at full depth in every row, and verifies the best nodes of all rows.

    With Margins as its model it is vLLM's adaptive verification: one budget for the chains of all rows,
    spent on the most probable tokens.
    """

    def plan(self, rows: Planned, other_load: Load) -> DepthPlan:
        return super().plan(rows, other_load)._replace(depths=rows.max_depths)


class LookupAlone(Controller):
    """Prompt lookup without a draft: vLLM's ngram, but only nodes with an expected gain are verified."""

    def plan(self, rows: Planned, other_load: Load) -> DepthPlan:
        return super().plan(rows, other_load)._replace(depths=np.zeros_like(rows.max_depths))


class LookupOrDraft(Controller):
    """Prompt lookup for rows whose text has a match, the draft for the others: the priorities of llama.cpp."""

    def plan(self, rows: Planned, other_load: Load) -> DepthPlan:
        plan = super().plan(rows, other_load)
        return plan._replace(depths=np.where(rows.kinds > 1, 0, plan.depths))


class TreeBudget(WholeDraft):
    """CaDDTree (arXiv 2606.01813): a node budget for each row's tree, chosen as if the row were alone."""

    def select(self, trees: Trees, rates: Array, drafted: Load) -> Array:
        nodes, row_drafted = trees.nodes, drafted.num_drafted // max(drafted.rows, 1)
        alone = Load(1, row_drafted, num_passes=passes([row_drafted], self.price.is_sequential))
        return np.array([_best_budget(tree, self.price, alone) for tree in nodes.chances * nodes.grown])


def _best_budget(node_probs: Array, price: StepPrice, drafted: Load) -> int:
    """Number of nodes, in order of their acceptance probabilities, that maximises the step's tokens per second."""
    expected_tokens = drafted.rows + np.concatenate([[0.0], node_probs.cumsum()])
    return int((expected_tokens / seconds_of_more(price, drafted, len(node_probs))).argmax())


class Margins(AcceptanceModel):
    """Acceptance probabilities of a chain's tokens by the margin between the draft's two best scores: a logistic
    regression for every position, updated after every token (vLLM's).
    """

    def __init__(self, deepest: int) -> None:
        super().__init__(deepest)
        self.margin_weights = np.tile([0.5, 0.5], (self.deepest, 1))  # weights of margin and 1
        self._covariances = np.tile(np.eye(2), (self.deepest, 1, 1))

    def propose(self, known: Array, candidates: Candidates, slots: Array) -> Proposal:
        scores, drawn = candidates.scores.numpy(force=True), candidates.drawn.numpy(force=True)
        first = logistic((self.margin_weights[slots] * _margins(scores)).sum(axis=1))[:, None]
        later = np.minimum(first, draft_probs(candidates)[0, :, 1:].numpy(force=True))
        probs = np.concatenate([first, later], axis=1)[None].repeat(NUM_CONTEXTS, axis=0)
        return Proposal(scores, scores, drawn, slots, probs)

    def learn(self, observed: ObservedChoices) -> None:
        """Online Newton step for each first choice that was reached."""
        is_first = observed.ranks == 0
        first = _margins(observed.scores)[is_first], observed.slots[is_first].tolist(), observed.right[is_first]
        for inputs, slot, was_right in zip(*first, strict=True):
            prob = logistic(self.margin_weights[slot] @ inputs)
            covariance_x = self._covariances[slot] @ inputs
            weight = prob * (1 - prob)
            self._covariances[slot] -= (
                weight * np.outer(covariance_x, covariance_x) / (1 + weight * np.dot(inputs, covariance_x))
            )
            self.margin_weights[slot] += self._covariances[slot] @ inputs * (was_right - prob)


def _margins(scores: Array) -> Array:
    """Inputs [N, 2] of the regression from scores [N, k]: the margin of the best score over the next, and 1."""
    margins = np.nan_to_num(scores[:, 0].astype(float) - scores[:, min(1, scores.shape[1] - 1)]).clip(max=20)
    return np.stack([margins, np.ones(len(scores))], axis=1)
