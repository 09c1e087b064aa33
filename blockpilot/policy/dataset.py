"""A sweep's rows as tensors to train on, kept in flat files that are mapped into memory.

Kind `prompt` has an example a row: the distribution after the prompt, and tau of every candidate. Kind `step` has an
example for each of a row's recorded steps: what is known before it, and its tokens with every candidate.

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

from blockpilot.policy.network import Kind, PolicyFeatures, SparseProbs, scalars
from blockpilot.policy.nodes import Outcomes, Proposed, outcomes_of
from blockpilot.storage import write_text
from blockpilot.sweep.rows import SweepRow, vectors

INDEX_FILE = "index.json"
_COLUMNS: dict[str, Any] = {
    "rows": np.int32,
    "ids": np.int32,
    "probs": np.float32,
    "lengths": np.int64,
    "scalars": np.float32,
    "context": np.float16,
    "anchor": np.float16,
    "taus": np.float32,
    "ranks": np.int8,
    "scores": np.float16,
    "log_probs": np.float16,
}


class Sizes(NamedTuple):
    """Widths of an example."""

    context: int
    anchor: int
    candidates: int
    depth: int
    """Slots that the draft proposes choices for."""


class Index(NamedTuple):
    """What is known of every row of a sweep, in the order of the files."""

    prompt_ids: tuple[str, ...]
    prompts: tuple[str, ...]  # prompt_key() of their texts
    sets: tuple[str, ...]
    num_examples: int
    sizes: Sizes


@dataclass(frozen=True)
class Examples:
    """Some of the examples that the columns hold, one after the other; `index` [E] int64 says which."""

    index: Tensor
    rows: Tensor
    """[N] int32, the row of the sweep that an example is of."""
    ids: Tensor
    probs: Tensor
    ends: Tensor
    """[N + 1] int64: example i's entries of `ids` and `probs` are ends[i] .. ends[i + 1] - 1."""
    scalars: Tensor
    context: Tensor
    anchor: Tensor
    all_taus: Tensor
    """[N, K] float32: tokens of a step with each candidate."""
    ranks: Tensor
    """[N, D] int8, and the draft's choices: see `SweepRow`."""
    scores: Tensor
    """[N, D, NUM_CHOICES]"""
    log_probs: Tensor

    def __len__(self) -> int:
        return len(self.index)

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.context.shape[1], self.anchor.shape[1], self.all_taus.shape[1], self.ranks.shape[1])

    @property
    def taus(self) -> Tensor:
        """[E, K], in memory."""
        return self.all_taus[self.index]

    @property
    def proposed(self) -> Proposed:
        """The draft's choices in these examples, in memory."""
        drawn = self.scalars[self.index, -1] > 0  # the temperature
        return Proposed(self.ranks[self.index], self.scores[self.index], self.log_probs[self.index], drawn)

    @property
    def outcomes(self) -> Outcomes:
        """Outcomes of those choices."""
        return outcomes_of(self.proposed)

    @property
    def prompt_of(self) -> Tensor:
        """[E] int64: 0 for the examples of the first row, 1 for those of the next one, and so on."""
        rows = self.rows[self.index]
        return (rows.diff(prepend=rows[:1]) != 0).cumsum(0)

    def following(self, chosen: Tensor) -> Tensor:
        """[E] int64: the example of the same row that decoding comes to after example e, len(self) if there is none.

        chosen [E] are the candidates taken. The examples must be whole rows, in order.
        """
        prompts, emitted = self.prompt_of, self.taus.gather(1, chosen[:, None])[:, 0].long()
        found = torch.arange(len(self)) + emitted
        inside = (found < len(self)) & (prompts[found.clamp_max(len(self) - 1)] == prompts)
        return torch.where(inside, found, len(self))

    @property
    def features(self) -> PolicyFeatures:
        """In memory."""
        starts, lengths = self.ends[self.index], (self.ends[1:] - self.ends[:-1])[self.index]
        offsets = lengths.cumsum(0) - lengths
        entries = torch.repeat_interleave(starts - offsets, lengths) + torch.arange(int(lengths.sum()))
        probs = SparseProbs(self.ids[entries].long(), self.probs[entries], offsets)
        context, anchor = self.context[self.index].float(), self.anchor[self.index].float()
        return PolicyFeatures(probs, context, anchor, self.scalars[self.index])

    def take(self, index: Tensor) -> "Examples":
        """The examples `index` [n] int64 of these, in that order; nothing is copied."""
        return replace(self, index=self.index[index])

    def where(self, chosen: Callable[[int], bool]) -> "Examples":
        """Those whose row of the sweep is chosen."""
        return self.take(torch.tensor([chosen(row) for row in self.rows[self.index].tolist()]).nonzero()[:, 0])

    def support(self, vocab_size: int, most: int) -> Tensor:
        """Token ids with the largest probability mass over all examples, `most` at most, increasing [S] int64."""
        mass = torch.zeros(vocab_size, dtype=torch.float64)
        for example in self.index.tolist():
            entries = slice(self.ends[example], self.ends[example + 1])
            mass.index_add_(0, self.ids[entries].long(), self.probs[entries].double())
        largest = mass.topk(min(most, int((mass > 0).sum()))).indices
        return largest.sort().values


