"""A pickle that is seen to have been loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


class PickleBomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)
