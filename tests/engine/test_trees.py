"""Trees: growth by descending probability, and the walk along the target's choices. Masks are in test_packing.py."""

from itertools import islice, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpilot.engine.engine import Engine
from blockpilot.engine.trees import Node, Slots, best_first, choices_of, paths_of, walk
from blockpilot.models.packing import depths_of
from blockpilot.pairs.loading import Pair
from blockpilot.types import Layout, Request, Sampling, Tree
from helpers.engines import NEVER, PROMPT, run
from helpers.trees import tree_of

SAMPLED = Sampling(1.0, seed=5)


@st.composite
def slots(draw: st.DrawFn, num_contexts: int = 2) -> Slots:
    """A few choices of a few slots, conditioned on the choice above or not; probabilities descend and may be 0."""
    depth, width, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    falling = st.lists(st.integers(0, 20), min_size=ranks, max_size=ranks).map(
        lambda numbers: [n / (1 + sum(numbers)) for n in sorted(numbers, reverse=True)]
    )
    chances = [[[draw(falling) for _ in range(width)] for _ in range(depth)] for _ in range(num_contexts)]
    tokens = [[list(range(10 * d, 10 * d + ranks))] * width for d in range(depth)]
    list_index = st.lists(st.integers(0, width - 1), min_size=ranks, max_size=ranks)
    return Slots(tokens, chances, [[draw(list_index) for _ in range(width)] for _ in range(depth)])


def every_prefix(draft_slots: Slots) -> list[float]:
    """Probabilities of all nodes of the full tree, in descending order, without zeros."""
    chances = []
    for depth in range(1, len(draft_slots.tokens) + 1):
        for ranks in product(*(range(len(after[0])) for after in draft_slots.tokens[:depth])):
            chance, num_later, after = 1.0, 0, 0
            for at, rank in enumerate(ranks):
                chance *= draft_slots.chances[min(num_later, len(draft_slots.chances) - 1)][at][after][rank]
                num_later += rank > 0
                after = draft_slots.next_lists[at][after][rank]
            chances.append(chance)
    return sorted((chance for chance in chances if chance > 0), reverse=True)


@given(slots())
def test_best_first_gives_all_nodes_by_falling_chance_where_deviations_do_not_help(draft_slots: Slots) -> None:
    alike = draft_slots._replace(chances=draft_slots.chances[:1])
    nodes = list(best_first(choices_of(alike)))
    assert [node.chance for node in nodes] == pytest.approx(every_prefix(alike))
    assert len(list(best_first(choices_of(draft_slots)))) == len(every_prefix(draft_slots))


@given(slots(), st.integers(0, 20))
def test_a_tree_has_every_prefix_once_and_first_choices_first(draft_slots: Slots, num: int) -> None:
    """Parents are before children, and the path of first choices is at the columns of its positions."""
    tree = tree_of(list(islice(best_first(choices_of(draft_slots)), num)))
    assert len(tree.tokens) == min(num, len(every_prefix(draft_slots)))
    assert len(set(paths_of(tree))) == 1 + len(tree.tokens)
    assert all(parent < i for i, parent in enumerate(tree.parents, 1))
    node, num_first = 0, 0
    for token, *_ in best_first(choices_of(draft_slots), is_chain=True):
        if (child := tree.children.get((node, token))) is None:
            break
        node, num_first = child, num_first + 1
    assert node == num_first
    assert tree.parents[:num_first] == tuple(range(num_first))


def test_the_walk_follows_the_targets_choices() -> None:
    #          anchor -> 5 -> 6 ; anchor -> 7 -> 6 -> 8
    nodes = [Node(5, 0, 0.6, 1, source=1), Node(7, 0, 0.3, 1, source=3), Node(6, 1, 0.3, 2, source=1),
             Node(6, 2, 0.2, 2, source=2), Node(8, 4, 0.1, 3)]  # fmt: skip
    tree = tree_of(nodes)
    assert tree == Tree((5, 6, 7, 6, 8), (0, 1, 0, 3, 4), (1, 1, 3, 2, 0))
    assert depths_of(tree.parents) == [0, 1, 2, 1, 2, 3]
    assert walk(tree, [7, 0, 0, 6, 8, 1]) == [0, 3, 4, 5]
    assert walk(tree, [5, 6, 1, 6, 8, 1]) == [0, 1, 2]
    assert walk(tree, [9, 6, 1, 6, 8, 1]) == [0]
    assert tree.is_chain is False


# --- in an engine ---


@pytest.mark.parametrize(("layout", "deepest"), [("tree", 2), ("chain", 3)])
def test_trees_are_no_deeper_than_exactness_allows(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch, layout: Layout, deepest: int
) -> None:
    """Chains may be deeper: their tokens are at the columns of their positions."""
    monkeypatch.setattr("blockpilot.engine.drafting.MAX_DEPTH", 2)
    engine, drafted = Engine(tiny_pair, num_slots=1, max_length=64), list[int]()
    propose = engine._drafter.propose
    monkeypatch.setattr(engine._drafter, "propose", lambda *inputs: (drafted.extend(inputs[2]), propose(*inputs))[1])
    run(engine, [Request(PROMPT, 20, SAMPLED, 4, NEVER, layout=layout)])
    assert max(drafted) == deepest
