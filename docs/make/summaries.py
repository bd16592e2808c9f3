"""Pages that sum up several result files: all adaptations, and the gates that were missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from docs.make.document import RESULTS, ROOT, Document, with_blocks
from docs.make.results import TEMPLATES
from tasks.paper.adaptation_rows import adaptation_rows
from tasks.report.render import Report, page
from umim_core.adaptation.settings import ADAPTED, WT

_SETTINGS: Final = (WT, "WT + Rules", ADAPTED, "input-adapter", "lora")
_PERFORMANCE: Final = ROOT / "docs" / "performance.md"


def documents() -> list[Document]:
    """Return docs/performance.md, which lists missed gates."""

    def text() -> str:
        return with_blocks(_PERFORMANCE.read_text("utf-8"), {"results:missed": missed_gates()})

    return [Document(_PERFORMANCE, text)]


def adaptation_summary(folder: Path = RESULTS) -> str:
    """Return the page with a row of every result file of an adaptation; empty without one.

    Rows are shown at the lowest threshold that was run.
    """
    files, shown = [], []
    for file in sorted(folder.glob("adaptation-*.json")):
        report = _read(file)
        files.append({"name": report["name"], "stem": file.stem})
        for place in report["backbones"]:
            rows = adaptation_rows(place)
            lowest = min((row["tau"] for row in rows if row["tau"] is not None), default=None)
            own = {row["setting"]: row for row in rows if row["tau"] in (None, lowest)}
            shown.append({**report, **place, "rows": {x: own[x] for x in _SETTINGS if x in own}})
    values = {"files": files, "shown": shown}
    return page("adaptation_summary.md", values, TEMPLATES) + "\n" if files else ""


def missed_gates(folder: Path = RESULTS) -> str:
    """Return a line for every result file that misses a gate; empty if none does."""
    missed = []
    for file in sorted(folder.glob("*.json")):
        gates = _read(file).get("gates", {})
        own = {name: gate[:2] for name, gate in gates.items() if not gate[2]}
        if own:
            name = max(own, key=lambda name: _times_off(*own[name]))
            value, limit = own[name]
            counts = {"stem": file.stem, "missed": len(own), "gates": len(gates)}
            missed.append(counts | {"name": name, "value": value, "limit": limit})
    return page("missed_gates.md", {"missed": missed}, TEMPLATES) + "\n" if missed else ""


def _times_off(value: float, limit: float) -> float:
    """Return how many times a value is above or below its limit."""
    low, high = sorted((value, limit))
    return high / low if low > 0 else float("inf")


def _read(path: Path) -> Report:
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
