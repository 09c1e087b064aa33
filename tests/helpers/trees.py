"""Trees from lists of nodes."""

from collections.abc import Sequence

import numpy as np

from blockpilot.control.choose import Trees
from blockpilot.engine.growing import GrownTrees, as_arrays, trees_of
from blockpilot.engine.trees import Node
from blockpilot.types import Tree


def grown_of(nodes_of_rows: Sequence[Sequence[Node]]) -> GrownTrees:
    """Grown trees of rows, with all nodes selected."""
    nodes = as_arrays(nodes_of_rows, max(map(len, nodes_of_rows)))
    return GrownTrees(nodes, nodes.num, *trees_of(nodes, nodes.num))


def tree_of(nodes: Sequence[Node]) -> Tree:
    """The tree of a row's nodes."""
    return grown_of([nodes]).trees[0]


def nodes_of(grown: GrownTrees) -> list[list[Node]]:
    """Selected nodes of every row."""
    nodes_by_row = list[list[Node]]()
    for r, size in enumerate(grown.sizes.tolist()):
        nodes_by_row.append(list(map(Node, *(values[r, :size].tolist() for values in grown.nodes[:-1]))))
    return nodes_by_row


def trees_to_select(chances_of_rows: Sequence[Sequence[float]]) -> Trees:
    """Trees of rows at temperature 0, each a chain with these probabilities."""
    chains = [[Node(0, i, chance, i + 1, choice_index=0) for i, chance in enumerate(row)] for row in chances_of_rows]
    num = np.array(list(map(len, chains)))
    return Trees(np.zeros_like(num), num, as_arrays(chains, max(1, int(num.max()))))
