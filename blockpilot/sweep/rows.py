"""Rows of a sweep as Parquet: per prompt, tau of every block size and the target's distribution after the prefill.

The block sizes to compare, the candidate set, are by default those of BlockPilot (arXiv 2606.31315).

A file has one row per prompt, one schema, and provenance as a JSON value in its metadata. Rows are validated when
they are written and when they are read, and files are written atomically.
"""

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from blockpilot.prompts.files import Prompt
from blockpilot.storage import Place, file_names, first_line, is_file, is_folder, join, located, write_bytes
from blockpilot.types import MAX_BLOCK_SIZE, CandidateSet, PairId

METADATA_KEY, DIGEST_KEY = b"blockpilot", b"blockpilot.sha256"
NUM_CHOICES = 8  # recorded choices per slot
MIN_PROB = 1e-5  # smaller prefill_probs are summed into tail_mass
MASS_TOLERANCE = 1e-3  # |sum(probs) + tail_mass - 1|: rounding of a float32 softmax over a large vocabulary
ROW_GROUP_SIZE = 256

Method = Literal["replay", "dense", "decode"]
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
    output_tokens: Ints  # of the first candidate, including the prefill's token
    finish_reason: str  # "stop" or "length"
    candidates: Ints  # ascending block sizes
    taus: Annotated[list[float], pa.list_(pa.float64())]  # emitted tokens per verify step
    num_steps: Ints  # verify steps
    emitted_histograms: Annotated[list[list[int]], pa.list_(pa.list_(pa.int32()))]
    """[c][n] = number of verify steps of candidate c that emitted n tokens."""
    accepted: Annotated[list[list[int]], pa.list_(pa.list_(pa.uint8()))]
    """[c][p] = drafted tokens of candidate c accepted after output token p; empty unless dense."""
    texts_agree: bool  # every candidate decoded output_tokens; always true in float32
    probs_ids: Ints  # ascending token ids with prefill_probs >= MIN_PROB
    probs: Floats  # prefill_probs of probs_ids
    tail_mass: Annotated[float, pa.float32()]  # sum of all other prefill_probs
    context: Floats  # [draft hidden]: context vector at the last prompt token; empty if no candidate drafts
    step_places: Ints  # P consecutive positions p of `accepted` with a recorded step; empty unless dense
    step_contexts: bytes  # float16 [P, draft hidden]: the context vector at the token before the anchor
    step_embeddings: bytes  # float16 [P, target hidden]: the target's embedding of the anchor
    seed: int  # of the sampler
    temperature: float
    # The draft's NUM_CHOICES best choices for each of its D slots at step_places; empty unless dense.
    step_ranks: bytes = b""  # int8 [P, D]: index of the text's token; -1 if absent; -2 if unknown
    step_scores: bytes = b""  # float16 [P, D, NUM_CHOICES], as step_log_probs; see types.Candidates
    step_log_probs: bytes = b""
    step_nodes: bytes = b""
    """uint8 [P, D]: nodes of the smallest tree that accepts up to each depth (sweep/trees.py); empty if slots depend
    on earlier choices."""
    step_matches: bytes = b""
    """uint8 [P, 2] of prompt lookup: length of the longest earlier match of the text's end (0 if there is none), and
    number of tokens after the match that also follow the anchor; empty without the functions in C."""


def _arrow_type(annotation: Any) -> Any:
    return ARROW[annotation] if annotation in ARROW else annotation.__metadata__[0]


SCHEMA = pa.schema([(field.name, _arrow_type(field.type)) for field in fields(SweepRow)])


class Reject(NamedTuple):
    """A prompt without a row, and the reason."""

    prompt_id: str
    prompt_set: str
    prompt: str
    error: str


class Outcome(NamedTuple):
    """Rows and rejects of prompts; the rows are in the order of the prompts."""

    rows: list[SweepRow]
    rejects: list[Reject]

    def checked(self, metadata: "Metadata") -> "Outcome":
        """The outcome with each row that cannot be written, such as one that is not finite, as a reject."""
        rows, rejects = list[SweepRow](), list(self.rejects)
        for row in self.rows:
            if problem := next(_problems(row, metadata), None):
                rejects.append(Reject(row.prompt_id, row.prompt_set, row.prompt, problem))
            else:
                rows.append(row)
        return Outcome(rows, rejects)


