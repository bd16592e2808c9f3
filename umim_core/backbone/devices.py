"""Devices of this machine, in one place: a name that is not among them is refused."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from umim_core.errors import ConfigError

if TYPE_CHECKING:
    import torch

_WITHOUT_FLOAT64: Final = frozenset({"mps"})


def has_device(name: str) -> bool:
    """Return whether this machine has a device that models can run on.

    Args:
        name: As torch names it: ``cpu``, ``cuda``, ``cuda:1`` and so on.
    """
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

    Args:
        name: As torch names it.
    """
    import torch

    if torch.device(name).type != "cpu":
        return True
    found = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # torch built without it
    return found is not None and bool(found())


def usable_device(asked: str) -> str:
    """Return the device asked for.

    Raises:
        ConfigError: If this machine has no such device.
    """
    if not has_device(asked):
        gpus = gpu_count()
        found = ", ".join(["cpu", "cuda", *(f"cuda:{number}" for number in range(gpus))])
        raise ConfigError(
            f"device must be {found if gpus else 'cpu: there is no usable GPU'}",
            asked,
            "Choose such a device, or leave it out.",
        )
    return asked


def gpu_count() -> int:
    """Return how many GPUs this machine has."""
    import torch

    return torch.cuda.device_count() if has_device("cuda") else 0


def default_device() -> str:
    """Return ``cuda`` where there is one, else ``cpu``."""
    return "cuda" if has_device("cuda") else "cpu"


def float64_device(device: torch.device) -> torch.device:
    """Return where numbers of a device can be computed in float64: there, or on the CPU.

    Args:
        device: Where the numbers are; Apple's GPUs (``mps``) have no float64.
    """
    import torch

    return torch.device("cpu") if device.type in _WITHOUT_FLOAT64 else device


def forked_generators(device: torch.device) -> AbstractContextManager[None]:
    """Return a context behind which torch's generators of the CPU and of a GPU are as before."""
    import torch

    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def release_memory() -> None:
    """Give back the GPU memory that nothing uses any more; other processes may need it."""
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # theirs
        gc.collect()  # models refer to themselves
        torch.cuda.empty_cache()
