"""A sweep's rows as what policies learn from, kept in flat files that are mapped into memory.

Kind `prompt` has an example a row: the distribution after the prompt, and tau of every candidate. Kind `step` has one
for each of a row's recorded steps: what the draft proposed there, and which of it was right.

Examples are written part by part and read example by example, so neither needs them in memory together: the operating
system keeps what is used. All ranks of a training map the same files.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockpilot.policy.learned import Kind
from blockpilot.policy.network import SparseProbs
from blockpilot.policy.outcomes import Proposed
from blockpilot.storage import write_text
from blockpilot.sweep.rows import NUM_CHOICES, SweepRow
from blockpilot.types import LEAST_TEMPERATURE

INDEX_FILE = "index.json"
Columns = dict[str, NDArray[Any]]
_COLUMNS: dict[Kind, dict[str, Any]] = {
    "prompt": {"rows": np.int32, "ids": np.int32, "probs": np.float32, "lengths": np.int64, "taus": np.float32},
    "step": {"rows": np.int32, "ranks": np.int8, "scores": np.float16, "log_probs": np.float16, "drawn": np.bool_},
}
_WIDTH_OF: dict[Kind, str] = {"prompt": "taus", "step": "ranks"}  # numbers of an example in this column
_NAMES = sorted({name for of_kind in _COLUMNS.values() for name in of_kind})


class Index(NamedTuple):
    """What is known of every row of a sweep, in the order of the files."""

    prompt_ids: tuple[str, ...]
    prompts: tuple[str, ...]  # prompt_key() of their texts
    sets: tuple[str, ...]
    kind: Kind
    num_examples: int
    width: int
    """Candidates of kind `prompt`; slots that the draft proposes choices for, of kind `step`."""


@dataclass(frozen=True)
class Examples:
    """Some of the examples of kind `prompt`, one after the other; `index` [E] int64 says which."""

    index: Tensor
    rows: Tensor
    """[N] int32, the row of the sweep that an example is of."""
    ids: Tensor
    probs: Tensor
    ends: Tensor
    """[N + 1] int64: example i's entries of `ids` and `probs` are ends[i] .. ends[i + 1] - 1."""
    all_taus: Tensor
    """[N, K] float32: tokens of a step with each candidate."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def taus(self) -> Tensor:
        """[E, K], in memory."""
        return self.all_taus[self.index]

    @property
    def features(self) -> SparseProbs:
        """In memory."""
        starts, lengths = self.ends[self.index], (self.ends[1:] - self.ends[:-1])[self.index]
        offsets = lengths.cumsum(0) - lengths
        entries = torch.repeat_interleave(starts - offsets, lengths) + torch.arange(int(lengths.sum()))
        return SparseProbs(self.ids[entries].long(), self.probs[entries], offsets)

    def take(self, index: Tensor) -> "Examples":
        """The examples `index` [n] int64 of these, in that order; nothing is copied."""
        return replace(self, index=self.index[index])

    def where(self, chosen: Callable[[int], bool]) -> "Examples":
        """Those whose row of the sweep is chosen."""
        return self.take(_where(self.rows[self.index], chosen))

    def support(self, vocab_size: int, most: int) -> Tensor:
        """Token ids with the largest probability mass over all examples, `most` at most, increasing [S] int64."""
        mass = torch.zeros(vocab_size, dtype=torch.float64)
        for example in self.index.tolist():
            entries = slice(self.ends[example], self.ends[example + 1])
            mass.index_add_(0, self.ids[entries].long(), self.probs[entries].double())
        largest = mass.topk(min(most, int((mass > 0).sum()))).indices
        return largest.sort().values


def _where(rows: Tensor, chosen: Callable[[int], bool]) -> Tensor:
    return torch.tensor([chosen(row) for row in rows.tolist()], dtype=torch.bool).nonzero()[:, 0]


# --- writing ---


def write_examples(folder: Path, parts: Iterable[Sequence[SweepRow]], candidates: Sequence[int]) -> Index:
    """Write those of kind `prompt`: the columns, and last the index.

    `candidates` are some of the rows', and 1 whether they have it or not.
    """
    return _write(folder, parts, "prompt", lambda row: _of_prompt(row, candidates))


def write_steps(folder: Path, parts: Iterable[Sequence[SweepRow]]) -> Index:
    """Write those of kind `step`: the columns, and last the index.

    Raises ValueError for rows of drafts of different sizes, and where no choices are recorded.
    """
    return _write(folder, parts, "step", _of_steps)


def _write(
    folder: Path, parts: Iterable[Sequence[SweepRow]], kind: Kind, columns_of: Callable[[SweepRow], Columns]
) -> Index:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (INDEX_FILE, *_NAMES):
        (folder / name).unlink(missing_ok=True)  # not cut short: who has mapped the old ones keeps them
    known, widths, num_examples = list[tuple[str, str, str]](), set[int](), 0
    files = {name: (folder / name).open("wb") for name in _COLUMNS[kind]}
    try:
        for row in (row for rows in parts for row in rows):
            columns = columns_of(row)
            num, width = columns[_WIDTH_OF[kind]].shape
            columns["rows"] = np.full(num, len(known))
            for name, column in columns.items():
                column.astype(_COLUMNS[kind][name]).tofile(files[name])
            known.append((row.prompt_id, prompt_key(row.prompt), row.prompt_set))
            num_examples += num
            if num:
                widths.add(width)
    finally:
        for file in files.values():
            file.close()
    if not widths:
        raise ValueError(
            f"none of {len(known)} rows has recorded choices of a draft: sweep with --method dense, "
            "or train --kind prompt"
        )
    if len(widths) != 1:
        raise ValueError(f"rows of drafts with {' and '.join(map(str, sorted(widths)))} slots: must be of one draft")
    prompt_ids, prompts, sets = zip(*known, strict=True)
    index = Index(prompt_ids, prompts, sets, kind, num_examples, widths.pop())
    write_text(folder / INDEX_FILE, json.dumps(index._asdict()))
    return index


def _of_prompt(row: SweepRow, candidates: Sequence[int]) -> Columns:
    taus = {1: 1.0} | dict(zip(row.candidates, row.taus, strict=True))
    return {
        "ids": np.array(row.probs_ids),
        "probs": np.array(row.probs),
        "lengths": np.array([len(row.probs_ids)]),
        "taus": np.array([[taus[size] for size in candidates]]),
    }


def _of_steps(row: SweepRow) -> Columns:
    num = len(row.step_places) if row.step_ranks else 0
    return {
        "ranks": np.frombuffer(row.step_ranks, np.int8).reshape(num, -1) if num else np.zeros((0, 0)),
        "scores": np.frombuffer(row.step_scores, "<f2"),
        "log_probs": np.frombuffer(row.step_log_probs, "<f2"),
        "drawn": np.full(num, row.temperature >= LEAST_TEMPERATURE),
    }


def prompt_key(prompt: str) -> str:
    """A short name for a prompt's text."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]


