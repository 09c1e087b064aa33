"""A sweep's rows as what policies learn from: an Arrow file of examples, and an index of the rows beside it.

Kind `prompt` has an example a row: the distribution after the prompt, and tau of every candidate. Kind `step` has one
for each of a row's recorded steps: what the draft proposed there, and which of it was right. They are written part by
part, so that nobody holds all rows of a sweep; a training holds all examples.
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
        """[E, K]."""
        return self.all_taus[self.index]

    @property
    def features(self) -> SparseProbs:
        """Distributions after the prompts."""
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
    """Write those of kind `prompt`, and last the index.

    `candidates` are some of the rows', and 1 whether they have it or not.
    """
    return _write(folder, parts, "prompt", partial(_of_prompts, candidates=candidates))


def write_steps(folder: Path, parts: Iterable[Sequence[SweepRow]]) -> Index:
    """Write those of kind `step`, and last the index.

    Raises ValueError for rows of drafts of different sizes, and where no choices are recorded.
    """
    return _write(folder, parts, "step", _of_steps)


def _write(
    folder: Path,
    parts: Iterable[Sequence[SweepRow]],
    kind: Kind,
    batch_of: Callable[[Sequence[SweepRow], int], pa.RecordBatch | None],
) -> Index:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (INDEX_FILE, EXAMPLES_FILE):
        (folder / name).unlink(missing_ok=True)
    known, num_examples, width = list[tuple[str, str, str]](), 0, 0
    with ExitStack() as stack:
        writer = None
        for rows in parts:
            batch = batch_of(rows, len(known))
            known += [(row.prompt_id, prompt_key(row.prompt), row.prompt_set) for row in rows]
            if batch is None:
                continue
            own_width = batch.schema.field(_WIDTH_OF[kind]).type.list_size
            if writer is None:
                writer = stack.enter_context(pa.ipc.new_file(folder / EXAMPLES_FILE, batch.schema))
                width = own_width
            _check_width({width, own_width})
            writer.write_batch(batch)
            num_examples += batch.num_rows
    if not num_examples:
        raise ValueError(
            f"none of {len(known)} rows has recorded choices of a draft: sweep with --method dense, "
            "or train --kind prompt"
        )
    prompt_ids, prompts, sets = zip(*known, strict=True)
    index = Index(prompt_ids, prompts, sets, kind, num_examples, width)
    write_text(folder / INDEX_FILE, json.dumps(index._asdict()))
    return index


_WIDTH_OF: dict[Kind, str] = {"prompt": "taus", "step": "ranks"}  # numbers of an example in this column


def _check_width(widths: set[int]) -> None:
    if len(widths) > 1:
        raise ValueError(f"rows of drafts with {' and '.join(map(str, sorted(widths)))} slots: must be of one draft")


def _of_prompts(rows: Sequence[SweepRow], first: int, candidates: Sequence[int]) -> pa.RecordBatch | None:
    """An example of each row; `first` is the number of the first one in the sweep."""
    if not rows:
        return None
    taus = [{1: 1.0} | dict(zip(row.candidates, row.taus, strict=True)) for row in rows]
    of_candidates = [[of_row[size] for size in candidates] for of_row in taus]
    return pa.record_batch(
        {
            "row": pa.array(range(first, first + len(rows)), pa.int32()),
            "ids": pa.array([row.probs_ids for row in rows], pa.list_(pa.int32())),
            "probs": pa.array([row.probs for row in rows], pa.list_(pa.float32())),
            "taus": pa.array(of_candidates, pa.list_(pa.float32(), len(candidates))),
        }
    )


def _of_steps(rows: Sequence[SweepRow], first: int) -> pa.RecordBatch | None:
    """The recorded steps of rows, of which the first is number `first` in the sweep; None where there are none."""
    recorded = {first + i: row for i, row in enumerate(rows) if row.step_ranks}
    if not recorded:
        return None
    nums = [len(row.step_places) for row in recorded.values()]
    widths = {len(row.step_ranks) // num for row, num in zip(recorded.values(), nums, strict=True)}
    _check_width(widths)
    (width,) = widths

    def joined(columns: Iterable[bytes], dtype: str, size: int) -> pa.FixedSizeListArray:
        return pa.FixedSizeListArray.from_arrays(pa.array(np.frombuffer(b"".join(columns), dtype)), size)

    some, choices = recorded.values(), width * NUM_CHOICES
    drawn = [row.temperature >= LEAST_TEMPERATURE for row in some]
    return pa.record_batch(
        {
            "row": pa.array(np.repeat(np.array(list(recorded), np.int32), nums)),
            "ranks": joined((row.step_ranks for row in some), "i1", width),
            "scores": joined((row.step_scores for row in some), "<f2", choices),
            "log_probs": joined((row.step_log_probs for row in some), "<f2", choices),
            "drawn": pa.array(np.repeat(drawn, nums)),
        }
    )


def prompt_key(prompt: str) -> str:
    """A short name for a prompt's text."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]


# --- reading ---


def read_index(folder: Path) -> Index:
    fields = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    return Index(**fields | {name: tuple(fields[name]) for name in ("prompt_ids", "prompts", "sets")})


def open_examples(folder: Path) -> Examples:
    """Those of kind `prompt`, in the order of their prompt_ids, whatever that of the parts."""
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
    """Steps of kind `step` whose row of the sweep is chosen, in the order of their prompt_ids."""
    index, table = _open(folder, "step")
    rows = _tensor(table.column("row").chunk(0))
    order = _order(index, rows)
    some = order[_where(rows[order], chosen)]
    ranks, scores, log_probs = (
        _tensor(table.column(name).chunk(0).flatten()).view(index.num_examples, index.width, -1)[some]
        for name in ("ranks", "scores", "log_probs")
    )
    return Proposed(ranks[..., 0], scores, log_probs, _tensor(table.column("drawn").chunk(0))[some])


def _open(folder: Path, kind: Kind) -> tuple[Index, pa.Table]:
    """The index, and the examples as a table of one chunk."""
    index = read_index(folder)
    if index.kind != kind:
        raise ValueError(f"examples {folder}: of kind {index.kind!r}, not {kind!r}")
    with pa.memory_map(str(folder / EXAMPLES_FILE)) as source:
        return index, pa.ipc.open_file(source).read_all().combine_chunks()


def _order(index: Index, rows: Tensor) -> Tensor:
    """The examples by the prompt_ids of their rows [N]."""
    rank = torch.zeros(len(index.prompt_ids), dtype=torch.int64)
    rank[sorted(range(len(rank)), key=index.prompt_ids.__getitem__)] = torch.arange(len(rank))
    return rank[rows.long()].argsort(stable=True)


def _tensor(values: pa.Array) -> Tensor:
    return torch.from_numpy(values.to_numpy(zero_copy_only=False).copy())


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
