"""Totals of a sweep: tau by candidate and by tree, best candidates, and the ceiling of a choice per step."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from blockpilot.sweep.rows import SweepRow
from blockpilot.sweep.trees import MOST_NODES, emitted_along


@dataclass
class Summary:
    """Totals over rows of one candidate set, added bit by bit: rows need not be in memory together."""

    emitted: Counter[int] = field(default_factory=Counter)  # by candidate: tokens of verify steps
    steps: Counter[int] = field(default_factory=Counter)
    best: Counter[int] = field(default_factory=Counter)  # prompts; the smallest of equal candidates counts
    num_rows: int = 0
    num_disagreements: int = 0  # rows whose candidates gave different texts
    num_dense_tokens: int = 0  # of rows of a dense sweep, and the fewest steps that emit them
    num_fewest_steps: int = 0
    num_places: int = 0  # of rows that show which tree accepts what, and steps through them by drafted tokens of one
    tree_steps: Counter[int] = field(default_factory=Counter)
    chain_steps: Counter[int] = field(default_factory=Counter)

    def add(self, rows: Sequence[SweepRow]) -> "Summary":
        for row in rows:
            self.num_rows += 1
            self.num_disagreements += not row.texts_agree
            self.best[row.candidates[row.taus.index(max(row.taus))]] += 1
            for size, num_steps, histogram in zip(row.candidates, row.num_steps, row.emitted_histograms, strict=True):
                self.steps[size] += num_steps
                self.emitted[size] += sum(n * count for n, count in enumerate(histogram))
            if row.accepted:
                self.num_dense_tokens += len(row.accepted[0])
                self.num_fewest_steps += fewest_steps(row.accepted)
            if row.step_nodes:
                self._add_trees(row)
        return self

    def _add_trees(self, row: SweepRow) -> None:
        places = slice(row.step_places[0], row.step_places[-1] + 1)
        nodes = np.frombuffer(row.step_nodes, np.uint8).reshape(len(row.step_places), -1)
        self.num_places += len(nodes)
        for num in range(1, MOST_NODES + 1):
            self.tree_steps[num] += len(emitted_along((nodes <= num).sum(axis=1).tolist()))
        for size, accepted in zip(row.candidates, row.accepted, strict=True):
            if size > 1:
                self.chain_steps[size - 1] += len(emitted_along(accepted[places]))

    @property
    def tau_curve(self) -> dict[int, float]:
        """tau of every candidate over all prompts: tokens emitted in total by verify steps in total."""
        return {size: self.emitted[size] / self.steps[size] for size in sorted(self.steps)}

    @property
    def tree_curve(self) -> dict[int, float]:
        """tau of trees by their nodes, out of all positions of a draft's block, where a dense sweep shows it."""
        return {num: self.num_places / steps for num, steps in self.tree_steps.items()}

    @property
    def chain_curve(self) -> dict[int, float]:
        """tau at the same places of every candidate, by the tokens that it drafts."""
        return {num: self.num_places / steps for num, steps in self.chain_steps.items()}

    @property
    def best_counts(self) -> dict[int, int]:
        """For every candidate, the prompts on which its tau is the highest."""
        return {size: self.best[size] for size in sorted(self.steps)}

    @property
    def ceiling(self) -> float | None:
        """tau of a choice that knows the best candidate at every step; None unless the sweep is dense."""
        return self.num_dense_tokens / self.num_fewest_steps if self.num_fewest_steps else None

    def share_within(self, distance: int, block_size: int) -> float:
        """Share of the prompts whose best candidate is at most `distance` from `block_size`."""
        near = sum(count for size, count in self.best.items() if abs(size - block_size) <= distance)
        return near / self.num_rows


def fewest_steps(accepted: Sequence[Sequence[int]]) -> int:
    """Steps of a decoding with the best candidate at every position: the ceiling of any policy."""
    return round(least_cost(accepted, [1.0] * len(accepted)))


def least_cost(accepted: Sequence[Sequence[int]], step_costs: Sequence[float]) -> float:
    """What a decoding costs that takes at every position the candidate that is the best in the end: a bound.

    accepted[c][p] are those of candidate c at anchor p, out of a dense sweep (dynamic programming from the end).
    """
    num_anchors = len(accepted[0])
    left = [0.0] * (num_anchors + 1)
    for p in reversed(range(num_anchors)):
        left[p] = min(
            cost + left[min(p + of_candidate[p] + 1, num_anchors)]
            for of_candidate, cost in zip(accepted, step_costs, strict=True)
        )
    return left[0]