# --- reading ---


def read_index(folder: Path) -> Index:
    fields = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    return Index(**fields | {name: tuple(fields[name]) for name in ("prompt_ids", "prompts", "sets")})


def open_examples(folder: Path) -> Examples:
    """Map the columns of kind `prompt`; examples are in the order of their prompt_ids, whatever that of the parts."""
    index, columns = _open(folder, "prompt")
    return Examples(
        _order(index, columns["rows"]),
        columns["rows"],
        columns["ids"],
        columns["probs"],
        torch.cat([torch.zeros(1, dtype=torch.int64), columns["lengths"].cumsum(0)]),
        columns["taus"].view(index.num_examples, -1),
    )


def read_steps(folder: Path, chosen: Callable[[int], bool] = lambda row: True) -> Proposed:
    """Steps of kind `step` whose row of the sweep is chosen, in the order of their prompt_ids; in memory."""
    index, columns = _open(folder, "step")
    order = _order(index, columns["rows"])
    some = order[_where(columns["rows"][order], chosen)]
    shape = index.num_examples, index.width
    ranks, scores, log_probs = columns["ranks"].view(shape), columns["scores"], columns["log_probs"]
    choices = (*shape, NUM_CHOICES)
    return Proposed(ranks[some], scores.view(choices)[some], log_probs.view(choices)[some], columns["drawn"][some])


def _open(folder: Path, kind: Kind) -> tuple[Index, dict[str, Tensor]]:
    index = read_index(folder)
    if index.kind != kind:
        raise ValueError(f"examples {folder}: of kind {index.kind!r}, not {kind!r}")
    return index, {name: _map(folder / name, dtype) for name, dtype in _COLUMNS[kind].items()}


def _order(index: Index, rows: Tensor) -> Tensor:
    """The examples by the prompt_ids of their rows [N]."""
    rank = torch.zeros(len(index.prompt_ids), dtype=torch.int64)
    rank[sorted(range(len(rank)), key=index.prompt_ids.__getitem__)] = torch.arange(len(rank))
    return rank[rows.long()].argsort(stable=True)


def _map(path: Path, dtype: Any) -> Tensor:
    """A column in memory of its own where it is written to; an empty file cannot be mapped."""
    return torch.from_numpy(np.memmap(path, dtype, mode="c") if path.stat().st_size else np.zeros(0, dtype))


def split_examples(folder: Path, held_out: float, seed: int) -> tuple[Examples, Examples]:
    """(training, validation): `held_out` of the prompts, at least one, with all their examples.

    Depends on the prompts' texts and the seed, not on their order. Raises ValueError for less than two prompts.
    """
    is_held, examples = _held_out(folder, held_out, seed), open_examples(folder)
    return examples.where(lambda row: not is_held[row]), examples.where(is_held.__getitem__)


def split_steps(folder: Path, held_out: float, seed: int) -> tuple[Proposed, Proposed]:
    """`split_examples` of kind `step`: the same prompts are held out."""
    is_held = _held_out(folder, held_out, seed)
    return read_steps(folder, lambda row: not is_held[row]), read_steps(folder, is_held.__getitem__)


def _held_out(folder: Path, held_out: float, seed: int) -> list[bool]:
    """Flags of every row of the sweep: True where its prompt is held out."""
    prompts = read_index(folder).prompts
    held = held_out_prompts(prompts, held_out, seed)
    return [prompt in held for prompt in prompts]


def held_out_prompts(keys: Collection[str], held_out: float, seed: int) -> set[str]:
    """Some of the prompts, at least one and not all. Raises ValueError for less than two."""
    # Not prompts.files.split: that one decides by another hash for each prompt alone, and may hold none or all. This
    # one holds an exact number, which committed policies were validated on.
    prompts = sorted(set(keys), key=lambda key: hashlib.sha256(f"{seed}\n{key}".encode()).digest())
    if len(prompts) < 2:
        raise ValueError(f"{len(prompts)} different prompts: at least 2 are needed to hold some back")
    return set(prompts[: min(max(1, round(held_out * len(prompts))), len(prompts) - 1)])
