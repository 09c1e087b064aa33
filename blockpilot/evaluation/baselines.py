"""Rules that others ship or publish, to be measured beside ours: same engine, live price and exact text."""

import numpy as np

from blockpilot.control.acceptance import AcceptanceModel, Array, Proposal, logistic
from blockpilot.control.choose import Trees, seconds_of_more
from blockpilot.control.controller import Controller, Planned
from blockpilot.control.cost import Load, StepPrice, passes
from blockpilot.drafts.choices import own_chances
from blockpilot.native.growing import NUM_CONTEXTS
from blockpilot.types import Candidates


class DepthController(Controller):
    """Verifies chains as deep as they are drafted: by running means, what Ollama and llama-server-like runtimes do.

    For requests of layout "chain".
    """

    def select(self, trees: Trees, drafted: Load) -> Array:
        super().select(trees, drafted)
        return trees.num


class WholeDraft(Controller):
    """Every row drafts all that its draft can, and the best nodes of all rows are verified.

    With Margins as its model vLLM's adaptive verification: one budget for the chains of all rows, of the most
    probable tokens.
    """

    def plan(self, rows: Planned, beside: Load) -> Array:
        super().plan(rows, beside)  # the rate at which nodes are selected
        return self._begin(rows, rows.deepest)


class LookupAlone(Controller):
    """No row ever drafts: vLLM's ngram, but that as much is verified as is worth its seconds."""

    def plan(self, rows: Planned, beside: Load) -> Array:
        super().plan(rows, beside)
        return self._begin(rows, np.zeros_like(rows.deepest))


class LookupOrDraft(Controller):
    """A row whose text has a match verifies what followed there, and only others draft: llama.cpp's priorities."""

    def plan(self, rows: Planned, beside: Load) -> Array:
        depths = super().plan(rows, beside)
        return self._begin(rows, np.where(rows.kinds > 1, 0, depths))


class TreeBudget(WholeDraft):
    """CaDDTree's (arXiv 2606.01813): a budget for each row's tree, as if it were the only one."""

    def select(self, trees: Trees, drafted: Load) -> Array:
        of_row = drafted.num_drafted // max(drafted.rows, 1)
        alone = Load(1, of_row, num_passes=passes([of_row], self.price.is_sequential))
        return np.array([_best_budget(tree, self.price, alone) for tree in trees.chances * trees.taken])


def _best_budget(chances: Array, price: StepPrice, drafted: Load) -> int:
    """Nodes, of these chances, that make the most tokens a second of this step."""
    tokens = drafted.rows + np.concatenate([[0.0], chances.cumsum()])
    return int((tokens / seconds_of_more(price, drafted, len(chances))).argmax())


class Margins(AcceptanceModel):
    """Chances of a chain's tokens by the margin of the draft's best score over the next: a logistic regression for
    every position, refit with every step (vLLM's).
    """

    def __init__(self, deepest: int) -> None:
        super().__init__(deepest)
        self.of_margin = np.tile([0.5, 0.5], (self.deepest, 1))  # weights of margin and 1
        self._covariances = np.tile(np.eye(2), (self.deepest, 1, 1))

    def propose(self, known: Array, found: Candidates, slots: Array) -> Proposal:
        scores, drawn = found.scores.numpy(force=True), found.drawn.numpy(force=True)
        first = logistic((self.of_margin[slots] * _margins(scores)).sum(axis=1))[:, None]
        later = np.minimum(first, own_chances(found)[0, :, 1:].numpy(force=True))
        chances = np.concatenate([first, later], axis=1)[None].repeat(NUM_CONTEXTS, axis=0)
        return Proposal(scores, scores, drawn, slots, chances)

    def learn(self, proposal: Proposal, choices: Array, laters: Array, right: Array) -> None:
        """A Newton step for each first choice that was reached."""
        width, margins = proposal.scores.shape[1], _margins(proposal.scores)
        for choice, was_right in zip(choices, right, strict=True):
            if choice % width:
                continue
            x, of_slot = margins[choice // width], int(proposal.slots[choice // width])
            chance = logistic(self.of_margin[of_slot] @ x)
            with_x = self._covariances[of_slot] @ x
            weight = chance * (1 - chance)
            self._covariances[of_slot] -= weight * np.outer(with_x, with_x) / (1 + weight * np.dot(x, with_x))
            self.of_margin[of_slot] += self._covariances[of_slot] @ x * (was_right - chance)


def _margins(scores: Array) -> Array:
    """Margins of the best score over the next, and 1, of scores [N, k]: [N, 2]."""
    margins = np.nan_to_num(scores[:, 0].astype(float) - scores[:, min(1, scores.shape[1] - 1)]).clip(max=20)
    return np.stack([margins, np.ones(len(scores))], axis=1)
