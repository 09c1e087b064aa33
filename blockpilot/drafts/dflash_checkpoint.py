"""Checkpoints of block-diffusion drafts: config.json and safetensors, converted to DFlash's (arXiv 2602.06036).

DSpark's format (arXiv 2607.05147; `dspark_qwen3_*`, and `dflash_qwen3_*` without heads) has its options at the top
level, and each slot proposes the token after it; SpecForge writes the same format under another name. The format of
vLLM's speculators nests the network's configuration, numbers target layers by their inputs, and may have an LM head
over some tokens only. All may carry the target's weights. DFlash 2 (z-lab/dflash) adds convolutions and a candidate
selector. A draft with a separate vocabulary has one more file, which other readers of the format ignore.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config

from blockpilot.drafts.base import Draft
from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.options import (
    ARCHITECTURE,
    CONSOLIDATED,
    DFLASH2,
    MASK_FILE,
    OWN_OPTIONS,
    VOCABULARY_FILE,
    default_layer_ids,
)
from blockpilot.models.cache import head_dim, layer_config
from blockpilot.models.decoder import full_rope
from blockpilot.storage import first_line, write_text

CODEBOOKS = tuple(f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor"))
_SHARED_WITH_TARGET = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("max_position_embeddings", "rms_norm_eps"),
)

_OF_HYBRIDS = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")  # a draft rotates whole heads


def load_draft(directory: Path) -> DraftModel:
    """Read a DFlash checkpoint directory into fp32 weights; raises ValueError, saying what is wrong with it.

    Only config.json and safetensors are read; no code of the checkpoint runs.
    """
    model = _new_draft(directory / "config.json")
    if (directory / MASK_FILE).exists():
        raise ValueError(
            f"draft {directory}: {MASK_FILE} is pickled and not read: store the embeddings, with this row at the mask"
            " token, as embed_tokens.weight in the safetensors, and remove the file"
        )
    stored = read_weights(directory)
    with named_errors(directory):
        weights = take_own(model, stored)
    size = model.config.vocab_size
    vocabulary = None if model.lm_head is not None else _read_vocabulary(directory / VOCABULARY_FILE, size)
    if vocabulary is not None:
        weights = {n: _full_codebook(v, vocabulary, size) if n in CODEBOOKS else v for n, v in weights.items()}
        model.vocabulary = vocabulary
    check_weights(model, weights, directory)
    model.load_state_dict(weights)
    return model


def _full_codebook(codebook: Tensor, vocabulary: Tensor, size: int) -> Tensor:
    """Codebook [size, rank]; if stored for the draft's vocabulary only, other tokens get zero rows, so no edges."""
    if len(codebook) != len(vocabulary):
        return codebook
    return codebook.new_zeros(size, codebook.shape[1]).index_copy_(0, vocabulary, codebook)


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Tensors of all safetensors files of a directory by name; raises ValueError if there are none."""
    weights: dict[str, Tensor] = {}
    for file in sorted({*directory.glob("*.safetensors")} - {*directory.glob(CONSOLIDATED)}):
        try:
            weights |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"draft {file}: not readable as safetensors ({error})") from None
    if not weights:
        pickled = any(directory.glob("*.bin"))
        hint = "; pickled ones (.bin) are not read, convert them" if pickled else ""
        raise ValueError(f"draft {directory}: no .safetensors file with weights there{hint}")
    return weights


def check_weights(model: nn.Module, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Raise ValueError unless names and shapes of the weights are those of the network."""
    expected = {name: parameter.shape for name, parameter in model.state_dict().items()}
    wrong = sorted(expected.keys() ^ weights.keys()) or sorted(
        name for name, shape in expected.items() if weights[name].shape != shape
    )
    if wrong:
        raise ValueError(f"draft {directory}: weights do not fit config.json at {', '.join(wrong[:3])}")


