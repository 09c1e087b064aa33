"""Size of the smallest draft tree that accepts each depth at an anchor.

A best-first tree contains all smaller ones (engine/trees.py). One number per depth, the nodes after which its right
choice is in the tree, therefore says which tree sizes accept it.
"""

from collections.abc import Sequence
from itertools import islice

from blockpilot.engine.trees import best_first, choices_of, independent_slots

MOST_NODES = 64


def emitted_along(num_accepted: Sequence[int]) -> list[int]:
    """Number of tokens emitted by each step, from the number of drafted tokens accepted at each anchor of a text."""
    emitted: list[int] = []
    position = 0
    while position < len(num_accepted):
        emitted.append(min(num_accepted[position] + 1, len(num_accepted) - position))
        position += emitted[-1]
    return emitted


def nodes_needed(probs: Sequence[Sequence[float]], right_choices: Sequence[int]) -> list[int]:
    """Number of nodes [D] of the smallest tree that accepts more than d drafted tokens, for each depth d.

    probs [D][k] are the probabilities of a slot's choices; right_choices [D] is the index of the right one, below 0
    if none is right. MOST_NODES + 1 means that MOST_NODES nodes are not enough.
    """
    slots = independent_slots([range(len(slot_probs)) for slot_probs in probs], [probs])
    num_nodes, parent = list[int](), 0
    for number, node in enumerate(islice(best_first(choices_of(slots)), MOST_NODES), 1):
        if len(num_nodes) == len(right_choices) or right_choices[len(num_nodes)] < 0:
            break
        if (node.parent, node.token) == (parent, right_choices[len(num_nodes)]):
            num_nodes.append(number)
            parent = number
    return num_nodes + [MOST_NODES + 1] * (len(right_choices) - len(num_nodes))
