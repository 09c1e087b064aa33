"""Files on the local disk, or by URI (s3://, gs://, hdfs://, file://) on any file system that pyarrow knows.

A place is a path or such a URI. What is written is there whole or not at all, whenever the writer is killed.
"""

import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
from pyarrow.fs import FileSelector, FileSystem, FileType, LocalFileSystem

Place = str | os.PathLike[str]


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A local path to write to; what is written there takes the place of `path` when the block ends without an error.

    A writer that is killed leaves `.NAME.<random>.tmp` behind and nothing else. Missing folders are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(_unfinished_name(path.name))
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def is_uri(place: Place) -> bool:
    return "://" in os.fspath(place)


def located(place: Place) -> tuple[FileSystem, str]:
    """File system and path there; raises ValueError for a URI that pyarrow cannot open."""
    path = os.fspath(place)
    try:
        return _opened(path) if is_uri(path) else (LocalFileSystem(), os.path.abspath(path))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: {error}") from None


_opened = lru_cache(maxsize=256)(FileSystem.from_uri)


def join(place: Place, *names: str) -> str:
    """A place below another."""
    return "/".join([os.fspath(place).rstrip("/"), *names])


def is_file(place: Place) -> bool:
    return bool(_type(place) == FileType.File)


def is_folder(place: Place) -> bool:
    return bool(_type(place) == FileType.Directory)


def _type(place: Place) -> FileType:
    fs, path = located(place)
    return fs.get_file_info([path])[0].type


def file_names(place: Place, suffix: str = "", *, recursive: bool = True) -> list[str]:
    """Files below a folder, as paths relative to it, in order; none where there is no folder."""
    fs, path = located(place)
    found = fs.get_file_info(FileSelector(path, allow_not_found=True, recursive=recursive))
    names = (info.path[len(path) :].lstrip("/") for info in found if info.type == FileType.File)
    return sorted(name for name in names if name.endswith(suffix))


def read_bytes(place: Place) -> bytes:
    """A file's content; raises OSError."""
    fs, path = located(place)
    with fs.open_input_stream(path) as stream:
        return bytes(stream.read())


def write_bytes(place: Place, content: bytes | pa.Buffer) -> None:
    """Write a file whole or not at all."""
    if not is_uri(place):
        with whole(Path(place)) as unfinished:
            unfinished.write_bytes(content)
        return
    fs, path = located(place)
    folder, _, name = path.rpartition("/")
    unfinished_path = f"{folder}/{_unfinished_name(name)}"
    fs.create_dir(folder)
    with fs.open_output_stream(unfinished_path) as stream:
        stream.write(content)
    fs.move(unfinished_path, path)


def create(place: Place, content: bytes, settle_s: float = 2.0) -> bool:
    """Write a file unless it is there; returns whether this caller wrote it, which of several is one.

    Exclusive on local file systems, where a writer that is killed may leave an empty file. pyarrow's others have no
    such call: there the last writer's stands, and each reads back after settle_s, which must be longer than a check
    and a write take (Fischer's mutual exclusion).
    """
    fs, path = located(place)
    if isinstance(fs, LocalFileSystem):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(path, "xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        return True
    if is_file(place):
        return False
    write_bytes(place, content)
    time.sleep(settle_s)
    return is_file(place) and read_bytes(place) == content


def _unfinished_name(name: str) -> str:
    """Name that no other writer uses, on whatever host."""
    return f".{name}.{secrets.token_hex(8)}.tmp"


def delete(place: Place) -> None:
    """Delete a file, if it is there."""
    if is_file(place):
        fs, path = located(place)
        fs.delete_file(path)


def remove_folder(folder: Path) -> None:
    """Delete a local folder: under its name it is there whole or not at all, whenever this is killed."""
    gone = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)  # what a kill left
    if folder.exists():
        folder.rename(gone)
        shutil.rmtree(gone)


def write_text(place: Place, text: str) -> None:
    """Write a UTF-8 file whole or not at all."""
    write_bytes(place, text.encode())


def remove_unfinished(folder: Place) -> None:
    """Delete what killed writers left anywhere below a folder. Only before anybody writes there."""
    for name in file_names(folder, suffix=".tmp"):
        if name.rpartition("/")[2].startswith("."):
            delete(join(folder, name))


_SECRET = r"[^=&?#\s\"'\\]*(?:key|secret|token|sig|password|credential)[^=&?#\s\"'\\]*"  # name of a query parameter


def without_secrets(text: str) -> str:
    """A text, or JSON, whose addresses have lost their user names and passwords, presigned ones also their keys."""
    text = re.sub(r"://[^/\s\"'\\]*@", "://***@", text)
    return re.sub(rf"([?&]{_SECRET}=)[^&#\s\"'\\]+", r"\1***", text, flags=re.IGNORECASE)


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type where it has none: libraries write paragraphs."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
