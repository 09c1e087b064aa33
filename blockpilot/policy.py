"""Policies: what picks a request's block size from its prefill.

`ClassPolicy` is the network of BlockPilot (arXiv 2606.31315): a residual MLP on prefill_probs, one logit
per candidate. Its first layer is as wide as the vocabulary, and a prompt's distribution is nearly all
zeros, so the layer is a weighted embedding bag over the token ids whose probability passes the record
threshold of the sweep. That is exactly the dense layer on the thresholded distribution. The layer starts at
zero; a token id that never occurred in training therefore still has a row of zeros, and only the other rows
(the support) are stored.

A policy travels as a directory: `policy.safetensors` and `policy.json`. Nothing is unpickled.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from blockpilot.files import write_text
from blockpilot.pairs import PairId

if TYPE_CHECKING:
    from blockpilot.engine import Prefill
    from blockpilot.pairs import Pair

WEIGHTS_FILE = "policy.safetensors"
INFO_FILE = "policy.json"
_KIND = {"format": 1, "objective": "tau", "head": "class", "input": "probs"}

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class CandidateSet:
    """The block sizes a policy may choose, smallest first; a class of the policy is an index into it."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ValueError("candidates (): at least one block size is needed")
        for size in self.sizes:
            if type(size) is not int or size < 1:
                raise ValueError(f"candidates {self.sizes}: {size!r} is not a block size; allowed: integers >= 1")
        if any(b <= a for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError(f"candidates {self.sizes}: each must be larger than the one before")

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sizes)

    def __getitem__(self, index: int) -> int:
        return self.sizes[index]


@dataclass(frozen=True)
class FixedPolicy:
    """The same block size for every request."""

    block_size: int

    def __post_init__(self) -> None:
        CandidateSet((self.block_size,))

    def __call__(self, prefill: "Prefill") -> int:
        return self.block_size


class SparseProbs(NamedTuple):
    """A batch of B thresholded distributions, one after the other."""

    ids: Tensor
    """[N] int64 token ids."""
    probs: Tensor
    """[N] float32, their probabilities."""
    offsets: Tensor
    """[B] int64, where each distribution starts in `ids`."""


def sparse_probs(probs: Tensor, threshold: float) -> SparseProbs:
    """The entries of one distribution [V] that are at least `threshold`, as a batch of one."""
    (ids,) = torch.nonzero(probs >= threshold, as_tuple=True)
    return SparseProbs(ids, probs[ids], torch.zeros(1, dtype=torch.int64, device=probs.device))


class ProbsMLP(nn.Module):
    """Linear(V, hidden)-ReLU-Dropout-[Linear(hidden, hidden) + residual]-Linear(hidden, num_candidates).

    `support` [S] int64, increasing: the token ids whose column of the first layer may differ from zero.
    """

    support: Tensor
    row_of_id: Tensor

    def __init__(
        self, support: Tensor, vocab_size: int, num_candidates: int, hidden: int = 2048, dropout: float = 0.2
    ) -> None:
        super().__init__()
        row_of_id = torch.full((vocab_size,), -1, dtype=torch.int64)
        row_of_id[support] = torch.arange(len(support))
        self.register_buffer("support", support, persistent=False)
        self.register_buffer("row_of_id", row_of_id, persistent=False)
        self.rows = nn.Parameter(torch.zeros(len(support), hidden))
        self.bias = nn.Parameter(torch.empty(hidden).uniform_(-1, 1) / math.sqrt(vocab_size))
        self.mix = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, num_candidates)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, probs: Tensor, offsets: Tensor) -> Tensor:
        """SparseProbs of B distributions -> logits [B, num_candidates]."""
        rows = self.row_of_id[ids]
        weights = torch.where(rows >= 0, probs, 0.0)
        bags = functional.embedding_bag(rows.clamp(min=0), self.rows, offsets, mode="sum", per_sample_weights=weights)
        hidden = self.dropout(torch.relu(bags + self.bias))
        logits: Tensor = self.head(hidden + self.mix(hidden))
        return logits


@dataclass(frozen=True)
class PolicyInfo:
    """What a policy knows about itself: the pair it was trained for, its choices, and where it comes from."""

    pair: PairId
    vocab_size: int
    candidates: CandidateSet
    threshold: float
    """Probabilities below it are taken as zero, in training and in use."""
    training: Mapping[str, Scalar] = field(default_factory=dict)
    """Provenance: seed, rows, sweep id, ... Not read by the policy."""


