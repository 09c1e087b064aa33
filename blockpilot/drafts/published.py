"""Published formats of block-diffusion drafts, in the terms of DFlash's own (arXiv 2602.06036).

DSpark's (arXiv 2607.05147; `dspark_qwen3_*`, and `dflash_qwen3_*` without heads) names its options at the top level,
and its slots propose the tokens after them; SpecForge writes the same under another name. That of vLLM's speculators
nests the network's configuration, counts a target layer by its input, and may have an LM head over some tokens only.
All may carry the target's weights. DFlash 2 (z-lab/dflash) adds convolutions and a candidate selector.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.options import ARCHITECTURE, DFLASH2, OWN_OPTIONS

DSPARK, FLAT_DSPARK = "Qwen3DSparkModel", "DSparkDraftModel"
DFLASH_ARCHITECTURES = (
    *(ARCHITECTURE, DFLASH2, DSPARK, FLAT_DSPARK),
    *("DFlashSpeculator", "DSparkSpeculator", "DFlash2Speculator"),  # of speculators, which has DSparkDraftModel, too
)
_OF_TARGET = ("verifier_norm.weight", "verifier_lm_head.weight")  # copies that speculators trains against
_MARKOV = "markov_head.markov_w2.weight"
_logger = logging.getLogger(__name__)


def as_dflash(stored: dict[str, Any]) -> dict[str, Any]:
    """The config.json of any of the formats as DFlash's own; raises ValueError for what it lacks."""
    named = stored.get("architectures") or [ARCHITECTURE]
    if "transformer_layer_config" in stored:
        stored = _of_speculators(stored) | {"architectures": [ARCHITECTURE] if _is_known(named) else named}
    elif DSPARK in named or FLAT_DSPARK in named:
        own = {**(stored.get("dflash_config") or {}), "sample_from_anchor": True}
        if own.get("projector_type") == "dspark":  # SpecForge's word for the same
            del own["projector_type"]
        stored = stored | {"architectures": [ARCHITECTURE], "dflash_config": own}
    if "sliding_attention" in (stored.get("layer_types") or ()):  # which Qwen3's class would give no window
        stored = {"use_sliding_window": True} | stored
    return stored


def _is_known(named: list[str]) -> bool:
    return any(name in DFLASH_ARCHITECTURES for name in named)


def _of_speculators(stored: dict[str, Any]) -> dict[str, Any]:
    network: dict[str, Any] = stored["transformer_layer_config"]
    if missing := [name for name in ("aux_hidden_state_layer_ids", "mask_token_id") if stored.get(name) is None]:
        raise ValueError(f"draft config.json lacks {', '.join(missing)}")
    own = {name: stored[name] for name in OWN_OPTIONS if name in stored}
    own["target_layer_ids"] = [i - 1 for i in stored["aux_hidden_state_layer_ids"]]
    if network.get("model_type") == "llama":  # whose class fills in what is missing
        network = LlamaConfig.from_dict(network).to_dict()
    causal = {"is_causal": False} if stored.get("sliding_window_non_causal") else {}
    return network | causal | {"model_type": "qwen3", "dflash_config": own}


def take_own(model: DraftModel, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights to load out of those stored, with room in the network for embeddings and an LM head of its own.

    Such a head may score fewer tokens than the target has; `d2t` says what to add to a token's number for the
    target's. The confidence head, of which the node model's own features say more, is left out.
    """
    known = {name: value for name, value in stored.items() if name not in (*_OF_TARGET, "d2t", "t2d")}
    weights = {name: value for name, value in known.items() if not name.startswith("confidence_head.")}
    if len(weights) < len(known):
        _logger.warning("the draft's confidence head is not used: its scores and the policy give the chances")
    head, size, ids = weights.get("lm_head.weight"), model.config.vocab_size, None
    if head is not None:
        ids = torch.arange(len(head)) + stored.get("d2t", 0)
        if not 0 <= int(ids.min()) <= int(ids.max()) < size or len(ids.unique()) < len(ids):
            raise ValueError(f"LM head of {len(head)} tokens: d2t must lead to different ones of 0 to {size - 1}")
        if _MARKOV in weights and len(weights[_MARKOV]) == len(ids):
            every = weights[_MARKOV].new_zeros(size, weights[_MARKOV].shape[1])
            weights[_MARKOV] = every.index_copy_(0, ids, weights[_MARKOV])
    model.make_room("embed_tokens.weight" in weights, ids)
    return weights
