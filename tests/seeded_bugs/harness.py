"""A copy of the tree, a bug in it, and the tests that are asked whether they notice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from umim_core.errors import ConfigError

from .bug import SeededBug

ROOT: Final = Path(__file__).resolve().parents[2]
Suite = Literal["quick", "full"]
_SECONDS: Final = 540  # for one run of the named tests; a bug may make one wait for good
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+?::\S.*?)(?: - .*)?$", re.MULTILINE)
# Exit codes of pytest; others mean that it could not even collect. The last is `timeout`'s.
_GOOD, _BAD, _ENDLESS = 0, 1, 124


@dataclass(frozen=True)
class Finding:
    """What became of one bug.

    Attributes:
        name: The bug.
        kind: Its class.
        file: Where it was put.
        caught_by: The first test that failed; None if all passed.
        suite: Whether that test is a quick one, or marked full.
    """

    name: str
    kind: str
    file: str
    caught_by: str | None
    suite: Suite | None


class Harness:
    """Runs tests in a copy of the tree.

    Args:
        folder: Receives the copy.
        prefix: What a run of tests is started with, ``nice`` say.
    """

    def __init__(self, folder: Path, prefix: Sequence[str] = ()) -> None:
        self._copy, self._prefix = folder / "tree", tuple(prefix)
        self._passed: set[tuple[Suite, tuple[str, ...]]] = set()
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        for name in listed.stdout.decode().split("\0"):
            if name and (ROOT / name).is_file():
                (self._copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self._copy / name)

    def seed(self, bug: SeededBug, *, whole: bool = False) -> Finding:
        """Put a bug into the copy, ask its tests, and take it out again.

        Args:
            bug: What to change.
            whole: Ask every test, full ones too, if those named for the bug do not notice.
        """
        bug.check(self._copy)
        path = self._copy / bug.file
        before = path.read_text(encoding="utf-8")
        asked: list[tuple[Suite, tuple[str, ...]]]
        asked = [("quick", bug.tests), ("full", bug.full_tests)]
        runs = [(suite, tests) for suite, tests in asked if tests]  # none named: not all of them
        for suite, tests in runs:
            self._require_passing(suite, tests)
        runs += [("quick", ()), ("full", ())] if whole else []
        path.write_text(bug.apply(before), encoding="utf-8")
        try:
            for suite, tests in runs:
                failed = self._first_failure(suite, tests)
                if failed is not None:
                    return Finding(bug.name, bug.kind, bug.file, failed, suite)
        finally:
            path.write_text(before, encoding="utf-8")
        return Finding(bug.name, bug.kind, bug.file, None, None)

    def _require_passing(self, suite: Suite, tests: tuple[str, ...]) -> None:
        """Ask the undisturbed copy, once per set of tests."""
        if (suite, tests) in self._passed:
            return
        failed = self._first_failure(suite, tests)
        if failed is not None:
            raise ConfigError("tests must pass before a bug is seeded", failed, "Mend that first.")
        self._passed.add((suite, tests))

    def _first_failure(self, suite: Suite, tests: tuple[str, ...]) -> str | None:
        """Return the first test that fails; all tests are asked where none is named."""
        marked = ["-m", "full"] if suite == "full" else []
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", *marked, *tests]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self._copy),  # the tree is installed from another place
            "PYTHONDONTWRITEBYTECODE": "1",  # a change within a second would not be seen
            "OMP_NUM_THREADS": "1",
        }
        # What the prefix waits for, a lock say, is not the tests' time.
        done = subprocess.run(
            [*self._prefix, "timeout", str(_SECONDS), *command],
            cwd=self._copy,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == _ENDLESS:
            return f"a test of {', '.join(tests)} that never ends"
        if done.returncode == _GOOD:
            return None
        found = _FAILED.search(done.stdout)
        if done.returncode != _BAD or found is None:
            raise ConfigError(
                "the named tests must run",
                f"pytest ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-500:]}",
                "Mend the bug's entry: it must not break the import.",
            )
        return found[1]
