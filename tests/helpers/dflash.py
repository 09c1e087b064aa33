"""Reference DFlash network: one head and one query at a time, in float64."""

import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from blockpilot.drafts.dflash import DraftModel


class SlowDFlash:
    """Reference network of published weights, by name, with the sizes of a Qwen3 configuration."""

    def __init__(self, weights: Mapping[str, Tensor], config: Any) -> None:
        self.weights = {name: value.detach().double() for name, value in weights.items()}
        self.config = config

    @classmethod
    def of(cls, draft: DraftModel) -> Self:
        return cls(draft.state_dict(), draft.config)

    def __call__(
        self, features: Tensor, block: Tensor, anchor: int, causal: bool | None = None, window: int | None = None
    ) -> Tensor:
        """One row: features [C, F], block [B, hidden] -> [B, hidden]."""
        c, w = self.config, self.weights
        eps, theta = c.rms_norm_eps, c.rope_parameters["rope_theta"]
        context = rms(features.double() @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
        hidden = block.double()
        group = c.num_attention_heads // c.num_key_value_heads
        for layer in range(c.num_hidden_layers):
            p = {k.removeprefix(f"layers.{layer}."): v for k, v in w.items() if k.startswith(f"layers.{layer}.")}
            sliding = c.layer_types[layer] == "sliding_attention"
            normed = rms(hidden, p["input_layernorm.weight"], eps)
            kernels = kernels_of(p, "attention_conv", normed)
            normed = convolved(normed, kernels, 0)
            sources = [(i, context[i]) for i in range(anchor)] + [(anchor + j, x) for j, x in enumerate(normed)]
            attended = torch.zeros(len(block), c.num_attention_heads * c.head_dim, dtype=torch.float64)
            for h in range(c.num_attention_heads):
                head = slice(h * c.head_dim, (h + 1) * c.head_dim)
                if h % group == 0:  # the heads of a group share keys and values
                    kv_head = slice(h // group * c.head_dim, (h // group + 1) * c.head_dim)
                    k, v = (p[f"self_attn.{name}_proj.weight"][kv_head] for name in "kv")
                    keys = [rotate(rms(k @ x, p["self_attn.k_norm.weight"], eps), i, theta) for i, x in sources]
                    values = [v @ x for _, x in sources]
                for j in range(len(block)):
                    query = rms(p["self_attn.q_proj.weight"][head] @ normed[j], p["self_attn.q_norm.weight"], eps)
                    query, seen = rotate(query, anchor + j, theta), []
                    for i, (position, _) in enumerate(sources):
                        distance = anchor + j - position
                        if (sliding if causal is None else causal) and distance < 0:
                            continue
                        if sliding and window is not None and abs(distance) >= window:
                            continue
                        seen.append(i)
                    scores = torch.stack([query @ keys[i] / math.sqrt(c.head_dim) for i in seen])
                    attended[j, head] = scores.softmax(0) @ torch.stack([values[i] for i in seen])
            hidden = hidden + convolved(attended @ p["self_attn.o_proj.weight"].T, kernels, 1)
            normed = rms(hidden, p["post_attention_layernorm.weight"], eps)
            kernels = kernels_of(p, "mlp_conv", normed)
            normed = convolved(normed, kernels, 0)
            gate = torch.nn.functional.silu(normed @ p["mlp.gate_proj.weight"].T)
            mlp_output = (gate * (normed @ p["mlp.up_proj.weight"].T)) @ p["mlp.down_proj.weight"].T
            hidden = hidden + convolved(mlp_output, kernels, 1)
        return rms(hidden, w["norm.weight"], eps)


def kernels_of(weights: Mapping[str, Tensor], name: str, read: Tensor) -> Tensor | None:
    """Kernels [tokens, side, tap, channel] of a block's tokens [B, hidden]; None without a convolution."""
    if f"{name}.base_kernel" not in weights:
        return None
    base, projection = weights[f"{name}.base_kernel"], weights[f"{name}.kernel_projection.weight"]
    sides, taps, width = base.shape
    num_groups = len(projection) // (sides * taps)
    kernels = base.repeat(len(read), 1, 1, 1)
    for token, x in enumerate(read):
        token_kernels = projection @ x
        for side in range(sides):
            for tap in range(taps):
                for channel in range(width):
                    group = channel // (width // num_groups)
                    kernels[token, side, tap, channel] += token_kernels[(side * taps + tap) * num_groups + group]
    return kernels


def convolved(x: Tensor, kernels: Tensor | None, side: int) -> Tensor:
    """Causal convolution over the tokens of a block [B, hidden]; unchanged without kernels."""
    if kernels is None:
        return x
    output = torch.zeros_like(x)
    for token in range(len(x)):
        for tap in range(kernels.shape[2]):
            if token >= tap:
                output[token] += kernels[token, side, tap] * x[token - tap]
    return output


def slow_cap(logits: Tensor, cap: float | None) -> Tensor:
    """Logits with a soft cap, if there is one."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def slow_lift(weights: Mapping[str, Tensor], hidden: Tensor, before: int, num_tokens: int) -> Tensor:
    """Scores [num_tokens] that a draft's edges add to all tokens after the token `before`; zeros without edges."""
    if "candidate_selector.successor_codebook" in weights:
        names = "hidden_projection.weight", "predecessor_codebook", "successor_codebook"
        projection, predecessors, successors = (weights[f"candidate_selector.{name}"] for name in names)
        return successors @ (predecessors[before] * (projection @ hidden))
    if "markov_head.markov_w1.weight" not in weights:
        return torch.zeros(num_tokens)
    vector = weights["markov_head.markov_w1.weight"][before]
    if "markov_head.gate_proj.weight" in weights:
        gate = weights["markov_head.gate_proj.weight"] @ torch.cat([hidden, vector])
        vector = torch.sigmoid(gate + weights["markov_head.gate_proj.bias"]) * vector
    return weights["markov_head.markov_w2.weight"] @ vector


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    half = len(x) // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out
