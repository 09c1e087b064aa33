"""The target: a stock transformers causal language model, run over a SlotCache.

One forward pass serves prefill, block scoring and plain decoding: rows of tokens at explicit positions, equally long
or packed (packing.py), with a 4-D mask `key_position <= query_position`. The LM head runs only on the positions that
somebody reads.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from blockpilot.models.cache import SlotCache, SlotView
from blockpilot.models.packing import ATTENTION, SideBySide

FAMILIES = ("llama", "qwen3", "qwen3_moe")


class Scored(NamedTuple):
    """hidden [R, W, hidden] before the LM head; features [R, W, len(layer_ids) * hidden], None when not asked for."""

    hidden: Tensor
    features: Tensor | None


class Target:
    """A transformers model and the layers whose output its draft reads (`layer_ids`, 0 is the first layer)."""

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        check_family(model.config)
        if model.config._attn_implementation != ATTENTION:
            model.set_attn_implementation(ATTENTION)
        self.model = model
        self.layer_ids = tuple(layer_ids)

    def new_cache(self, num_slots: int, length: int) -> SlotCache:
        """An empty cache of `num_slots` rows of `length` columns for this model."""
        return SlotCache(self.model.config, num_slots, length, self.model.dtype, self.model.device)

    def score(
        self, tokens: Tensor, positions: Tensor, cache: SlotView, *, features: bool, packing: SideBySide | None = None
    ) -> Scored:
        """Run tokens [R, W] at positions [R, W], storing their keys and values in `cache`.

        With a packing they are [1, N], and `cache` is read row by row.
        """
        columns = torch.arange(cache.length, device=tokens.device)
        queries = positions if packing is None else packing.pad(positions[0])[None]
        output = self.model.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=(columns <= queries[:, :, None])[:, None],
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=[i + 1 for i in self.layer_ids] if features else False,
            packing=packing,
        )
        chosen = None
        if features:
            chosen = torch.cat([output.hidden_states[i + 1] for i in self.layer_ids], dim=-1)
        return Scored(output.last_hidden_state, chosen)

    def logits(self, hidden: Tensor) -> Tensor:
        """LM head: [N, hidden] -> [N, vocab]."""
        logits: Tensor = self.model.lm_head(hidden)
        return logits

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings of tokens, as the draft reads them."""
        embeddings: Tensor = self.model.get_input_embeddings()(tokens)
        return embeddings


def check_family(config: PretrainedConfig) -> None:
    """Raise ValueError for a model that this engine cannot run exactly."""
    if config.model_type not in FAMILIES:
        raise ValueError(f"target family {config.model_type!r}: supported are {', '.join(FAMILIES)}")
    layer_types = getattr(config, "layer_types", None) or []
    if "sliding_attention" in layer_types:
        raise ValueError("target with sliding-window layers: only full attention is supported")
