"""The table of missed gates in docs/performance.md, out of the results of benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from docs.make.document import RESULTS, ROOT, Document, with_blocks
from tasks.report.page_template import Report, page

_PAGE: Final = ROOT / "docs" / "performance.md"
_TABLE: Final = page(
    """\
@ rows
< results | {results}
missed    | {missed:,}
of        | {gates:,}
< furthest from the limit | {furthest}
""",
    rows=lambda report: report["rows"],
)


def documents() -> list[Document]:
    """Return docs/performance.md."""
    return [Document(_PAGE, _performance)]


def _performance() -> str:
    text = _PAGE.read_text(encoding="utf-8")
    return with_blocks(text, {"results:missed": missed_gates()})


def missed_gates(folder: Path = RESULTS) -> str:
    """Return a line for every result file that misses a gate; empty if none does.

    Args:
        folder: That of the result files.
    """
    rows = []
    for file in sorted(folder.glob("*.json")):
        gates = json.loads(file.read_text(encoding="utf-8")).get("gates", {})
        missed = {name: gate[:2] for name, gate in gates.items() if not gate[2]}
        if missed:
            rows.append(_row(file.stem, missed, len(gates)))
    return f"{_TABLE({'rows': rows})}\n" if rows else ""


def _row(stem: str, missed: dict[str, list[float]], gates: int) -> Report:
    worst = max(missed, key=lambda name: _times_off(*missed[name]))
    value, limit = missed[worst]
    return {
        "results": f"[{stem}](results/{stem}.md)",
        "missed": len(missed),
        "gates": gates,
        "furthest": f"{worst.replace('_', ' ')}: {value:g}, limit {limit:g}",
    }


def _times_off(value: float, limit: float) -> float:
    """Return how many times a value is above or below its limit."""
    low, high = sorted((value, limit))
    return high / low if low > 0 else float("inf")
