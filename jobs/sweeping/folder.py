"""Output directory of a sweep, on the local disk or by URI on any file system that pyarrow supports.

    config.json      settings that the rows depend on, written first
    prompts/         the prompts of every shard, so that no process holds all of them in memory
    rows/            one Parquet part per shard; every row in it is finished
    rejects.jsonl    prompts without a row, and the reasons
    price.json       step cost on the worker that measured it

The name of a part contains a hash of its prompts, so the same command reuses its parts, and another sweep is refused.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from blockpilot.prompts.files import Prompt, save_prompts
from blockpilot.storage import Place, delete, file_names, is_file, join, read_bytes, remove_unfinished, write_text
from blockpilot.sweep.rows import Metadata, Reject, SweepRow, difference, mismatch, read_file, write_rows
from jobs.common.build import versions

CONFIG_FILE = "config.json"
REJECTS_FILE = "rejects.jsonl"
PROMPTS_FOLDER = "prompts"
ROWS_FOLDER = "rows"


class SweepShard(NamedTuple):
    """Prompts whose rows share a part file: for each prompt the ids of its rows, one per turn."""

    number: int
    prompts: tuple[tuple[str, ...], ...]

    @property
    def ids(self) -> list[str]:
        """Ids of all rows, in order."""
        return [row_id for row_ids in self.prompts for row_id in row_ids]

    @property
    def part(self) -> str:
        return f"part-{self.number:05d}-{digest(self.ids)[:12]}.parquet"


def digest(ids: Iterable[str]) -> str:
    """Hash of prompt ids, in order."""
    return hashlib.sha256("".join(ids).encode()).hexdigest()


def made_by(
    pair: Any, dtype: str, candidates: Sequence[int], identity: dict[str, Any], git_commit: str, **packages: str
) -> Metadata:
    """Provenance of rows that a worker makes with a pair, its own or vLLM's; packages: versions of others it uses."""
    return Metadata(
        config=identity,
        pair=pair.id,
        dtype=dtype,
        vocab_size=pair.vocab_size,
        block_size=pair.block_size,
        candidates=list(candidates),
        versions=versions() | packages,
        git_commit=git_commit,
    )


class SweepFolder:
    """Output of a sweep. One process writes at a time, the holder of the directory's lease."""

    def __init__(self, place: Place, identity: dict[str, Any]) -> None:
        self.place, self.rows, self.identity = str(place), join(str(place), ROWS_FOLDER), identity
        self.metadata: Metadata | None = None  # of the rows, after the first read or write

    def open(self, shards: Sequence[SweepShard], prompts: Sequence[Prompt]) -> None:
        """Prepare the directory for these shards, with `prompts` in their order; removes files left by a killed run.

        Raises ValueError as `check` does.
        """
        self.check(shards)
        remove_unfinished(self.place)
        write_text(join(self.place, CONFIG_FILE), json.dumps(self.identity, indent=2) + "\n")
        remaining = iter(prompts)
        for shard in shards:
            save_prompts(self._prompts_file(shard), list(islice(remaining, len(shard.prompts))))

    def left(self, shard: SweepShard) -> tuple[int, ...]:
        """Indices of a shard's prompts that lack a row."""
        done = {row.prompt_id for row in self.read(shard)}
        return tuple(i for i, row_ids in enumerate(shard.prompts) if not done.issuperset(row_ids))

    def prompts(self, shard: SweepShard, indices: Sequence[int]) -> list[Prompt]:
        """The prompts of a shard at these indices."""
        lines = read_bytes(self._prompts_file(shard)).decode().split("\n")
        return [Prompt.from_json(lines[i]) for i in indices]

    def read(self, shard: SweepShard) -> list[SweepRow]:
        """Rows of a shard's part; empty if it is missing or damaged, so that it is decoded again.

        Raises ValueError for a part of another pair or precision than the others.
        """
        part = join(self.rows, shard.part)
        if not is_file(part):
            return []
        try:
            sweep = read_file(part)
        except ValueError as error:
            print(f"sweep: decoding again what was in {error}")
            return []
        self.take(sweep.metadata)
        return [row for row in sweep.rows if row.prompt_id in shard.ids]

    def take(self, metadata: Metadata) -> None:
        """Accept rows of this pair and precision; raises ValueError if the existing rows are of another one."""
        self.metadata = self.metadata or metadata
        if reason := mismatch(self.metadata, metadata):
            raise ValueError(f"output {self.place}: has rows of another pair or precision ({reason})")

    def write(self, shard: SweepShard, rows: Sequence[SweepRow], metadata: Metadata) -> None:
        """Rewrite the part of a shard: its existing rows and the new ones, in the order of the prompts."""
        if not rows:
            return
        by_id = {row.prompt_id: row for row in (*self.read(shard), *rows)}
        self.take(metadata)
        ordered = [by_id[key] for key in shard.ids if key in by_id]
        write_rows(join(self.rows, shard.part), ordered, metadata)

    def write_rejects(self, rejects: Sequence[Reject]) -> None:
        """Replace the file of rejects; removes it if there are none."""
        if rejects:
            lines = (json.dumps(reject._asdict(), ensure_ascii=False) + "\n" for reject in rejects)
            write_text(join(self.place, REJECTS_FILE), "".join(lines))
        else:
            delete(join(self.place, REJECTS_FILE))

    def _prompts_file(self, shard: SweepShard) -> str:
        return join(self.place, PROMPTS_FOLDER, f"{Path(shard.part).stem}.jsonl")

    def check(self, shards: Sequence[SweepShard]) -> None:
        """Raise ValueError, naming the difference, for a directory that holds rows of another sweep."""
        parts = set(file_names(self.rows, ".parquet"))
        if not parts:
            return
        try:
            stored = json.loads(read_bytes(join(self.place, CONFIG_FILE)))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"output {self.place}: holds rows, but {CONFIG_FILE} is not readable ({error})"
            ) from None
        if changed := difference(stored, self.identity):
            raise ValueError(f"output {self.place}: holds another sweep (stored and requested: {changed})")
        if foreign := parts - {shard.part for shard in shards}:
            raise ValueError(f"output {self.place}: {ROWS_FOLDER}/{min(foreign)} does not belong to this sweep")
