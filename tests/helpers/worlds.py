"""Prompts with shared prefixes, their texts by one-token-at-a-time decoding, and a draft that proposes these."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.dflash_prepared import CachedDFlash, PreparedDFlash
from blockpilot.models.cache import SlotView
from blockpilot.models.packing import Packing
from blockpilot.models.target import embedding_table
from blockpilot.pairs.loading import Pair
from blockpilot.types import FinishReason, Request, Sampling
from helpers.engines import plain_text

MAX_LENGTH, MAX_NEW_TOKENS = 112, 24  # some requests reach MAX_LENGTH
SYSTEM = tuple(torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(1)).tolist())
QUESTIONS = tuple(range(10, 18)), tuple(range(90, 98))


class Chat(NamedTuple):
    """Prefix of the system prompt, a question, and optionally tokens of its answer with the other question."""

    num_system: int
    question: int
    num_answered: int


Errors = Callable[[int], tuple[bool, bool]]
"""Errors of a position's first and second choice: True if the choice is wrong."""


class KnowingDraft(CachedDFlash):
    """A draft that proposes remembered texts, found by position and anchor, with errors at some positions.

    Two texts with the same token at one position are not distinguished: it may draft the other one's tokens.
    """

    def __init__(self, pair: Pair, errors: Errors) -> None:
        assert isinstance(pair.draft, DraftModel)
        super().__init__(pair.draft)
        self.errors = errors
        self.embedding = embedding_table(pair.target)
        self.head = pair.target.get_input_embeddings().weight.detach()
        self.texts = dict[tuple[int, int], Sequence[int]]()

    def remember(self, text: Sequence[int]) -> None:
        for key in enumerate(text):
            self.texts[key] = text

    def propose(self, embedded: Tensor, packing: Packing, cache: SlotView) -> Tensor:
        super().propose(embedded, packing, cache)
        token_ids = (embedded[:, None] == self.embedding).all(dim=2).int().argmax(dim=1).tolist()
        tokens, seconds = list[int](), list[int]()
        text: Sequence[int] = ()
        for i, key in enumerate(zip(packing.positions.tolist(), token_ids, strict=True)):
            if i in packing.firsts:  # an anchor
                text = self.texts.get(key, ())
            position = key[0]
            right = text[position] if position < len(text) else 0
            for choices, is_wrong in zip((tokens, seconds), self.errors(position), strict=True):
                choices.append((right + is_wrong) % len(self.head))
        # Tied embeddings: the LM head's best match of a scaled embedding is its own token.
        normed = self.head / self.head.norm(dim=1, keepdim=True).square().clamp(min=1e-6)
        return 50 * normed[torch.tensor(tokens)] + 49.5 * normed[torch.tensor(seconds)]


def knowing(pair: Pair, errors: Errors) -> tuple[Pair, KnowingDraft]:
    """The pair with a `KnowingDraft`, and that draft."""
    draft, knowing_pair = KnowingDraft(pair, errors), replace(pair)
    knowing_pair.__dict__["prepared_draft"] = PreparedDFlash(draft, pair.target)
    return knowing_pair, draft


class World:
    """A target and its texts, all remembered by the draft of `knowing_pair`. At some of the positions where its first
    choice is wrong, the second is right.
    """

    def __init__(self, pair: Pair) -> None:
        self._stock = pair
        self.knowing_pair, self._draft = knowing(pair, lambda p: (p % 5 == 0 or p % 7 == 3, p % 7 == 3))

    def prompt(self, chat: Chat, sampling: Sampling) -> tuple[int, ...]:
        prompt = (*SYSTEM[: chat.num_system], *QUESTIONS[chat.question])
        if not chat.num_answered:
            return prompt
        return (*prompt, *self.text(prompt, sampling)[: chat.num_answered], *QUESTIONS[1 - chat.question])

    def text(self, prompt: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
        text = plain_text(self._stock, prompt, MAX_NEW_TOKENS, sampling)
        self._draft.remember((*prompt, *text))
        return text

    def decode(self, tokens: Sequence[int]) -> str:
        decoded = self._stock.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(decoded, str)
        return decoded

    def ended(self, request: Request) -> tuple[tuple[int, ...], str, FinishReason]:
        """Tokens of a request up to its end, its text up to a stop string, and its finish reason."""
        room = min(request.max_new_tokens, MAX_LENGTH - len(request.prompt_ids))
        tokens = self.text(request.prompt_ids, request.sampling)[:room]
        for num, token in enumerate(tokens, 1):
            shown = self.decode(tokens[:num])
            stops = [shown.index(stop) for stop in request.stop_strings if stop in shown]
            if token in request.stop_token_ids or stops:
                return tokens[:num], shown[: min(stops, default=len(shown))], "stop"
        return tokens, self.decode(tokens), "length"
