"""Totals of a sweep: tau by candidate and by tree size, best candidates, tau of an oracle choice at every step."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np

from blockpilot.sweep.rows import SweepRow
from blockpilot.sweep.trees import MOST_NODES, emitted_along


class SlotAccuracy(NamedTuple):
    """Accuracy of a slot after a right token: share of positions where its first choice is the target's token, and
    where any recorded choice is.
    """

    first: float
    any: float


@dataclass
class Summary:
    """Running totals over rows of one candidate set, so that not all rows need to be in memory."""

    emitted: Counter[int] = field(default_factory=Counter)  # by candidate: tokens emitted by verify steps
    steps: Counter[int] = field(default_factory=Counter)  # by candidate: verify steps
    best: Counter[int] = field(default_factory=Counter)  # by candidate: prompts with this best candidate
    num_rows: int = 0
    num_disagreements: int = 0  # rows whose candidates gave different texts
    num_dense_tokens: int = 0  # tokens of dense rows
    num_fewest_steps: int = 0  # the fewest steps that can emit them
    num_places: int = 0  # positions of rows with `step_nodes`
    tree_steps: Counter[int] = field(default_factory=Counter)  # by nodes of a tree: steps that decode these positions
    chain_steps: Counter[int] = field(default_factory=Counter)  # by drafted tokens of a chain: steps that decode them
    slots: Counter[int] = field(default_factory=Counter)  # by slot: positions where a dense sweep recorded choices
    first_right: Counter[int] = field(default_factory=Counter)  # by slot: positions where the first choice is right
    any_right: Counter[int] = field(default_factory=Counter)  # by slot: positions where any choice is right

    def add(self, rows: Sequence[SweepRow]) -> "Summary":
        """Add rows and return the summary. Among equally good candidates the smallest counts as the best."""
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
            if row.step_ranks:
                self._add_slots(row)
            if row.step_nodes:
                self._add_trees(row)
        return self

    @classmethod
    def total(cls, summaries: Iterable["Summary"]) -> "Summary":
        """Sum of several summaries."""
        total = cls()
        for summary in summaries:
            for part in fields(cls):
                setattr(total, part.name, getattr(total, part.name) + getattr(summary, part.name))
        return total

    def _add_slots(self, row: SweepRow) -> None:
        ranks = np.frombuffer(row.step_ranks, np.int8).reshape(len(row.step_places), -1)
        for slot, slot_ranks in enumerate(ranks.T, 1):
            known = slot_ranks != -2
            self.slots[slot] += int(known.sum())
            self.first_right[slot] += int((slot_ranks == 0).sum())
            self.any_right[slot] += int((slot_ranks >= 0).sum())

    def _add_trees(self, row: SweepRow) -> None:
        recorded = slice(row.step_places[0], row.step_places[-1] + 1)
        nodes = np.frombuffer(row.step_nodes, np.uint8).reshape(len(row.step_places), -1)
        self.num_places += len(nodes)
        for num in range(1, MOST_NODES + 1):
            self.tree_steps[num] += len(emitted_along((nodes <= num).sum(axis=1).tolist()))
        for size, accepted in zip(row.candidates, row.accepted, strict=True):
            if size > 1:
                self.chain_steps[size - 1] += len(emitted_along(accepted[recorded]))

    @property
    def tau_curve(self) -> dict[int, float]:
        """tau of every candidate over all prompts: total tokens emitted by verify steps over total verify steps."""
        return {size: self.emitted[size] / self.steps[size] for size in sorted(self.steps)}

    @property
    def tree_curve(self) -> dict[int, float]:
        """tau of trees by number of nodes, over the positions where a dense sweep recorded the draft's choices."""
        return {num: self.num_places / steps for num, steps in self.tree_steps.items()}

    @property
    def chain_curve(self) -> dict[int, float]:
        """tau of chains by number of drafted tokens, over the same positions as `tree_curve`."""
        return {num: self.num_places / steps for num, steps in self.chain_steps.items()}

    @property
    def slot_accuracy(self) -> dict[int, SlotAccuracy]:
        """Accuracy of the draft's choices by slot, over the positions where a dense sweep recorded them."""
        return {
            slot: SlotAccuracy(self.first_right[slot] / num, self.any_right[slot] / num)
            for slot, num in sorted(self.slots.items())
            if num
        }

    @property
    def best_counts(self) -> dict[int, int]:
        """For every candidate, the number of prompts on which its tau is the highest."""
        return {size: self.best[size] for size in sorted(self.steps)}

    @property
    def ceiling(self) -> float | None:
        """tau of an oracle that chooses the best candidate at every step; None unless the sweep is dense."""
        return self.num_dense_tokens / self.num_fewest_steps if self.num_fewest_steps else None

    def share_within(self, distance: int, block_size: int) -> float:
        """Share of the prompts whose best candidate is at most `distance` from `block_size`."""
        num_near = sum(count for size, count in self.best.items() if abs(size - block_size) <= distance)
        return num_near / self.num_rows


def fewest_steps(accepted: Sequence[Sequence[int]]) -> int:
    """Fewest steps that decode a text if an oracle chooses the candidate at every step: a bound for any policy.

    accepted[c][p]: drafted tokens of candidate c accepted at anchor p, from a dense sweep. Dynamic programming from
    the end.
    """
    num_anchors = len(accepted[0])
    steps_from = [0] * (num_anchors + 1)
    for anchor in reversed(range(num_anchors)):
        next_anchors = (min(anchor + num_accepted[anchor] + 1, num_anchors) for num_accepted in accepted)
        steps_from[anchor] = 1 + min(steps_from[position] for position in next_anchors)
    return steps_from[0]