@dataclass(frozen=True)
class Metadata:
    """Provenance of a file's rows. Files of one sweep differ in versions and git_commit only."""

    config: dict[str, Any]  # settings of the sweep that its rows depend on
    pair: PairId
    dtype: str
    vocab_size: int
    block_size: int  # that the draft was trained for
    candidates: list[int]
    versions: dict[str, str]
    git_commit: str

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary, with `pair` as a dictionary."""
        return asdict(self) | {"pair": self.pair._asdict()}

    def to_json(self) -> str:
        """The fields as one line of JSON."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @staticmethod
    def from_json(text: str | bytes) -> "Metadata":
        """Inverse of `to_json`; raises ValueError that names missing or unknown keys."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("metadata is not an object")
        wrong = {field.name for field in fields(Metadata)} ^ set(values)
        if wrong:
            raise ValueError(f"metadata keys missing or unknown: {', '.join(sorted(wrong))}")
        return Metadata(**values | {"pair": PairId(**values["pair"])})


class Sweep(NamedTuple):
    """Rows in the order of the files, and their provenance."""

    rows: list[SweepRow]
    metadata: Metadata


def candidates_around(block_size: int, k: int = 2) -> list[int]:
    """The paper's candidate set {B0 - k .. B0 + k}, limited to 1 .. MAX_BLOCK_SIZE."""
    return [b for b in range(block_size - k, block_size + k + 1) if 1 <= b <= MAX_BLOCK_SIZE]


def check_candidates(candidates: Sequence[int], context: int | None = None) -> None:
    """Raise ValueError for an invalid candidate set, or block sizes above MAX_BLOCK_SIZE or not below `context`."""
    largest = max(CandidateSet(tuple(candidates)))
    if largest > MAX_BLOCK_SIZE:
        raise ValueError(f"candidates {tuple(candidates)}: block sizes must be at most {MAX_BLOCK_SIZE}")
    if context is not None and largest >= context:
        raise ValueError(f"candidates {tuple(candidates)}: must be shorter than the target's context of {context}")


def prompt_ids(prompt: Prompt, seed: int, temperature: float) -> tuple[str, ...]:
    """Ids of one prompt's turns in a sweep, 32 hex digits each: the first turn's, then the follow-ups'."""
    messages = [[message.role, message.content] for message in prompt.messages]
    keys = [json.dumps([prompt.set, messages, seed, float(temperature)])]
    keys += [json.dumps([keys[0], prompt.follow_ups[: i + 1]]) for i in range(len(prompt.follow_ups))]
    return tuple(hashlib.sha256(key.encode()).hexdigest()[:32] for key in keys)


def validate(row: SweepRow, metadata: Metadata) -> None:
    """Raise ValueError for an inconsistent row, one that no sweep can have produced."""
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
    label = f"of block size {block_size}"
    if not math.isfinite(tau):
        yield f"tau {label} is {tau}"
    if num_steps < 1 or sum(histogram) != num_steps:
        yield f"emitted_histograms {label} counts {sum(histogram)} steps, num_steps is {num_steps}"
    if len(histogram) != block_size + 1 or min(histogram) < 0:
        yield f"emitted_histograms {label} is {histogram}, not {block_size + 1} counts >= 0"
    emitted = sum(n * count for n, count in enumerate(histogram))
    if abs(tau * num_steps - emitted) > 1e-6 * emitted:
        yield f"tau {label} is {tau}, its histogram says {emitted}/{num_steps}"


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
    positions = row.step_places
    if not row.accepted or not positions or positions[0] < 0 or positions[-1] >= len(row.accepted[0]):
        yield f"step_places {positions[:3]} ... are not places of accepted"
    if any(b != a + 1 for a, b in pairwise(positions)):
        yield f"step_places {positions[:3]} ... are not consecutive"
    sizes = len(row.step_contexts), len(row.step_embeddings)
    if sizes[0] != 2 * len(positions) * len(row.context) or not sizes[1] or sizes[1] % (2 * max(len(positions), 1)):
        yield f"step_contexts and step_embeddings have {sizes} bytes for {len(positions)} places"
    elif not all(np.isfinite(vectors(data, 1)).all() for data in (row.step_contexts, row.step_embeddings)):
        yield "step_contexts or step_embeddings have entries that are not finite"
    num_bytes = len(row.step_ranks), len(row.step_scores), len(row.step_log_probs)
    if num_bytes[0] % len(positions) or any(size != 2 * NUM_CHOICES * num_bytes[0] for size in num_bytes[1:]):
        yield f"step_ranks, step_scores and step_log_probs have {num_bytes} bytes for {len(positions)} places"
    if len(row.step_nodes) not in (0, num_bytes[0]) or 0 in row.step_nodes:
        yield f"step_nodes has {len(row.step_nodes)} bytes for {num_bytes[0]} ranks, none of them 0"
    if len(row.step_matches) not in (0, 2 * len(positions)):
        yield f"step_matches has {len(row.step_matches)} bytes for {len(positions)} places"


