"""A generated document: where it lies, how it is made, whether it is current."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
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


def with_blocks(text: str, blocks: Mapping[str, str]) -> str:
    """Return a text whose blocks between ``<!-- NAME -->`` and ``<!-- /NAME -->`` are made anew."""
    for name, block in blocks.items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = between.sub(lambda match, block=block: match[1] + block + match[2], text)
    return text
