"""Draft trees: which of a draft's choices are verified, and which of them the target's own choices confirm.

One pass of a block draft gives every slot a distribution of its own, which a Markov head bends by the choice right
above; a draft that goes token by token gives one after each of the prefixes that it follows. A node of a tree is one
choice of the slot at its depth, given the choices above it; its chance is the product of theirs. Best-first growth
takes nodes by falling chance, so that the tree of n nodes lies inside that of n + 1 (arXiv 2604.12989, there for
whole trees at temperature 0). A chain is a tree of first choices.

The text is a pure function of the target's logits, the seed and the position, so verification is a walk: from the
anchor to the child that the target itself chooses, until there is none. No token is rejected by chance.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from blockpilot.types import DRAFTED, Tree

MAX_DEPTH = 31  # of a path: further back layers.c sums columns in another order


class Slots(NamedTuple):
    """Choices of the D slots of one draft pass after each of P choices of the slot before, the best of each first.

    P is 1 where slots are drawn apart. tokens [D][P][K]; chances [A][D][P][K] that the target makes the choice where
    it has made those above it, by how many of those are no first choices (as the last number where they are more);
    both fall along K. places [D][P][K] say which of the P a choice is for the slot below; -1: nothing grows below it.
    """

    tokens: Sequence[Sequence[Sequence[int]]]
    chances: Sequence[Sequence[Sequence[Sequence[float]]]]
    places: Sequence[Sequence[Sequence[int]]]
    unknown: int = 0
    """The one for the slot below after a token that is none of the choices; -1: none."""
    sources: Sequence[Sequence[Sequence[int]]] | None = None
    """Where choices [D][P][K] are from, as in `Tree`; None: all are the draft's."""


def drawn_apart(tokens: Sequence[Sequence[int]], chances: Sequence[Sequence[Sequence[float]]]) -> Slots:
    """Slots whose choices do not depend on those above: tokens [D][K], chances [A][D][K]."""
    places = [[[0] * len(each)] for each in tokens]
    return Slots([[each] for each in tokens], [[[each] for each in at] for at in chances], places)


class Node(NamedTuple):
    """A choice in a growing tree: parent is the number of another, which came before it; 0 is the anchor."""

    token: int
    parent: int
    chance: float
    depth: int
    choice: int = -1
    """Flat place among the choices [D][P][K] of a draft, where it is one of them."""
    num_later: int = 0
    """Choices above it that are no first ones."""
    step: int = -1
    """Flat place among the tokens [R][M] of paths, where it is one of them."""
    source: int = 0
    """Where it is from, as in `Tree`."""


class Choice(NamedTuple):
    """A token that may follow others, and the chance that the target makes it there."""

    token: int
    chance: float
    after: int
    """Which choice of its slot it is for the slot below, as `Slots.places` has it."""
    num_later: int
    """Number of the choices so far that are no first ones."""
    place: int = -1
    """Flat place among the choices [D][P][K] of a draft, where it is one of them and may be learned from."""
    source: int = DRAFTED
    """Source, as in `Tree`."""


Follow = Callable[[tuple[int, ...], int, int], Iterable[Choice]]
"""Choices after the tokens of a path, by falling chance; with the `after` and `num_later` of its last one."""


def choices_of(slots: Slots) -> Follow:
    """The choices of a draft."""

    def follow(path: tuple[int, ...], after: int, num_later: int) -> Iterator[Choice]:
        depth = len(path)
        if depth >= len(slots.tokens) or after < 0:
            return
        below, chances = slots.places[depth][after], slots.chances[min(num_later, len(slots.chances) - 1)]
        first = (depth * len(slots.places[depth]) + after) * len(below)
        for rank, (token, chance) in enumerate(zip(slots.tokens[depth][after], chances[depth][after], strict=False)):
            yield Choice(token, chance, below[rank], num_later + (rank > 0), first + rank)

    return follow


def best_first(follow: Follow, deepest: int = MAX_DEPTH, *, is_chain: bool = False) -> Iterator[Node]:
    """Nodes by falling chance, at most so deep; the first is number 1. A chain has the best choices only.

    Ends where no choice is left that has a chance.
    """
    # Each entry is the best choice that is left after one path: taking it puts the next one after that path, and the
    # best one below it, in its place. Ties go to the parent that came first, then by rank.
    heap: list[tuple[float, int, int, Choice, Iterator[Choice], tuple[int, ...], int, float]] = []

    def offer(
        parent: int, rank: int, choices: Iterator[Choice], path: tuple[int, ...], num_later: int, above: float
    ) -> None:
        """The next choice after a path, which is reached with chance `above`."""
        if (choice := next(choices, None)) is not None and above * choice.chance > 0:
            heappush(heap, (-above * choice.chance, parent, rank, choice, choices, path, num_later, above))

    def offer_below(parent: int, path: tuple[int, ...], after: int, num_later: int, above: float) -> None:
        if len(path) < deepest:
            offer(parent, 0, iter(follow(path, after, num_later)), path, num_later, above)

    offer_below(0, (), 0, 0, 1.0)
    number = 0
    while heap:
        negative, parent, rank, choice, choices, path, num_later, above = heappop(heap)
        number += 1
        yield Node(choice.token, parent, -negative, len(path) + 1, choice.place, num_later, source=choice.source)
        if not is_chain:
            offer(parent, rank + 1, choices, path, num_later, above)
        offer_below(number, (*path, choice.token), choice.after, choice.num_later, -negative)


def tree_of(nodes: Sequence[Node]) -> Tree:
    """The tree of nodes as `best_first` gives them, in the order of `places_of`."""
    place = places_of(nodes)
    taken = sorted(zip(place[1:], nodes, strict=True))
    tokens, sources = zip(*((node.token, node.source) for _, node in taken), strict=True) if taken else ((), ())
    return Tree(tokens, tuple(place[node.parent] for _, node in taken), sources)


def places_of(nodes: Sequence[Node]) -> list[int]:
    """Place of the anchor and of every node in their tree [1 + nodes]: the chain of first children is laid out first,
    else as they grew. If those are accepted, their keys and values lie where they belong.
    """
    chain = [0]  # numbers of the anchor, its first child, that one's first child ...
    for number, node in enumerate(nodes, 1):
        if node.parent == chain[-1]:
            chain.append(number)
    places = dict(zip(chain, range(len(chain)), strict=True))
    others = (number for number in range(len(nodes) + 1) if number not in places)
    places |= dict(zip(others, range(len(chain), len(nodes) + 1), strict=True))
    return [places[number] for number in range(len(nodes) + 1)]


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    """Tokens from the anchor (without it) to every node [1 + nodes], the node itself the last."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths


def walk(tree: Tree, chosen: Sequence[int]) -> list[int]:
    """The accepted path, from the anchor (0) on: nodes that the target chose where it had chosen those before.

    chosen [1 + nodes] are its choices after the anchor and after every node.
    """
    children = tree.children
    path, node = [0], children.get((0, chosen[0]))
    while node is not None:
        path.append(node)
        node = children.get((node, chosen[node]))
    return path
