"""One seeded bug: a small change of the product that some test must notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from umim_core.errors import ConfigError

Kind = Literal["method", "resume", "wiring"]


@dataclass(frozen=True)
class SeededBug:
    """One change of one file.

    Attributes:
        name: What goes wrong, in words.
        kind: ``method``; ``resume`` (with stages, locks and tracking); ``wiring`` of flows.
        file: The file, from the root of the repository.
        old: Text that stands in it exactly once.
        new: What takes its place.
        tests: Quick test files that are expected to fail.
        full_tests: Test files with tests marked full, asked if no quick one fails.
    """

    name: str
    kind: Kind
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    full_tests: tuple[str, ...] = ()

    def apply(self, text: str) -> str:
        """Return the file's text with the bug."""
        found = text.count(self.old)
        if found != 1:
            raise ConfigError(
                f"the old text of {self.name!r} must stand once in {self.file}",
                f"{found} times",
                "Take the text that stands there now (tests/seeded_bugs).",
            )
        return text.replace(self.old, self.new)

    def check(self, root: Path) -> None:
        """Refuse a bug that does not apply, changes nothing or names tests that are not there."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        changed = self.apply(text)
        compile(changed, self.file, "exec")
        absent = [name for name in (*self.tests, *self.full_tests) if not (root / name).is_file()]
        if absent or changed == text:
            raise ConfigError(
                f"{self.name!r} must change its file and name test files",
                absent or "the same text",
                "Mend its entry in tests/seeded_bugs.",
            )
