"""Options of a DFlash checkpoint that Qwen3Config does not have."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Qwen3Config

ARCHITECTURE = "DFlashDraftModel"
VOCABULARY_FILE = "draft_vocabulary.json"  # token ids, the most frequent first
# Options of newer checkpoints, with the values that leave the network as implemented here.
_NEUTRAL: dict[str, Any] = {
    **{"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None, "logit_scale": 1.0},
    **{"markov_head_type": "vanilla", "projector_type": "dflash", "hidden_act": "silu", "is_neox_style": True},
    **dict.fromkeys(("use_swa", "attention_sink_bias", "add_swa_attention_sink_bias", "shift_label"), False),
    **dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")),
    "quantization_config": None,
}
_CAUSAL = ("is_causal", "causal", "causal_head")  # names of one option; the last is JetSpec's (arXiv 2606.18394)
OWN_OPTIONS = (
    *("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "markov_rank", "sample_from_anchor"),
    *("target_hidden_size", *_CAUSAL, *_NEUTRAL),
)


@dataclass(frozen=True)
class DraftOptions:
    """Options of a DFlash draft; target_layer_ids count from 0, markov_rank 0 is no Markov head."""

    block_size: int
    """Tokens of a step: the anchor and the positions drafted."""
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    """None where the checkpoint does not say."""
    markov_rank: int = 0
    sample_from_anchor: bool = False
    """A slot of the draft's pass proposes the token after its own position: as many as there are slots (DSpark)."""
    causal: bool | None = None
    """Causal mask inside the block; None: in sliding-window layers alone."""


def default_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """DFlash's choice of target layers for a new draft: evenly spaced from the second to the fourth-last."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


def parse_options(config: "Qwen3Config") -> DraftOptions:
    """Options of a configuration; raises ValueError, naming what is missing or not supported."""
    own: dict[str, Any] = getattr(config, "dflash_config", None) or {}

    def option(name: str) -> Any:
        value = own.get(name)
        return getattr(config, name, None) if value is None else value

    architectures = config.architectures or [ARCHITECTURE]
    if ARCHITECTURE not in architectures:
        raise ValueError(f"draft architecture {architectures}: supported is {ARCHITECTURE}")
    for name, neutral in (_NEUTRAL | {"target_hidden_size": config.hidden_size}).items():
        if option(name) not in (None, neutral):
            raise ValueError(f"draft option {name} = {option(name)}: not supported (only {neutral})")
    missing = [name for name in ("block_size", "mask_token_id", "target_layer_ids") if option(name) in (None, [])]
    if missing:
        raise ValueError(f"draft config.json lacks {', '.join(missing)}")
    if "sliding_attention" in (config.layer_types or ()) and config.sliding_window is None:
        raise ValueError("draft layer_types has sliding_attention without a window in use (sliding_window = None)")
    from_anchor, num_target_layers = bool(option("sample_from_anchor")), option("num_target_layers")
    return DraftOptions(
        block_size=int(option("block_size")) + from_anchor,  # stored are the slots of a pass
        mask_token_id=int(option("mask_token_id")),
        target_layer_ids=tuple(option("target_layer_ids")),
        num_target_layers=None if num_target_layers is None else int(num_target_layers),
        markov_rank=int(option("markov_rank") or 0),
        sample_from_anchor=from_anchor,
        causal=_causal({name: option(name) for name in _CAUSAL}),
    )


def _causal(written: dict[str, Any]) -> bool | None:
    """The option that has three names; raises ValueError for names that contradict each other."""
    given = {name: value for name, value in written.items() if value is not None}
    if len({*given.values()}) > 1 or not all(type(value) is bool for value in given.values()):
        raise ValueError(f"draft options {given}: must be one of true and false")
    return next(iter(given.values()), None)
