"""Functions in C for a CPU, compiled by the machine's compiler when a model is first prepared, in a second or two.

products.c multiplies with the weights (tiles.c on CPUs with AMX), layers.c runs all layers of a decoder (experts.c
mixtures of experts), delta_net.c those with recurrent states, ranking.c ranks logits, linking.c applies a draft's
edges, growing.c grows draft trees, matching.c is prompt lookup. Without a compiler or an x86-64 CPU with AVX2,
there is no prompt lookup, and Python, torch and numpy replace the rest.
"""

import ctypes
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from blockpilot.device import dtype_name
from blockpilot.storage import CACHE, whole

Array = NDArray[Any]

FOLDER = Path(__file__).parent
SOURCES = tuple(
    FOLDER / f"{name}.c"
    for name in ("products", "tiles", "experts", "layers", "delta_net", "ranking", "linking", "growing", "matching")
)
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-fopenmp", "-Wno-psabi")
_DEFINES = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}

_NOTHING = ctypes.c_char * 0  # three times as fast as numpy's pointers

_logger = logging.getLogger(__name__)


class DtypeChoice(NamedTuple):
    """A dtype by its name, and the reason for it."""

    name: str
    why: str


def fastest_dtype(device: torch.device) -> DtypeChoice:
    """bfloat16 on a GPU that multiplies it, and on a CPU with exact layers in C; float32 elsewhere.

    Layers in C are memory-bound, or multiply in float32 equally fast from both dtypes: bfloat16 is faster even on
    CPUs without bfloat16 instructions. With torch it would be slower there, and exact up to rounding only.
    """
    if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return DtypeChoice("float32", "a GPU without bfloat16 products")
    if device.type != "cpu":
        return DtypeChoice("bfloat16", "a GPU")
    if reason := reason_without(torch.bfloat16, device):
        return DtypeChoice("float32", f"no layers in C: {reason}")
    return DtypeChoice("bfloat16", "layers in C")


def pick_dtype(dtype: str, device: torch.device | str) -> str:
    """Name of a dtype; "auto" is the fastest on this device."""
    return fastest_dtype(torch.device(device)).name if dtype == "auto" else dtype


def library_for(dtype: torch.dtype, device: torch.device) -> ctypes.CDLL | None:
    """The functions in C for a dtype; None if there are none."""
    library = _library_or_reason(dtype, device)
    return library if isinstance(library, ctypes.CDLL) else None


def text_library() -> ctypes.CDLL | None:
    """The functions of trees and texts, which take no tensors; None if there are none."""
    library = _library(torch.float32)
    return library if isinstance(library, ctypes.CDLL) else None


def has_functions() -> bool:
    """True if the functions of trees and texts are available."""
    return text_library() is not None


def pointer(values: "Array | array[int]") -> ctypes.Array[ctypes.c_char]:
    """An array as an argument of a C function; TypeError or ValueError if it is read-only or not contiguous."""
    return _NOTHING.from_buffer(values)  # type: ignore[arg-type]  # a buffer: numpy's types are older


def tensor_pointer(values: torch.Tensor | None) -> ctypes.c_void_p | None:
    """A contiguous tensor as an argument of a C function, NULL for None; the caller keeps it alive."""
    return None if values is None else ctypes.c_void_p(values.data_ptr())


def fields(kind: Any, *names: str) -> tuple[tuple[str, Any], ...]:
    """Fields of a struct that all have the same type."""
    return tuple((name, kind) for name in names)


def reason_without(dtype: torch.dtype, device: torch.device) -> str:
    """Reason why there are no functions in C for a dtype; empty if there are."""
    library = _library_or_reason(dtype, device)
    return library if isinstance(library, str) else ""


def _library_or_reason(dtype: torch.dtype, device: torch.device) -> ctypes.CDLL | str:
    if device.type != "cpu":
        return f"device {device.type}"
    return _library(dtype) if dtype in _DEFINES else dtype_name(dtype)


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | str:
    """The functions in C for a dtype, or the reason why there are none, which is logged."""
    try:
        _check_machine()
        # One library per dtype: the sources are compiled for one.
        return _kept(("cc", *FLAGS, *_DEFINES[dtype], "-c"))
    except (OSError, subprocess.SubprocessError, NotImplementedError) as error:
        is_missing = isinstance(error, FileNotFoundError) and error.filename == "cc"
        reason = "no C compiler" if is_missing else str(error)
        _logger.warning("decoder layers by torch, which is slower, and exact up to rounding: %s", reason)
        return reason


def _kept(command: Sequence[str]) -> ctypes.CDLL:
    """The library that an earlier process compiled from the same sources with the same compiler, or a new one."""
    file = CACHE / f"native-{_identity(command)}.so"
    with suppress(OSError):  # there is none, or it is damaged
        return ctypes.CDLL(str(file))
    with tempfile.TemporaryDirectory() as folder:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda source: _run(folder, *command, str(source)), SOURCES))
        # Not linked to OpenMP: its calls use torch's OpenMP, and so share its threads.
        _run(folder, "cc", "-shared", *(f"{source.stem}.o" for source in SOURCES), "-o", "native.so", "-lm")
        compiled = Path(folder, "native.so")
        try:
            with whole(file) as unfinished:
                shutil.copyfile(compiled, unfinished)
            return ctypes.CDLL(str(file))
        except OSError as error:
            _logger.info("compiled functions are not kept: %s", error)
        # Not first: the folder of temporary files may not be executable.
        return ctypes.CDLL(str(compiled))


def _identity(command: Sequence[str]) -> str:
    """Hash of all that a library depends on: sources, command, compiler and instructions of the CPU."""
    digest = hashlib.sha256(repr((command, sorted(torch.cpu.get_capabilities().items()))).encode())
    for file in sorted(FOLDER.glob("*.[ch]")):
        digest.update(file.read_bytes())
    digest.update(_run(".", "cc", "--version"))
    return digest.hexdigest()[:16]


def _check_machine() -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine() != "x86_64" or not capability.startswith("AVX"):
        raise NotImplementedError(f"{platform.machine()} {capability}: an x86-64 CPU with AVX2 is needed")


def _run(folder: str, *command: str) -> bytes:
    """The output of a command; raises OSError if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=60, check=False)
    if done.returncode:
        message = done.stderr[-400:].decode(errors="replace").strip()
        raise OSError(f"{command[0]}: {message or f'ended with status {done.returncode}'}")
    return done.stdout