# --- writing ---


def write_examples(folder: Path, parts: Iterable[Sequence[SweepRow]], candidates: Sequence[int], kind: Kind) -> Index:
    """Write the columns, and last the index; `candidates` are some of the rows', and 1 whether they have it or not.

    Raises ValueError for rows of different sizes, and for kind `step` where no steps are recorded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (INDEX_FILE, *_COLUMNS):
        (folder / name).unlink(missing_ok=True)  # not cut short: who has mapped the old ones keeps them
    known: list[tuple[str, str, str]] = []
    sizes: set[Sizes] = set()
    num_examples = 0
    files = {name: (folder / name).open("wb") for name in _COLUMNS}
    try:
        for row in (row for rows in parts for row in rows):
            columns = _of_prompt(row, candidates) if kind == "prompt" else _of_steps(row, candidates)
            columns["rows"] = np.full(len(columns["taus"]), len(known))
            for name, column in columns.items():
                column.astype(_COLUMNS[name]).tofile(files[name])
            known.append((row.prompt_id, prompt_key(row.prompt), row.prompt_set))
            if len(columns["taus"]):
                sizes.add(Sizes(*(columns[name].shape[1] for name in ("context", "anchor", "taus", "ranks"))))
            num_examples += len(columns["taus"])
    finally:
        for file in files.values():
            file.close()
    if not sizes:
        raise ValueError(
            f"none of {len(known)} rows has a recorded step: sweep with --method dense, or train --kind prompt"
        )
    if len(sizes) != 1:
        raise ValueError(f"rows of different sizes: {' and '.join(map(str, sorted(sizes)))}")
    prompt_ids, prompts, sets = zip(*known, strict=True)
    index = Index(prompt_ids, prompts, sets, num_examples, sizes.pop())
    write_text(folder / INDEX_FILE, json.dumps(index._asdict() | {"sizes": index.sizes}))
    return index


def _of_prompt(row: SweepRow, candidates: Sequence[int]) -> dict[str, NDArray[Any]]:
    taus = {1: 1.0} | dict(zip(row.candidates, row.taus, strict=True))
    return {
        "ids": np.array(row.probs_ids),
        "probs": np.array(row.probs),
        "lengths": np.array([len(row.probs_ids)]),
        "scalars": np.array([_scalars(row)]),
        "context": np.zeros((1, 0)),
        "anchor": np.zeros((1, 0)),
        "taus": np.array([[taus[size] for size in candidates]]),
        "ranks": np.zeros((1, 0)),
        "scores": np.zeros(0),
        "log_probs": np.zeros(0),
    }


def _of_steps(row: SweepRow, candidates: Sequence[int]) -> dict[str, NDArray[Any]]:
    num = len(row.step_places)
    accepted = dict(zip(row.candidates, row.accepted, strict=False))
    left = len(row.output_tokens) - 1  # no bonus token follows one that stops
    emitted = [
        [min(accepted[size][p] + 1, left - p) if size > 1 else 1 for size in candidates] for p in row.step_places
    ]
    return {
        "ids": np.zeros(0),
        "probs": np.zeros(0),
        "lengths": np.zeros(num),
        "scalars": np.tile(_scalars(row), (num, 1)),
        "context": vectors(row.step_contexts, num) if num else np.zeros((0, 0)),
        "anchor": vectors(row.step_embeddings, num) if num else np.zeros((0, 0)),
        "taus": np.array(emitted),
        "ranks": np.frombuffer(row.step_ranks, np.int8).reshape(num, -1) if num else np.zeros((0, 0)),
        "scores": np.frombuffer(row.step_scores, "<f2"),
        "log_probs": np.frombuffer(row.step_log_probs, "<f2"),
    }


def _scalars(row: SweepRow) -> list[float]:
    return scalars(torch.tensor(row.probs), row.num_prompt_tokens, row.temperature)


def prompt_key(prompt: str) -> str:
    """A short name for a prompt's text."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]


