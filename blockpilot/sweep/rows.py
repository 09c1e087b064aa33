"""The rows of a sweep as Parquet: what block sizes gave on each prompt, and what was known after its prefill.

One row a prompt, one schema, and one JSON value of file metadata that says what made the rows. Everything
is checked on the way in and on the way out, so a reader may trust what it gets; files appear whole or not
at all.
"""

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from blockpilot.prompts.files import Prompt
from blockpilot.storage import Place, file_names, first_line, is_file, is_folder, join, located, write_bytes
from blockpilot.types import PairId

METADATA_KEY, DIGEST_KEY = b"blockpilot", b"blockpilot.sha256"
NUM_CHOICES = 8  # of a slot
MIN_PROB = 1e-5  # prefill_probs below it are summed into tail_mass
MASS_TOLERANCE = 1e-3  # of sum(probs) + tail_mass around 1: float32 softmax over a large vocabulary, rounded
ROW_GROUP_SIZE = 256

Ints = Annotated[list[int], pa.list_(pa.int32())]
Floats = Annotated[list[float], pa.list_(pa.float32())]
ARROW = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64(), bytes: pa.large_binary()}


@dataclass(frozen=True)
class SweepRow:
    """One prompt of a sweep. Lists over the candidate set are in the order of `candidates`."""

    prompt_id: str  # see prompt_ids()
    prompt_set: str
    prompt: str  # its text
    num_prompt_tokens: Annotated[int, pa.int32()]
    output_tokens: Ints  # of the first candidate; the prefill's token included
    finish_reason: str  # "stop" or "length"
    candidates: Ints  # ascending block sizes
    taus: Annotated[list[float], pa.list_(pa.float64())]  # emitted tokens per verify step
    num_steps: Ints  # verify steps
    emitted_histograms: Annotated[list[list[int]], pa.list_(pa.list_(pa.int32()))]
    """[c][n] = verify steps of candidate c that emitted n tokens."""
    accepted: Annotated[list[list[int]], pa.list_(pa.list_(pa.uint8()))]
    """[c][p] = drafts of candidate c accepted after output token p; empty unless dense."""
    texts_agree: bool  # every candidate gave output_tokens; always so in float32
    probs_ids: Ints  # ascending token ids with prefill_probs >= MIN_PROB
    probs: Floats  # theirs
    tail_mass: Annotated[float, pa.float32()]  # the sum of all other prefill_probs
    context: Floats  # [draft hidden]; empty when no candidate drafts
    step_places: Ints  # some consecutive places p of `accepted`; empty unless dense
    step_contexts: bytes  # float16 [len(step_places), draft hidden]: the context vector before the anchor
    step_embeddings: bytes  # float16 [len(step_places), target hidden]: the target's embedding of the anchor
    seed: int  # the seed the sampler ran with
    temperature: float
    # What the draft proposed at step_places for each of its D slots, k choices a slot; empty unless dense.
    step_ranks: bytes = b""  # int8 [places, D]: the choice that was right, -1 for none of them, -2 for not known
    step_scores: bytes = b""  # float16 [places, D, NUM_CHOICES], as step_log_probs: those of types.Candidates
    step_log_probs: bytes = b""
    step_nodes: bytes = b""
    """uint8 [places, D]: nodes of the smallest tree that accepts so far (sweep/trees.py); empty where slots depend on
    the choices above."""
    step_matches: bytes = b""
    """uint8 [places, 2]: tokens that the text's end shares with an earlier place, 0 for none, and how many of those
    that followed there followed again, as far as the text shows; empty without the functions in C."""


def _arrow_type(annotation: Any) -> Any:
    return ARROW[annotation] if annotation in ARROW else annotation.__metadata__[0]


SCHEMA = pa.schema([(field.name, _arrow_type(field.type)) for field in fields(SweepRow)])


class Reject(NamedTuple):
    """A prompt that gave no row, and why."""

    prompt_id: str
    prompt_set: str
    prompt: str
    error: str


class Outcome(NamedTuple):
    """Rows and rejects of some prompts, each in their order."""

    rows: list[SweepRow]
    rejects: list[Reject]


