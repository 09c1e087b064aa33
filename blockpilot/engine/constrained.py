"""Constrained requests: what may be drafted under an automaton, and which tokens the target chooses.

The text is what one-token-at-a-time decoding under the same mask gives. The noise of a token in the keyed sampler's
race does not depend on what else is allowed, so a free choice that is allowed is the constrained choice as well. The
mask is needed only where the free choice is refused, and where min_p, top_k or top_p cut by what is allowed.
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
    # Only choices on the accepted path are settled: others are never read.
    while node is not None and chosen[node] != NO_TOKEN and not automaton.ends(path):
        if is_cut or not automaton.allowed(path, chosen[node : node + 1])[0]:
            try:
                refused = ~automaton.mask(path).to(logits.device)
            except ValueError:
                if not path:
                    raise
                chosen[node] = NO_TOKEN  # the tokens before it stand, as in plain decoding
                break
            # The same noise among what is allowed: the draw of one token at a time.
            masked = logits[node : node + 1].masked_fill(refused, -math.inf)
            if logits is not of_target and masked.isneginf().all():
                masked = of_target[node : node + 1].masked_fill(refused, -math.inf)
            chosen[node] = int(keyed_sample(masked, [len(row.tokens) + len(path)], [sampling]))
        path.append(chosen[node])
        node = children.get((node, chosen[node]))
    return chosen


def allowed(automaton: Automaton, slots: Slots) -> Follow:
    """Choices that an automaton allows; the chances of a draft's are shares of what is not refused.

    Where a token is forced it is certain, and nothing else is a choice, also below the last slot. Nothing is learned
    of them.
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
        may = automaton.allowed(path, tokens)
        # What is refused cannot be chosen: its probability is shared among the rest.
        left = 1.0 - sum(chance for chance, fits in zip(chances, may, strict=False) if not fits)
        for rank, (token, chance, fits) in enumerate(zip(tokens, chances, may, strict=False)):
            if fits and chance > 0:
                below, share = slots.places[depth][after][rank], min(1.0, chance / max(left, chance))
                yield Choice(token, share, below, num_later + (rank > 0), source=sources[rank])

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
        return Choice(token, 1.0, slots.places[depth][after][rank], num_later + (rank > 0), source=sources[rank])
    below = slots.unknown if depth < len(slots.tokens) else -1
    return Choice(token, 1.0, below, num_later + (len(tokens) > 0), source=0)
