"""Initial weights of a draft, copied from its target: last layers, final norm, and the deepest feature layer."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.eagle3 import Eagle3Model


def check_start(config: PretrainedConfig) -> None:
    """Raise ValueError for a target whose layers a draft cannot start from."""
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        raise ValueError(
            "start 'target': the target's layers have recurrent states, a draft's do not; allowed are 'random' and"
            " the directory of a draft"
        )


@torch.no_grad()
def start_from_target(draft: DraftModel, target: PreTrainedModel, text: Sequence[int]) -> int:
    """Copy the target's last layers and final norm into the draft; returns the number of weights copied.

    The fused context is initialised to the deepest layer that the draft reads, with the norm of the first copied
    layer. Weights with another name or shape are unchanged. If the target has no query and key norms, the draft's are
    set to the mean size of the target's queries and keys on `text` (token ids), which keeps the sharpness of its
    attention. Raises ValueError as `check_start` does.
    """
    check_start(target.config)
    first = int(target.config.num_hidden_layers) - draft.config.num_hidden_layers
    source = {name.removeprefix("model."): value for name, value in target.state_dict().items()}
    source["hidden_norm.weight"] = source[f"layers.{first}.input_layernorm.weight"]
    sizes = _query_and_key_sizes(target, text, first)
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
def start_eagle3_from_target(draft: Eagle3Model, target: PreTrainedModel) -> None:
    """Copy the target's last layer, final norm and LM head rows into an EAGLE-3 draft, where their shapes fit.

    The fused features are initialised to the deepest layer that the draft reads. The part of the projections that
    reads embeddings stays random. So do the query and key projections if the target has norms after them, which the
    draft does not have. Raises ValueError as `check_start` does.
    """
    check_start(target.config)
    width = draft.config.hidden_size
    source = {name.removeprefix("model."): value for name, value in target.state_dict().items()}
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


def _query_and_key_sizes(target: PreTrainedModel, text: Sequence[int], first: int) -> dict[str, float]:
    """Root mean square of a text's queries and keys in the layers from `first` on, by name of the norm's weight."""
    sizes: dict[str, float] = {}

    def measure(name: str, output: Tensor) -> None:
        sizes[name] = float(output.float().square().mean().sqrt())

    handles = [
        layer.self_attn.get_submodule(f"{kind}_proj").register_forward_hook(
            lambda _, __, output, name=f"layers.{i}.self_attn.{kind}_norm.weight": measure(name, output)
        )
        for i, layer in enumerate(target.model.layers[first:], start=first)
        for kind in "qk"
    ]
    target.model(torch.tensor([text], device=target.device), use_cache=False)
    for handle in handles:
        handle.remove()
    return sizes
