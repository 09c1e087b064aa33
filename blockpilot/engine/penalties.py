"""Logits processors: what a request changes of its logits before a token is drawn, in the order that vLLM has.

Bias, then stop tokens before the least length, then penalties of what the text has already. A penalty depends on the
tokens before a position. For a node of a draft tree these are the row's text and the node's ancestors, so a tree's
text is that of one token at a time. A block draft's slots do not know their ancestors: its logits are changed by the
row's text alone, which costs acceptance where a text repeats itself and never changes it.

Changed logits are float32: a bias of 0.1 would be lost in bfloat16.
"""

import math
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Self

import numpy as np
import torch
from torch import Tensor

from blockpilot.device import sent, tensor_on
from blockpilot.types import Request

LARGEST_LOGIT = 1e29  # of a changed one: larger ones count as not finite (sampling.py)


class LogitsProcessor:
    """Changes of one request's logits; follows its text as it grows."""

    def __init__(self, request: Request) -> None:
        self._sampling, self._num_prompt_tokens = request.sampling, len(request.prompt_ids)
        self._least, self._stop_token_ids = request.min_new_tokens, sorted(request.stop_token_ids)
        self._places: dict[int, int] = {}  # of the tokens that penalties are for, in the order in which they came
        self._counts = array("f")  # how often each of them is in the answer
        self._num_counted = self._num_prompt_tokens
        if self._sampling.repetition_penalty != 1:
            for token in request.prompt_ids:
                self._place(token)
        self._num_of_prompt = len(self._places)

    @classmethod
    def of(cls, request: Request) -> Self | None:
        """That of a request; None where it changes nothing."""
        sampling = request.sampling
        has_least = request.min_new_tokens > 0 and request.stop_token_ids
        return cls(request) if sampling.has_penalties or sampling.logit_bias or has_least else None

    def __call__(
        self,
        logits: Tensor,
        tokens: Sequence[int],
        positions: Sequence[int],
        paths: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Logits [n, V] as float32, changed, for tokens to be drawn at `positions` [n].

        tokens: the row's text. paths [n]: what follows it before each position; nothing that counts without them.
        """
        changed = logits.to(torch.float32, copy=True)
        # 1. Bias.
        if bias := self._sampling.logit_bias:
            ids, values = (tensor_on(changed.device, of_bias) for of_bias in zip(*bias, strict=True))
            changed[:, ids] += values.float()
        # 2. Nothing stops the text before its least length.
        early = [i for i, at in enumerate(positions) if at - self._num_prompt_tokens < self._least]
        if early and self._stop_token_ids:
            rows, columns = tensor_on(changed.device, early), tensor_on(changed.device, self._stop_token_ids)
            changed[rows[:, None], columns] = -math.inf
        # 3. Penalties.
        if self._sampling.has_penalties:
            self._count(tokens)
            self._penalise(changed, paths or [()] * len(changed))
        return changed

    def _place(self, token: int) -> int:
        if token not in self._places:
            self._places[token] = len(self._places)
            self._counts.append(0)
        return self._places[token]

    def _count(self, tokens: Sequence[int]) -> None:
        for token in tokens[self._num_counted :]:
            self._counts[self._place(token)] += 1
        self._num_counted = len(tokens)

    def _penalise(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Penalise, in place, the tokens of the text and of every row's own path."""
        # 1. Counts [n, tokens]: of the text, the same for all, and of each row's own path.
        sampling, known = self._sampling, len(self._places)
        places = dict[int, int]()  # of tokens that only paths have
        for token in chain.from_iterable(paths):
            if token not in self._places:
                places.setdefault(token, known + len(places))
        counts = np.zeros((len(paths), known + len(places)), dtype=np.float32)
        counts[:, :known] = self._counts
        for i, path in enumerate(paths):
            for token in path:
                counts[i, places[token] if token in places else self._places[token]] += 1
        # 2. Repetition counts prompt and answer, frequency and presence the answer alone.
        of_answer = sent(torch.from_numpy(counts), logits.device)
        seen = of_answer > 0
        of_text = seen.clone()
        of_text[:, : self._num_of_prompt] = True
        ids = sent(torch.tensor([*self._places, *places], dtype=torch.int64), logits.device)
        some = logits[:, ids]
        repeated = torch.where(some > 0, some / sampling.repetition_penalty, some * sampling.repetition_penalty)
        some = torch.where(of_text, repeated, some)
        some = some - sampling.frequency_penalty * of_answer - sampling.presence_penalty * seen.float()
        logits[:, ids] = some.clamp(max=LARGEST_LOGIT)
