"""Training examples of policies, made from a sweep's rows: an Arrow file of examples and an index of the rows.

Kind `prompt` has one example per row: the distribution after the prompt, and tau of every candidate. Kind `step` has
one per recorded step of a row: the choices that the draft proposed, and which of them was right. Examples are written
part by part, so the rows of a sweep need not fit in memory. Training holds all examples in memory.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from blockpilot.policy.learned import Kind
from blockpilot.policy.network import SparseProbs
from blockpilot.policy.outcomes import Proposed
from blockpilot.storage import write_text
from blockpilot.sweep.rows import NUM_CHOICES, SweepRow
from blockpilot.types import LEAST_TEMPERATURE

INDEX_FILE, EXAMPLES_FILE = "index.json", "examples.arrow"


class Index(NamedTuple):
    """Keys of every row of a sweep, in the order of the files, and the form of the examples."""

    prompt_ids: tuple[str, ...]
    prompts: tuple[str, ...]  # prompt_key() of their texts
    sets: tuple[str, ...]
    kind: Kind
    num_examples: int
    width: int
    """Kind `prompt`: number of candidates. Kind `step`: number of slots that the draft proposes choices for."""


@dataclass(frozen=True)
class Examples:
    """Selection of E of the N examples of kind `prompt`, by `index` [E] int64."""

    index: Tensor
    rows: Tensor
    """[N] int32: the sweep row of each example."""
    ids: Tensor
    probs: Tensor
    ends: Tensor
    """[N + 1] int64: example i's entries of `ids` and `probs` are ends[i] .. ends[i + 1] - 1."""
    all_taus: Tensor
    """[N, K] float32: mean tokens per step with each candidate."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def taus(self) -> Tensor:
        """Taus [E, K] of the selected examples."""
        return self.all_taus[self.index]

    @property
    def features(self) -> SparseProbs:
        """Distributions after the prompts."""
        starts, lengths = self.ends[self.index], (self.ends[1:] - self.ends[:-1])[self.index]
        offsets = lengths.cumsum(0) - lengths
        entries = torch.repeat_interleave(starts - offsets, lengths) + torch.arange(int(lengths.sum()))
        return SparseProbs(self.ids[entries].long(), self.probs[entries], offsets)

    def take(self, index: Tensor) -> "Examples":
        """The examples at positions `index` [n] int64 of this selection, in that order; nothing is copied."""
        return replace(self, index=self.index[index])

    def where(self, chosen: Callable[[int], bool]) -> "Examples":
        """The examples whose sweep row number `chosen` accepts."""
        return self.take(_matching_rows(self.rows[self.index], chosen))

    def support(self, vocab_size: int, max_size: int) -> Tensor:
        """Up to `max_size` token ids with the largest probability mass over all examples, ascending [S] int64."""
        mass = torch.zeros(vocab_size, dtype=torch.float64)
        for example in self.index.tolist():
            entries = slice(self.ends[example], self.ends[example + 1])
            mass.index_add_(0, self.ids[entries].long(), self.probs[entries].double())
        largest = mass.topk(min(max_size, int((mass > 0).sum()))).indices
        return largest.sort().values


def _matching_rows(rows: Tensor, chosen: Callable[[int], bool]) -> Tensor:
    return torch.tensor([chosen(row) for row in rows.tolist()], dtype=torch.bool).nonzero()[:, 0]


# --- writing ---


def write_examples(folder: Path, parts: Iterable[Sequence[SweepRow]], candidates: Sequence[int]) -> Index:
    """Write the examples of kind `prompt`, then the index.

    `candidates` must be among the candidates of every row; 1 is always allowed, with tau 1.
    """
    return _write(folder, parts, "prompt", partial(_prompt_batch, candidates=candidates))


def write_steps(folder: Path, parts: Iterable[Sequence[SweepRow]]) -> Index:
    """Write the examples of kind `step`, then the index.

    Raises ValueError if the rows' drafts have different numbers of slots, or if no row has recorded choices.
    """
    return _write(folder, parts, "step", _step_batch)


def _write(
    folder: Path,
    parts: Iterable[Sequence[SweepRow]],
    kind: Kind,
    make_batch: Callable[[Sequence[SweepRow], int], pa.RecordBatch | None],
) -> Index:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (INDEX_FILE, EXAMPLES_FILE):
        (folder / name).unlink(missing_ok=True)
    row_keys, num_examples, width = list[tuple[str, str, str]](), 0, 0
    with ExitStack() as stack:
        writer = None
        for rows in parts:
            batch = make_batch(rows, len(row_keys))
            row_keys += [(row.prompt_id, prompt_key(row.prompt), row.prompt_set) for row in rows]
            if batch is None:
                continue
            batch_width = batch.schema.field(_WIDTH_COLUMN[kind]).type.list_size
            if writer is None:
                writer = stack.enter_context(pa.ipc.new_file(folder / EXAMPLES_FILE, batch.schema))
                width = batch_width
            _check_width({width, batch_width})
            writer.write_batch(batch)
            num_examples += batch.num_rows
    if not num_examples:
        raise ValueError(
            f"none of {len(row_keys)} rows has recorded choices of a draft: sweep with --method dense, "
            "or train --kind prompt"
        )
    prompt_ids, prompts, sets = zip(*row_keys, strict=True)
    index = Index(prompt_ids, prompts, sets, kind, num_examples, width)
    write_text(folder / INDEX_FILE, json.dumps(index._asdict()))
    return index


_WIDTH_COLUMN: dict[Kind, str] = {"prompt": "taus", "step": "ranks"}  # its list size is `Index.width`


def _check_width(widths: set[int]) -> None:
    if len(widths) > 1:
        raise ValueError(f"rows of drafts with {' and '.join(map(str, sorted(widths)))} slots: must be of one draft")


def _prompt_batch(rows: Sequence[SweepRow], first_row: int, candidates: Sequence[int]) -> pa.RecordBatch | None:
    """One example per row; `first_row` is the sweep row number of the first one. None without rows."""
    if not rows:
        return None
    taus_by_size = [{1: 1.0} | dict(zip(row.candidates, row.taus, strict=True)) for row in rows]
    taus = [[row_taus[size] for size in candidates] for row_taus in taus_by_size]
    return pa.record_batch(
        {
            "row": pa.array(range(first_row, first_row + len(rows)), pa.int32()),
            "ids": pa.array([row.probs_ids for row in rows], pa.list_(pa.int32())),
            "probs": pa.array([row.probs for row in rows], pa.list_(pa.float32())),
            "taus": pa.array(taus, pa.list_(pa.float32(), len(candidates))),
        }
    )


def _step_batch(rows: Sequence[SweepRow], first_row: int) -> pa.RecordBatch | None:
    """One example per recorded step; `first_row` is the sweep row number of the first row. None without steps."""
    row_numbers = [number for number, row in enumerate(rows, first_row) if row.step_ranks]
    rows_with_steps = [row for row in rows if row.step_ranks]
    if not rows_with_steps:
        return None
    num_steps = [len(row.step_places) for row in rows_with_steps]
    widths = {len(row.step_ranks) // num for row, num in zip(rows_with_steps, num_steps, strict=True)}
    _check_width(widths)
    (width,) = widths

    def joined(columns: Iterable[bytes], dtype: str, size: int) -> pa.FixedSizeListArray:
        return pa.FixedSizeListArray.from_arrays(pa.array(np.frombuffer(b"".join(columns), dtype)), size)

    num_scores = width * NUM_CHOICES
    drawn = [row.temperature >= LEAST_TEMPERATURE for row in rows_with_steps]
    return pa.record_batch(
        {
            "row": pa.array(np.repeat(np.array(row_numbers, np.int32), num_steps)),
            "ranks": joined((row.step_ranks for row in rows_with_steps), "i1", width),
            "scores": joined((row.step_scores for row in rows_with_steps), "<f2", num_scores),
            "log_probs": joined((row.step_log_probs for row in rows_with_steps), "<f2", num_scores),
            "drawn": pa.array(np.repeat(drawn, num_steps)),
        }
    )


def prompt_key(prompt: str) -> str:
    """Hash of a prompt's text, 16 hex digits."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]


