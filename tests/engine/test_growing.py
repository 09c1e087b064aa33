"""Trees of all rows grown in C equal those grown in Python; outcomes of verified nodes equal those of the texts."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from blockpilot.control.acceptance import OF_MATCH, OF_PATH, Paths, logistic
from blockpilot.control.choose import Trees
from blockpilot.control.controller import VerifiedNodes
from blockpilot.engine import growing
from blockpilot.engine.growing import Array, StepCandidates, grow_all, merge_paths, verified
from blockpilot.engine.rows import Row
from blockpilot.engine.trees import Node, best_first, choices_of, paths_of, walk
from blockpilot.native.growing import PATH_INPUTS, Lists
from blockpilot.types import DRAFTED, Layout, Request, Step
from helpers.trees import grown_of, nodes_of, tree_of

NUM_TOKENS = 40


def random_offer(draws: np.random.Generator, depths: Sequence[int]) -> StepCandidates:
    """Up to 5 choices of every slot after up to 3 others; many of their probabilities are equal, some are 0."""
    num, lists, k, laters = sum(depths), *(int(draws.integers(1, most)) for most in (4, 6, 4))
    chances = -np.sort(-draws.integers(0, 9, (laters, num, lists, k)) / 8, axis=-1)
    next_lists = draws.integers(-1, lists, (num, lists, k))
    next_lists[:, 0, 0] = 0
    tokens = np.argsort(draws.random((num, lists, NUM_TOKENS)), axis=-1)[..., :k].copy()
    ends, drafted = np.cumsum(np.array(depths, dtype=int)), np.array(depths, dtype=int)
    lists = Lists(ends - depths, drafted, tokens, chances, next_lists)
    return StepCandidates(drafted, lists, unknown=-1)


def slow(candidates: StepCandidates, r: int, widest: int, most: int) -> list[Node]:
    """Nodes of a row, from the `widest` best choices of each list; choices are indices among those of all rows."""
    slots = candidates.row_slots(r)
    tokens = [[choices[:widest] for choices in lists] for lists in slots.tokens]
    next_lists = candidates.lists.next_lists
    start = int(candidates.lists.firsts[r]) * next_lists[0].size if len(next_lists) else 0
    nodes = [
        node for node, _ in zip(best_first(choices_of(slots._replace(tokens=tokens))), range(most), strict=False)
    ]
    return [node._replace(choice_index=start + node.choice_index) for node in nodes]


DEPTHS = st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any)
SEEDS = st.integers(0, 2**32 - 1)


class AskedRow(NamedTuple):
    """Layout of a row, and its block size if it does not adapt."""

    layout: Layout
    block_size: int | None


def row_of(row_spec: AskedRow) -> Row:
    request = Request((1,), 100, block_size=row_spec.block_size, layout=row_spec.layout)
    return Row(0, request, 101, [1], None, block_size=row_spec.block_size)


ASKED = st.builds(AskedRow, st.sampled_from(["auto", "chain", "tree"]), st.none() | st.integers(2, 12))


@pytest.mark.parametrize("by", ["C", "Python"])
@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(ASKED, st.integers(0, 4)), min_size=1, max_size=5), SEEDS)
def test_every_row_has_the_nodes_that_its_size_or_the_controller_allows(
    by: str, row_specs: list[tuple[AskedRow, int]], seed: int
) -> None:
    """Trees and chains, of rows that adapt and of fixed size; some draft nothing."""
    draws = np.random.default_rng(seed)
    rows = [row_of(row_spec) for row_spec, _ in row_specs]
    depths, most = [depth for _, depth in row_specs], int(draws.integers(11, 32))
    candidates = random_offer(draws, depths) if any(depths) else None
    shown = list[list[float]]()
    sizes = draws.integers(0, most + 1, len(rows)).tolist()

    def select(trees: Trees) -> Array:
        chances, nums = trees.nodes.chances, trees.nodes.num.tolist()
        shown.extend(row_chances[:num].tolist() for row_chances, num in zip(chances, nums, strict=True))
        return np.array([min(size, num) for size, num in zip(sizes, nums, strict=False)])

    with pytest.MonkeyPatch.context() as patch:
        if by == "Python":
            patch.setattr(growing, "has_functions", lambda: False)
        grown = grow_all(rows, candidates, np.zeros(len(rows), dtype=int), select, most)
    if candidates is None:
        assert grown is None
        return
    assert grown is not None
    expected, may_be_taken = list[list[Node]](), list[list[float]]()
    for r, row in enumerate(rows):
        limit = most if row.adapts else row.next_block_size - 1
        nodes = slow(candidates, r, candidates.lists.next_lists.shape[2] if row.is_tree else 1, limit)
        if row.adapts:
            may_be_taken.append([node.chance for node in nodes])
            nodes = nodes[: sizes[len(may_be_taken) - 1]]
        expected.append([with_token(candidates, node) for node in nodes])
    assert shown == may_be_taken
    assert nodes_of(grown) == expected
    assert list(grown.trees) == [tree_of(nodes) for nodes in expected]


def with_token(candidates: StepCandidates, node: Node) -> Node:
    return node._replace(token=int(candidates.lists.tokens.reshape(-1)[node.choice_index]), source=DRAFTED)


# --- paths of earlier text together with the draft's choices ---


class Merged(NamedTuple):
    """A node; choice, step: flat indices among the draft's choices and the paths' tokens, -1 for none."""

    chance: float
    choice: int
    step: int
    num_later: int


def slow_merged(candidates: StepCandidates, r: int, paths: Paths, weights: Array) -> dict[Any, Merged]:
    """Every node of row r with a positive probability, by its path."""
    draft_slots, lists, nodes = candidates.row_slots(r), candidates.lists, dict[Any, Merged]()
    path = paths.tokens[r, : paths.sizes[r]].tolist()
    start, (contexts, width) = int(lists.firsts[r]), lists.next_lists.shape[1:]

    def chance_of(depth: int, draft_chance: float | None, rank: int, *, speaks: bool) -> float:
        p = min(max(draft_chance or 0.0, 1e-4), 1 - 1e-4)
        logit = np.log(p / (1 - p)) / 5 if draft_chance is not None else 0.0
        flags = [rank == 0, rank > 0, speaks and rank < 0]
        length, *match_inputs = paths.known[r]
        inputs = np.array([1, np.log2(length + depth) / 5, *match_inputs, depth > 0, logit, *flags], dtype=float)
        return float(logistic(weights[paths.drawn[r]] @ inputs))

    def visit(prefix: tuple[int, ...], after: int, num_later: int, above: float) -> None:
        depth, follows = len(prefix), list(prefix) == path[: len(prefix)]
        speaks = depth < len(draft_slots.tokens) and after >= 0
        at = min(num_later, len(draft_slots.chances) - 1)
        choices = list(enumerate(draft_slots.tokens[depth][after])) if speaks else []
        chances = draft_slots.chances[at][depth][after] if speaks else []
        token = path[depth] if follows and depth < len(path) else None
        rank = next((k for k, choice in choices if choice == token and chances[k] > 0), -1)
        left, path_chance = 1.0, 0.0
        if token is not None:
            draft_chance = chances[rank] if rank >= 0 else None
            path_chance = chance_of(depth, draft_chance, rank, speaks=speaks)
            left = min(1.0, (1 - path_chance) / max(1 - (draft_chance or 0.0), 1e-4))
        for k, choice in choices:
            chance = above * (path_chance if k == rank else chances[k] * left)
            if chance > 0:
                step = r * paths.tokens.shape[1] + depth if k == rank else -1
                flat = ((start + depth) * contexts + after) * width + k
                nodes[*prefix, choice] = Merged(chance, flat, step, num_later)
                visit((*prefix, choice), draft_slots.next_lists[depth][after][k], num_later + (k > 0), chance)
        if token is not None and rank < 0 and path_chance > 0:
            step = r * paths.tokens.shape[1] + depth
            nodes[*prefix, token] = Merged(above * path_chance, -1, step, num_later)
            visit((*prefix, token), candidates.unknown, num_later + 1, above * path_chance)

    visit((), 0, 0, 1.0)
    return nodes


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=3), SEEDS)
def test_a_token_that_draft_and_path_propose_is_one_node(sizes: list[tuple[int, int]], seed: int) -> None:
    """Its probability is the path token's, and the others share the rest, for rows with and without drafts or paths.
    The path continues after the end of the draft's block.
    """
    assert len(OF_PATH) == PATH_INPUTS
    assume(any(size for _, size in sizes))
    draws = np.random.default_rng(seed)
    candidates, has_drafted = random_offer(draws, [depth for depth, _ in sizes]), any(depth for depth, _ in sizes)
    if has_drafted:
        few = candidates.lists.tokens % 6  # so that paths contain them
        few = np.where(few == np.roll(few, 1, axis=-1), few + 10 * (1 + np.arange(few.shape[-1])), few)
        few = few + 100 * np.arange(few.shape[-1]) * (np.arange(few.shape[-1]) > 1)  # unique tokens in a list
        is_unlinked = bool(draws.random() < 0.5) and candidates.lists.next_lists.shape[1] == 1
        next_lists = np.zeros_like(candidates.lists.next_lists) if is_unlinked else candidates.lists.next_lists
        candidates = candidates._replace(
            lists=candidates.lists._replace(tokens=few, next_lists=next_lists), unknown=0 if is_unlinked else -1
        )
    tokens = draws.integers(0, 6, (len(sizes), 4)).astype(np.int32)
    inputs = np.abs(draws.normal(2, 1, (len(sizes), len(OF_MATCH)))) + 1
    paths = Paths(tokens, np.array([size for _, size in sizes]), inputs, draws.integers(0, 2, len(sizes)), inputs)
    weights = draws.normal(0, 1, (2, PATH_INPUTS))
    merged = merge_paths(candidates if has_drafted else None, paths, weights)
    rows, room = [row_of(AskedRow("tree", None))] * len(sizes), 400
    grown = grow_all(rows, merged, np.zeros(len(sizes), dtype=int), lambda trees: trees.nodes.num, room)
    assert grown is not None
    for r, nodes in enumerate(nodes_of(grown)):
        prefixes, nodes_by_path = [()], dict[Any, Merged]()
        for node in nodes:
            prefixes.append((*prefixes[node.parent], node.token))
            assert prefixes[-1] not in nodes_by_path
            nodes_by_path[prefixes[-1]] = Merged(node.chance, node.choice_index, node.path_index, node.num_later)
        expected = slow_merged(candidates, r, paths, weights)
        assert nodes_by_path.keys() == expected.keys()
        for prefix, node in nodes_by_path.items():
            assert node.chance == pytest.approx(expected[prefix].chance, rel=1e-6, abs=1e-12)
            assert node[1:] == expected[prefix][1:]
        assert all(a.chance >= b.chance for a, b in pairwise(nodes))


# --- outcomes ---


def slow_verified(trees: Sequence[Sequence[Node]], emitted: Sequence[Sequence[int]]) -> list[tuple[int, int, bool]]:
    """Outcomes by paths: (choice, later choices, right) if the parent's path is a prefix and the text continues."""
    node_outcomes = list[tuple[int, int, bool]]()
    for nodes, text in zip(trees, emitted, strict=True):
        paths: list[tuple[int, ...]] = [()]
        for node in nodes:
            paths.append((*paths[node.parent], node.token))
            if len(paths[-1]) <= len(text) and paths[node.parent] == tuple(text[: len(paths[-1]) - 1]):
                node_outcomes.append((node.choice_index, node.num_later, paths[-1] == tuple(text[: len(paths[-1])])))
    return node_outcomes