def read_config(path: Path) -> Any:
    """Parsed config.json; raises ValueError if it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"draft {path.parent}: no config.json there") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"draft {path}: not JSON ({error})") from None
    except Exception as error:  # a directory, not UTF-8, nested too deeply
        raise ValueError(f"draft {path}: not a configuration ({first_line(error)})") from None


def _new_draft(path: Path) -> DraftModel:
    """Network of a config.json, with random weights; raises ValueError for an invalid configuration."""
    stored = read_config(path)
    try:
        config = Qwen3Config.from_dict(as_dflash(stored))
    except Exception as error:  # transformers raises many types
        raise ValueError(f"draft {path}: not a configuration ({first_line(error)})") from None
    with named_errors(path):
        return DraftModel(config)


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Convert errors of making a network from a config.json into one-line ValueErrors that name its path."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"draft {path}: {first_line(error)}") from None
    except Exception as error:  # from transformers and torch, for impossible networks
        raise ValueError(
            f"draft {path}: cannot build a network from this config ({type(error).__name__}: {first_line(error)})"
        ) from None


def _read_vocabulary(path: Path, size: int) -> Tensor | None:
    """Token ids of a file; None if it does not exist. Raises ValueError for ids that the target does not have."""
    if not path.exists():
        return None
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8, not JSON
        raise ValueError(f"draft {path}: not JSON ({error})") from None
    if not (isinstance(ids, list) and ids and all(type(i) is int for i in ids) and len(set(ids)) == len(ids)):
        raise ValueError(f"draft {path}: must be a list of different token ids")
    if outside := [i for i in ids if not 0 <= i < size]:
        raise ValueError(f"draft {path}: token {outside[0]}, must be 0 to {size - 1}")
    return torch.tensor(ids)


def save_draft(model: DraftModel, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the published format: config.json, and weights of `dtype` in model.safetensors.

    A vocabulary is `d2t` beside the draft's own LM head. Beside the target's it is one more file, and codebooks then
    have the rows of its tokens only.
    """
    architecture, weights = DFLASH2 if model.options.is_dflash2 else ARCHITECTURE, model.state_dict()
    if model.vocabulary is not None and model.lm_head is not None:
        weights["d2t"] = model.vocabulary - torch.arange(len(model.vocabulary), device=model.vocabulary.device)
    elif model.vocabulary is not None:
        weights |= {name: weights[name][model.vocabulary] for name in CODEBOOKS if name in weights}
        directory.mkdir(parents=True, exist_ok=True)
        write_vocabulary(directory, model.vocabulary)
    write_checkpoint(model, weights, {"architectures": [architecture]}, directory, dtype)


def write_checkpoint(
    model: Draft, weights: Mapping[str, Tensor], options: Mapping[str, Any], directory: Path, dtype: torch.dtype
) -> None:
    """Write a network's weights, floating-point ones as `dtype`, and its configuration with these options."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: _stored(value, dtype) for name, value in weights.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")} | options
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    value = value.detach().to("cpu")
    return (value.to(dtype) if value.is_floating_point() else value).contiguous()


def write_vocabulary(directory: Path, ids: Tensor) -> None:
    """Write a draft's vocabulary to its directory: the tokens that it proposes, the most frequent first."""
    write_text(directory / VOCABULARY_FILE, json.dumps(ids.tolist()) + "\n")


def draft_rope(target_config: Any) -> dict[str, Any]:
    """Rotary parameters of a new draft: those of the target's full-attention layers, for whole heads."""
    return {name: value for name, value in full_rope(target_config).items() if name not in _OF_HYBRIDS}


def new_draft_config(
    target_config: Any,
    *,
    num_layers: int,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: Sequence[int] | None = None,
    **parts: int | str,
) -> Qwen3Config:
    """Configuration of a new draft for a target: `num_layers` layers like the target's first, with its rotary base.

    parts: options of optional parts, such as `selector_rank`; 0 omits the part.
    """
    num_target_layers = target_config.num_hidden_layers
    layer_ids = target_layer_ids or default_layer_ids(num_target_layers, num_layers)
    first_layer = layer_config(target_config, 0)
    options: dict[str, Any] = {name: getattr(first_layer, name) for name in _SHARED_WITH_TARGET} | {
        "architectures": [ARCHITECTURE],
        "num_hidden_layers": num_layers,
        "head_dim": head_dim(first_layer),
        "rope_parameters": draft_rope(target_config),
        "attention_bias": False,
        "tie_word_embeddings": False,
        "block_size": block_size,
        "num_target_layers": num_target_layers,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(layer_ids)}
        | {name: size for name, size in parts.items() if size},
    }
    return Qwen3Config(**options)


