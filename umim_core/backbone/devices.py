"""Devices of this machine, in one place: a name that is not among them is refused."""

from __future__ import annotations

import gc
import sys
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from umim_core.errors import ConfigError

if TYPE_CHECKING:
    import torch

BFLOAT16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # bf16: ARM's name
_FLAGS: Final = ("flags", "Features")  # what x86 and ARM call them in /proc/cpuinfo
_WITHOUT_FLOAT64: Final = frozenset({"mps"})


def has_device(name: str) -> bool:
    """Return whether this machine has a device that models can run on, by torch's name for it."""
    import torch

    try:
        device = torch.device(name)
        kind = torch.get_device_module(device)
    except RuntimeError:  # no such name, or nothing can run there, as on meta
        return False
    return bool(kind.is_available()) and (device.index or 0) < int(kind.device_count())


def computes_bfloat16(name: str) -> bool:
    """Return whether a device has instructions for products in bfloat16.

    A processor without them imitates them: a training step of SmolLM2-135M took 76 s so, and 9 s in
    float32.
    """
    import torch

    if torch.device(name).type != "cpu":
        return True
    is_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return is_supported is not None and bool(is_supported())  # None: torch built without it


def fastest_dtype(name: str) -> Literal["bfloat16", "float32"]:
    """Return the data type that a device computes a frozen model fastest in.

    ========================================  ========
    device                                    type
    ========================================  ========
    GPU with products in bfloat16             bfloat16
    processor with one of ``BFLOAT16_FLAGS``  bfloat16
    everything else                           float32
    ========================================  ========
    """
    import torch

    kind = torch.device(name).type
    if kind == "cuda":
        fast = has_device("cuda") and torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_products = kind == "cpu" and not BFLOAT16_FLAGS.isdisjoint(processor_flags())
        fast = has_products and computes_bfloat16(name)
    return "bfloat16" if fast else "float32"


@cache
def processor_flags() -> frozenset[str]:
    """Return the features that Linux lists of the first processor; none on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    named = (line.partition(":") for line in lines)
    return next((frozenset(v.split()) for k, _, v in named if k.strip() in _FLAGS), frozenset())


def usable_device(name: str) -> str:
    if not has_device(name):
        gpus = gpu_count()
        names = ", ".join(["cpu", "cuda", *(f"cuda:{number}" for number in range(gpus))])
        rule = f"device must be {names if gpus else 'cpu: there is no usable GPU'}"
        raise ConfigError(rule, name or "''", "Choose such a device, or leave it out.")
    return name


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count() if has_device("cuda") else 0


def default_device() -> str:
    return "cuda" if has_device("cuda") else "cpu"


def float64_device(device: torch.device) -> torch.device:
    """Return where numbers of a device can be computed in float64: there, or on the CPU.

    Apple's GPUs (``mps``) have no float64.
    """
    import torch

    return torch.device("cpu") if device.type in _WITHOUT_FLOAT64 else device


def forked_generators(device: torch.device) -> AbstractContextManager[None]:
    """Return a context behind which torch's generators of the CPU and of a GPU are as before."""
    import torch

    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def release_memory() -> None:
    """Give back the GPU memory that nothing uses any more; other processes may need it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()  # models refer to themselves
        torch.cuda.empty_cache()
