"""Draft trees: best-first growth from a draft's choices, and verification by the target's choices.

One pass of a block draft gives a distribution for every slot, which a Markov head conditions on the choice directly
above; an autoregressive draft gives one after each prefix that it expands. A node of a tree is one choice for the
slot at its depth, given the choices above; its `chance` is the product of the acceptance probabilities on its path.
Best-first growth takes nodes in descending order of chance, so the tree of n nodes is a subtree of the tree of n + 1
(arXiv 2604.12989, there for entire trees at temperature 0). A chain is a tree of first choices.

The text is a pure function of the target's logits, the seed and the position, so verification is a walk: from the
anchor to the child that equals the target's choice, until there is none. There is no rejection sampling.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from blockpilot.types import DRAFTED, Tree

MAX_DEPTH = 31  # maximum depth of a path: beyond it layers.c would sum columns in another order


class Slots(NamedTuple):
    """Choices for the D slots of a draft: per slot P lists of K choices, best first, each list after a choice above.

    P is 1 if slots are independent. tokens [D][P][K]. chances [A][D][P][K]: acceptance probabilities given that the
    choices above were accepted, by the number of later (not first) choices above, at most A - 1; descending along K.
    next_lists [D][P][K]: index (0 to P - 1) of the list of the slot below that follows a choice; -1: none.
    """

    tokens: Sequence[Sequence[Sequence[int]]]
    chances: Sequence[Sequence[Sequence[Sequence[float]]]]
    next_lists: Sequence[Sequence[Sequence[int]]]
    unknown: int = 0
    """Index of the list that follows a token that is not one of the choices; -1: none."""
    sources: Sequence[Sequence[Sequence[int]]] | None = None
    """Sources of the choices [D][P][K], as in `Tree`; None: all are the draft's."""

    def flat_index(self, depth: int, after: int, rank: int) -> int:
        """Flat index of a choice in [D][P][K]."""
        lists = self.next_lists[depth]
        return (depth * len(lists) + after) * len(lists[after]) + rank


def independent_slots(tokens: Sequence[Sequence[int]], chances: Sequence[Sequence[Sequence[float]]]) -> Slots:
    """Slots whose choices are independent of those above: tokens [D][K], chances [A][D][K]."""
    next_lists = [[[0] * len(slot)] for slot in tokens]
    return Slots([[slot] for slot in tokens], [[[slot] for slot in slots] for slots in chances], next_lists)


class Node(NamedTuple):
    """A node of a growing tree; parent is an earlier node's number (0: the anchor), chance the path probability."""

    token: int
    parent: int
    chance: float
    depth: int
    choice_index: int = -1
    """Flat index among the choices [D][P][K] of a draft; -1 if it is not one of them."""
    num_later: int = 0
    """Number of choices above it that are not first choices."""
    path_index: int = -1
    """Flat index among the tokens [R][M] of paths; -1 if it is not one of them."""
    source: int = 0
    """Source, as in `Tree`."""


class Choice(NamedTuple):
    """A token that may follow a path, and its acceptance probability there."""

    token: int
    chance: float
    after: int
    """Index of the list of the slot below that follows it, as in `Slots.next_lists`."""
    num_later: int
    """Number of choices down to this one that are not first choices."""
    flat_index: int = -1
    """Flat index among the choices [D][P][K]; -1 for a token that is forced."""
    source: int = DRAFTED
    """Source, as in `Tree`."""


Follow = Callable[[tuple[int, ...], int, int], Iterable[Choice]]
"""Choices after the tokens of a path, most probable first, given `after` and `num_later` of its last choice."""


def choices_of(slots: Slots) -> Follow:
    """`Follow` for the choices of a draft."""

    def follow(path: tuple[int, ...], after: int, num_later: int) -> Iterator[Choice]:
        depth = len(path)
        if depth >= len(slots.tokens) or after < 0:
            return
        below, chances = slots.next_lists[depth][after], slots.chances[min(num_later, len(slots.chances) - 1)]
        first = slots.flat_index(depth, after, 0)
        for rank, (token, chance) in enumerate(zip(slots.tokens[depth][after], chances[depth][after], strict=False)):
            yield Choice(token, chance, below[rank], num_later + (rank > 0), first + rank)

    return follow


def best_first(follow: Follow, deepest: int = MAX_DEPTH, *, is_chain: bool = False) -> Iterator[Node]:
    """Nodes in descending order of path probability, to depth `deepest`, numbered from 1. A chain has no siblings.

    Ends when no choice with a positive probability is left.
    """
    # Each entry is the best remaining choice after one path. When it is taken, the next choice after that path and
    # the best choice below it enter the heap. Ties go to the earlier parent, then to the better rank.
    heap: list[tuple[float, int, int, Choice, Iterator[Choice], tuple[int, ...], int, float]] = []

    def push(
        parent: int, rank: int, choices: Iterator[Choice], path: tuple[int, ...], num_later: int, above: float
    ) -> None:
        """Push the next choice after a path of probability `above`."""
        if (choice := next(choices, None)) is not None and above * choice.chance > 0:
            heappush(heap, (-above * choice.chance, parent, rank, choice, choices, path, num_later, above))

    def push_below(parent: int, path: tuple[int, ...], after: int, num_later: int, above: float) -> None:
        if len(path) < deepest:
            push(parent, 0, iter(follow(path, after, num_later)), path, num_later, above)

    push_below(0, (), 0, 0, 1.0)
    number = 0
    while heap:
        negative, parent, rank, choice, choices, path, num_later, above = heappop(heap)
        number += 1
        yield Node(choice.token, parent, -negative, len(path) + 1, choice.flat_index, num_later, source=choice.source)
        if not is_chain:
            push(parent, rank + 1, choices, path, num_later, above)
        push_below(number, (*path, choice.token), choice.after, choice.num_later, -negative)


def tree_order(parents: Sequence[int]) -> list[int]:
    """Index of the anchor and of every node in their `Tree` [1 + nodes], given the nodes' parents as in `Node`.

    The chain of first children comes first, then the others in the order of growth. If the chain is accepted, its
    keys and values are already in their final columns of the cache.
    """
    chain = [0]  # numbers of the anchor, its first child, that one's first child ...
    for number, parent in enumerate(parents, 1):
        if parent == chain[-1]:
            chain.append(number)
    index_of = dict(zip(chain, range(len(chain)), strict=True))
    others = (number for number in range(len(parents) + 1) if number not in index_of)
    index_of |= dict(zip(others, range(len(chain), len(parents) + 1), strict=True))
    return [index_of[number] for number in range(len(parents) + 1)]


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    """Tokens of the path to every node [1 + nodes], without the anchor, the node itself last."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths


def walk(tree: Tree, chosen: Sequence[int]) -> list[int]:
    """The accepted path from the anchor (0): the nodes that equal the target's choices, one after the other.

    chosen [1 + nodes] are the target's choices after the anchor and after every node.
    """
    children = tree.children
    path, node = [0], children.get((0, chosen[0]))
    while node is not None:
        path.append(node)
        node = children.get((node, chosen[node]))
    return path