# --- reading ---


def read_index(folder: Path) -> Index:
    fields = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    return Index(**fields | {name: tuple(fields[name]) for name in ("prompt_ids", "prompts", "sets")})


def open_examples(folder: Path) -> Examples:
    """The examples of kind `prompt`, ordered by prompt_id."""
    index, table = _open(folder, "prompt")
    rows, ids, probs, taus = (table.column(name).chunk(0) for name in ("row", "ids", "probs", "taus"))
    return Examples(
        _order(index, _tensor(rows)),
        _tensor(rows),
        _tensor(ids.flatten()),
        _tensor(probs.flatten()),
        _tensor(ids.offsets).long(),
        _tensor(taus.flatten()).view(index.num_examples, -1),
    )


def read_steps(folder: Path, chosen: Callable[[int], bool] = lambda row: True) -> Proposed:
    """The steps whose sweep row number `chosen` accepts, ordered by prompt_id."""
    index, table = _open(folder, "step")
    rows = _tensor(table.column("row").chunk(0))
    order = _order(index, rows)
    selected = order[_matching_rows(rows[order], chosen)]
    ranks, scores, log_probs = (
        _tensor(table.column(name).chunk(0).flatten()).view(index.num_examples, index.width, -1)[selected]
        for name in ("ranks", "scores", "log_probs")
    )
    return Proposed(ranks[..., 0], scores, log_probs, _tensor(table.column("drawn").chunk(0))[selected])


