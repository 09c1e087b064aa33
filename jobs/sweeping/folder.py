"""The output directory of a sweep, on the local disk or by URI on any file system that pyarrow knows.

    config.json      settings that the rows depend on, written first
    prompts/         the prompts of every shard, so that nobody holds all of them in memory
    rows/            a Parquet part a shard: what is there is finished
    rejects.jsonl    prompts that gave no row, and why
    price.json       what a step costs on the worker that measured it

A part is named by the prompts of its shard, so the same command finds what it has, and another command is refused.
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

CONFIG_FILE = "config.json"
REJECTS_FILE = "rejects.jsonl"
PROMPTS_FOLDER = "prompts"
ROWS_FOLDER = "rows"


class SweepShard(NamedTuple):
    """Prompts whose rows share a part file: for each of them the ids of its rows, one a turn."""

    number: int
    prompts: tuple[tuple[str, ...], ...]

    @property
    def ids(self) -> list[str]:
        """Of all rows, in order."""
        return [key for of_prompt in self.prompts for key in of_prompt]

    @property
    def part(self) -> str:
        return f"part-{self.number:05d}-{digest(self.ids)[:12]}.parquet"


def digest(ids: Iterable[str]) -> str:
    """A hash of prompt ids, in order."""
    return hashlib.sha256("".join(ids).encode()).hexdigest()


class SweepFolder:
    """Output of a sweep so far. One process writes at a time, the holder of the directory's lease."""

    def __init__(self, place: Place, identity: dict[str, Any]) -> None:
        self.place, self.rows, self.identity = str(place), join(str(place), ROWS_FOLDER), identity
        self.metadata: Metadata | None = None  # of the rows there, once some were read or written

    def open(self, shards: Sequence[SweepShard], prompts: Sequence[Prompt]) -> None:
        """Make the directory ready for these shards, whose prompts follow one another; removes what a kill left.

        Raises ValueError as `check` does.
        """
        self.check(shards)
        remove_unfinished(self.place)
        write_text(join(self.place, CONFIG_FILE), json.dumps(self.identity, indent=2) + "\n")
        left = iter(prompts)
        for shard in shards:
            save_prompts(self._prompts_file(shard), list(islice(left, len(shard.prompts))))

    def left(self, shard: SweepShard) -> tuple[int, ...]:
        """Places of a shard's prompts that lack a row."""
        done = {row.prompt_id for row in self.read(shard)}
        return tuple(i for i, of_prompt in enumerate(shard.prompts) if not done.issuperset(of_prompt))

    def prompts(self, shard: SweepShard, places: Sequence[int]) -> list[Prompt]:
        """Some of a shard's prompts."""
        lines = read_bytes(self._prompts_file(shard)).decode().split("\n")
        return [Prompt.from_json(lines[i]) for i in places]

    def read(self, shard: SweepShard) -> list[SweepRow]:
        """Rows of a shard's part; none if it is missing or damaged, for then it is decoded again.

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
        """Let rows of this pair and precision in; raises ValueError where those there are of another one."""
        self.metadata = self.metadata or metadata
        if found := mismatch(self.metadata, metadata):
            raise ValueError(f"output {self.place}: its rows are of another pair or precision ({found})")

    def write(self, shard: SweepShard, rows: Sequence[SweepRow], metadata: Metadata) -> None:
        """Write the part of a shard anew: the rows it had and the new ones, in the order of the prompts."""
        if not rows:
            return
        by_id = {row.prompt_id: row for row in (*self.read(shard), *rows)}
        self.take(metadata)
        ordered = [by_id[key] for key in shard.ids if key in by_id]
        write_rows(join(self.rows, shard.part), ordered, metadata)

    def write_rejects(self, rejects: Sequence[Reject]) -> None:
        """Replace the rejects; no file when there are none."""
        if rejects:
            lines = (json.dumps(reject._asdict(), ensure_ascii=False) + "\n" for reject in rejects)
            write_text(join(self.place, REJECTS_FILE), "".join(lines))
        else:
            delete(join(self.place, REJECTS_FILE))

    def _prompts_file(self, shard: SweepShard) -> str:
        return join(self.place, PROMPTS_FOLDER, f"{Path(shard.part).stem}.jsonl")

    def check(self, shards: Sequence[SweepShard]) -> None:
        """Raise ValueError, naming the difference, for a directory that holds rows of another sweep."""
        found = set(file_names(self.rows, ".parquet"))
        if not found:
            return
        try:
            stored = json.loads(read_bytes(join(self.place, CONFIG_FILE)))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"output {self.place}: holds rows, but {CONFIG_FILE} is not readable ({error})"
            ) from None
        if changed := difference(stored, self.identity):
            raise ValueError(f"output {self.place}: holds another sweep (there and here: {changed})")
        if foreign := found - {shard.part for shard in shards}:
            raise ValueError(f"output {self.place}: {ROWS_FOLDER}/{min(foreign)} is no part of this sweep")