DSPARK, FLAT_DSPARK = "Qwen3DSparkModel", "DSparkDraftModel"
DFLASH_ARCHITECTURES = (
    *(ARCHITECTURE, DFLASH2, DSPARK, FLAT_DSPARK),
    *("DFlashSpeculator", "DSparkSpeculator", "DFlash2Speculator"),  # of speculators, as is DSparkDraftModel
)
OF_TARGET = ("verifier_norm.weight", "verifier_lm_head.weight")  # copies that speculators trains against
_MARKOV = "markov_head.markov_w2.weight"
_logger = logging.getLogger(__name__)


def as_dflash(stored: dict[str, Any]) -> dict[str, Any]:
    """config.json of any format, converted to DFlash's; raises ValueError, naming options that it lacks."""
    named = stored.get("architectures") or [ARCHITECTURE]
    if "transformer_layer_config" in stored:
        stored = _from_speculators(stored) | {"architectures": [ARCHITECTURE] if _is_known(named) else named}
    elif DSPARK in named or FLAT_DSPARK in named:
        options = {**(stored.get("dflash_config") or {}), "sample_from_anchor": True}
        if options.get("projector_type") == "dspark":  # SpecForge's name for DSpark
            del options["projector_type"]
        stored = stored | {"architectures": [ARCHITECTURE], "dflash_config": options}
    if "sliding_attention" in (stored.get("layer_types") or ()):  # else Qwen3Config drops the window
        stored = {"use_sliding_window": True} | stored
    return stored


def _is_known(named: list[str]) -> bool:
    return any(name in DFLASH_ARCHITECTURES for name in named)


def _from_speculators(stored: dict[str, Any]) -> dict[str, Any]:
    network: dict[str, Any] = stored["transformer_layer_config"]
    if missing := [name for name in ("aux_hidden_state_layer_ids", "mask_token_id") if stored.get(name) is None]:
        raise ValueError(f"draft config.json lacks {', '.join(missing)}")
    options = {name: stored[name] for name in OWN_OPTIONS if name in stored}
    # Its embeddings are copies of the target's weights, which a Gemma target scales; trained without the scale.
    options.setdefault("input_embedding_scale", 1.0)
    options["target_layer_ids"] = [i - 1 for i in stored["aux_hidden_state_layer_ids"]]
    if network.get("model_type") == "llama":  # LlamaConfig fills in missing options
        network = LlamaConfig.from_dict(network).to_dict()
    # The default is that of DFlash 2, and of vLLM for DFlash; DSpark has none.
    is_dspark = stored.get("speculators_model_type") == "dspark"
    causal = {"is_causal": False} if stored.get("sliding_window_non_causal", not is_dspark) else {}
    return network | causal | {"model_type": "qwen3", "dflash_config": options}


def _token_ids(num: int, size: int, stored: Mapping[str, Tensor]) -> Tensor:
    """Token ids [num] that an LM head scores, of `size`; ValueError if it is smaller and nothing maps it."""
    if "d2t" in stored:
        return torch.arange(num) + stored["d2t"]
    if "t2d" in stored and num < size:
        return stored["t2d"].nonzero().flatten()
    if num < size:
        raise ValueError(f"LM head of {num} tokens, the target has {size}: neither d2t nor t2d maps them")
    return torch.arange(num)


def take_own(model: DraftModel, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights to load, out of those stored; the network gets the modules for stored embeddings and a stored LM head.

    This head may score fewer tokens than the target's: `d2t` is the offset from each of its indices to the target's
    token id. The confidence head is left out, because the acceptance model's features are more informative.
    """
    known = {name: value for name, value in stored.items() if name not in (*OF_TARGET, "d2t", "t2d")}
    weights = {name: value for name, value in known.items() if not name.startswith("confidence_head.")}
    if len(weights) < len(known):
        _logger.warning("the draft's confidence head is not used: the acceptance model takes its place")
    head, size, ids = weights.get("lm_head.weight"), model.config.vocab_size, None
    if head is not None:
        ids = _token_ids(len(head), size, stored)
        if len(ids) != len(head) or not 0 <= int(ids.min()) <= int(ids.max()) < size or len(ids.unique()) < len(ids):
            raise ValueError(f"LM head of {len(head)} tokens: d2t must lead to different ones of 0 to {size - 1}")
        if _MARKOV in weights and len(weights[_MARKOV]) == len(ids):
            every = weights[_MARKOV].new_zeros(size, weights[_MARKOV].shape[1])
            weights[_MARKOV] = every.index_copy_(0, ids, weights[_MARKOV])
    model.make_room("embed_tokens.weight" in weights, ids)
    return weights
