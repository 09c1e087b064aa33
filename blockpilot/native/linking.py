"""The choices of a draft after each token before them, by its edges, in C (linking.c).

By torch they take a dozen calls and a millisecond, 4% of a step of the embedded draft.
"""

from ctypes import c_int, c_long, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from blockpilot.native.library import text_library
from blockpilot.types import Candidates

MOST_WIDTH, MOST_RANK = 64, 512  # of linking.c


class EdgeTables(NamedTuple):
    """Vectors of tokens before a slot and of those in it [vocab, rank], float32.

    projection [rank, hidden]: of a slot's hidden state, by which the vectors before it are multiplied; None: by 1.
    """

    predecessors: Tensor
    successors: Tensor
    projection: Tensor | None


class Followed(NamedTuple):
    """The best choices after each of P tokens [N, P, K], and which of the slot's own choices each was."""

    tokens: Tensor
    log_probs: Tensor
    scores: Tensor
    places: Tensor


def link_choices(
    tables: EdgeTables,
    choices: Candidates,
    hidden: Tensor,
    before: Tensor,
    temperatures: Tensor,
    num: int,
    *,
    is_whole: bool,
) -> Followed | None:
    """The `num` best choices [N, W] after the tokens before [N, P], as `Edges.link` has them.

    hidden [N, hidden], temperatures [N] float32. None without C, and for more than it has room for.
    """
    (num_slots, width), contexts, rank = choices.tokens.shape, before.shape[1], tables.successors.shape[1]
    library = text_library() if width <= MOST_WIDTH and rank <= MOST_RANK else None
    if library is None:
        return None
    shape = num_slots, contexts, min(num, width)
    tokens, places = (torch.empty(shape, dtype=torch.int64) for _ in range(2))
    found = Followed(tokens, torch.empty(shape), torch.empty(shape), places)
    sizes = map(c_long, (num_slots, contexts, width, rank, hidden.shape[1], shape[2]))
    # Kept until the call is over: C has their addresses.
    kept = hidden.float().contiguous(), before.contiguous(), temperatures
    given = choices.tokens.contiguous(), choices.log_probs.contiguous(), choices.scores.contiguous()
    library.link_choices(
        *(*sizes, _pointer(kept[0]), _pointer(tables.projection), _pointer(tables.predecessors)),
        *(_pointer(tables.successors), *map(_pointer, kept[1:]), c_int(is_whole), *map(_pointer, (*given, *found))),
    )
    return found


def _pointer(values: Tensor | None) -> c_void_p | None:
    return None if values is None else c_void_p(values.data_ptr())