def vectors(data: bytes, num: int) -> NDArray[np.float16]:
    """Bytes of a row's step columns as float16 [num, size]."""
    return np.frombuffer(data, "<f2").reshape(num, -1)


def write_rows(place: Place, rows: Sequence[SweepRow], metadata: Metadata) -> None:
    """Write one Parquet file atomically; raises ValueError for an inconsistent row."""
    _validate_all(place, rows, metadata)
    metadata_json = metadata.to_json().encode()
    table = pa.Table.from_pylist([vars(row) for row in rows], schema=SCHEMA)
    table = table.replace_schema_metadata({METADATA_KEY: metadata_json, DIGEST_KEY: _digest(table, metadata_json)})
    content = pa.BufferOutputStream()
    pq.write_table(table, content, compression="zstd", row_group_size=ROW_GROUP_SIZE, write_page_checksum=True)
    write_bytes(place, content.getvalue())


def _digest(table: pa.Table, metadata_json: bytes) -> bytes:
    """Checksum of all values and of the metadata, since Parquet's page checksums do not cover the file's footer."""
    digest = hashlib.sha256(metadata_json)
    for column in table.columns:
        _add(digest, column.combine_chunks())
    return digest.hexdigest().encode()


def _add(digest: Any, array: Any) -> None:
    """Add an array's values to the digest, independent of its chunks, offsets and buffers."""
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
    """Read and validate one file; raises ValueError that names the file and the problem."""
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
    rows = [SweepRow(**columns) for columns in values]
    _validate_all(place, rows, metadata)
    return Sweep(rows, metadata)


def _file_metadata(path: Place, schema: Any) -> Metadata:
    if not schema.equals(SCHEMA):
        schema_types = {field.name: str(field.type) for field in schema}
        expected_types = {field.name: str(field.type) for field in SCHEMA}
        raise ValueError(f"{path}: not the schema of a sweep ({difference(schema_types, expected_types)})")
    try:
        return Metadata.from_json((schema.metadata or {})[METADATA_KEY])
    except KeyError:
        raise ValueError(f"{path}: no {METADATA_KEY.decode()!r} metadata") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def read_parts(place: Place) -> Iterator[Sweep]:
    """Yield the sweep of a file, or of each part file of a folder in order of name.

    Raises ValueError if there are no files, if two files come from different pairs, candidate sets or configurations
    (the message names the difference), or if a prompt occurs twice.
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
        if reason := mismatch(first, sweep.metadata):
            raise ValueError(f"{files[0]} and {file} are of different sweeps ({reason})")
        for row in sweep.rows:
            if row.prompt_id in seen:
                raise ValueError(f"{file}: prompt {row.prompt_id} is already in {seen[row.prompt_id]}")
            seen[row.prompt_id] = file
        yield sweep


def mismatch(one: Metadata, other: Metadata, ignored: Collection[str] = ()) -> str:
    """The first difference in two files' provenance, in words; empty if their rows may be mixed.

    Keys in `ignored` are not compared, such as `config`, which differs for other prompts or temperatures.
    """
    skipped = {"versions", "git_commit", *ignored}
    one_fields, other_fields = ({k: v for k, v in m.to_dict().items() if k not in skipped} for m in (one, other))
    return difference(one_fields, other_fields)


def difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The first key (dotted for inner dictionaries) whose values differ, and both values; empty if none."""
    for key in [*one, *(key for key in other if key not in one)]:
        left, right = one.get(key), other.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            if inner := difference(left, right):
                return f"{key}.{inner}"
        elif left != right:
            return f"{key}: {left!r} and {right!r}"
    return ""
