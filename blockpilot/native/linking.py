"""Edges of a draft: its choices conditioned on the previous token, in C (linking.c).

By torch they take a dozen calls and one millisecond, 4% of a step of the embedded draft.
"""

from ctypes import c_int, c_long
from typing import NamedTuple

import torch
from torch import Tensor

from blockpilot.native.library import tensor_pointer, text_library
from blockpilot.types import Candidates

MOST_WIDTH, MOST_RANK = 64, 512  # of linking.c


class EdgeTables(NamedTuple):
    """Vectors [vocab, rank] float32 of tokens as predecessors and as successors.

    projection [rank, hidden]: maps a slot's hidden state to a gate of the predecessor's vector; None: the gate is 1.
    """

    predecessors: Tensor
    successors: Tensor
    projection: Tensor | None


class LinkedChoices(NamedTuple):
    """The best choices after each of P tokens [N, P, K]; indices: their indices among the slot's choices."""

    tokens: Tensor
    log_probs: Tensor
    scores: Tensor
    indices: Tensor


def link_choices(
    tables: EdgeTables,
    choices: Candidates,
    hidden: Tensor,
    before: Tensor,
    temperatures: Tensor,
    num: int,
    *,
    is_whole: bool,
) -> LinkedChoices | None:
    """The `num` best of the choices [N, W] after each of the tokens before [N, P], as in `Edges.link`.

    hidden [N, hidden], temperatures [N] float32. None without C, and above MOST_WIDTH or MOST_RANK.
    """
    (num_slots, width), contexts, rank = choices.tokens.shape, before.shape[1], tables.successors.shape[1]
    library = text_library() if width <= MOST_WIDTH and rank <= MOST_RANK else None
    if library is None:
        return None
    shape = num_slots, contexts, min(num, width)
    tokens, indices = (torch.empty(shape, dtype=torch.int64) for _ in range(2))
    followed = LinkedChoices(tokens, torch.empty(shape), torch.empty(shape), indices)
    sizes = map(c_long, (num_slots, contexts, width, rank, hidden.shape[1], shape[2]))
    # Variables keep the arrays alive during the call: C has their addresses.
    states, tokens_before = hidden.float().contiguous(), before.contiguous()
    inputs = states, tables.projection, tables.predecessors, tables.successors, tokens_before, temperatures
    slot_choices = choices.tokens.contiguous(), choices.log_probs.contiguous(), choices.scores.contiguous()
    arguments, choice_arguments = map(tensor_pointer, inputs), map(tensor_pointer, (*slot_choices, *followed))
    library.link_choices(*sizes, *arguments, c_int(is_whole), *choice_arguments)
    return followed
