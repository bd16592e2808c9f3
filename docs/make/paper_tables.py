"""``docs/results/paper-tables.md``: the paper's tables next to our committed results."""

from __future__ import annotations

from docs.make.document import RESULTS, Document
from tasks.paper.paper_page import paper_page


def documents() -> list[Document]:
    """Return the page."""
    return [Document(RESULTS / "paper-tables.md", lambda: paper_page(RESULTS).markdown)]
