"""The prepared form of a target: its embeddings, its layers as one call over packed tokens, and its LM head.

What does not depend on the layer (rotary tables, masks, where keys go) is worked out once a pass.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from blockpilot.models.cache import SlotView, num_kv_heads
from blockpilot.models.graphs import Box, BoxPlaces
from blockpilot.models.kernels import leave_file, prepared, use_huge_pages
from blockpilot.models.layers import Mask, Rotary, RotaryTable
from blockpilot.models.native_layers import layers_of
from blockpilot.models.packing import Packing, SideBySide

FAMILIES = ("llama", "qwen3", "qwen3_moe")


class Decoder:
    """The layers of a model, its embeddings and its LM head. Raises ValueError for a family that it does not know.

    The model's linear layers are prepared in place, once; it stays an ordinary model to call.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel) -> None:
        check_family(model.config)
        body, config = cast(Any, model.model), model.config
        self._layers = layers_of(body.layers, body.norm.weight, config)
        self._rotary, self.embed = RotaryTable(body.rotary_emb), body.embed_tokens
        self._groups = config.num_attention_heads // num_kv_heads(config)
        is_new = type(model.lm_head) is nn.Linear
        self.head = prepared(model, "lm_head")
        if self.head.is_packed and is_new:
            leave_file(model)
            use_huge_pages()

    def __call__(
        self, tokens: Tensor, packing: SideBySide, cache: SlotView, kept: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [N, hidden] of packed tokens [N]: normed; and after the layers `kept`, side by side."""
        hidden = self.embed(tokens)
        table = self._rotary.table(cache, hidden)
        if self._layers.is_dense and len(packing.parts) == 1:
            in_box = partial(self._in_box, table, tuple(kept))
            found = cache.by_graph(in_box, ("target", *kept), hidden, packing.parts[0])
            if found is not None:
                normed, after = found
                return normed, after
        masks = [Mask(part, part.visible, self._groups, hidden.dtype) for part in packing.parts]
        return self._layers(hidden, table.at(packing.positions), cache, [masks] * len(self._layers), kept)

    def _in_box(
        self,
        table: Rotary,
        kept: Sequence[int],
        hidden: Tensor,
        box: Box,
        places: BoxPlaces,
        packing: Packing,
        cache: SlotView,
    ) -> tuple[Tensor, Tensor]:
        masks = [Mask(packing, box.visible(places), self._groups, hidden.dtype)]
        return self._layers(hidden, table.at(places.positions), cache, [masks] * len(self._layers), kept)


def check_family(config: PretrainedConfig) -> None:
    """Raise ValueError for a model that this engine cannot run exactly."""
    if config.model_type not in FAMILIES:
        raise ValueError(f"target family {config.model_type!r}: supported are {', '.join(FAMILIES)}")
    layer_types = getattr(config, "layer_types", None) or []
    if "sliding_attention" in layer_types:
        raise ValueError("target with sliding-window layers: only full attention is supported")
