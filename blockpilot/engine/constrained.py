"""Constrained requests: what may be drafted under an automaton, and which tokens the target chooses.

The text is what one-token-at-a-time decoding under the same mask gives. The noise of a token in the keyed sampler's
race does not depend on what else is allowed, so a free choice that is allowed is the constrained choice as well. The
mask is needed only where the free choice is refused, and where min_p, top_k or top_p cut by what is allowed.
"""

import math
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from torch import Tensor

from blockpilot.engine.rows import Row
from blockpilot.engine.sampling import NO_TOKEN, cuts, keyed_sample
from blockpilot.engine.trees import Node, Slots
from blockpilot.types import DRAFTED, Automaton, Tree

NO_SLOTS = Slots([], [], [])


class _Choice(NamedTuple):
    """A token that may follow, and its chance; `after` and `num_later` are those of the slot below (`Slots`)."""

    token: int
    chance: float
    after: int
    num_later: int
    source: int = 0


def settle(
    row: Row, automaton: Automaton, tree: Tree, chosen: Sequence[int], logits: Tensor, of_target: Tensor
) -> list[int]:
    """The choices that a row's automaton allows in the place of free ones, along the path that they accept.

    chosen [1 + nodes] are the target's free choices after the anchor and after every node, drawn from
    logits [1 + nodes, vocab]; where these leave nothing that is allowed (all stop tokens, before the least length),
    the target's own logits, of_target, decide. NO_TOKEN after a path beyond which the automaton's limits are; raises
    its error where they are reached at once.
    """
    chosen, sampling = list(chosen), row.request.sampling
    is_cut = not sampling.is_greedy and cuts(sampling, logits.shape[1])
    children, path = tree.children, list[int]()
    node: int | None = 0
    while node is not None and chosen[node] != NO_TOKEN and not automaton.ends(path):
        if is_cut or not automaton.allowed(path, chosen[node : node + 1])[0]:
            try:
                refused = ~automaton.mask(path).to(logits.device)
            except ValueError:
                if not path:
                    raise
                chosen[node] = NO_TOKEN  # the tokens before it stand, as in plain decoding
                break
            masked = logits[node : node + 1].masked_fill(refused, -math.inf)
            if logits is not of_target and masked.isneginf().all():
                masked = of_target[node : node + 1].masked_fill(refused, -math.inf)
            chosen[node] = int(keyed_sample(masked, [len(row.tokens) + len(path)], [sampling]))
        path.append(chosen[node])
        node = children.get((node, chosen[node]))
    return chosen


def best_allowed(automaton: Automaton, slots: Slots, deepest: int, *, is_chain: bool) -> Iterator[Node]:
    """`best_first` among the choices that an automaton allows, down to a depth; forced tokens are certain.

    Where a token is forced nothing else is a choice, also below the last slot. A chain has the best choice only.
    """
    heap: list[tuple[float, int, int, _Choice, tuple[int, ...]]] = []

    def offer(parent: int, path: tuple[int, ...], choices: "Sequence[_Choice]", above: float) -> None:
        for rank, choice in enumerate(choices[:1] if is_chain else choices):
            heappush(heap, (-above * choice.chance, parent, rank, choice, (*path, choice.token)))

    if deepest > 0:
        offer(0, (), _choices(automaton, slots, (), 0, 0), 1.0)
    number = 0
    while heap:
        negative, parent, _, choice, path = heappop(heap)
        number += 1
        yield Node(choice.token, parent, -negative, len(path), source=choice.source)
        if len(path) < deepest:
            offer(number, path, _choices(automaton, slots, path, choice.after, choice.num_later), -negative)


def _choices(
    automaton: Automaton, slots: Slots, path: tuple[int, ...], after: int, num_later: int
) -> Sequence[_Choice]:
    """Choices that may follow a path, the most probable first: chances are shares of what is not refused."""
    depth = len(path)
    drafted = slots.tokens[depth][after] if depth < len(slots.tokens) and after >= 0 else []
    sources = slots.sources[depth][after] if slots.sources and drafted else [DRAFTED] * len(drafted)
    if forced := automaton.forced(path)[:1]:
        rank = drafted.index(forced[0]) if forced[0] in drafted else len(drafted)
        below = slots.unknown if depth < len(slots.tokens) else -1
        if rank < len(drafted):
            below = slots.places[depth][after][rank]
        return [_Choice(forced[0], 1.0, below, num_later + (rank > 0), sources[rank] if rank < len(drafted) else 0)]
    if not drafted:
        return []
    chances = slots.chances[min(num_later, len(slots.chances) - 1)][depth][after]
    allowed = automaton.allowed(path, drafted)
    left = 1.0 - sum(chance for chance, may in zip(chances, allowed, strict=False) if not may)
    found = []
    for rank, (token, chance, may) in enumerate(zip(drafted, chances, allowed, strict=False)):
        if may and chance > 0:
            below = slots.places[depth][after][rank]
            share = min(1.0, chance / max(left, chance))
            found.append(_Choice(token, share, below, num_later + (rank > 0), sources[rank]))
    return found
