"""Options of a DFlash checkpoint that Qwen3Config does not have."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Qwen3Config

ARCHITECTURE, DFLASH2 = "DFlashDraftModel", "DFlash2DraftModel"
VOCABULARY_FILE = "draft_vocabulary.json"  # token ids, the most frequent first
MASK_FILE = "mask_embedding.pt"  # pickled embedding of the mask token: only noticed, never read
CONSOLIDATED = "consolidated*"  # copies of the weights in Mistral's format: not loaded
# Options of newer checkpoints, with the values that leave the network as implemented here.
_NEUTRAL: dict[str, Any] = {
    **{"output_multiplier": 1.0, "logit_scale": 1.0},
    **{"projector_type": "dflash", "hidden_act": "silu", "is_neox_style": True, "attention_value_scale": 1.0},
    **dict.fromkeys(("use_swa", "attention_sink_bias", "add_swa_attention_sink_bias", "shift_label"), False),
    "quantization_config": None,
}
_OF_DFLASH2 = "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"
_HEAD_TYPES = "vanilla", "gated"  # of a Markov head
CAUSAL = ("is_causal", "causal", "causal_head")  # names of one option; the last is JetSpec's (arXiv 2606.18394)
OWN_OPTIONS = (
    *("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "markov_rank", "sample_from_anchor"),
    *("target_hidden_size", "markov_head_type", "input_embedding_scale", "final_logit_softcapping"),
    *("swa_window_size", *_OF_DFLASH2, *CAUSAL, *_NEUTRAL),
)


@dataclass(frozen=True)
class DraftOptions:
    """Options of a DFlash draft; target_layer_ids count from 0; a rank or kernel size of 0 omits that part."""

    block_size: int
    """Tokens of a step: the anchor and the drafted positions."""
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    """None if the checkpoint does not say."""
    markov_rank: int = 0
    is_gated: bool = False
    """The Markov head is gated by the slot's hidden state."""
    selector_rank: int = 0
    selector_top_k: int = 0
    """Best tokens of a slot that the candidate selector chooses among."""
    conv_kernel_size: int = 0
    """Tokens of a block that a convolution reads."""
    conv_group_size: int = 0
    """Channels that share its kernels."""
    sample_from_anchor: bool = False
    """A slot proposes the token after its position, so a pass drafts as many tokens as it has slots (DSpark)."""
    causal: bool | None = None
    """Causal mask inside the block; None: only in sliding-window layers."""
    embedding_scale: float | None = None
    """Factor of the embeddings as they are stored; None: embedded as by the target, which may scale (Gemma)."""
    soft_cap: float | None = None
    """Soft cap of the logits, which must be the target's; None: the checkpoint does not say."""

    @property
    def is_dflash2(self) -> bool:
        """True if it has a part that DFlash does not have."""
        return bool(self.selector_rank or self.conv_kernel_size)


def default_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """DFlash's choice of target layers for a new draft: evenly spaced from the second to the fourth-last."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


def parse_options(config: "Qwen3Config") -> DraftOptions:
    """Options of a configuration; raises ValueError, naming what is missing or not supported."""
    nested: dict[str, Any] = getattr(config, "dflash_config", None) or {}

    def option(name: str) -> Any:
        value = nested.get(name)
        return getattr(config, name, None) if value is None else value

    architectures = config.architectures or [ARCHITECTURE]
    if not {ARCHITECTURE, DFLASH2} & {*architectures}:
        raise ValueError(f"draft architecture {architectures}: supported are {ARCHITECTURE}, {DFLASH2}")
    neutral = _NEUTRAL | {"target_hidden_size": config.hidden_size}
    check_neutral({name: option(name) for name in neutral}, neutral)
    check_neutral(config.rope_parameters or {}, {"partial_rotary_factor": 1.0})
    if "sliding_attention" in (config.layer_types or ()) and config.sliding_window is None:
        raise ValueError("draft layer_types has sliding_attention without a window in use (sliding_window = None)")
    check_neutral({"swa_window_size": option("swa_window_size")}, {"swa_window_size": config.sliding_window})
    head_type = option("markov_head_type") or _HEAD_TYPES[0]
    if head_type not in _HEAD_TYPES:
        raise ValueError(
            f"draft option markov_head_type = {head_type}: not supported (only {', '.join(_HEAD_TYPES)})"
        )
    parts = {name: _natural(name, option(name)) for name in ("markov_rank", *_OF_DFLASH2)}
    _check_parts(parts, config.hidden_size)
    missing = [name for name in ("block_size", "mask_token_id", "target_layer_ids") if option(name) in (None, [])]
    if missing:
        raise ValueError(f"draft config.json lacks {', '.join(missing)}")
    from_anchor, num_target_layers = bool(option("sample_from_anchor")), option("num_target_layers")
    return DraftOptions(
        block_size=int(option("block_size")) + from_anchor,  # the checkpoint stores the slots of a pass
        mask_token_id=int(option("mask_token_id")),
        target_layer_ids=tuple(option("target_layer_ids")),
        num_target_layers=None if num_target_layers is None else int(num_target_layers),
        is_gated=head_type == "gated",
        **parts,
        sample_from_anchor=from_anchor,
        causal=_causal({name: option(name) for name in CAUSAL}),
        embedding_scale=_positive("input_embedding_scale", option("input_embedding_scale")),
        soft_cap=_positive("final_logit_softcapping", option("final_logit_softcapping")),
    )


def check_neutral(options: Mapping[str, Any], neutral: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the option, if one has another value than its neutral one."""
    for name, value in neutral.items():
        if options.get(name) not in (None, value):
            raise ValueError(f"draft option {name} = {options[name]}: not supported (only {value})")


def _positive(name: str, value: Any) -> float | None:
    if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
        raise ValueError(f"draft option {name} = {value!r}: must be a positive number")
    return None if value is None else float(value)


def _natural(name: str, value: Any) -> int:
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError(f"draft option {name} = {value!r}: must be a whole number, 0 for none")
    return value or 0


def _check_parts(parts: dict[str, int], width: int) -> None:
    """Raise ValueError for incomplete parts of DFlash 2, and parts that do not fit the network or each other."""
    for one, other in (("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k")):
        if bool(parts[one]) != bool(parts[other]):
            raise ValueError(f"draft options {one} = {parts[one]}, {other} = {parts[other]}: both or none are needed")
    group = parts["conv_group_size"]
    if group and width % group:
        raise ValueError(f"draft option conv_group_size = {group}: must divide the hidden size {width}")
    if parts["markov_rank"] and parts["selector_rank"]:
        raise ValueError(f"draft options markov_rank and selector_rank = {parts['selector_rank']}: one at a time")


def _causal(written: dict[str, Any]) -> bool | None:
    """Value of the option with three names; raises ValueError unless all given values are the same bool."""
    given = {name: value for name, value in written.items() if value is not None}
    if len({*given.values()}) > 1 or not all(type(value) is bool for value in given.values()):
        raise ValueError(f"draft options {given}: must be one of true and false")
    return next(iter(given.values()), None)
