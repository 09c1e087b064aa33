"""Draft stage of a step: a pass of the draft over its KV cache, and the trees to verify.

The draft's cache covers all accepted tokens of the rows that may draft. Every step stores the target's features of
these tokens, also while a row decodes plainly: a gap in the draft's context would silently lower acceptance. They
enter the cache together before the row drafts: one token at a time would cost 3% of a plain step.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockpilot.control.acceptance import Array, Paths
from blockpilot.control.controller import NO_RATES, Controller, Planned, StepOutcome, VerifiedNodes
from blockpilot.control.cost import Load, passes
from blockpilot.device import tensor_on
from blockpilot.drafts.base import Draft, DraftRequest, PreparedDraft
from blockpilot.drafts.choices import ConditionalCandidates
from blockpilot.drafts.head import DraftHead
from blockpilot.engine.batch import Batch
from blockpilot.engine.growing import GrownTrees, StepCandidates, grow_all, merge_paths, score_candidates, verified
from blockpilot.engine.lookup import Lookup
from blockpilot.engine.rows import Row, num_fixed
from blockpilot.engine.sampling import best_choices
from blockpilot.engine.trees import MAX_DEPTH
from blockpilot.models.graphs import Graphs
from blockpilot.models.packing import Packing
from blockpilot.types import NO_TREE, Candidates, Sampling, Step, Tree

NUM_CANDIDATES = 8  # per slot of a tree


class Drafter:
    """A draft and its KV cache of `num_slots` slots."""

    def __init__(self, draft: PreparedDraft, num_slots: int, length: int) -> None:
        self._draft = draft
        self.cache = draft.new_cache(num_slots, length)

    def propose(
        self, rows: Sequence[Row], slots: Sequence[int], depths: Sequence[int], num: int
    ) -> Candidates | ConditionalCandidates:
        """The `num` best choices for each of the depths[r] (1 or more) positions after the anchor of every row [R].

        The rows are in `slots` [R]. Draft and target sample a position's token with the same key: if their
        distributions are equal, so are the tokens, at any temperature.
        """
        starts, anchors = [row.anchor_position for row in rows], [row.tokens[-1] for row in rows]
        sampling = [row.request.sampling for row in rows]
        width = num if any(row.is_tree for row in rows) else 1

        def choose(hidden: Tensor, row_ids: Sequence[int], positions: Sequence[int]) -> Candidates:
            head = self._draft.head
            if all(rows[r].processor is None for r in set(row_ids)):
                state_sampling = [sampling[r] for r in row_ids]
                return draft_candidates(head, hidden, positions, state_sampling, num, self.cache.graphs)
            return _processed_candidates(head, hidden, positions, [rows[r] for r in row_ids], num)

        request = DraftRequest(slots, starts, anchors, depths, sampling, num, width)
        return self._draft.propose(request, self.cache, choose)

    def note(self, batch: Batch, paths: Sequence[Sequence[int]], chosen: Sequence[int], features: Tensor) -> None:
        """Store the target's features of accepted tokens in the rows that may draft, given all features [N, F].

        paths [R] are the accepted paths of blocks, chosen [M] the target's choices.
        """
        accepted, next_tokens = batch.accepted_indices(paths), batch.next_tokens(chosen)
        # One copy for all rows: one per row would be a GPU kernel each.
        all_indices, end = list(chain.from_iterable(accepted.values())), 0
        if len(all_indices) == len(features):  # in order, as in a plain step
            accepted_features = features.clone()
        else:
            accepted_features = features.index_select(0, tensor_on(features.device, all_indices))
        for row, indices in accepted.items():
            row.features.append(accepted_features[end : end + len(indices)])
            row.next_tokens += [next_tokens[index] for index in indices]
            end += len(indices)

    def update_cache(self, rows: Sequence[Row], slots: Sequence[int]) -> Tensor | None:
        """Add the pending tokens of rows [R] in these slots to the draft's cache.

        Returns the context vectors [N, hidden] of the pending tokens of all rows, in the order of the rows; None if
        there were none.
        """
        # 1. Flattened pending tokens of all rows; those of a row start after its cached tokens.
        pending, pending_slots, sizes, starts = list[Row](), list[int](), list[int](), list[int]()
        features, next_tokens = list[Tensor](), list[int]()
        for row, slot in zip(rows, slots, strict=True):
            if row.next_tokens:
                pending.append(row)
                pending_slots.append(slot)
                sizes.append(len(row.next_tokens))
                starts.append(row.num_draft_cached)
                features += row.features
                next_tokens += row.next_tokens
        if not pending:
            return None
        # 2. One pass of the draft's context projection.
        packing = Packing(sizes, starts, features[0].device)
        vectors = self._draft.update_cache(torch.cat(features), next_tokens, pending_slots, packing, self.cache)
        for row, size in zip(pending, sizes, strict=True):
            row.num_draft_cached += size
            row.features, row.next_tokens = [], []
        return vectors


class Drafts(NamedTuple):
    """The draft stage's result for R rows: trees to verify, and the data that the controller learns from."""

    trees: Sequence[Tree]
    grown: GrownTrees | None
    candidates: StepCandidates | None
    load: Load
    """Load of the step, in which num_verified counts only rows of fixed block sizes."""

    def outcome(
        self,
        rows: Sequence[Row],
        accepted: Sequence[Sequence[int]],
        steps: Sequence[Step],
        *,
        num_prompt_tokens: int,
        has_captured: bool,
    ) -> StepOutcome:
        """Outcome of the step, given the accepted paths [R] of the trees."""
        load = self.load._replace(num_verified=sum([len(tree.tokens) for tree in self.trees]))
        proposal = None if self.candidates is None else self.candidates.proposal
        verified_nodes: Callable[[], VerifiedNodes] | None = None
        if self.grown is not None:
            # Computed later, for many steps together: between passes that read all weights, Python is slow.
            verified_nodes = partial(verified, rows, self.grown, accepted, steps, self.candidates)
        return StepOutcome(load, num_prompt_tokens, proposal, verified_nodes, has_captured)


