"""The target: a causal language model of transformers in its prepared form, run over a SlotCache.

The same forward pass serves prefill, block scoring and plain decoding: packed rows of tokens at explicit positions,
which attend to columns up to their own. The LM head runs only on requested positions.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from blockpilot.models.cache import SlotCache, SlotView
from blockpilot.models.decoder import Decoder
from blockpilot.models.packing import Packing


def embedding_table(model: PreTrainedModel) -> Tensor:
    """Embeddings [vocab, hidden] of all tokens, as input of the layers: a copy if the model scales its weights."""
    embeddings: Any = model.get_input_embeddings()
    weight: Tensor = embeddings.weight.detach()
    scale = getattr(embeddings, "embed_scale", None)
    return weight if scale is None else weight * scale.to(weight.dtype)


class Scored(NamedTuple):
    """States [..., hidden] before the LM head; features [..., len(layer_ids) * hidden], None if not requested."""

    hidden: Tensor
    features: Tensor | None


class Target:
    """A transformers model and the layers whose output its draft reads (`layer_ids`, 0 is the first layer).

    Raises ValueError for a model of an unsupported family.
    """

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        self.model = model
        self.layer_ids = tuple(layer_ids)
        self._decoder = Decoder(model)

    @property
    def exactness(self) -> str:
        """Exactness of texts on this machine, "bit for bit" or "up to rounding", and the reason."""
        return self._decoder.exactness

    @property
    def has_states(self) -> bool:
        """True if some layers have a recurrent state of the text instead of keys and values."""
        return self._decoder.has_states

    def new_cache(self, num_slots: int, length: int, num_spare: int = 0) -> SlotCache:
        """This model's empty cache of `num_slots` texts of at most `length` tokens, with spare columns for trees."""
        return self._decoder.new_cache(self.model.config, num_slots, length, num_spare)

    def score(self, tokens: Tensor, cache: SlotView, packing: Packing, *, features: bool) -> Scored:
        """Run packed tokens [N], storing their keys and values in `cache`, whose rows are those of the packing.

        After a pass with blocks the cache's `accept` must be called before the next pass.
        """
        # Features are concatenated only if a draft reads them.
        hidden, after = self._decoder(tokens, packing, cache, self.layer_ids if features else ())
        return Scored(hidden, after if features else None)

    def score_rows(self, tokens: Tensor, start: int, cache: SlotCache, slots: Tensor) -> Scored:
        """Run tokens [R, W] of `slots` [R] at positions from `start` on: hidden and features are [R, W, ...]."""
        num_rows, width = tokens.shape
        packing = Packing([width] * num_rows, [start] * num_rows, tokens.device)
        view = cache.view(slots[packing.rows], packing.columns, slots, packing.length)
        scored = self.score(tokens.flatten(), view, packing, features=True)
        assert scored.features is not None
        return Scored(scored.hidden.view(num_rows, width, -1), scored.features.view(num_rows, width, -1))

    def logits(self, hidden: Tensor) -> Tensor:
        """LM head: [N, hidden] -> [N, vocab]."""
        return self._decoder.logits(hidden)
