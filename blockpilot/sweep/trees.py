"""Which tree it takes to accept what a draft proposed at an anchor: trees of all sizes in one look.

Best-first trees nest (engine/trees.py), so the nodes that it takes until the right choice of a depth is among them
say what every tree accepts there.
"""

from collections.abc import Sequence
from itertools import islice

from blockpilot.engine.trees import best_first, choices_of, drawn_apart

MOST_NODES = 64


def emitted_along(num_accepted: Sequence[int]) -> list[int]:
    """Tokens of each step that decodes a text, given the drafts accepted at each of its anchors, in order."""
    emitted: list[int] = []
    position = 0
    while position < len(num_accepted):
        emitted.append(min(num_accepted[position] + 1, len(num_accepted) - position))
        position += emitted[-1]
    return emitted


def nodes_needed(chances: Sequence[Sequence[float]], right: Sequence[int]) -> list[int]:
    """Nodes of the smallest tree that accepts more than d drafted tokens, of every depth [D].

    chances [D][k] are those of a slot's choices, right [D] the place of the right one, below 0 for none of them.
    MOST_NODES + 1 where no tree of MOST_NODES does.
    """
    slots = drawn_apart([range(len(of_slot)) for of_slot in chances], [chances])
    needed, last = list[int](), 0
    for number, node in enumerate(islice(best_first(choices_of(slots)), MOST_NODES), 1):
        if len(needed) == len(right) or right[len(needed)] < 0:
            break
        if (node.parent, node.token) == (last, right[len(needed)]):
            needed.append(number)
            last = number
    return needed + [MOST_NODES + 1] * (len(right) - len(needed))
