"""Texts of many requests by one-token-at-a-time decoding, and a draft that knows them."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.dflash_prepared import CachedDFlash, PreparedDFlash
from blockpilot.models.cache import SlotView
from blockpilot.models.packing import Packing
from blockpilot.pairs.loading import Pair
from blockpilot.types import FinishReason, Request, Sampling
from helpers.engines import plain_text

MAX_LENGTH, MAX_NEW_TOKENS, MAX_PROMPT_TOKENS = 48, 20, 40  # some requests reach the first


class KnowingDraft(CachedDFlash):
    """A draft that recognises the texts it was told by position and anchor, and errs at some positions: at some of
    those the right token is its second choice.

    Two texts with the same token at one position look alike to it: it may draft the other one's tokens.
    """

    def __init__(self, pair: Pair) -> None:
        assert isinstance(pair.draft, DraftModel)
        super().__init__(pair.draft)
        self.embedding = pair.target.get_input_embeddings().weight.detach()
        self.texts = dict[tuple[int, int], Sequence[int]]()

    def remember(self, text: Sequence[int]) -> None:
        for place in enumerate(text):
            self.texts[place] = text

    def propose(self, embedded: Tensor, packing: Packing, cache: SlotView) -> Tensor:
        super().propose(embedded, packing, cache)
        same = (embedded[:, None] == self.embedding).all(dim=2).int().argmax(dim=1).tolist()
        tokens, seconds = list[int](), list[int]()
        text: Sequence[int] = ()
        for position, token in zip(packing.positions.tolist(), same, strict=True):
            if token != self.mask_token_id:
                text = self.texts.get((position, token), ())
            right = text[position] if position < len(text) else 0
            tokens.append((right + (position % 5 == 0 or position % 7 == 3)) % 256)
            seconds.append((right + (position % 7 == 3)) % 256)
        # Tied embeddings: the LM head's best match of a scaled embedding is its own token.
        normed = self.embedding / self.embedding.norm(dim=1, keepdim=True).square().clamp(min=1e-6)
        return 50 * normed[torch.tensor(tokens)] + 49.5 * normed[torch.tensor(seconds)]


def prompt(num_tokens: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(num_tokens)
    return tuple(torch.randint(0, 256, (num_tokens,), generator=generator).tolist())


class World:
    """A pair and its texts, of which a draft is told that knows them."""

    def __init__(self, pair: Pair) -> None:
        self.pair = self._stock = pair
        self._draft: KnowingDraft | None = None
        self.num_accepted = 0  # of all drafted tokens
        self._texts = dict[tuple[int, Sampling], tuple[int, ...]]()

    def with_knowing_draft(self) -> "World":
        self.pair, self._draft = replace(self._stock), KnowingDraft(self._stock)
        self.pair.__dict__["prepared_draft"] = PreparedDFlash(self._draft, self.pair.target)
        return self

    def text(self, num_prompt_tokens: int, sampling: Sampling) -> tuple[int, ...]:
        key = num_prompt_tokens, sampling
        if key not in self._texts:
            with torch.inference_mode():
                self._texts[key] = plain_text(self._stock, prompt(num_prompt_tokens), MAX_NEW_TOKENS, sampling)
        if self._draft is not None:
            self._draft.remember((*prompt(num_prompt_tokens), *self._texts[key]))
        return self._texts[key]

    def decode(self, tokens: Sequence[int]) -> str:
        decoded = self.pair.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(decoded, str)
        return decoded

    def ended(self, request: Request) -> tuple[tuple[int, ...], FinishReason]:
        """The text of a request, up to what ends it."""
        room = min(request.max_new_tokens, MAX_LENGTH - len(request.prompt_ids))
        text = self.text(len(request.prompt_ids), request.sampling)[:room]
        for num, token in enumerate(text, 1):
            shown = self.decode(text[:num])
            if token in request.stop_token_ids or any(stop in shown for stop in request.stop_strings):
                return text[:num], "stop"
        return text, "length"