class ClassPolicy:
    """Chooses the candidate with the largest logit (the smallest of equals). Runs where its input lies."""

    def __init__(self, info: PolicyInfo, network: ProbsMLP) -> None:
        self.info = info
        self.network = network.eval().requires_grad_(False)

    @property
    def candidates(self) -> CandidateSet:
        return self.info.candidates

    def __call__(self, prefill: "Prefill") -> int:
        return self.candidates[int(self.logits(prefill.probs).argmax())]

    def logits(self, probs: Tensor) -> Tensor:
        """prefill_probs [V] -> one logit per candidate [K]. Raises ValueError for another vocabulary."""
        if probs.shape != (self.info.vocab_size,):
            raise ValueError(f"prefill_probs {tuple(probs.shape)}: the policy's vocabulary is {self.info.vocab_size}")
        if self.network.rows.device != probs.device:
            self.network.to(probs.device)
        logits: Tensor = self.network(*sparse_probs(probs, self.info.threshold))
        return logits[0]

    def check(self, pair: "Pair") -> None:
        """Raise ValueError, naming both, unless `pair` is the one the policy was trained for."""
        if (self.info.pair, self.info.vocab_size) != (pair.id, pair.vocab_size):
            made_for = _describe(self.info.pair, self.info.vocab_size)
            raise ValueError(f"policy made for {made_for}; this pair is {_describe(pair.id, pair.vocab_size)}")


def _describe(pair: PairId, vocab_size: int) -> str:
    return (
        f"target {pair.target}@{pair.target_revision} with draft {pair.draft}@{pair.draft_revision} "
        f"(vocabulary {vocab_size})"
    )


# --- save and load ---


def save_policy(policy: ClassPolicy, directory: str | Path) -> None:
    """Write the policy; a directory without `policy.json` (written last) is an unfinished one."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INFO_FILE).unlink(missing_ok=True)
    tensors = {name: t.detach().cpu().contiguous() for name, t in policy.network.state_dict().items()}
    save_file(tensors | {"support": policy.network.support.cpu()}, folder / WEIGHTS_FILE)
    info = policy.info
    fields = _KIND | {
        "pair": info.pair._asdict(),
        "vocab_size": info.vocab_size,
        "candidates": list(info.candidates),
        "threshold": info.threshold,
        "training": dict(info.training),
    }
    write_text(folder / INFO_FILE, json.dumps(fields, indent=2) + "\n")


def load_policy(directory: str | Path) -> ClassPolicy:
    """Read what `save_policy` wrote. Raises ValueError that names the file and the wrong field."""
    folder = Path(directory)
    info = _read_info(folder / INFO_FILE)
    return ClassPolicy(info, _read_network(folder / WEIGHTS_FILE, info))


def _read_info(path: Path) -> PolicyInfo:
    fields = _read_json(path)
    expected = {*_KIND, "pair", "vocab_size", "candidates", "threshold", "training"}
    if odd := sorted(expected ^ set(fields)):
        raise ValueError(f"{path}: {'unknown' if odd[0] in fields else 'missing'} field {odd[0]!r}")
    for name, known in _KIND.items():
        if fields[name] != known:
            raise ValueError(f"{path}: field {name!r} is {fields[name]!r}; this version knows {known!r}")
    pair, vocab_size, threshold = fields["pair"], fields["vocab_size"], fields["threshold"]
    if not isinstance(pair, dict) or set(pair) != set(PairId._fields) or not _all_str(pair.values()):
        raise ValueError(f"{path}: field 'pair' must hold the strings {', '.join(PairId._fields)}, got {pair!r}")
    if type(vocab_size) is not int or vocab_size < 1:
        raise ValueError(f"{path}: field 'vocab_size' must be an integer >= 1, got {vocab_size!r}")
    if type(threshold) is not float or not 0 <= threshold < 1:
        raise ValueError(f"{path}: field 'threshold' must be a number in [0, 1), got {threshold!r}")
    if not isinstance(fields["training"], dict):
        raise ValueError(f"{path}: field 'training' must be an object, got {fields['training']!r}")
    try:
        candidates = CandidateSet(tuple(fields["candidates"]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: field 'candidates': {error}") from None
    return PolicyInfo(PairId(**pair), vocab_size, candidates, threshold, fields["training"])


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


def _read_network(path: Path, info: PolicyInfo) -> ProbsMLP:
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from None
    support = _read_support(path, tensors, info.vocab_size)
    if "bias" not in tensors or tensors["bias"].numel() == 0:
        raise ValueError(f"{path}: missing tensor 'bias'")
    network = ProbsMLP(support, info.vocab_size, len(info.candidates), tensors["bias"].numel())
    for name, wanted in network.state_dict().items():
        _check_tensor(path, name, tensors.get(name), wanted)
    if unknown := sorted(set(tensors) - set(network.state_dict())):
        raise ValueError(f"{path}: unknown tensor {unknown[0]!r}")
    network.load_state_dict(tensors)
    return network


def _read_support(path: Path, tensors: dict[str, Tensor], vocab_size: int) -> Tensor:
    """Take the support out of `tensors`; ValueError unless increasing and inside the vocabulary."""
    support = tensors.pop("support", None)
    if support is None or support.dtype != torch.int64 or support.dim() != 1 or support.numel() == 0:
        raise ValueError(f"{path}: tensor 'support' must hold int64 token ids")
    if bool((support.diff() <= 0).any()) or int(support[0]) < 0 or int(support[-1]) >= vocab_size:
        raise ValueError(f"{path}: tensor 'support' must be increasing ids below {vocab_size}")
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