@dataclass(frozen=True)
class Metadata:
    """What made the rows of a file. Files belong together if they differ in versions and git_commit only."""

    config: dict[str, Any]  # settings of the sweep that rows depend on
    pair: PairId
    dtype: str
    vocab_size: int
    block_size: int  # the draft's trained one
    candidates: list[int]
    versions: dict[str, str]
    git_commit: str

    def to_dict(self) -> dict[str, Any]:
        """The fields, `pair` as a dictionary too."""
        return asdict(self) | {"pair": self.pair._asdict()}

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @staticmethod
    def from_json(text: str | bytes) -> "Metadata":
        """Inverse of `to_json`; ValueError names the keys that are missing or unknown."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("metadata is not an object")
        wrong = {field.name for field in fields(Metadata)} ^ set(values)
        if wrong:
            raise ValueError(f"metadata keys missing or unknown: {', '.join(sorted(wrong))}")
        return Metadata(**values | {"pair": PairId(**values["pair"])})


class Sweep(NamedTuple):
    """Rows in the order of the files, and what made them."""

    rows: list[SweepRow]
    metadata: Metadata


def prompt_ids(prompt: Prompt, seed: int, temperature: float) -> tuple[str, ...]:
    """32 hex digits for each turn of one prompt of one sweep: the first one's, then those of the follow-ups."""
    messages = [[message.role, message.content] for message in prompt.messages]
    keys = [json.dumps([prompt.set, messages, seed, float(temperature)])]
    keys += [json.dumps([keys[0], prompt.follow_ups[: i + 1]]) for i in range(len(prompt.follow_ups))]
    return tuple(hashlib.sha256(key.encode()).hexdigest()[:32] for key in keys)


def validate(row: SweepRow, metadata: Metadata) -> None:
    """Raise ValueError for a row that no sweep can have produced."""
    if problem := next(_problems(row, metadata), None):
        raise ValueError(f"row {row.prompt_id!r}: {problem}")


def _problems(row: SweepRow, metadata: Metadata) -> Iterator[str]:
    if row.candidates != metadata.candidates:
        yield f"candidates {row.candidates} are not the file's {metadata.candidates}"
    if not row.candidates or row.candidates[0] < 1 or any(a >= b for a, b in pairwise(row.candidates)):
        yield f"candidates {row.candidates} are not ascending block sizes >= 1"
    for name in ("taus", "num_steps", "emitted_histograms"):
        if len(getattr(row, name)) != len(row.candidates):
            yield f"{name} has {len(getattr(row, name))} entries for {len(row.candidates)} candidates"
    for measured in zip(row.candidates, row.taus, row.num_steps, row.emitted_histograms, strict=True):
        yield from _candidate_problems(*measured)
    if row.accepted:
        yield from _accepted_problems(row)
    if row.finish_reason not in ("stop", "length"):
        yield f"finish_reason {row.finish_reason!r} is neither 'stop' nor 'length'"
    if not row.output_tokens:
        yield "output_tokens is empty"
    yield from _prefill_problems(row, metadata.vocab_size)


def _candidate_problems(block_size: int, tau: float, num_steps: int, histogram: list[int]) -> Iterator[str]:
    where = f"of block size {block_size}"
    if not math.isfinite(tau):
        yield f"tau {where} is {tau}"
    if num_steps < 1 or sum(histogram) != num_steps:
        yield f"emitted_histograms {where} counts {sum(histogram)} steps, num_steps is {num_steps}"
    if len(histogram) != block_size + 1 or min(histogram) < 0:
        yield f"emitted_histograms {where} is {histogram}, not {block_size + 1} counts >= 0"
    emitted = sum(n * count for n, count in enumerate(histogram))
    if abs(tau * num_steps - emitted) > 1e-6 * emitted:
        yield f"tau {where} is {tau}, its histogram says {emitted}/{num_steps}"


