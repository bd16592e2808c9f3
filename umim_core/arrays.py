"""Array files: opened as what they are, memory-mapped, never unpickled."""

from __future__ import annotations

from pathlib import Path
from tokenize import TokenError
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import ArtifactError

# The header of the format is a Python literal; numpy parses it, and what is no literal raises any
# of these.
_MALFORMED: Final = (
    OSError,
    OverflowError,
    RecursionError,
    SyntaxError,
    TokenError,
    TypeError,
    ValueError,
)


def open_array(path: Path) -> NDArray[Any]:
    """Map an ``.npy`` file into memory, read-only; processes that open it share its pages.

    Raises:
        ArtifactError: If it is missing, torn or no ``.npy`` file, or holds Python objects.
    """
    try:
        # Unlike np.load this opens .npy files only and can never reach the unpickler.
        return np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except _MALFORMED as error:
        raise ArtifactError(
            f"{path} must be an .npy array", str(error), "Build the artifact again."
        ) from error
