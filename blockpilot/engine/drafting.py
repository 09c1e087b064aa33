"""The draft over a cache of its own: it proposes choices for every slot, and its cache holds what became final.

The target's features of every final token of a row that may draft are kept, also of steps in which the row decodes
plainly: a draft that misses part of its context is accepted less, and nothing else would show it. They go into the
cache together before the row drafts: in runs of plain steps one token at a time would cost 3% of a step.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockpilot.control.acceptance import Array, Paths
from blockpilot.control.controller import Controller, Planned, StepOutcome
from blockpilot.control.cost import Load, passes
from blockpilot.device import tensor_on
from blockpilot.drafts.base import Asked, Draft, PreparedDraft
from blockpilot.drafts.choices import Linked
from blockpilot.drafts.head import DraftHead
from blockpilot.engine.batch import Batch
from blockpilot.engine.growing import Offered, grow_all, offer, offer_paths, outcomes_of
from blockpilot.engine.lookup import Lookup
from blockpilot.engine.rows import Row, num_fixed
from blockpilot.engine.sampling import candidates
from blockpilot.engine.trees import MAX_DEPTH, Node, tree_of
from blockpilot.models.graphs import Graphs
from blockpilot.models.packing import Packing
from blockpilot.types import NO_TREE, Candidates, Sampling, Step, Tree

NUM_CANDIDATES = 8  # of a tree's every slot


class Drafter:
    """A draft and its cache of `num_slots` slots."""

    def __init__(self, draft: PreparedDraft, num_slots: int, length: int) -> None:
        self._draft = draft
        self.cache = draft.new_cache(num_slots, length)

    def propose(
        self, rows: Sequence[Row], slots: Sequence[int], depths: Sequence[int], num: int
    ) -> Candidates | Linked:
        """The `num` best choices for each of the depths[r] (1 or more) positions after the anchor of every row [R].

        The rows lie in `slots` [R]. Draft and target draw a position's token with the same key: where their
        distributions agree, so do the tokens, at any temperature.
        """
        starts, anchors = [row.anchor_position for row in rows], [row.tokens[-1] for row in rows]
        sampling = [row.request.sampling for row in rows]
        width = num if any(row.is_tree for row in rows) else 1

        def choose(hidden: Tensor, of_rows: Sequence[int], positions: Sequence[int]) -> Candidates:
            head, own = self._draft.head, [sampling[r] for r in of_rows]
            if all(rows[r].processor is None for r in set(of_rows)):
                return draft_candidates(head, hidden, positions, own, num, self.cache.graphs)
            return _changed_candidates(head, hidden, positions, [rows[r] for r in of_rows], num)

        asked = Asked(slots, starts, anchors, depths, sampling, num, width)
        return self._draft.propose(asked, self.cache, choose)

    def note(self, batch: Batch, paths: Sequence[Sequence[int]], chosen: Sequence[int], features: Tensor) -> None:
        """Keep the target's features of a batch's tokens [N, F] that are final, of rows that may draft.

        paths [R] are the accepted ones of blocks, chosen [M] the target's choices.
        """
        final, following = batch.final(paths), batch.following(chosen)
        # One gather for all rows: on a GPU each would be a kernel of its own.
        of_final = features[tensor_on(features.device, list(chain.from_iterable(final.values())))]
        of_rows = of_final.split(list(map(len, final.values())))
        for (row, places), of_row in zip(final.items(), of_rows, strict=True):
            row.features.append(of_row)
            row.following += [following[place] for place in places]

    def keep_up(self, rows: Sequence[Row], slots: Sequence[int]) -> dict[Row, Tensor]:
        """Take in what the cache lacks of rows [R] in these slots.

        Returns the context vector [hidden] of the last token of each row that lacked any.
        """
        # 1. Side by side: what each row lacks, from the position on up to which the cache is filled.
        lacking, own_slots, sizes, starts = list[Row](), list[int](), list[int](), list[int]()
        features, following = list[Tensor](), list[int]()
        for row, slot in zip(rows, slots, strict=True):
            if row.following:
                lacking.append(row)
                own_slots.append(slot)
                sizes.append(len(row.following))
                starts.append(row.num_drafted_from)
                features += row.features
                following += row.following
        if not lacking:
            return {}
        # 2. One pass of the draft's context projection over all of it.
        packing = Packing(sizes, starts, features[0].device)
        vectors = self._draft.keep_up(torch.cat(features), following, own_slots, packing, self.cache)
        # 3. Nothing is lacking any more; the last token's vector is what a policy may see.
        for row, size in zip(lacking, sizes, strict=True):
            row.num_drafted_from += size
            row.features, row.following = [], []
        last = np.cumsum(sizes) - 1
        return dict(zip(lacking, vectors[tensor_on(vectors.device, last.tolist())], strict=True))


class Drafts(NamedTuple):
    """The draft stage's result for R rows: trees to verify, and what its controller learns from."""

    trees: list[Tree]
    nodes: list[list[Node]]
    """Those of the trees, as they grew."""
    offered: Offered | None
    load: Load
    """The step's, but for the tokens that it verifies."""

    def outcome(
        self,
        rows: Sequence[Row],
        accepted: Sequence[Sequence[int]],
        steps: Sequence[Step],
        *,
        num_prompt_tokens: int,
        has_captured: bool,
    ) -> StepOutcome:
        """Outcome of the step, by the accepted paths [R] of the trees."""
        load = self.load._replace(num_verified=sum(len(tree.tokens) for tree in self.trees))
        verified = outcomes_of(rows, self.nodes, accepted, steps, self.offered)
        return StepOutcome(load, num_prompt_tokens, verified, has_captured)


