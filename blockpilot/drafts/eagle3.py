"""EAGLE-3 draft network (arXiv 2503.01840): proposes token by token, from its own hidden states.

One decoder layer with an LM head of its own, over a draft vocabulary of the target's most frequent tokens. Its input
for position t is the target's feature of token t (the hidden states of three layers or more, fused by `fc`) beside
the embedding of token t + 1, and its output predicts token t + 2. After the last position whose feature is known, its
own hidden state before the final norm takes the place of the feature.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from blockpilot.drafts.base import Draft, Embed, check_layers
from blockpilot.drafts.blocks import Blocks, KnownContext
from blockpilot.drafts.dflash import DraftMlp, Rotary, turned
from blockpilot.models.cache import head_dim, num_kv_heads
from blockpilot.models.kernels import outputs


class UnrolledAttention:
    """Attention of chains that a text's own tokens lead: a call is the next drafted step of every chain.

    A chain sees the text's keys as far as they are `visible` to it, and of the drafted steps only its own: one score
    each, so that no mask over the keys of all steps is needed.

    known: keys and values [N, kv_heads, S, head_dim] of texts, and visible [N, A, S] of A chains each. By default the
    first call gives them, the text's own step in training-time test: each of its S positions starts a chain, which
    sees the text up to itself.
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


NUM_FEATURES = 3  # target layers that are read by default
LEAST_VOCABULARY = 8  # tokens: the choices of a tree's position

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rotated queries [R, heads, W, head_dim], rotated keys and values [R, kv_heads, W, head_dim] -> as the queries."""


@dataclass(frozen=True)
class Eagle3Options:
    """Options of an EAGLE-3 draft.

    target_layer_ids count from 0; None where the checkpoint leaves them to the default.
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
        """Target layers that are read."""
        return len(self.target_layer_ids or ()) or NUM_FEATURES

    def layer_ids(self, num_target_layers: int) -> tuple[int, ...]:
        """Layers read of a target of so many layers; raises ValueError for one that it does not have."""
        ids = self.target_layer_ids or eagle3_layer_ids(num_target_layers)
        check_layers(ids, num_target_layers)
        return ids


def eagle3_layer_ids(num_target_layers: int) -> tuple[int, ...]:
    """EAGLE-3's choice of target layers: the paper's code takes the inputs of layers 2, n // 2 and n - 3."""
    return 1, num_target_layers // 2 - 1, num_target_layers - 4


class Eagle3Attention(nn.Module):
    """Grouped-query attention over embedding and hidden state side by side."""

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
        attended = attend(turned(queries, rotary), turned(keys, rotary), values.transpose(1, 2))
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(-2))
        return output


class Eagle3Layer(nn.Module):
    """Decoder layer whose attention reads the embedding of the next token beside the hidden state."""

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

    The draft vocabulary is `d2t` [draft vocab] (what to add to the draft's id of a token for the target's) and `t2d`
    [vocab] (which of the target's tokens it holds).
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
        """Embeddings of a checkpoint that carries them, frozen; None: the target's."""
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64))  # at first the first tokens
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
        """Propose these tokens of the target's, in any order; raises ValueError for too few or too many."""
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
        """Embed with these [vocab, hidden], which are never trained, instead of the target's."""
        self.embed_tokens = nn.Embedding.from_pretrained(weight, freeze=True)

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [..., layers * hidden] -> [..., hidden]."""
        fused: Tensor = self.fc(features)
        return fused

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [R, W, hidden] for `logits`, and for the next drafted step.

        Inputs at positions [R, W]: fused features, or the draft's own hidden states, and the embeddings of the tokens
        one further on, both [R, W, hidden].
        """
        output: Tensor = self.midlayer(embedded, hidden, self.rotary_emb(hidden, positions), attend)
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., draft vocab] of the token after the embedded one."""
        scores: Tensor = self.lm_head(self.norm(hidden))
        return scores

    def at_anchors(self, blocks: Blocks, context: KnownContext, embed: Embed) -> Tensor:
        """Chains along the texts: at the first drafted position it is the context vector before the anchor."""
        assert context.tokens is not None
        assert context.contexts is not None
        num_texts, length, width = context.contexts.shape
        anchors = blocks.anchors.reshape(num_texts, -1)  # a text's rows side by side
        visible = torch.arange(context.num_columns, device=anchors.device) < anchors[:, :, None]
        attend = UnrolledAttention((context.keys[0], context.values[0], visible))
        embed = self.embed_tokens or embed
        hidden = context.contexts.gather(1, (anchors - 1)[:, :, None].expand(-1, -1, width))
        states = [hidden, hidden]  # nobody reads the anchor's own
        for i in range(max(blocks.widths) - 2):
            tokens = context.tokens.gather(1, (anchors + 1 + i).clamp_max(length - 1))
            hidden = self(embed(tokens), hidden, anchors + i, attend)
            states.append(hidden)
        block, offset = blocks.layout()
        of_blocks = torch.stack(states, dim=2).view(*blocks.anchors.shape, -1, width)
        return of_blocks[:, block, offset]
