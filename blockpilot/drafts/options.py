"""Options of a DFlash checkpoint that Qwen3Config does not have."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Qwen3Config

ARCHITECTURE = "DFlashDraftModel"
VOCABULARY_FILE = "draft_vocabulary.json"  # token ids, the most frequent first
# Options of newer checkpoints, with the values that leave the network as implemented here.
_NEUTRAL = {
    **{"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None},
    **dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")),
}


@dataclass(frozen=True)
class DraftOptions:
    """Options of a DFlash draft; target_layer_ids count from 0, markov_rank 0 is no Markov head."""

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    markov_rank: int = 0


def default_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """DFlash's choice of target layers: evenly spaced from the second to the fourth-last."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


def parse_options(config: "Qwen3Config") -> DraftOptions:
    """Options of a configuration; raises ValueError, naming what is missing or not supported."""
    own: dict[str, Any] = getattr(config, "dflash_config", None) or {}

    def option(name: str) -> Any:
        return own.get(name, getattr(config, name, None))

    architectures = config.architectures or [ARCHITECTURE]
    if ARCHITECTURE not in architectures:
        raise ValueError(f"draft architecture {architectures}: supported is {ARCHITECTURE}")
    for name, neutral in _NEUTRAL.items():
        if option(name) not in (None, neutral):
            raise ValueError(f"draft option {name} = {option(name)}: not supported (only {neutral})")
    required = ("block_size", "mask_token_id", "num_target_layers")
    missing = [name for name in required if option(name) is None]
    if missing:
        raise ValueError(f"draft config.json lacks {', '.join(missing)}")
    layers = option("target_layer_ids")
    num_target_layers = int(option("num_target_layers"))
    return DraftOptions(
        block_size=int(option("block_size")),
        mask_token_id=int(option("mask_token_id")),
        target_layer_ids=tuple(layers or default_layer_ids(num_target_layers, config.num_hidden_layers)),
        num_target_layers=num_target_layers,
        markov_rank=int(option("markov_rank") or 0),
    )
