"""Policies as directories: `policy.json`, `policy.safetensors` (kind `prompt`), `price.json` (step cost, if any).

A server needs only the directory, no training code. Nothing is unpickled.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockpilot.control.cost import PRICE_FILE, StepPrice, read_price
from blockpilot.policy.learned import (
    WEIGHT_NAMES,
    Kind,
    LearnedPolicy,
    PromptInfo,
    PromptPolicy,
    Scalar,
    StepInfo,
    StepPolicy,
)
from blockpilot.policy.network import NetworkShape, PolicyNetwork
from blockpilot.storage import write_text
from blockpilot.types import CandidateSet, PairId

WEIGHTS_FILE = "policy.safetensors"
INFO_FILE = "policy.json"
FORMAT = 5
_SHARED = {"format", "kind", "pair", "training"}
_FIELDS: dict[Kind, set[str]] = {
    "prompt": _SHARED | {"objective", "candidates", "threshold", "network"},
    "step": _SHARED | {"vocab_size", "weights"},
}
Fields = dict[str, Any]


def save_policy(policy: LearnedPolicy, directory: str | Path) -> None:
    """Write the policy; `policy.json` is written last, so a directory without it is unfinished."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    remove_policy(folder)
    if isinstance(policy, PromptPolicy):
        tensors = {name: t.detach().cpu().contiguous() for name, t in policy.network.state_dict().items()}
        save_file(tensors | {"support": policy.network.support.cpu()}, folder / WEIGHTS_FILE)
    if policy.price is not None:
        write_text(folder / PRICE_FILE, policy.price.to_json())
    info = policy.info
    fields = {"format": FORMAT, "kind": info.kind, "pair": info.pair._asdict()}
    fields |= _prompt_fields(policy.info) if isinstance(policy, PromptPolicy) else _step_fields(policy)
    write_text(folder / INFO_FILE, json.dumps(fields | {"training": dict(info.training)}, indent=2) + "\n")


def _prompt_fields(info: PromptInfo) -> Fields:
    return {
        "objective": info.objective,
        "candidates": list(info.candidates),
        "threshold": info.threshold,
        "network": asdict(info.shape),
    }


def _step_fields(policy: StepPolicy) -> Fields:
    """Vocabulary size, and each weight by name as [value for greedy slots, value for sampled slots]."""
    weights = dict(zip(WEIGHT_NAMES, policy.weights.T.tolist(), strict=True))
    return {"vocab_size": policy.info.vocab_size, "weights": weights}


def remove_policy(directory: str | Path) -> None:
    """Delete the files of a policy; other files in the directory stay."""
    for name in (INFO_FILE, PRICE_FILE, WEIGHTS_FILE):
        (Path(directory) / name).unlink(missing_ok=True)


def load_policy(directory: str | Path) -> LearnedPolicy:
    """Inverse of `save_policy`; raises ValueError that names the file and the wrong field."""
    folder = Path(directory)
    path = folder / INFO_FILE
    fields = _read_json(path)
    kind, pair, training = _check_shared(path, fields)
    if kind == "step":
        return _read_step(folder, fields, pair, training)
    info = _read_prompt(path, fields, pair, training)
    network = _read_network(folder / WEIGHTS_FILE, info.shape)
    return PromptPolicy(info, network, _read_price(folder) if info.objective == "throughput" else None)


def load_step_policy(directory: str | Path) -> StepPolicy:
    """Load a policy of kind `step`; raises ValueError as `load_policy` does, and for kind `prompt`."""
    if not isinstance(policy := load_policy(directory), StepPolicy):
        raise ValueError(f"policy {directory}: of kind prompt; must be of kind step")
    return policy


