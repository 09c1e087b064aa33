"""A decoder's layers in C on a CPU, compiled by the machine's own compiler when a model is prepared, in a second.

products.c multiplies with the weights; layer.c does what lies between: norms, rotation, storing keys and values,
attention. In both a row's results do not depend on the rows beside it, so that a token is the same alone, in a
batch, and verified in a tree, in bfloat16, too. Where there is no compiler, no x86-64 CPU with AVX2 or no fitting
shape, torch does all of it.
"""

import ctypes
import logging
import platform
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from blockpilot.models.cache import SlotView
from blockpilot.models.operations import Mask, Operations, Rotary

SOURCES = tuple(Path(__file__).with_name(name) for name in ("products.c", "layer.c"))
FLAGS = ("-O3", "-march=native", "-fPIC", "-fopenmp", "-Wno-psabi")
PANEL, INPUTS = 16, 32  # of which products.c takes multiples
QUERIES, LANES = 4, 16  # as in layer.c, where some CPUs have fewer lanes
MOST_ALONE = 1 << 14  # numbers that one thread works on sooner than others wake
_DEFINES = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}

_logger = logging.getLogger(__name__)


def operations_for(dtype: torch.dtype, device: torch.device, hidden_size: int, head_dim: int) -> Operations:
    """The quickest that there are for a model of these."""
    fits = hidden_size % LANES == 0 and head_dim % (2 * LANES) == 0
    library = _library_for(dtype, device) if fits else None
    return Operations() if library is None else NativeOperations(library)


class NativeProduct:
    """x [..., inputs] -> x @ weight.T + bias, with the weight [outputs, inputs] packed as products.c reads it."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> None:
        self._library, self._bias = library, bias
        self._num_outputs, self._num_inputs = weight.shape
        per_unit = 4 // weight.element_size()
        panels = weight.view(-1, PANEL, self._num_inputs // per_unit, per_unit)
        self._packed = panels.transpose(1, 2).contiguous()  # [panels, units, PANEL, inputs of a unit]

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        assert (x.dtype, x.shape[-1]) == (self._packed.dtype, self._num_inputs)
        out = x.new_empty(*x.shape[:-1], self._num_outputs)
        self._library.product(
            *(x.numel() // self._num_inputs, self._num_inputs, self._num_outputs),
            *(x.data_ptr(), self._packed.data_ptr(), None if self._bias is None else self._bias.data_ptr()),
            *(out.data_ptr(), torch.get_num_threads()),
        )
        return out

    def unpacked(self) -> Tensor:
        """The weight, a copy."""
        return self._packed.transpose(1, 2).reshape(self._num_outputs, self._num_inputs)


def native_product(weight: Tensor, bias: Tensor | None) -> NativeProduct | None:
    """For a weight [outputs, inputs] on a CPU; None where there is none."""
    num_outputs, num_inputs = weight.shape
    fits = num_outputs % PANEL == 0 and num_inputs % INPUTS == 0
    library = _library_for(weight.dtype, weight.device) if fits else None
    return None if library is None else NativeProduct(library, weight, bias)


class NativeOperations(Operations):
    """The functions of layer.c."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        assert all(x.is_contiguous() and x.shape == hidden.shape for x in (hidden, delta) if x is not None)
        out = torch.empty_like(hidden)
        added = None if delta is None else delta.data_ptr()
        rows, width = hidden.shape
        pointers = hidden.data_ptr(), added, weight.data_ptr()
        self._library.add_norm(rows, width, *pointers, eps, out.data_ptr(), _threads(hidden))
        return out

    def rotate_and_store(
        self, heads: Tensor, norms: Tensor | None, eps: float, rotary: Rotary, cache: SlotView, layer_idx: int
    ) -> Tensor:
        num_kv, (rows, num_all, dim) = cache.num_heads, heads.shape
        slots, columns = cache.places
        assert heads.is_contiguous()
        assert rows == len(slots) == len(rotary.cosines)
        layer = cache.layer(layer_idx)
        to_value, to_slot, to_head, _, _ = layer.stride()
        self._library.rotate_and_store(
            *(rows, num_all - 2 * num_kv, num_kv, dim, heads.data_ptr()),
            *(None if norms is None else norms.data_ptr(), eps),
            *(rotary.cosines.data_ptr(), rotary.sines.data_ptr()),
            *(layer.data_ptr(), slots.data_ptr(), columns.data_ptr(), to_slot, to_head, to_value),
            _threads(heads),
        )
        return heads[:, : -2 * num_kv]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Mask) -> Tensor:
        packing = mask.packing
        (num_tokens, num_heads, dim), (rows, num_kv, length, _) = query.shape, key.shape
        assert mask.visible.shape == (rows, 1, packing.width, length)
        groups = num_heads // num_kv
        room = -(-length // LANES) * LANES
        out = query.new_empty(num_tokens, num_heads * dim)
        threads = torch.get_num_threads()
        scores = torch.empty(threads * QUERIES * room)
        sizes, firsts = packing.spans
        self._library.attend(
            *(rows, sizes.data_ptr(), firsts.data_ptr(), packing.width, num_kv, groups, dim, length),
            *(query.data_ptr(), query.stride(0), key.data_ptr(), value.data_ptr(), key.stride(0), key.stride(1)),
            *(mask.visible.data_ptr(), scale, scores.data_ptr(), room, out.data_ptr(), threads),
        )
        return out


def _threads(numbers: Tensor) -> int:
    return 1 if numbers.numel() <= MOST_ALONE else torch.get_num_threads()


def _library_for(dtype: torch.dtype, device: torch.device) -> ctypes.CDLL | None:
    return _library(dtype) if device.type == "cpu" and dtype in _DEFINES else None


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The functions in C for a dtype; None, with a line in the log, where it cannot be."""
    try:
        _check_machine()
        with tempfile.TemporaryDirectory() as folder:
            _run(folder, "cc", *FLAGS, *_DEFINES[dtype], "-c", *map(str, SOURCES))
            # No OpenMP of its own: its calls find the one that torch brought, whose threads they share.
            _run(folder, "cc", "-shared", *(f"{source.stem}.o" for source in SOURCES), "-o", "native.so", "-lm")
            return _declared(ctypes.CDLL(str(Path(folder, "native.so"))))
    except (OSError, subprocess.SubprocessError, NotImplementedError) as error:
        _logger.warning("decoder layers by torch, which is slower: %s", error)
        return None


def _check_machine() -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine() != "x86_64" or not capability.startswith("AVX"):
        raise NotImplementedError(f"{platform.machine()} {capability}: an x86-64 CPU with AVX2 is needed")


def _run(folder: str, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command[:1])}: {done.stderr.strip()[-400:]}")


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    kinds = {"p": ctypes.c_void_p, "n": ctypes.c_long, "f": ctypes.c_float, "i": ctypes.c_int}
    for name, arguments in (
        ("product", "nnnppppi"),
        ("add_norm", "nnpppfpi"),
        ("rotate_and_store", "nnnnppfpppppnnni"),
        ("attend", "nppnnnnnpnppnnpfpnpi"),
    ):
        function = getattr(library, name)
        function.argtypes, function.restype = [kinds[kind] for kind in arguments], None
    return library
