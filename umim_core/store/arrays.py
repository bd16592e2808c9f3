"""Array files: memory-mapped, never unpickled, written whole or not at all."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from threading import Lock
from tokenize import TokenError
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import ArtifactError, require
from umim_core.store.disk import write_bytes

_PARSING: Final = Lock()  # of headers as Python, which 3.11 cannot do in two threads at once
# The header of the format is a Python literal; numpy parses it, and what is no literal raises any
# of these.
_MALFORMED: Final = (
    OSError, OverflowError, RecursionError, SyntaxError, TokenError, TypeError, ValueError,
)  # fmt: skip


def open_array(path: Path) -> NDArray[Any]:
    """Map an ``.npy`` file into memory, read-only; processes that open it share its pages."""
    rule = f"{path} must be a regular file"
    found = "a folder, pipe or device"
    remedy = "Build the artifact again."
    require(not path.exists() or path.is_file(), ArtifactError, rule, found, remedy)
    try:
        # Unlike np.load this opens .npy files only and can never reach the unpickler.
        with _PARSING:
            mapped = np.lib.format.open_memmap(path, mode="r")
        if mapped.offset + mapped.nbytes != path.stat().st_size:
            raise ValueError("it is longer than its header says")
        return np.asarray(mapped)
    except _MALFORMED as error:
        raise ArtifactError(
            f"{path} must be an .npy array", str(error), "Build the artifact again."
        ) from error


def save_array(path: Path, array: NDArray[Any]) -> None:
    """Write an ``.npy`` file, replacing what is there; its bytes are those of ``numpy.save``.

    numpy itself loses the reason where the disk refuses a write.
    """
    numbers = np.ascontiguousarray(array)
    header = array_header(numbers.dtype, numbers.shape)
    write_bytes(path, header, numbers.data, durable=False)


def array_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    stream = BytesIO()
    np.lib.format.write_array_header_1_0(
        stream, {"descr": dtype.str, "fortran_order": False, "shape": shape}
    )
    return stream.getvalue()