def _check_shared(path: Path, fields: Fields) -> tuple[Kind, PairId, Mapping[str, Scalar]]:
    """The fields that both kinds have. Raises ValueError for another format, and for unknown or missing fields."""
    if (version := fields.get("format")) != FORMAT:
        raise ValueError(f"{path}: format {version!r}, this version reads {FORMAT}: retrain with jobs/train.py")
    kind: Kind
    if (kind := fields.get("kind")) not in get_args(Kind):  # type: ignore[assignment]
        raise ValueError(f"{path}: field 'kind' must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    if mismatched := sorted(_FIELDS[kind] ^ set(fields)):
        raise ValueError(f"{path}: {'unknown' if mismatched[0] in fields else 'missing'} field {mismatched[0]!r}")
    pair = fields["pair"]
    if not isinstance(pair, dict) or set(pair) != set(PairId._fields) or not _all_str(pair.values()):
        raise ValueError(f"{path}: field 'pair' must hold the strings {', '.join(PairId._fields)}, got {pair!r}")
    if not isinstance(fields["training"], dict):
        raise ValueError(f"{path}: field 'training' must be an object, got {fields['training']!r}")
    return kind, PairId(**pair), fields["training"]


def _read_prompt(path: Path, fields: Fields, pair: PairId, training: Mapping[str, Scalar]) -> PromptInfo:
    threshold = fields["threshold"]
    if type(threshold) is not float or not 0 <= threshold < 1:
        raise ValueError(f"{path}: field 'threshold' must be a number in [0, 1), got {threshold!r}")
    try:
        candidates = CandidateSet(tuple(fields["candidates"]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: field 'candidates': {error}") from None
    try:
        shape = NetworkShape(**fields["network"])
        return PromptInfo(pair, candidates, fields["objective"], shape, threshold, training)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _read_step(folder: Path, fields: Fields, pair: PairId, training: Mapping[str, Scalar]) -> StepPolicy:
    path, weights = folder / INFO_FILE, fields["weights"]
    if not isinstance(weights, dict):
        raise ValueError(f"{path}: field 'weights' must be an object, got {weights!r}")
    if mismatched := sorted(set(WEIGHT_NAMES) ^ set(weights)):
        raise ValueError(f"{path}: {'unknown' if mismatched[0] in weights else 'missing'} weight {mismatched[0]!r}")
    for name in WEIGHT_NAMES:
        values = weights[name]
        if not isinstance(values, list) or len(values) != 2 or not all(map(_is_finite, values)):
            raise ValueError(f"{path}: weight {name!r} must be two finite numbers, got {values!r}")
    try:
        info = StepInfo(pair, fields["vocab_size"], training)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    price = _read_price(folder) if (folder / PRICE_FILE).exists() else None
    by_kind = np.array([[weights[name][kind] for name in WEIGHT_NAMES] for kind in (0, 1)], dtype=float)
    return StepPolicy(by_kind, info, price)


def _read_price(folder: Path) -> StepPrice:
    return read_price(str(folder / PRICE_FILE))


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file (a policy is a directory with {INFO_FILE})") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: a JSON object is needed, got {type(fields).__name__}")
    return fields


def _all_str(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _read_network(path: Path, shape: NetworkShape) -> PolicyNetwork:
    tensors = _read_tensors(path)
    sizes: dict[str, tuple[int, ...]] = {"bias": (shape.hidden,), "head.weight": (shape.num_outputs, shape.hidden)}
    for name, size in sizes.items():  # before a network of these sizes is allocated
        _check_tensor(path, name, tensors.get(name), torch.empty(size, device="meta"))
    network = PolicyNetwork(shape, _read_support(path, tensors, shape))
    for name, expected in network.state_dict().items():
        _check_tensor(path, name, tensors.get(name), expected)
    if unknown := sorted(set(tensors) - set(network.state_dict())):
        raise ValueError(f"{path}: unknown tensor {unknown[0]!r}")
    network.load_state_dict(tensors)
    return network


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from None


def _read_support(path: Path, tensors: dict[str, Tensor], shape: NetworkShape) -> Tensor:
    """Remove the support from `tensors` and return it; ValueError unless ascending ids of the vocabulary."""
    support = tensors.pop("support", None)
    if support is None or support.dtype != torch.int64 or support.dim() != 1:
        raise ValueError(f"{path}: tensor 'support' must hold int64 token ids")
    if support.numel() == 0:
        raise ValueError(f"{path}: tensor 'support' is empty")
    inside = int(support[0]) >= 0 and int(support[-1]) < shape.vocab_size
    if bool((support.diff() <= 0).any()) or not inside:
        raise ValueError(f"{path}: tensor 'support' must be increasing ids below {shape.vocab_size}")
    return support


def _check_tensor(path: Path, name: str, tensor: Tensor | None, expected: Tensor) -> None:
    if tensor is None:
        raise ValueError(f"{path}: missing tensor {name!r}")
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        raise ValueError(
            f"{path}: tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}; "
            f"needed: {expected.dtype} {tuple(expected.shape)}"
        )
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{path}: tensor {name!r} holds values that are not finite")
