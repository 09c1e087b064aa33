"""Logits processors in vLLM's order: bias, minimum length (no stop tokens before it), then penalties.

A penalty depends on the tokens before a position. For the choice after a node of a draft tree these are the row's
text and the node's path, so the text equals one-token-at-a-time decoding. The slots of a block draft do not depend on
the path: its logits are penalised by the row's text alone. In repetitive texts this lowers acceptance; it never
changes the text.

Processed logits are float32: a bias of 0.1 would be lost in bfloat16.
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

LARGEST_LOGIT = 1e29  # after processing: larger ones count as not finite (sampling.py)


class LogitsProcessor:
    """Bias, minimum length and penalties of one request; counts the tokens of its text as it grows."""

    def __init__(self, request: Request) -> None:
        self._sampling, self._num_prompt_tokens = request.sampling, len(request.prompt_ids)
        self._min_new_tokens, self._stop_token_ids = request.min_new_tokens, sorted(request.stop_token_ids)
        self._index_of: dict[int, int] = {}  # token -> index in _counts, of the tokens with penalties
        self._counts = array("f")  # occurrences in the answer
        self._num_counted = self._num_prompt_tokens
        if self._sampling.repetition_penalty != 1:
            for token in request.prompt_ids:
                self._add(token)
        self._num_prompt_ids = len(self._index_of)  # different tokens of the prompt

    @classmethod
    def of(cls, request: Request) -> Self | None:
        """The processor of a request; None if it changes no logits."""
        sampling = request.sampling
        has_min_length = request.min_new_tokens > 0 and request.stop_token_ids
        return cls(request) if sampling.has_penalties or sampling.logit_bias or has_min_length else None

    def __call__(
        self,
        logits: Tensor,
        tokens: Sequence[int],
        positions: Sequence[int],
        paths: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Processed copy, float32, of logits [n, V] for tokens to be sampled at `positions` [n].

        tokens: the row's text. paths [n]: tokens between the text and each position; by default none.
        """
        processed = logits.to(torch.float32, copy=True)
        # 1. Bias.
        if bias := self._sampling.logit_bias:
            ids, values = (tensor_on(processed.device, column) for column in zip(*bias, strict=True))
            processed[:, ids] += values.float()
        # 2. No stop tokens before the minimum length.
        min_end = self._num_prompt_tokens + self._min_new_tokens
        early = [i for i, position in enumerate(positions) if position < min_end]
        if early and self._stop_token_ids:
            rows, columns = tensor_on(processed.device, early), tensor_on(processed.device, self._stop_token_ids)
            processed[rows[:, None], columns] = -math.inf
        # 3. Penalties.
        if self._sampling.has_penalties:
            self._count(tokens)
            self._penalise(processed, paths or [()] * len(processed))
        return processed

    def _add(self, token: int) -> int:
        """Index of a token in the counts, added if it is new."""
        if token not in self._index_of:
            self._index_of[token] = len(self._index_of)
            self._counts.append(0)
        return self._index_of[token]

    def _count(self, tokens: Sequence[int]) -> None:
        for token in tokens[self._num_counted :]:
            self._counts[self._add(token)] += 1
        self._num_counted = len(tokens)

    def _penalise(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Penalise, in place, the tokens of the text and of each row's path."""
        # 1. Counts [n, tokens]: of the text, the same for all rows, and of each row's path.
        sampling, num_text_ids = self._sampling, len(self._index_of)
        path_index_of = dict[int, int]()  # of tokens that are only in paths
        for token in chain.from_iterable(paths):
            if token not in self._index_of:
                path_index_of.setdefault(token, num_text_ids + len(path_index_of))
        counts = np.zeros((len(paths), num_text_ids + len(path_index_of)), dtype=np.float32)
        counts[:, :num_text_ids] = self._counts
        for i, path in enumerate(paths):
            for token in path:
                counts[i, path_index_of[token] if token in path_index_of else self._index_of[token]] += 1
        # 2. Repetition counts prompt and answer, frequency and presence the answer only.
        answer_counts = sent(torch.from_numpy(counts), logits.device)
        in_answer = answer_counts > 0
        in_text = in_answer.clone()
        in_text[:, : self._num_prompt_ids] = True
        ids = sent(torch.tensor([*self._index_of, *path_index_of], dtype=torch.int64), logits.device)
        values = logits[:, ids]
        repeated = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
        values = torch.where(in_text, repeated, values)
        values = values - sampling.frequency_penalty * answer_counts - sampling.presence_penalty * in_answer.float()
        logits[:, ids] = values.clamp(max=LARGEST_LOGIT)
