"""The report: which seeded bug was caught by which test, and what escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from .catalogue import BUGS
from .harness import ROOT, Finding

PAGE: Final = ROOT / "docs" / "results" / "seeded_bugs.md"
_HEAD: Final = """\
# Seeded bugs

Each bug is put into a copy of the tree by itself; then the tests of the part that it is in are run
until one fails. Without the bug they pass. `quick` tests are those of `make test`, `full` ones are
added by `make test-full`. Made by `python -m tests.seeded_bugs`.

"""
_NAMES: Final = {
    "method": "method",
    "resume": "stages, resuming, locks, ranks, tracking",
    "wiring": "wiring",
}


def load(path: Path) -> list[Finding]:
    """Return what an earlier run found, none where there was none."""
    if not path.is_file():
        return []
    return [Finding(**row) for row in json.loads(path.read_text(encoding="utf-8"))["bugs"]]


def merged(old: Iterable[Finding], new: Iterable[Finding]) -> list[Finding]:
    """Return the newest finding of every bug that still exists, in the catalogue's order."""
    newest = {finding.name: finding for finding in (*old, *new)}
    return [newest[bug.name] for bug in BUGS if bug.name in newest]


def counts(findings: Sequence[Finding]) -> dict[str, int]:
    """Return how many bugs were seeded, and caught by the quick tests and by all."""
    return {
        "seeded": len(findings),
        "caught_by_quick_tests": sum(finding.suite == "quick" for finding in findings),
        "caught": sum(finding.suite is not None for finding in findings),
    }


def write(findings: Sequence[Finding], page: Path) -> None:
    """Write the page, and the JSON of the same name."""
    found = {"counts": counts(findings), "bugs": [asdict(finding) for finding in findings]}
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    page.with_suffix(".json").write_text(text, encoding="utf-8")
    page.write_text(_HEAD + _totals(findings) + _table(findings), encoding="utf-8")


def _totals(findings: Sequence[Finding]) -> str:
    lines = ["| class | bugs | caught by quick tests | caught |", "|---|---|---|---|"]
    for kind, name in (*_NAMES.items(), ("", "all")):
        found = counts([finding for finding in findings if finding.kind == kind or not kind])
        lines.append(f"| {name} | {' | '.join(str(number) for number in found.values())} |")
    seeded = {finding.name for finding in findings}
    waiting = [bug.name for bug in BUGS if bug.name not in seeded]
    lines += ["", f"Not seeded yet: {'; '.join(waiting)}."] if waiting else []
    return "\n".join(lines) + "\n"


def _table(findings: Sequence[Finding]) -> str:
    lines = ["", "| bug | file | first test that fails | suite |", "|---|---|---|---|"]
    for finding in findings:
        test = "escaped" if finding.caught_by is None else f"`{finding.caught_by}`"
        lines.append(f"| {finding.name} | `{finding.file}` | {test} | {finding.suite or ''} |")
    return "\n".join(lines) + "\n"
