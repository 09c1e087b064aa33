"""Initial weights of a draft from its target: last layers, final norm, and a fusion that selects the deepest layer.

Drafts have Llama's or Qwen3's layers. Weights of a Gemma 3 are converted: 1 is added to norm weights, and the average
effect of the norm on a sublayer's output is folded into the sublayer's last projection.
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.eagle3 import Eagle3Model
from blockpilot.models.states import LINEAR


def check_start(config: PretrainedConfig) -> None:
    """Raise ValueError for a target whose layers a draft cannot start from."""
    if LINEAR in (getattr(config, "layer_types", None) or ()):
        raise ValueError(
            "start 'target': the target's layers have recurrent states, a draft's do not; allowed are 'random' and"
            " the directory of a draft"
        )
    if config.model_type == "gemma4_text":
        raise ValueError(
            "start 'target': a Gemma 4's layers have scales and norms of values, a draft's do not; allowed are"
            " 'random' and the directory of a draft"
        )


@torch.no_grad()
def start_from_target(draft: DraftModel, target: PreTrainedModel, text: Sequence[int]) -> int:
    """Copy the target's last layers and final norm into the draft; returns the number of weights copied.

    The fused context is initialised to the deepest layer that the draft reads, with the norm of the first copied
    layer. Weights with another name or shape are unchanged. If the target has no query and key norms, the draft's are
    set to the root mean square of the target's queries and keys on `text` (token ids), which keeps the sharpness of
    its attention. Raises ValueError as `check_start` does.
    """
    check_start(target.config)
    first = int(target.config.num_hidden_layers) - draft.config.num_hidden_layers
    source = _source(target, text)
    source["hidden_norm.weight"] = source[f"layers.{first}.input_layernorm.weight"]
    sizes = {
        name.replace("_proj", "_norm.weight"): size
        for name, size in _sizes(target, text, ("self_attn.q_proj", "self_attn.k_proj")).items()
    }
    copied = 0
    for name, weight in draft.named_parameters():
        target_name = re.sub(r"^layers\.(\d+)", lambda m: f"layers.{int(m[1]) + first}", name)
        value = source.get(target_name)
        if value is not None and value.shape == weight.shape:
            weight.copy_(value)
            copied += 1
        elif target_name in sizes:
            weight.fill_(sizes[target_name])
    draft.fc.weight.zero_()
    draft.fc.weight[:, -draft.config.hidden_size :].fill_diagonal_(1.0)
    return copied


@torch.no_grad()
def start_eagle3_from_target(draft: Eagle3Model, target: PreTrainedModel, text: Sequence[int]) -> None:
    """Copy the target's last layer, final norm and LM head rows into an EAGLE-3 draft, where their shapes fit.

    The fused features are initialised to the deepest layer that the draft reads. The part of the projections that
    reads embeddings stays random. So do the query and key projections if the target has norms after them, which the
    draft does not have. Raises ValueError as `check_start` does.
    """
    check_start(target.config)
    width = draft.config.hidden_size
    source = _source(target, text)
    last = f"layers.{int(target.config.num_hidden_layers) - 1}."
    source |= {f"midlayer.{name.removeprefix(last)}": v for name, v in source.items() if name.startswith(last)}
    source["midlayer.hidden_norm.weight"] = source.pop("midlayer.input_layernorm.weight")
    source["lm_head.weight"] = target.get_output_embeddings().weight[draft.vocabulary.to(target.device)]
    is_normed = "midlayer.self_attn.q_norm.weight" in source
    for name, weight in draft.named_parameters():
        kind = name.removeprefix("midlayer.self_attn.").removesuffix("_proj.weight")
        if kind in ("q", "k") and is_normed:
            continue
        part = weight[:, width:] if kind in ("q", "k", "v") else weight
        if (value := source.get(name)) is not None and value.shape == part.shape:
            part.copy_(value)
    draft.fc.weight.zero_()
    draft.fc.weight[:, -width:].fill_diagonal_(1.0)


def _source(target: PreTrainedModel, text: Sequence[int]) -> dict[str, Tensor]:
    """Weights of the target, converted to the names and the structure of Llama or Qwen3."""
    source = {name.removeprefix("model."): value for name, value in target.state_dict().items()}
    if target.config.model_type != "gemma3_text":
        return source
    converted = {name: value + 1 if "norm" in name else value for name, value in source.items()}
    sizes = _sizes(target, text, ("self_attn.o_proj", "mlp.down_proj"))
    for i in range(int(target.config.num_hidden_layers)):
        layer = f"layers.{i}."
        for norm, product in (("post_attention", "self_attn.o_proj"), ("post_feedforward", "mlp.down_proj")):
            weight = converted.pop(f"{layer}{norm}_layernorm.weight") / sizes[layer + product]
            converted[f"{layer}{product}.weight"] = weight[:, None] * converted[f"{layer}{product}.weight"]
        converted[f"{layer}post_attention_layernorm.weight"] = converted.pop(
            f"{layer}pre_feedforward_layernorm.weight"
        )
    return converted


def _sizes(target: PreTrainedModel, text: Sequence[int], products: Sequence[str]) -> dict[str, float]:
    """Root mean square of the outputs of these projections on a text, for every layer, by `layers.i.NAME`."""
    sizes: dict[str, float] = {}

    def measure(name: str, output: Tensor) -> None:
        sizes[name] = float(output.float().square().mean().sqrt())

    handles = [
        layer.get_submodule(product).register_forward_hook(
            lambda _, __, output, name=f"layers.{i}.{product}": measure(name, output)
        )
        for i, layer in enumerate(target.model.layers)
        for product in products
    ]
    target.model(torch.tensor([text], device=target.device), use_cache=False)
    for handle in handles:
        handle.remove()
    return sizes