def _accepted_problems(row: SweepRow) -> Iterator[str]:
    if [len(anchors) for anchors in row.accepted] != [len(row.output_tokens) - 1] * len(row.candidates):
        yield "accepted does not have an entry for every candidate and output token but the last"
    for block_size, anchors in zip(row.candidates, row.accepted, strict=False):
        if not all(0 <= n < block_size for n in anchors):
            yield f"accepted of block size {block_size} has entries outside 0 to {block_size - 1}"


def _prefill_problems(row: SweepRow, vocab_size: int) -> Iterator[str]:
    ids, probs = np.asarray(row.probs_ids, np.int64), np.asarray(row.probs, np.float64)
    if len(ids) != len(probs):
        yield f"probs has {len(probs)} entries for {len(ids)} probs_ids"
    if len(ids) and (ids[0] < 0 or ids[-1] >= vocab_size or (np.diff(ids) <= 0).any()):
        yield f"probs_ids are not ascending token ids below {vocab_size}"
    if (probs < 0).any() or row.tail_mass < 0:
        yield "probs or tail_mass below 0"
    mass = probs.sum() + row.tail_mass
    if not abs(mass - 1) <= MASS_TOLERANCE:
        yield f"probs and tail_mass sum to {mass}, not to 1"
    if not np.isfinite(row.context).all():
        yield "context has entries that are not finite"
    if row.step_places or row.step_contexts or row.step_embeddings:
        yield from _step_problems(row)


def _step_problems(row: SweepRow) -> Iterator[str]:
    places = row.step_places
    if not row.accepted or not places or places[0] < 0 or places[-1] >= len(row.accepted[0]):
        yield f"step_places {places[:3]} ... are not places of accepted"
    if any(b != a + 1 for a, b in pairwise(places)):
        yield f"step_places {places[:3]} ... are not consecutive"
    sizes = len(row.step_contexts), len(row.step_embeddings)
    if sizes[0] != 2 * len(places) * len(row.context) or not sizes[1] or sizes[1] % (2 * max(len(places), 1)):
        yield f"step_contexts and step_embeddings have {sizes} bytes for {len(places)} places"
    elif not all(np.isfinite(vectors(data, 1)).all() for data in (row.step_contexts, row.step_embeddings)):
        yield "step_contexts or step_embeddings have entries that are not finite"
    offers = len(row.step_ranks), len(row.step_scores), len(row.step_log_probs)
    if offers[0] % len(places) or any(size != 2 * NUM_CHOICES * offers[0] for size in offers[1:]):
        yield f"step_ranks, step_scores and step_log_probs have {offers} bytes for {len(places)} places"
    if len(row.step_nodes) not in (0, offers[0]) or 0 in row.step_nodes:
        yield f"step_nodes has {len(row.step_nodes)} bytes for {offers[0]} ranks, none of them 0"
    if len(row.step_matches) not in (0, 2 * len(places)):
        yield f"step_matches has {len(row.step_matches)} bytes for {len(places)} places"


def vectors(data: bytes, num: int) -> NDArray[np.float16]:
    """Bytes of a row's step columns as float16 [num, size]."""
    return np.frombuffer(data, "<f2").reshape(num, -1)


def write_rows(place: Place, rows: Sequence[SweepRow], metadata: Metadata) -> None:
    """Write one Parquet file; it is there whole or not at all, whenever the writer is killed."""
    _validate_all(place, rows, metadata)
    about = metadata.to_json().encode()
    table = pa.Table.from_pylist([vars(row) for row in rows], schema=SCHEMA)
    table = table.replace_schema_metadata({METADATA_KEY: about, DIGEST_KEY: _digest(table, about)})
    content = pa.BufferOutputStream()
    pq.write_table(table, content, compression="zstd", row_group_size=ROW_GROUP_SIZE, write_page_checksum=True)
    write_bytes(place, content.getvalue())


def _digest(table: pa.Table, about: bytes) -> bytes:
    """Checksum of all values and of the metadata; the pages' own checksums do not cover the file's footer."""
    digest = hashlib.sha256(about)
    for column in table.columns:
        _add(digest, column.combine_chunks())
    return digest.hexdigest().encode()


