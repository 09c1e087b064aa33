"""Rows of prompt files as people have them: endings, compression, encodings.

A file that is no such file raises ValueError; a row that cannot be read is yielded as the ValueError that says why.
"""

import codecs
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from blockpilot.prompts.conversations import FIELDS, PROMPT_FIELDS, has_prompt_field, is_message
from blockpilot.storage import first_line

ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet", ".txt")
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # those that pyarrow has


class FileRow(NamedTuple):
    """A row, or why it cannot be read, and where it is: "line 7", "row 7"."""

    where: str
    value: object


class FileName(NamedTuple):
    """Parts of a file's name: `questions`, `.jsonl` and `gzip` of `Questions.JSONL.gz`; "" where it has none."""

    stem: str
    ending: str
    compression: str

    @classmethod
    def of(cls, path: Path) -> "FileName":
        compression = COMPRESSIONS.get(path.suffix.lower(), "")
        named = path.with_suffix("") if compression else path
        return cls(named.stem, named.suffix.lower(), compression)


def read_rows(path: Path) -> Iterator[FileRow]:
    """Rows of a file whose ending is one of ENDINGS; blank lines are none."""
    _, ending, compression = FileName.of(path)
    if ending == ".parquet":
        return _parquet_rows(path, compression)
    content = _as_utf8(path, _unpacked(path, compression) if compression else path.read_bytes())
    if ending == ".txt":
        return _lines(content, is_json=False)
    document = _document(content, wanted=ending == ".json")
    if document is None:
        return _lines(content, is_json=True)
    return (FileRow(f"row {number}", value) for number, value in enumerate(document, start=1))


def _unpacked(path: Path, compression: str) -> bytes:
    try:
        with pa.input_stream(str(path), compression=compression) as stream:
            return bytes(stream.read())
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a {compression} file, or a part of one ({first_line(error)})") from error


def _as_utf8(path: Path, content: bytes) -> bytes:
    """The content without a byte order mark; UTF-16, which has one, as UTF-8."""
    try:
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return content.decode("utf-16").encode()
    except UnicodeError as error:
        raise ValueError(f"{path}: not UTF-16 text ({error})") from error
    return content.removeprefix(codecs.BOM_UTF8)


def _lines(content: bytes, *, is_json: bool) -> Iterator[FileRow]:
    # Bytes are split at \n, \r and \r\n only; a string also at characters that JSON has in its strings, as U+2028.
    for number, line in enumerate(content.splitlines(), start=1):
        where = f"line {number}"
        try:
            text = line.decode("utf-8").strip()
            if text:
                yield FileRow(where, json.loads(text) if is_json else text)
        except UnicodeDecodeError as error:
            yield FileRow(where, ValueError(f"not UTF-8 text ({error.reason})"))
        except json.JSONDecodeError as error:
            yield FileRow(where, ValueError(f"not JSON ({error.msg} at column {error.colno})"))
        except (ValueError, RecursionError) as error:  # an integer of thousands of digits; thousands of brackets
            yield FileRow(where, ValueError(f"not JSON that can be read ({first_line(error)})"))


def _document(content: bytes, *, wanted: bool) -> Sequence[object] | None:
    """Rows of a single JSON document: a list of them, or an object that holds one; None for JSON lines.

    Where a document is not `wanted`, only a list is one: an object is then a line.
    """
    if not content.lstrip().startswith((b"[", b"{") if wanted else b"["):
        return None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if isinstance(found, list):
        return [found] if found and all(map(is_message, found)) else found
    if has_prompt_field(found):
        return [found]
    values = list(found.values())
    if values and all(isinstance(value, dict) and has_prompt_field(value) for value in values):
        return values  # rows by their names
    for kind in (dict, str):
        lists = [value for value in values if isinstance(value, list) and value and isinstance(value[0], kind)]
        if len(lists) == 1:
            return list(lists[0])
    return [found]


def _parquet_rows(path: Path, compression: str) -> Iterator[FileRow]:
    source = pa.BufferReader(_unpacked(path, compression)) if compression else path
    try:
        names = pq.read_schema(source).names
        columns = [name for name in names if name.lower() in FIELDS]
        table = pq.read_table(source, columns=columns)
    except pa.ArrowException as error:
        raise ValueError(f"{path}: not a Parquet file ({first_line(error)})") from error
    if not has_prompt_field(columns):
        raise ValueError(f"{path}: needs one of {', '.join(PROMPT_FIELDS)}, has {', '.join(names) or 'no columns'}")
    for number, row in enumerate(table.to_pylist(), start=1):
        yield FileRow(f"row {number}", row)
