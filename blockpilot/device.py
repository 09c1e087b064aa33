"""Devices and dtypes: lookup by name, free memory, transfers to a device, and device names for stored step costs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

CPU_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512_f", "avx2")  # best first
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Device = str | int | torch.device
MEMORY_FILE = Path("/proc/meminfo")  # Linux
CONTAINER = Path("/sys/fs/cgroup")  # limits of a container (cgroup version 2)


def best_device() -> str:
    """cuda if there is a GPU, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def to_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """torch.dtype by name, or itself; raises ValueError for one that is not in DTYPES."""
    torch_dtype = DTYPES.get(str(dtype).removeprefix("torch."))
    if torch_dtype is None:
        raise ValueError(f"dtype {dtype!r}: must be one of {', '.join(DTYPES)}")
    return torch_dtype


def to_device(device: Device) -> torch.device:
    """torch.device by name or GPU number, or itself; raises ValueError for one that this machine does not have."""
    name = f"cuda:{device}" if type(device) is int else str(device)
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    available = ["cpu", *(("cuda", *gpus) if gpus else ())]
    if name not in (*available, "cpu:0"):
        raise ValueError(f"device {name!r}: must be one of {', '.join(available)}, which this machine has")
    return torch.device(name)


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype without the torch prefix, such as float32."""
    return str(dtype).removeprefix("torch.")


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's name with its best instructions and the number of threads.

    CPUs with the same name may differ in bfloat16 instructions, which is a factor of three in speed.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu = torch.cpu.get_capabilities()
    best_instructions = next((name for name in CPU_INSTRUCTIONS if cpu.get(name)), cpu.get("architecture"))
    return f"{cpu.get('cpu_name', device.type)} ({best_instructions}), {torch.get_num_threads()} threads"


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU, or of a Linux machine or container; None if unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # cached by torch
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return min((free for free in (_available_bytes(), _left_in_container()) if free is not None), default=None)


def _available_bytes() -> int | None:
    if not MEMORY_FILE.exists():
        return None
    lines = MEMORY_FILE.read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _left_in_container() -> int | None:
    """Bytes that a container may still use, not counting its file cache, which yields; None without a limit."""
    try:
        limit, used = ((CONTAINER / name).read_text().strip() for name in ("memory.max", "memory.current"))
        parts = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if not limit.isdecimal():  # "max"
        return None
    return max(0, int(limit) - int(used) + int(parts["file"]) - int(parts["shmem"]))


def gib(num_bytes: float) -> str:
    """Bytes as text, such as 1.5 GiB."""
    return f"{num_bytes / 2**30:.1f} GiB"


def sent(host: Tensor, device: torch.device) -> Tensor:
    """A host tensor copied to a device asynchronously; returned unchanged if it is already there."""
    return host if host.device.type == device.type else host.pin_memory().to(device, non_blocking=True)


def tensor_on(device: torch.device, values: Sequence[Any]) -> Tensor:
    """Host values as a tensor on a device, copied asynchronously; floats become float32."""
    # After a target pass, when the CPU's caches hold its weights, torch.tensor takes twice as long as a NumPy array.
    host = torch.from_numpy(np.array(values))
    return sent(host.float() if host.is_floating_point() else host, device)