class Proposer:
    """The draft stage of a step: candidates of the draft and of rows' own texts, and the trees that are worth it."""

    def __init__(self, drafter: Drafter, lookup: Lookup, draft: Draft, max_block_size: int) -> None:
        self._drafter, self._lookup = drafter, lookup
        self._deepest, self._most = min(draft.block_size - 1, MAX_DEPTH), max_block_size - 1
        self._passes = partial(passes, is_sequential=draft.is_sequential)

    def propose(self, rows: Sequence[Row], controller: Controller) -> Drafts:
        """Trees for rows [R] in the first slots; the controller chooses for those that adapt."""
        drawn = np.array([not row.request.sampling.is_greedy for row in rows], dtype=int)
        # 1. Paths that rows' own texts offer, and by both the kinds of rows that are planned alike.
        paths = self._lookup.paths(rows, drawn, self._most, controller.follow)
        kinds = controller.kinds(drawn, paths)
        # 2. How deep each row drafts, and one pass of the draft over those that do.
        depths = self._depths(rows, kinds, controller)
        offered = self._offer(rows, depths, paths, controller)
        # 3. Trees, as large as the controller finds worth verifying.
        load = Load(len(rows), sum(depths), num_fixed(rows), self._passes(depths))
        nodes = grow_all(rows, offered, kinds, partial(controller.select, drafted=load), self._most)
        return Drafts([tree_of(each) if each else NO_TREE for each in nodes], nodes, offered, load)

    def _depths(self, rows: Sequence[Row], kinds: Array, controller: Controller) -> list[int]:
        """Positions that the draft proposes tokens for, of every row [R] of these kinds [R]."""
        depths = [0 if row.adapts else row.next_depth(self._deepest) for row in rows]
        free = [r for r, row in enumerate(rows) if row.adapts]
        if not free:
            return depths
        # Rows of fixed sizes are a load that the controller cannot change.
        beside = Load(len(rows) - len(free), sum(depths), num_fixed(rows), self._passes(depths))
        most = np.array([rows[r].most_depth(self._deepest) for r in free], dtype=int)
        chosen = controller.plan(Planned(kinds[free], most), beside)
        for r, depth in zip(free, chosen.tolist(), strict=True):
            depths[r] = depth
        return depths

    def _offer(
        self, rows: Sequence[Row], depths: Sequence[int], paths: Paths | None, controller: Controller
    ) -> Offered | None:
        """Candidates for rows [R], after one pass of the draft over those that draft; None where there are none."""
        # 1. The draft, for rows that draft: its cache first takes in what it lacks of them.
        slots = [slot for slot, depth in enumerate(depths) if depth]
        offered: Offered | None = None
        if slots:
            drafting, of_slots = [rows[slot] for slot in slots], [depths[slot] for slot in slots]
            many = any(row.is_tree or row.looks_up or row.adapts or row.automaton is not None for row in drafting)
            self._drafter.keep_up(drafting, slots)
            found = self._drafter.propose(drafting, slots, of_slots, NUM_CANDIDATES if many else 1)
            offered = offer(found, slots, [row.adapts for row in drafting], of_slots, controller)
        # 2. Paths of rows' own texts beside its choices, also for rows that do not draft.
        if paths is not None and paths.sizes.any():
            offered = offer_paths(offered, paths, controller.model.paths.weights)
        return offered


def draft_candidates(
    head: DraftHead,
    hidden: Tensor,
    positions: Sequence[int],
    sampling: Sequence[Sampling],
    num: int,
    graphs: Graphs | None = None,
) -> Candidates:
    """The draft's `num` best choices at hidden states [N, hidden], or as many as its edges look at."""
    return candidates(head(hidden), positions, sampling, _num_of(head, num), head.subset, graphs)


def _num_of(head: DraftHead, num: int) -> int:
    return num if head.edges is None else max(num, head.edges.width)


def _changed_candidates(
    head: DraftHead, hidden: Tensor, positions: Sequence[int], rows: Sequence[Row], num: int
) -> Candidates:
    """`draft_candidates` for rows [N] of which some have logits processors, which change the draft's logits alike."""
    logits = head(hidden)
    # Tokens are counted in the target's vocabulary, of which a draft may know a part.
    logits = logits if head.subset is None else head.subset.expanded(logits)
    logits = logits.float()
    by_row: dict[Row, list[int]] = {}
    for i, row in enumerate(rows):
        by_row.setdefault(row, []).append(i)
    for row, places in by_row.items():
        if row.processor is not None:
            logits[places] = row.processor(logits[places], row.tokens, [positions[i] for i in places])
    return candidates(logits, positions, [row.request.sampling for row in rows], _num_of(head, num))
