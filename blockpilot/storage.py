"""Atomic files on the local disk, or by URI (s3://, gs://, hdfs://, file://) on any file system of pyarrow.

A `Place` is a path or such a URI. Writes are atomic: a killed writer leaves either the complete file or none.
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
CACHE = Path.home() / ".cache" / "blockpilot"  # local files that can be made again


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary local path, which replaces `path` when the block ends without an error.

    A killed writer leaves only `.NAME.<random>.tmp` behind. Missing folders are created.
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
    """File system of a place and path in it; raises ValueError for a URI that pyarrow cannot open."""
    path = os.fspath(place)
    try:
        return _opened(path) if is_uri(path) else (LocalFileSystem(), os.path.abspath(path))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: {error}") from None


_opened = lru_cache(maxsize=256)(FileSystem.from_uri)


def join(place: Place, *names: str) -> str:
    """Path or URI of `names` below a place; a URI keeps its options, such as ?region=eu-1, at its end."""
    path, mark, options = os.fspath(place).partition("?") if is_uri(place) else (os.fspath(place), "", "")
    return "/".join([path.rstrip("/"), *names]) + mark + options


def is_file(place: Place) -> bool:
    return bool(_type(place) == FileType.File)


def is_folder(place: Place) -> bool:
    return bool(_type(place) == FileType.Directory)


def _type(place: Place) -> FileType:
    fs, path = located(place)
    return fs.get_file_info([path])[0].type


def file_names(place: Place, suffix: str = "", *, recursive: bool = True) -> list[str]:
    """Sorted paths of the files below a folder, relative to it; empty if the folder does not exist."""
    fs, path = located(place)
    infos = fs.get_file_info(FileSelector(path, allow_not_found=True, recursive=recursive))
    names = (info.path[len(path) :].lstrip("/") for info in infos if info.type == FileType.File)
    return sorted(name for name in names if name.endswith(suffix))


def read_bytes(place: Place) -> bytes:
    """Content of a file; raises OSError if it cannot be read."""
    fs, path = located(place)
    with fs.open_input_stream(path) as stream:
        return bytes(stream.read())


def write_bytes(place: Place, content: bytes | pa.Buffer) -> None:
    """Write a file atomically."""
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
    """Write a file unless it exists; returns True for exactly one of several concurrent callers.

    Local file systems create exclusively; a killed writer may leave an empty file there. pyarrow's other file systems
    cannot: the last writer wins, and every writer reads the file back after settle_s, which must be longer than a
    check and a write take (Fischer's mutual exclusion).
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
    """Temporary name that no other writer uses, on any host."""
    return f".{name}.{secrets.token_hex(8)}.tmp"


def delete(place: Place) -> None:
    """Delete a file if it exists."""
    if is_file(place):
        fs, path = located(place)
        fs.delete_file(path)


def remove_folder(folder: Path) -> None:
    """Delete a local folder atomically: it is renamed first, so a kill never leaves half of it under its name."""
    trash = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(trash, ignore_errors=True)  # left by a killed deletion
    if folder.exists():
        folder.rename(trash)
        shutil.rmtree(trash)


def write_text(place: Place, text: str) -> None:
    """Write a UTF-8 file atomically."""
    write_bytes(place, text.encode())


def remove_unfinished(folder: Place) -> None:
    """Delete the temporary files of killed writers below a folder; nobody may be writing there."""
    for name in file_names(folder, suffix=".tmp"):
        if name.rpartition("/")[2].startswith("."):
            delete(join(folder, name))


_SECRET = r"[^=&?#\s\"'\\]*(?:key|secret|token|sig|password|credential)[^=&?#\s\"'\\]*"  # name of a query parameter


def without_secrets(text: str) -> str:
    """A text or JSON without the credentials of its URLs: user names, passwords, and keys of presigned URLs."""
    text = re.sub(r"://[^/\s\"'\\]*@", "://***@", text)
    return re.sub(rf"([?&]{_SECRET}=)[^&#\s\"'\\]+", r"\1***", text, flags=re.IGNORECASE)


def first_line(error: Exception) -> str:
    """First line of an error's message, or its type if it has none, since libraries raise multi-line messages."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
