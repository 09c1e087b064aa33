"""Devices: numbers on their way to one, and names of what the seconds of a step depend on."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

BFLOAT16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")
CPU_INSTRUCTIONS = (*BFLOAT16_INSTRUCTIONS, "avx512_f", "avx2")  # best first
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Device = str | int | torch.device


def best_device() -> str:
    """cuda where there is a GPU, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def to_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Torch's dtype, given by itself or its name; raises ValueError for one that models are not run in."""
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ValueError(f"dtype {dtype!r}: must be one of {', '.join(DTYPES)}")
    return found


def to_device(device: Device) -> torch.device:
    """Torch's device, given by itself, its name or a GPU's number; raises ValueError for one that is not here."""
    name = f"cuda:{device}" if type(device) is int else str(device)
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    here = ["cpu", *(("cuda", *gpus) if gpus else ())]
    if name not in (*here, "cpu:0"):
        raise ValueError(f"device {name!r}: must be one of {', '.join(here)}, which this machine has")
    return torch.device(name)


def dtype_name(dtype: torch.dtype) -> str:
    """float32, bfloat16, ..."""
    return str(dtype).removeprefix("torch.")


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's with its best instructions, and the number of threads.

    One name may stand for CPUs with and without instructions for bfloat16, a factor of three apart.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu = torch.cpu.get_capabilities()
    best = next((name for name in CPU_INSTRUCTIONS if cpu.get(name)), cpu.get("architecture"))
    return f"{cpu.get('cpu_name', device.type)} ({best}), {torch.get_num_threads()} threads"


def sent(host: Tensor, device: torch.device) -> Tensor:
    """A host's tensor on a device, queued there: the host does not wait. One that is there already is given back."""
    return host if host.device.type == device.type else host.pin_memory().to(device, non_blocking=True)


def tensor_on(device: torch.device, values: Sequence[Any]) -> Tensor:
    """A host's numbers on a device, `sent` there."""
    return sent(torch.tensor(values), device)
