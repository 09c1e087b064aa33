"""Constrained decoding: the tokens that may be drafted under an automaton, and the tokens that the target chooses.

The text equals one-token-at-a-time decoding under the same mask. A token's noise in the keyed sampler's race does not
depend on which others are allowed, so an unconstrained choice that is allowed is also the constrained choice. The
mask is only needed if the automaton refuses that choice, or if min_p, top_k or top_p select among the allowed tokens.
"""

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from blockpilot.engine.rows import Row
from blockpilot.engine.sampling import NO_TOKEN, cuts, keyed_sample
from blockpilot.engine.trees import Choice, Follow, Slots
from blockpilot.types import DRAFTED, Automaton, Tree

NO_SLOTS = Slots([], [], [])


def settle(
    row: Row, automaton: Automaton, tree: Tree, chosen: Sequence[int], logits: Tensor, target_logits: Tensor
) -> list[int]:
    """Choices [1 + nodes] of the target, those on the accepted path replaced by ones that the row's automaton allows.

    chosen [1 + nodes]: unconstrained choices after the anchor and after every node, from logits [1 + nodes, vocab].
    If every allowed token is masked there (stop tokens before the minimum length), the target's unprocessed logits
    decide. The choice is NO_TOKEN where the automaton reaches its limits after at least one token; if it reaches them
    at the anchor, its ValueError is raised.
    """
    chosen, sampling = list(chosen), row.request.sampling
    is_cut = not sampling.is_greedy and cuts(sampling, logits.shape[1])
    children, path = tree.children, list[int]()
    node: int | None = 0
    # Only choices on the accepted path are constrained: others are never read.
    while node is not None and chosen[node] != NO_TOKEN and not automaton.ends(path):
        if is_cut or not automaton.allowed(path, chosen[node : node + 1])[0]:
            try:
                refused = ~automaton.mask(path).to(logits.device)
            except ValueError:
                if not path:
                    raise
                chosen[node] = NO_TOKEN  # the tokens before it stay accepted, as in plain decoding
                break
            # The same noise over the allowed tokens gives the token of one-token-at-a-time decoding.
            masked = logits[node : node + 1].masked_fill(refused, -math.inf)
            if logits is not target_logits and masked.isneginf().all():
                masked = target_logits[node : node + 1].masked_fill(refused, -math.inf)
            chosen[node] = int(keyed_sample(masked, [len(row.tokens) + len(path)], [sampling]))
        path.append(chosen[node])
        node = children.get((node, chosen[node]))
    return chosen


def allowed(automaton: Automaton, slots: Slots) -> Follow:
    """Choices that an automaton allows, with the draft's probabilities renormalised over them.

    A forced token is the only choice, with probability 1, also below the last slot.
    """

    def follow(path: tuple[int, ...], after: int, num_later: int) -> Iterator[Choice]:
        depth = len(path)
        tokens = slots.tokens[depth][after] if depth < len(slots.tokens) and after >= 0 else []
        sources = slots.sources[depth][after] if slots.sources and tokens else [DRAFTED] * len(tokens)
        if forced := automaton.forced(path)[:1]:
            yield _forced(forced[0], slots, depth, after, tokens, sources, num_later)
            return
        if not tokens:
            return
        chances = slots.chances[min(num_later, len(slots.chances) - 1)][depth][after]
        are_allowed = automaton.allowed(path, tokens)
        # A refused token cannot be chosen: the others share its probability.
        left = 1.0 - sum(chance for chance, fits in zip(chances, are_allowed, strict=False) if not fits)
        for rank, (token, chance, fits) in enumerate(zip(tokens, chances, are_allowed, strict=False)):
            if fits and chance > 0:
                below, share = slots.next_lists[depth][after][rank], min(1.0, chance / max(left, chance))
                flat_index = slots.flat_index(depth, after, rank)
                yield Choice(token, share, below, num_later + (rank > 0), flat_index, sources[rank])

    return follow


def _forced(
    token: int,
    slots: Slots,
    depth: int,
    after: int,
    tokens: Sequence[int],
    sources: Sequence[int],
    num_later: int,
) -> Choice:
    """The forced choice at a depth, whether or not it is one of the draft's `tokens` there."""
    if token in tokens:
        rank = tokens.index(token)
        return Choice(token, 1.0, slots.next_lists[depth][after][rank], num_later + (rank > 0), source=sources[rank])
    below = slots.unknown if depth < len(slots.tokens) else -1
    return Choice(token, 1.0, below, num_later + (len(tokens) > 0), source=0)