# --- reading ---


def read_index(folder: Path) -> Index:
    fields = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    lists = {name: tuple(fields[name]) for name in ("prompt_ids", "prompts", "sets")}
    return Index(**fields | lists | {"sizes": Sizes(*fields["sizes"])})


def open_examples(folder: Path) -> Examples:
    """Map the columns; examples are in the order of their prompt_ids, whatever the order of the parts."""
    index = read_index(folder)
    num, sizes = index.num_examples, index.sizes
    columns = {name: _map(folder / name, dtype) for name, dtype in _COLUMNS.items()}
    rank = torch.zeros(len(index.prompt_ids), dtype=torch.int64)
    rank[sorted(range(len(rank)), key=index.prompt_ids.__getitem__)] = torch.arange(len(rank))
    return Examples(
        rank[columns["rows"].long()].argsort(stable=True),
        columns["rows"],
        columns["ids"],
        columns["probs"],
        torch.cat([torch.zeros(1, dtype=torch.int64), columns["lengths"].cumsum(0)]),
        columns["scalars"].view(num, -1),
        columns["context"].view(num, sizes.context),
        columns["anchor"].view(num, sizes.anchor),
        columns["taus"].view(num, -1),
        columns["ranks"].view(num, sizes.depth),
        columns["scores"].view(num, sizes.depth, -1) if sizes.depth else columns["scores"].view(num, 0, 0),
        columns["log_probs"].view(num, sizes.depth, -1) if sizes.depth else columns["log_probs"].view(num, 0, 0),
    )


def _map(path: Path, dtype: Any) -> Tensor:
    """A column in memory of its own where it is written to; an empty file cannot be mapped."""
    return torch.from_numpy(np.memmap(path, dtype, mode="c") if path.stat().st_size else np.zeros(0, dtype))


def split_examples(folder: Path, held_out: float, seed: int) -> tuple[Examples, Examples]:
    """(training, validation): `held_out` of the prompts, at least one, with all their examples.

    Depends on the prompts' texts and the seed, not on their order. Raises ValueError for less than two prompts.
    """
    index, examples = read_index(folder), open_examples(folder)
    held = held_out_prompts(index.prompts, held_out, seed)
    return (
        examples.where(lambda row: index.prompts[row] not in held),
        examples.where(lambda row: index.prompts[row] in held),
    )


def held_out_prompts(keys: Collection[str], held_out: float, seed: int) -> set[str]:
    """Some of the prompts, at least one and not all. Raises ValueError for less than two."""
    # Not prompts.files.split: that one decides by another hash for each prompt alone, and may hold none or all. This
    # one holds an exact number, which committed policies were validated on.
    prompts = sorted(set(keys), key=lambda key: hashlib.sha256(f"{seed}\n{key}".encode()).digest())
    if len(prompts) < 2:
        raise ValueError(f"{len(prompts)} different prompts: at least 2 are needed to hold some back")
    return set(prompts[: min(max(1, round(held_out * len(prompts))), len(prompts) - 1)])
