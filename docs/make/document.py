"""A generated document: where it lies, how it is made, whether it is current."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = ROOT / "docs" / "results"


@dataclass(frozen=True)
class Document:
    path: Path
    make: Callable[[], str]
    mark: str = ""

    def current(self) -> bool:
        """Return whether the file shows what it would be made of now."""
        if not self.path.is_file():
            return False
        text = self.path.read_text(encoding="utf-8")
        return text.endswith(self.mark) if self.mark else text == self.make()

    def write(self) -> None:
        self.path.write_text(self.make() + self.mark, encoding="utf-8")
