"""A pickle that is seen to have been loaded."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np


class PickleBomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


def write_bomb(path: Path, bomb: PickleBomb, how: str) -> None:
    """Write one to a file, "raw" or within an "array" of objects."""
    if how == "raw":
        path.write_bytes(pickle.dumps(bomb))
    else:
        np.save(path, np.array([bomb], dtype=object), allow_pickle=True)
