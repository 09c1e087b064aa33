"""A policy as a directory: `policy.safetensors`, `policy.json`, with kind `step` `nodes.safetensors`, and with the
objective "throughput" `price.json`.

The directory is all that a policy is: what serves one needs no training code. Nothing is unpickled.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blockpilot.control.cost import PRICE_FILE, read_price
from blockpilot.policy.learned import LearnedPolicy, PolicyInfo
from blockpilot.policy.network import NetworkShape, PolicyNetwork
from blockpilot.policy.nodes import NodeModel
from blockpilot.storage import write_text
from blockpilot.types import CandidateSet, PairId

WEIGHTS_FILE = "policy.safetensors"
NODES_FILE = "nodes.safetensors"
INFO_FILE = "policy.json"
FORMAT = 4


def save_policy(policy: LearnedPolicy, directory: str | Path) -> None:
    """Write the policy; a directory without `policy.json` (written last) is an unfinished one."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    remove_policy(folder)
    tensors = {name: t.detach().cpu().contiguous() for name, t in policy.network.state_dict().items()}
    save_file(tensors | {"support": policy.network.support.cpu()}, folder / WEIGHTS_FILE)
    if policy.nodes is not None:
        save_file({name: t.cpu().contiguous() for name, t in policy.nodes.state_dict().items()}, folder / NODES_FILE)
    if policy.price is not None:
        write_text(folder / PRICE_FILE, policy.price.to_json())
    info = policy.info
    network = asdict(info.shape)
    fields = {
        "format": FORMAT,
        "kind": network.pop("kind"),
        "objective": info.objective,
        "pair": info.pair._asdict(),
        "candidates": list(info.candidates),
        "threshold": info.threshold,
        "network": network,
        "training": dict(info.training),
    }
    write_text(folder / INFO_FILE, json.dumps(fields, indent=2) + "\n")


def remove_policy(directory: str | Path) -> None:
    """Delete the files of a policy; what else is in the directory stays."""
    for name in (INFO_FILE, PRICE_FILE, NODES_FILE, WEIGHTS_FILE):
        (Path(directory) / name).unlink(missing_ok=True)


def load_policy(directory: str | Path) -> LearnedPolicy:
    """Read what `save_policy` wrote. Raises ValueError that names the file and the wrong field."""
    folder = Path(directory)
    info = _read_info(folder / INFO_FILE)
    price = read_price(str(folder / PRICE_FILE)) if info.objective == "throughput" else None
    network = _read_network(folder / WEIGHTS_FILE, info.shape)
    nodes = _read_nodes(folder / NODES_FILE) if info.kind == "step" and (folder / NODES_FILE).exists() else None
    return LearnedPolicy(info, network, price, nodes)


def _read_info(path: Path) -> PolicyInfo:
    fields = _read_json(path)
    if fields.get("format") != FORMAT:
        found = fields.get("format")
        raise ValueError(f"{path}: format {found!r}, this version reads {FORMAT}: train anew with jobs/train.py")
    expected = {"format", "kind", "objective", "pair", "candidates", "threshold", "network", "training"}
    if odd := sorted(expected ^ set(fields)):
        raise ValueError(f"{path}: {'unknown' if odd[0] in fields else 'missing'} field {odd[0]!r}")
    pair, threshold = fields["pair"], fields["threshold"]
    if not isinstance(pair, dict) or set(pair) != set(PairId._fields) or not _all_str(pair.values()):
        raise ValueError(f"{path}: field 'pair' must hold the strings {', '.join(PairId._fields)}, got {pair!r}")
    if type(threshold) is not float or not 0 <= threshold < 1:
        raise ValueError(f"{path}: field 'threshold' must be a number in [0, 1), got {threshold!r}")
    if not isinstance(fields["training"], dict):
        raise ValueError(f"{path}: field 'training' must be an object, got {fields['training']!r}")
    try:
        candidates = CandidateSet(tuple(fields["candidates"]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: field 'candidates': {error}") from None
    try:
        shape = NetworkShape(fields["kind"], **fields["network"])
        return PolicyInfo(PairId(**pair), candidates, fields["objective"], shape, threshold, fields["training"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file (a policy is {INFO_FILE} and {WEIGHTS_FILE})") from None
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
    if shape.kind == "step":
        sizes["dense.weight"] = shape.hidden, shape.width
    for name, size in sizes.items():  # before memory is taken for a network that the file does not hold
        _check_tensor(path, name, tensors.get(name), torch.empty(size, device="meta"))
    network = PolicyNetwork(shape, _read_support(path, tensors, shape))
    _fill(network, path, tensors)
    return network


def _read_nodes(path: Path) -> NodeModel:
    model = NodeModel()
    _fill(model, path, _read_tensors(path))
    return model


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from None


def _fill(module: nn.Module, path: Path, tensors: dict[str, Tensor]) -> None:
    """Load tensors that were checked one by one."""
    for name, wanted in module.state_dict().items():
        _check_tensor(path, name, tensors.get(name), wanted)
    if unknown := sorted(set(tensors) - set(module.state_dict())):
        raise ValueError(f"{path}: unknown tensor {unknown[0]!r}")
    module.load_state_dict(tensors)


def _read_support(path: Path, tensors: dict[str, Tensor], shape: NetworkShape) -> Tensor:
    """Take the support out of `tensors`; ValueError unless increasing and inside the vocabulary."""
    support = tensors.pop("support", None)
    if support is None or support.dtype != torch.int64 or support.dim() != 1:
        raise ValueError(f"{path}: tensor 'support' must hold int64 token ids")
    if shape.kind == "prompt" and support.numel() == 0:
        raise ValueError(f"{path}: tensor 'support' is empty")
    inside = not support.numel() or (int(support[0]) >= 0 and int(support[-1]) < shape.vocab_size)
    if bool((support.diff() <= 0).any()) or not inside:
        raise ValueError(f"{path}: tensor 'support' must be increasing ids below {shape.vocab_size}")
    return support


def _check_tensor(path: Path, name: str, got: Tensor | None, wanted: Tensor) -> None:
    if got is None:
        raise ValueError(f"{path}: missing tensor {name!r}")
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        raise ValueError(
            f"{path}: tensor {name!r} is {got.dtype} {tuple(got.shape)}; needed: {wanted.dtype} {tuple(wanted.shape)}"
        )
    if not bool(got.isfinite().all()):
        raise ValueError(f"{path}: tensor {name!r} holds values that are not finite")
