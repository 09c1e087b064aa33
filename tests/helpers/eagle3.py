"""EAGLE-3 drafts for tests: random ones, and a reference network, one token and one head at a time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from blockpilot.drafts.eagle3 import Eagle3Model
from blockpilot.drafts.eagle3_checkpoint import new_eagle3
from blockpilot.pairs.loading import Pair
from helpers.dflash import rms, rotate

Cache = list[tuple[Tensor, Tensor]]  # keys and values [kv_heads, head_dim] of the positions so far


def random_eagle3(
    target_config: Any, vocabulary: Tensor, block_size: int = 4, seed: int = 3, head_norms: bool = False
) -> Eagle3Model:
    """A draft with random weights, norms included, that reads the outputs of target layers 0, 2 and 4."""
    torch.manual_seed(seed)
    draft = new_eagle3(target_config, vocabulary, block_size=block_size, target_layer_ids=(0, 2, 4))
    if head_norms:
        draft = Eagle3Model(draft.config, replace(draft.options, head_norms=True))
        draft.use_vocabulary(vocabulary)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.2, mean=float(parameter.dim() == 1))
    return draft


def eagle3_pair(pair: Pair, target: PreTrainedModel, vocabulary: Tensor, **options: Any) -> Pair:
    """This target with a random draft, and the tokenizer of `pair`."""
    draft = random_eagle3(target.config, vocabulary, **options).eval().requires_grad_(False)
    return Pair(pair.id, target.eval().requires_grad_(False), draft, pair.tokenizer)


class SlowEagle3:
    """Reference network of published weights, by name, with the sizes of a llama configuration."""

    def __init__(self, weights: Mapping[str, Tensor], config: Any, norm_before_residual: bool = False) -> None:
        self.weights = {name: value.detach() for name, value in weights.items()}
        self.config, self.norm_before_residual = config, norm_before_residual
        self._read = dict[tuple[tuple[int, ...], int], tuple[Tensor, Cache]]()  # by text and number of known tokens
        self._features = dict[tuple[int, ...], Tensor]()  # of accepted tokens

    def step(self, feature: Tensor, embedded: Tensor, position: int, cache: Cache) -> Tensor:
        """Hidden state [hidden] at a position; feature: the target's [layers * hidden], or the draft's last state."""
        w, size = self.weights, self.config.head_dim
        hidden = w["fc.weight"] @ feature if len(feature) > len(embedded) else feature
        normed = self._norm(hidden, "midlayer.hidden_norm")
        both = torch.cat([self._norm(embedded, "midlayer.input_layernorm"), normed])
        queries, keys, values = ((w[f"midlayer.self_attn.{n}_proj.weight"] @ both).view(-1, size) for n in "qkv")
        if "midlayer.self_attn.q_norm.weight" in w:
            queries, keys = (
                torch.stack([self._norm(head, f"midlayer.self_attn.{n}_norm") for head in projected])
                for n, projected in (("q", queries), ("k", keys))
            )
        cache.append((torch.stack([self._rotated(key, position) for key in keys]), values))
        heads = []
        for i, query in enumerate(queries):
            kv_head = i * len(keys) // len(queries)
            rotated = self._rotated(query, position)
            chances = torch.stack([rotated @ key[kv_head] / math.sqrt(size) for key, _ in cache]).softmax(0)
            heads.append(sum(chance * value[kv_head] for chance, (_, value) in zip(chances, cache, strict=True)))
        residual = normed if self.norm_before_residual else hidden
        hidden = residual + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
        normed = self._norm(hidden, "midlayer.post_attention_layernorm")
        gate, up = (w[f"midlayer.mlp.{n}_proj.weight"] @ normed for n in ("gate", "up"))
        return hidden + w["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.weights["lm_head.weight"] @ self._norm(hidden, "norm")

    def along(self, target: PreTrainedModel, tokens: Sequence[int], num_known: int) -> Tensor:
        """Logits [draft vocab] after tokens, of which the first `num_known` are accepted. Prefixes are cached."""
        if (known_tokens := tuple(tokens[:num_known])) not in self._features:
            states = target(torch.tensor([known_tokens]), output_hidden_states=True).hidden_states
            self._features[known_tokens] = torch.cat([states[layer + 1][0] for layer in (0, 2, 4)], dim=-1)
        features = self._features[known_tokens]
        embeddings = self.weights.get("embed_tokens.weight")
        embedded = (target.get_input_embeddings().weight if embeddings is None else embeddings)[torch.tensor(tokens)]
        cache: Cache = []
        for position in range(len(tokens) - 1):
            end = position + 2
            key = tuple(tokens[:end]), min(end, num_known)
            if key not in self._read:
                feature = features[position] if position < num_known - 1 else hidden  # noqa: F821
                cache = [*cache]
                self._read[key] = self.step(feature, embedded[position + 1], position, cache), cache
            hidden, cache = self._read[key]
        return self.logits(hidden)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def _rotated(self, head: Tensor, position: int) -> Tensor:
        return rotate(head, position, self.config.rope_parameters["rope_theta"])
