"""Reader of prompt files: formats by file ending, compression, text encodings.

An unreadable file raises ValueError; an unreadable row is yielded as a ValueError with the reason.
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
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # by pyarrow's names


class FileRow(NamedTuple):
    """A row's position in the file, "line 7" or "row 7", and its value, or a ValueError if it is unreadable."""

    where: str
    value: object


class FileName(NamedTuple):
    """Parts of a file's name: `Questions`, `.jsonl` and `gzip` of `Questions.JSONL.gz`; "" for a missing part."""

    stem: str
    ending: str
    compression: str

    @classmethod
    def of(cls, path: Path) -> "FileName":
        compression = COMPRESSIONS.get(path.suffix.lower(), "")
        uncompressed = path.with_suffix("") if compression else path
        return cls(uncompressed.stem, uncompressed.suffix.lower(), compression)


def read_rows(path: Path) -> Iterator[FileRow]:
    """Rows of a file whose ending is one of ENDINGS; blank lines are skipped."""
    _, ending, compression = FileName.of(path)
    if ending == ".parquet":
        return _parquet_rows(path, compression)
    content = _as_utf8(path, _unpacked(path, compression) if compression else path.read_bytes())
    if ending == ".txt":
        return _lines(content, is_json=False)
    document = _document(content, is_document=ending == ".json")
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
    """The content as UTF-8 without a byte order mark; UTF-16 is detected by its mark."""
    try:
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return content.decode("utf-16").encode()
    except UnicodeError as error:
        raise ValueError(f"{path}: not UTF-16 text ({error})") from error
    return content.removeprefix(codecs.BOM_UTF8)


def _lines(content: bytes, *, is_json: bool) -> Iterator[FileRow]:
    # bytes.splitlines splits at \n, \r and \r\n only; str.splitlines also at U+2028, which JSON strings may contain.
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
        except (ValueError, RecursionError) as error:  # an integer with thousands of digits; nesting thousands deep
            yield FileRow(where, ValueError(f"not JSON that can be read ({first_line(error)})"))


def _document(content: bytes, *, is_document: bool) -> Sequence[object] | None:
    """Rows of a single JSON document, a list of rows or an object that contains one; None for JSON lines.

    is_document: the file ending is that of a document; otherwise only a list is one, and objects are JSON lines.
    """
    if not content.lstrip().startswith((b"[", b"{") if is_document else b"["):
        return None
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if isinstance(document, list):
        return [document] if document and all(map(is_message, document)) else document
    if has_prompt_field(document):
        return [document]
    values = list(document.values())
    if values and all(isinstance(value, dict) and has_prompt_field(value) for value in values):
        return values  # an object that maps names to rows
    for kind in (dict, str):
        lists = [value for value in values if isinstance(value, list) and value and isinstance(value[0], kind)]
        if len(lists) == 1:
            return list(lists[0])
    return [document]


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
