"""DFlash draft network (arXiv 2602.06036): proposes a block of tokens in one pass.

A Qwen3-style decoder stack without embeddings or LM head (both are the target's). Its context is the target's hidden
states at chosen layers, fused by `fc` and `hidden_norm`; every layer projects that context with its own k_proj and
v_proj. Queries come only from the block [anchor, MASK x (B-1)]: attention is bidirectional inside the block and
covers the whole context, which ends strictly before the anchor. Sliding-window layers are causal.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import skip_init
from transformers import PretrainedConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half

from blockpilot.drafts.base import Draft, Embed, check_layers, check_same
from blockpilot.drafts.blocks import Blocks, KnownContext, KnownLayer, block_mask
from blockpilot.drafts.edges import CandidateSelector, Edges, GatedMarkovHead, MarkovHead
from blockpilot.drafts.options import DraftOptions, parse_options
from blockpilot.models.cache import num_kv_heads
from blockpilot.models.decoder import soft_cap
from blockpilot.models.kernels import outputs
from blockpilot.models.packing import folded, grouped_attention


class BlockConvolution(nn.Module):
    """Causal convolution over the tokens of a block (DFlash 2, z-lab/dflash), around a sublayer.

    Each token has kernels of a few taps: fixed ones, plus a projection of the sublayer's input, shared by groups of
    channels. One kernel is applied to the sublayer's input, the other to its output. Parameters are named as in the
    published checkpoints; initially the convolution is the identity.
    """

    def __init__(self, width: int, num_taps: int, group_size: int) -> None:
        super().__init__()
        self.group_size = group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, num_taps, width))
        nn.init.ones_(self.base_kernel[:, 0])
        self.kernel_projection = nn.Linear(width, 2 * num_taps * width // group_size, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x: Tensor, offsets: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Convolved output [..., N, width] of a sublayer for x [..., N, width]; offsets [N] in the blocks."""
        num_taps, width = self.base_kernel.shape[1:]
        dynamic = self.kernel_projection(x).unflatten(-1, (2, num_taps, width // self.group_size))
        kernels = self.base_kernel + dynamic.repeat_interleave(self.group_size, dim=-1)
        before, after = kernels.unbind(-3)
        return convolved(sublayer(convolved(x, before, offsets)), after, offsets)


def convolved(x: Tensor, kernels: Tensor, offsets: Tensor) -> Tensor:
    """Causal convolution [..., N, width]: the sum over taps t of kernels[..., t, :] * x[..., n - t, :].

    x [..., N, width], kernels [..., N, taps, width]. offsets [N]: tokens before a block's start count as 0.
    """
    total = kernels[..., 0, :] * x
    for tap in range(1, kernels.shape[-2]):
        earlier = x.roll(tap, dims=-2).masked_fill((offsets < tap)[:, None], 0)
        total = total + kernels[..., tap, :] * earlier
    return total


def through(
    convolution: BlockConvolution | None, x: Tensor, offsets: Tensor, sublayer: Callable[[Tensor], Tensor]
) -> Tensor:
    """Output of a sublayer for x, convolved if there is a convolution."""
    return sublayer(x) if convolution is None else convolution(x, offsets, sublayer)


Rotary = tuple[Tensor, Tensor]  # cosines and sines of the positions


class DraftAttention(nn.Module):
    """Grouped-query attention with q/k RMSNorm; queries from the block, keys from context and block."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        num_kv = num_kv_heads(config)
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, num_kv * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, num_kv * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, width, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def project(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of hidden [R, W, hidden]: two [R, kv_heads, W, head_dim]."""
        keys, values = (self._split_heads(projected) for projected in outputs((self.k_proj, self.v_proj), hidden))
        return rotated(self.k_norm(keys), rotary), values.transpose(1, 2)

    def forward(self, hidden: Tensor, rotary: Rotary, mask: Tensor, known: KnownLayer) -> Tensor:
        """Attention of hidden [R, W, hidden] to the context and the blocks, where mask [R, 1, W, keys] is true."""
        projections = self.q_proj, self.k_proj, self.v_proj
        queries, keys, values = (self._split_heads(projected) for projected in outputs(projections, hidden))
        queries, keys = rotated(self.q_norm(queries), rotary), rotated(self.k_norm(keys), rotary)
        keys, values = known.append(keys, values.transpose(1, 2))
        bias = folded(mask, queries.shape[1] // keys.shape[1], queries.dtype)
        attended = grouped_attention(queries, keys, values, bias, self.head_dim**-0.5).transpose(1, 2)
        output: Tensor = self.o_proj(attended.flatten(-2))
        return output

    def _split_heads(self, joined: Tensor) -> Tensor:
        """[R, W, heads * head_dim] -> [R, W, heads, head_dim]"""
        heads: Tensor = joined.unflatten(-1, (-1, self.head_dim))
        return heads


def rotated(heads: Tensor, rotary: Rotary) -> Tensor:
    """[R, W, heads, head_dim] -> [R, heads, W, head_dim], rotated by cosines and sines [R, W, head_dim]."""
    cosines, sines = (table[:, None] for table in rotary)
    heads = heads.transpose(1, 2)
    result: Tensor = heads * cosines + rotate_half(heads) * sines
    return result


class DraftMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = outputs((self.gate_proj, self.up_proj), hidden)
        output: Tensor = self.down_proj(functional.silu(gate) * up)
        return output


class DraftLayer(nn.Module):
    """Pre-norm decoder layer: attention, then SwiGLU, in DFlash 2 each with a convolution over the block."""

    def __init__(self, config: Qwen3Config, options: DraftOptions) -> None:
        super().__init__()
        self.attention_conv, self.mlp_conv = (_convolution(config, options) for _ in range(2))
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMlp(config.hidden_size, config.intermediate_size)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, rotary: Rotary, mask: Tensor, known: KnownLayer, offsets: Tensor) -> Tensor:
        attention = partial(self.self_attn, rotary=rotary, mask=mask, known=known)
        hidden = hidden + through(self.attention_conv, self.input_layernorm(hidden), offsets, attention)
        return hidden + through(self.mlp_conv, self.post_attention_layernorm(hidden), offsets, self.mlp)


class DraftModel(Draft):
    """DFlash network; its parameters are named as in the published checkpoints."""

    config: Qwen3Config
    options: DraftOptions

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.config = config
        self.options = parse_options(config)
        self.layers = nn.ModuleList(DraftLayer(config, self.options) for _ in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        num_features = len(self.options.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(num_features, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.markov_head, self.candidate_selector = _edges(config, self.options)
        self.vocabulary: Tensor | None
        """Tokens that the draft proposes, the most frequent first; None for all of the target's."""
        self.register_buffer("vocabulary", None, persistent=False)
        self.embed_tokens: nn.Embedding | None = None
        self.lm_head: nn.Linear | None = None
        """Embeddings and LM head, over the vocabulary, of a checkpoint that carries them; None: the target's."""

    @property
    def is_sequential(self) -> bool:
        return False

    @property
    def decoder_layers(self) -> Sequence[nn.Module]:
        return list(self.layers)

    @property
    def edges(self) -> Edges | None:
        """Scores of a token given the one before it; None if the slots are independent."""
        return self.markov_head or self.candidate_selector

    def layer_ids(self, num_target_layers: int) -> tuple[int, ...]:
        return self.options.target_layer_ids

    def check_fit(self, config: PretrainedConfig) -> None:
        options, mask = self.options, self.options.mask_token_id
        super().check_fit(config)
        if options.num_target_layers is not None:
            check_same("number of target layers", options.num_target_layers, config.num_hidden_layers)
        check_layers(options.target_layer_ids, config.num_hidden_layers)
        if not 0 <= mask < config.vocab_size:
            raise ValueError(f"draft mask token {mask}: must be 0 to {config.vocab_size - 1}")
        if options.soft_cap is not None:
            check_same("final_logit_softcapping", options.soft_cap, soft_cap(config))

    def embedding(self, target_embeddings: Embed) -> Embed:
        """Embeddings of the block's tokens: the draft's, or the target's, by the factor that the checkpoint says."""
        module, scale = self.embed_tokens or target_embeddings, self.options.embedding_scale
        if scale is None:
            return module
        # The weights themselves: the target's module may scale them.
        unscaled = partial(functional.embedding, weight=module.weight) if isinstance(module, nn.Embedding) else module
        return lambda tokens: unscaled(tokens) * scale

    def make_room(self, embeddings: bool, vocabulary: Tensor | None) -> None:
        """Add frozen embeddings, and a frozen LM head over a vocabulary [K], to be loaded from a checkpoint."""
        size, width = self.config.vocab_size, self.config.hidden_size
        if embeddings:
            self.embed_tokens = skip_init(nn.Embedding, size, width).requires_grad_(False)
        if vocabulary is not None:
            self.lm_head = skip_init(nn.Linear, width, len(vocabulary), bias=False).requires_grad_(False)
            self.vocabulary = vocabulary

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """A draft with these options as its `dflash_config`, and the weights that both have in common."""
        config = copy.deepcopy(self.config)
        config.dflash_config = dict(options)
        draft = type(self)(config)
        draft.make_room(self.embed_tokens is not None, None if self.lm_head is None else self.vocabulary)
        draft.load_state_dict(self.state_dict(), strict=False)
        draft.vocabulary = self.vocabulary
        return draft

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [..., n * hidden] -> context vectors [..., hidden]."""
        context: Tensor = self.hidden_norm(self.fc(features))
        return context

    def project(self, layer_idx: int, context: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """A layer's keys and values of context vectors [R, W, hidden]: two [R, kv_heads, W, head_dim]."""
        attention = cast(DraftLayer, self.layers[layer_idx]).self_attn
        return attention.project(context, rotary)

    def forward(
        self,
        block: Tensor,
        positions: Tensor,
        masks: Sequence[Tensor],
        context: KnownContext,
        offsets: Tensor | None = None,
    ) -> Tensor:
        """Embedded blocks [R, W, hidden] -> hidden states [R, W, hidden] for the target's LM head.

        Output j predicts the token at position j itself. masks: one [R, 1, W, keys] per layer. offsets [W]: of the
        positions in their blocks, if a row has several blocks.
        """
        offsets = torch.arange(block.shape[1], device=block.device) if offsets is None else offsets
        rotary = self.rotary_emb(block, positions)
        hidden = block
        for layer, mask, known in zip(self.layers, masks, context.layers, strict=True):
            hidden = layer(hidden, rotary, mask, known, offsets)
        output: Tensor = self.norm(hidden)
        return output

    def known(self, features: Tensor, rows_each: int = 1) -> KnownContext:
        """The context of texts whose tokens at positions 0 .. S-1 have the target's features [N, S, F]."""
        context = self.fuse(features)
        positions = torch.arange(features.shape[1], device=features.device).expand(len(features), -1)
        rotary = self.rotary_emb(context, positions)
        projected = [self.project(i, context, rotary) for i in range(len(self.layers))]
        return KnownContext([keys for keys, _ in projected], [values for _, values in projected], rows_each)

    def at_anchors(self, blocks: Blocks, context: KnownContext, embed: Embed) -> Tensor:
        embed = self.embedding(embed)
        if self.options.sample_from_anchor:  # one slot less: each predicts the token after its position
            shifted = self._slot_hidden(blocks._replace(sizes=(blocks.sizes - 1).clamp_min(1)), context, embed)
            return shifted.roll(1, dims=1)
        return self._slot_hidden(blocks, context, embed)

    def _slot_hidden(self, blocks: Blocks, context: KnownContext, embed: Embed) -> Tensor:
        block, offset = blocks.layout()
        tokens = torch.where(offset == 0, blocks.tokens[:, block], self.options.mask_token_id)
        positions = blocks.anchors[:, block] + offset
        columns = torch.arange(context.num_columns, device=positions.device).expand(len(positions), -1)
        keys = torch.cat([columns, positions], dim=1)
        masks = self.layer_masks(block_mask(blocks, context.num_columns), positions, keys)
        hidden: Tensor = self(embed(tokens), positions, masks, context, offset)
        return hidden

    def layer_masks(self, visible: Tensor, queries: Tensor, keys: Tensor) -> list[Tensor]:
        """Mask [R, 1, W, keys] of each layer: `visible` [R, 1 or W, keys], restricted by its window and causality.

        queries [R, W] and keys [R or 1, keys] are positions.
        """
        masks: dict[tuple[bool, int | None], Tensor] = {}
        kinds = [self._layer_kind(i) for i in range(len(self.layers))]
        for causal, window in set(kinds):
            mask = visible.expand(*queries.shape, -1)
            if causal or window is not None:
                distance = queries[:, :, None] - keys[:, None]
                mask = mask & (distance >= 0) if causal else mask
                mask = mask & (distance < window) & (distance > -window) if window is not None else mask
            masks[causal, window] = mask[:, None]
        return [masks[kind] for kind in kinds]

    def _layer_kind(self, layer_idx: int) -> tuple[bool, int | None]:
        """(causal, window) of a layer; sliding-window layers are causal unless the checkpoint says otherwise."""
        sliding = (self.config.layer_types or [])[layer_idx] == "sliding_attention"
        causal = self.options.causal
        return sliding if causal is None else causal, self.config.sliding_window if sliding else None


def _convolution(config: Qwen3Config, options: DraftOptions) -> BlockConvolution | None:
    taps, group = options.conv_kernel_size, options.conv_group_size
    return BlockConvolution(config.hidden_size, taps, group) if taps else None


def _edges(config: Qwen3Config, options: DraftOptions) -> tuple[MarkovHead | None, CandidateSelector | None]:
    """Markov head and candidate selector; a draft has one of them or neither."""
    size, width, rank = config.vocab_size, config.hidden_size, options.markov_rank
    if options.selector_rank:
        return None, CandidateSelector(size, options.selector_rank, width, options.selector_top_k)
    if not rank:
        return None, None
    return GatedMarkovHead(size, rank, width) if options.is_gated else MarkovHead(size, rank), None
