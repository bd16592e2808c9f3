"""Model cards of shipped checkpoints, from committed result files."""

from __future__ import annotations

from typing import Final

from docs.make.document import RESULTS, ROOT, Document
from docs.make.results import TEMPLATES, read_results, shipped_parts
from tasks.report.render import page

_ASSETS: Final = ROOT / "umim_core" / "embedded" / "assets"


def documents() -> list[Document]:
    """Return the card of every result file of a shipped checkpoint."""
    made = []
    for file in sorted(RESULTS.glob("*.json")):
        report = read_results(file)
        if report.get("benchmark") == "shipped_model":
            shown = report | shipped_parts(report)
            place = _ASSETS / report["checkpoint"] / "README.md"
            made.append(
                Document(place, lambda x=shown: page("shipped_card.md", x, TEMPLATES) + "\n")
            )
    return made
