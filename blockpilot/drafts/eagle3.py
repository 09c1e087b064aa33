"""EAGLE-3 draft network (arXiv 2503.01840): proposes token by token, from its own hidden states.

One decoder layer with a separate LM head, over a draft vocabulary of the target's most frequent tokens. Its input for
position t is the target's feature of token t (the hidden states of three layers or more, fused by `fc`) together with
the embedding of token t + 1; its output predicts token t + 2. After the last position with a known feature, the
draft's hidden state before the final norm replaces the feature.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from blockpilot.drafts.base import Draft, Embed, check_layers
from blockpilot.drafts.blocks import Blocks, KnownContext
from blockpilot.drafts.dflash import DraftMlp, Rotary, rotated
from blockpilot.models.cache import head_dim, num_kv_heads
from blockpilot.models.kernels import outputs


class UnrolledAttention:
    """Attention of chains of drafted steps along a text; each call is the next step of every chain.

    A chain attends to the text's keys that are `visible` to it, and of the drafted steps only to its own: one score
    each, so no mask over the keys of all steps is needed.

    known: keys and values [N, kv_heads, S, head_dim] of texts, and the mask visible [N, A, S] of A chains each. By
    default the first call sets them (the step over the text in training-time test): each of its S positions starts a
    chain, which attends to the text up to that position.
    """

    def __init__(self, known: tuple[Tensor, Tensor, Tensor] | None = None) -> None:
        self._known = known
        self._own: list[tuple[Tensor, Tensor]] = []

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Rotated queries [N, heads, A, head_dim], keys and values [N, kv_heads, A, head_dim] -> as the queries."""
        if self._known is None:
            length = keys.shape[2]
            self._known = keys, values, torch.ones(1, length, length, dtype=torch.bool, device=keys.device).tril_()
        else:
            self._own.append((keys, values))
        known_keys, known_values, visible = self._known
        num_kv, length, size = known_keys.shape[1:]
        shape = (num_kv, queries.shape[1] // num_kv)
        rows = queries.unflatten(1, shape) * size**-0.5  # [N, kv_heads, groups, A, head_dim]
        scores = (rows.flatten(2, 3) @ known_keys.transpose(2, 3)).unflatten(2, (shape[1], -1))
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
        own_scores = [(rows * own_keys[:, :, None]).sum(dim=-1, keepdim=True) for own_keys, _ in self._own]
        weights = torch.cat([scores, *own_scores], dim=-1).softmax(dim=-1, dtype=torch.float32).to(values.dtype)
        seen: Tensor = (weights[..., :length].flatten(2, 3) @ known_values).unflatten(2, (shape[1], -1))
        for i, (_, own_values) in enumerate(self._own, start=length):
            seen = seen + weights[..., i : i + 1] * own_values[:, :, None]
        return seen.flatten(1, 2)


NUM_FEATURES = 3  # number of target layers that are read by default
LEAST_VOCABULARY = 8  # tokens: as many as a position of a tree has choices

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rotated queries [R, heads, W, head_dim], rotated keys and values [R, kv_heads, W, head_dim] -> as the queries."""


@dataclass(frozen=True)
class Eagle3Options:
    """Options of an EAGLE-3 draft.

    target_layer_ids count from 0; None: the default layers.
    norm_before_residual: the residual of attention is the normed hidden state, not the one before the norm.
    head_norms: queries and keys are normed head by head, as in Qwen3.
    """

    draft_vocab_size: int
    block_size: int = 8
    target_layer_ids: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    head_norms: bool = False

    @property
    def num_features(self) -> int:
        """Number of target layers that are read."""
        return len(self.target_layer_ids or ()) or NUM_FEATURES

    def layer_ids(self, num_target_layers: int) -> tuple[int, ...]:
        """Target layers that are read; raises ValueError for a layer that the target does not have."""
        ids = self.target_layer_ids or eagle3_layer_ids(num_target_layers)
        check_layers(ids, num_target_layers)
        return ids


def eagle3_layer_ids(num_target_layers: int) -> tuple[int, ...]:
    """EAGLE-3's choice of target layers: the paper's code takes the inputs of layers 2, n // 2 and n - 3."""
    return 1, num_target_layers // 2 - 1, num_target_layers - 4


class Eagle3Attention(nn.Module):
    """Grouped-query attention over the concatenation of embedding and hidden state."""

    def __init__(self, config: LlamaConfig, head_norms: bool) -> None:
        super().__init__()
        self.head_dim = head_dim(config)
        num_heads, num_kv, width = config.num_attention_heads, num_kv_heads(config), config.hidden_size
        self.q_proj = nn.Linear(2 * width, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * width, num_kv * self.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * width, num_kv * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, width, bias=False)
        self.has_norms = head_norms
        if head_norms:
            self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(self, both: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """[R, W, 2 * hidden] -> [R, W, hidden]"""
        projections = self.q_proj, self.k_proj, self.v_proj
        queries, keys, values = (
            projected.unflatten(-1, (-1, self.head_dim)) for projected in outputs(projections, both)
        )
        if self.has_norms:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        attended = attend(rotated(queries, rotary), rotated(keys, rotary), values.transpose(1, 2))
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(-2))
        return output


class Eagle3Layer(nn.Module):
    """Decoder layer whose attention reads the embedding of the next token in addition to the hidden state."""

    def __init__(self, config: LlamaConfig, options: Eagle3Options) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = options.norm_before_residual
        self.self_attn = Eagle3Attention(config, options.head_norms)
        self.mlp = DraftMlp(width, config.intermediate_size)
        self.hidden_norm = LlamaRMSNorm(width, eps=eps)
        self.input_layernorm = LlamaRMSNorm(width, eps=eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps=eps)

    def forward(self, embedded: Tensor, hidden: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        hidden = (normed if self.norm_before_residual else hidden) + self.self_attn(both, rotary, attend)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Eagle3Model(Draft):
    """EAGLE-3 network; its parameters are named as in the published checkpoints.

    Draft vocabulary: d2t [draft vocab] are the offsets from the draft's id of a token to the target's; t2d [vocab] is
    the mask of its tokens among the target's.
    """

    config: LlamaConfig
    options: Eagle3Options
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: LlamaConfig, options: Eagle3Options) -> None:
        super().__init__()
        self.config, self.options = config, options
        width, size = config.hidden_size, options.draft_vocab_size
        if not 0 < size <= config.vocab_size:
            raise ValueError(f"draft_vocab_size {size}: must be 1 to {config.vocab_size}")
        self.fc = nn.Linear(options.num_features * width, width, bias=False)
        self.midlayer = Eagle3Layer(config, options)
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.embed_tokens: nn.Embedding | None = None
        """Embeddings of the checkpoint, frozen; None: the target's."""
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64))  # initially the first tokens
        self.register_buffer("t2d", torch.arange(config.vocab_size) < size)

    @property
    def is_sequential(self) -> bool:
        return True

    def layer_ids(self, num_target_layers: int) -> tuple[int, ...]:
        return self.options.layer_ids(num_target_layers)

    def check_fit(self, config: PretrainedConfig) -> None:
        super().check_fit(config)
        if (size := self.options.draft_vocab_size) < LEAST_VOCABULARY:
            raise ValueError(f"draft_vocab_size {size}: must be at least {LEAST_VOCABULARY}")
        self.options.layer_ids(config.num_hidden_layers)

    @property
    def vocabulary(self) -> Tensor:
        """The target's id of every token of the draft vocabulary, [draft vocab]."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @property
    def decoder_layers(self) -> Sequence[nn.Module]:
        return [self.midlayer]

    def use_vocabulary(self, ids: Tensor) -> None:
        """Set the draft vocabulary, in any order; ValueError unless it is `draft_vocab_size` different target ids."""
        size, vocab_size = len(self.d2t), len(self.t2d)
        ids = ids.to(self.d2t.device).unique()
        if len(ids) != size:
            raise ValueError(f"draft vocabulary of {len(ids)} different tokens, expected {size}")
        if not 0 <= int(ids[0]) <= int(ids[-1]) < vocab_size:
            raise ValueError(
                f"draft vocabulary: tokens {int(ids[0])} to {int(ids[-1])}, must be 0 to {vocab_size - 1}"
            )
        self.d2t.copy_(ids - torch.arange(size, device=ids.device))
        self.t2d.fill_(False).index_fill_(0, ids, True)

    def carry_embeddings(self, weight: Tensor) -> None:
        """Use these embeddings [vocab, hidden], frozen, instead of the target's."""
        self.embed_tokens = nn.Embedding.from_pretrained(weight, freeze=True)

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [..., layers * hidden] -> [..., hidden]."""
        fused: Tensor = self.fc(features)
        return fused

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [R, W, hidden] for `logits`, and for the next drafted step.

        hidden: fused features, or the draft's hidden states, at positions [R, W]; embedded: embeddings of the tokens
        one position later; both [R, W, hidden].
        """
        output: Tensor = self.midlayer(embedded, hidden, self.rotary_emb(hidden, positions), attend)
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., draft vocab] of the token after the embedded one."""
        scores: Tensor = self.lm_head(self.norm(hidden))
        return scores

    def at_anchors(self, blocks: Blocks, context: KnownContext, embed: Embed) -> Tensor:
        """Chains along the texts; the state of the first drafted position is the context vector before its anchor."""
        assert context.tokens is not None
        assert context.contexts is not None
        num_texts, length, width = context.contexts.shape
        anchors = blocks.anchors.reshape(num_texts, -1)  # all rows of a text
        visible = torch.arange(context.num_columns, device=anchors.device) < anchors[:, :, None]
        attend = UnrolledAttention((context.keys[0], context.values[0], visible))
        embed = self.embed_tokens or embed
        hidden = context.contexts.gather(1, (anchors - 1)[:, :, None].expand(-1, -1, width))
        states = [hidden, hidden]  # the first, of the anchor itself, is not used
        for i in range(max(blocks.widths) - 2):
            tokens = context.tokens.gather(1, (anchors + 1 + i).clamp_max(length - 1))
            hidden = self(embed(tokens), hidden, anchors + i, attend)
            states.append(hidden)
        block, offset = blocks.layout()
        block_states = torch.stack(states, dim=2).view(*blocks.anchors.shape, -1, width)
        return block_states[:, block, offset]