def _open(folder: Path, kind: Kind) -> tuple[Index, pa.Table]:
    """The index, and the examples as a table of one chunk; raises ValueError for examples of another kind."""
    index = read_index(folder)
    if index.kind != kind:
        raise ValueError(f"examples {folder}: of kind {index.kind!r}, not {kind!r}")
    with pa.memory_map(str(folder / EXAMPLES_FILE)) as source:
        return index, pa.ipc.open_file(source).read_all().combine_chunks()


def _order(index: Index, rows: Tensor) -> Tensor:
    """Order of the examples by prompt_id [N] int64, from their sweep row numbers [N]."""
    rank = torch.zeros(len(index.prompt_ids), dtype=torch.int64)
    rank[sorted(range(len(rank)), key=index.prompt_ids.__getitem__)] = torch.arange(len(rank))
    return rank[rows.long()].argsort(stable=True)


def _tensor(values: pa.Array) -> Tensor:
    return torch.from_numpy(values.to_numpy(zero_copy_only=False).copy())


def split_examples(folder: Path, held_out: float, seed: int) -> tuple[Examples, Examples]:
    """(training, validation) examples of kind `prompt`; validation gets `held_out` of the prompts, at least one.

    Depends on the prompts' texts and the seed, not on their order. Raises ValueError for fewer than two prompts.
    """
    is_held, examples = _held_out(folder, held_out, seed), open_examples(folder)
    return examples.where(lambda row: not is_held[row]), examples.where(is_held.__getitem__)


def split_steps(folder: Path, held_out: float, seed: int) -> tuple[Proposed, Proposed]:
    """(training, validation) steps of kind `step`; holds out the same prompts as `split_examples`."""
    is_held = _held_out(folder, held_out, seed)
    return read_steps(folder, lambda row: not is_held[row]), read_steps(folder, is_held.__getitem__)


def _held_out(folder: Path, held_out: float, seed: int) -> list[bool]:
    """Flag of every row of the sweep: True if its prompt is held out."""
    prompts = read_index(folder).prompts
    held = held_out_prompts(prompts, held_out, seed)
    return [prompt in held for prompt in prompts]


def held_out_prompts(keys: Collection[str], held_out: float, seed: int) -> set[str]:
    """Keys of the held-out prompts: at least one, and not all. Raises ValueError for fewer than two keys."""
    # prompts.files.split decides for each prompt independently and may hold out none or all. This holds out an exact
    # number of prompts. Committed policies were validated on this selection.
    prompts = sorted(set(keys), key=lambda key: hashlib.sha256(f"{seed}\n{key}".encode()).digest())
    if len(prompts) < 2:
        raise ValueError(f"{len(prompts)} different prompts: at least 2 are needed to hold some out")
    return set(prompts[: min(max(1, round(held_out * len(prompts))), len(prompts) - 1)])