class Proposer:
    """The draft stage of a step: candidates from the draft and from prompt lookup, and the trees to verify."""

    def __init__(self, drafter: Drafter, lookup: Lookup, draft: Draft, max_block_size: int) -> None:
        self._drafter, self._lookup = drafter, lookup
        self._draft_depth, self._most = min(draft.block_size - 1, MAX_DEPTH), max_block_size - 1
        self._passes = partial(passes, is_sequential=draft.is_sequential)

    def propose(self, rows: Sequence[Row], controller: Controller, num_prompt_tokens: int = 0) -> Drafts:
        """Trees for the decoding rows [R], in the first slots; the controller chooses for rows that adapt.

        num_prompt_tokens: prompt tokens that are prefilled in the same step.
        """
        sampled = np.array([not row.request.sampling.is_greedy for row in rows], dtype=int)
        # 1. Paths from prompt lookup, and the kinds of rows; rows of one kind share a plan.
        paths = self._lookup.paths(rows, sampled, self._most, controller.cut_paths)
        kinds = controller.kinds(sampled, paths)
        # 2. The depth of each row, and one pass of the draft over the rows that draft.
        depths, rates = self._depths(rows, kinds, controller)
        candidates = self._candidates(rows, depths, paths, controller)
        # 3. Trees, of as many nodes as the controller selects.
        load = Load(len(rows), sum(depths), num_fixed(rows), self._passes(depths))
        beside_prompts = load._replace(num_prompt_tokens=num_prompt_tokens)
        select = partial(controller.select, rates=rates, drafted=beside_prompts)
        grown = grow_all(rows, candidates, kinds, select, self._most)
        trees = [NO_TREE] * len(rows) if grown is None else grown.trees
        return Drafts(trees, grown, candidates, load)

    def _depths(self, rows: Sequence[Row], kinds: Array, controller: Controller) -> tuple[list[int], Array]:
        """Depths [R] of rows of these kinds [R]: positions that the draft proposes tokens for.

        Also the rates that the controller selects nodes by (`DepthPlan`), empty if it plans no row.
        """
        depths = [0 if row.adapts else row.fixed_depth(self._draft_depth) for row in rows]
        adapting = [r for r, row in enumerate(rows) if row.adapts]
        if not adapting:
            return depths, NO_RATES
        # Rows of fixed block sizes are a load that the controller cannot change.
        fixed_load = Load(len(rows) - len(adapting), sum(depths), num_fixed(rows), self._passes(depths))
        draft_depth = min(self._draft_depth, controller.model.deepest)
        max_depths = np.array([rows[r].draftable_depth(draft_depth) for r in adapting], dtype=int)
        plan = controller.plan(Planned(kinds[adapting], max_depths), fixed_load)
        for r, depth in zip(adapting, plan.depths.tolist(), strict=True):
            depths[r] = depth
        return depths, plan.rates

    def _candidates(
        self, rows: Sequence[Row], depths: Sequence[int], paths: Paths | None, controller: Controller
    ) -> StepCandidates | None:
        """Candidates for rows [R], after one pass of the draft over the rows that draft; None if there are none."""
        # 1. The draft's choices, after the pending tokens of the rows that draft are added to its cache.
        slots = [slot for slot, depth in enumerate(depths) if depth]
        candidates: StepCandidates | None = None
        if slots:
            drafting, positive_depths = [rows[slot] for slot in slots], [depths[slot] for slot in slots]
            many = any(row.is_tree or row.looks_up or row.adapts or row.automaton is not None for row in drafting)
            self._drafter.update_cache(drafting, slots)
            choices = self._drafter.propose(drafting, slots, positive_depths, NUM_CANDIDATES if many else 1)
            candidates = score_candidates(choices, [row.adapts for row in rows], depths, controller)
        # 2. Paths from prompt lookup, merged with these choices, also for rows that do not draft.
        if paths is not None and paths.sizes.any():
            candidates = merge_paths(candidates, paths, controller.model.paths.weights)
        return candidates


def draft_candidates(
    head: DraftHead,
    hidden: Tensor,
    positions: Sequence[int],
    sampling: Sequence[Sampling],
    num: int,
    graphs: Graphs | None = None,
) -> Candidates:
    """The draft's `num` best choices at hidden states [N, hidden]; with edges, as many as these rescore."""
    return best_choices(head(hidden), positions, sampling, _num_choices(head, num), head.subset, graphs)


def _num_choices(head: DraftHead, num: int) -> int:
    return num if head.edges is None else head.edges.width  # regardless of the other rows' `num`


def _processed_candidates(
    head: DraftHead, hidden: Tensor, positions: Sequence[int], rows: Sequence[Row], num: int
) -> Candidates:
    """`draft_candidates` for rows [N], some with logits processors, which apply to the draft's logits as well."""
    logits = head(hidden)
    # Processors use the target's vocabulary; a draft's may be a subset.
    logits = logits if head.subset is None else head.subset.expanded(logits)
    logits = logits.float()
    by_row: dict[Row, list[int]] = {}
    for i, row in enumerate(rows):
        by_row.setdefault(row, []).append(i)
    for row, indices in by_row.items():
        if row.processor is not None:
            logits[indices] = row.processor(logits[indices], row.tokens, [positions[i] for i in indices])
    return best_choices(logits, positions, [row.request.sampling for row in rows], _num_choices(head, num))