def _add(digest: Any, array: Any) -> None:
    """Add an array's values, whatever its chunks, offsets and buffers are."""
    digest.update(f"{len(array)} {array.null_count} ".encode())
    if pa.types.is_list(array.type):
        digest.update(pc.list_value_length(array).to_numpy(zero_copy_only=False).tobytes())
        _add(digest, array.flatten())
    elif pa.types.is_string(array.type) or pa.types.is_large_binary(array.type):
        digest.update(pc.binary_length(array).to_numpy(zero_copy_only=False).tobytes())
        digest.update(b"".join(array.cast(pa.large_binary()).to_pylist()))
    else:
        digest.update(array.to_numpy(zero_copy_only=False).tobytes())


def _validate_all(place: Place, rows: Iterable[SweepRow], metadata: Metadata) -> None:
    try:
        for row in rows:
            validate(row, metadata)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def read_file(place: Place) -> Sweep:
    """Read and check one file; ValueError names the file and what is wrong with it."""
    if not is_file(place):
        raise ValueError(f"{place}: no such file")
    fs, path = located(place)
    try:
        with fs.open_input_file(path) as file:
            table = pq.ParquetFile(file, page_checksum_verification=True).read()
        values = table.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{place}: not a readable Parquet file ({first_line(error)})") from error
    metadata = _file_metadata(place, table.schema)
    stored = table.schema.metadata
    if DIGEST_KEY in stored and stored[DIGEST_KEY] != _digest(table, stored[METADATA_KEY]):
        raise ValueError(f"{place}: damaged, its rows are not those that were written (checksum)")
    rows = [SweepRow(**of_row) for of_row in values]
    _validate_all(place, rows, metadata)
    return Sweep(rows, metadata)


def _file_metadata(path: Place, schema: Any) -> Metadata:
    if not schema.equals(SCHEMA):
        found = {field.name: str(field.type) for field in schema}
        wanted = {field.name: str(field.type) for field in SCHEMA}
        raise ValueError(f"{path}: not the schema of a sweep ({difference(found, wanted)})")
    try:
        return Metadata.from_json((schema.metadata or {})[METADATA_KEY])
    except KeyError:
        raise ValueError(f"{path}: no {METADATA_KEY.decode()!r} metadata") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def read_parts(place: Place) -> Iterator[Sweep]:
    """A file, or the part files of a folder in order of name, one after the other.

    Raises ValueError when there are none, when two files come from different pairs, candidate sets or
    configurations (the difference is named), or when a prompt comes twice.
    """
    place = os.fspath(place)
    files = [join(place, name) for name in file_names(place, ".parquet")] if is_folder(place) else [place]
    if not files:
        raise ValueError(f"no Parquet files in {place}")
    first: Metadata | None = None
    seen: dict[str, str] = {}
    for file in files:
        sweep = read_file(file)
        first = first or sweep.metadata
        if found := mismatch(first, sweep.metadata):
            raise ValueError(f"{files[0]} and {file} are of different sweeps ({found})")
        for row in sweep.rows:
            if row.prompt_id in seen:
                raise ValueError(f"{file}: prompt {row.prompt_id} is already in {seen[row.prompt_id]}")
            seen[row.prompt_id] = file
        yield sweep


def mismatch(one: Metadata, other: Metadata, ignored: Collection[str] = ()) -> str:
    """How two files' origins differ, in words; empty when their rows may be mixed.

    Sweeps of other prompts or temperatures differ in `config`, which may be ignored.
    """
    left_out = {"versions", "git_commit", *ignored}
    ours, theirs = ({k: v for k, v in m.to_dict().items() if k not in left_out} for m in (one, other))
    return difference(ours, theirs)


def difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The first key (dotted into inner dictionaries) at which two differ, and both values; empty if none."""
    for key in [*one, *(key for key in other if key not in one)]:
        mine, yours = one.get(key), other.get(key)
        if isinstance(mine, dict) and isinstance(yours, dict):
            if inner := difference(mine, yours):
                return f"{key}.{inner}"
        elif mine != yours:
            return f"{key}: {mine!r} and {yours!r}"
    return ""