def outcomes(
    trees: Sequence[Sequence[Node]], paths: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]
) -> VerifiedNodes:
    """Outcomes of rows that adapt and emitted these tokens."""
    rows = [row_of(AskedRow("auto", None)) for _ in trees]
    steps = list[Step]()
    for r, (row, tokens) in enumerate(zip(rows, emitted, strict=True)):
        row.request_id = r
        steps.append(Step(r, tuple(tokens), 1, len(tokens) - 1, None))
    return verified(rows, grown_of(trees), paths, steps, None)


def listed(verified_nodes: VerifiedNodes) -> list[tuple[Any, ...]]:
    return list(zip(*(values.tolist() for values in verified_nodes[:3]), strict=True))


@given(DEPTHS, SEEDS)
def test_what_was_verified_is_what_the_texts_say(depths: list[int], seed: int) -> None:
    """Outcomes in random trees and texts along them, which may end anywhere on the accepted path."""
    draws = np.random.default_rng(seed)
    candidates = random_offer(draws, depths)
    trees, taken, emitted = list[list[Node]](), list[list[int]](), list[list[int]]()
    for r in range(len(depths)):
        nodes = slow(candidates, r, 5, int(draws.integers(0, 20)))
        tree = tree_of(nodes)
        chosen = [int(draws.integers(0, NUM_TOKENS)) for _ in range(1 + len(nodes))]
        for parent, token in zip(tree.parents, tree.tokens, strict=True):
            if draws.random() < 0.6:
                chosen[parent] = token
        path = walk(tree, chosen)
        tokens = [chosen[node] for node in path]
        assert all(path_of == tuple(tokens[: len(path_of)]) for path_of in (paths_of(tree)[node] for node in path))
        num = int(draws.integers(1, len(tokens) + 1)) if draws.random() < 0.5 else len(tokens)
        trees.append(nodes)
        taken.append(path[:num])
        emitted.append(tokens[:num])
    assert listed(outcomes(trees, taken, emitted)) == slow_verified(trees, emitted)
