"""Pages and figures of result files, each made of its file alone.

A result file says what it is: ``"benchmark": NAME`` or, as ``umim-ablate`` writes it,
``"kind": "ablation"``. A figure ends with the digest of the results that it was drawn from.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

from docs.make.benchmark_figures import capacity_figure, scaling_figure
from docs.make.benchmark_pages import PAGES, benchmark_page
from docs.make.document import RESULTS, Document
from docs.make.wikitext import wikitext_figure
from tasks.report.ablation_data import AblationData
from tasks.report.ablation_figures import figure_svg
from tasks.report.ablation_page import FIGURES, ablation_page
from tasks.report.page_template import Report
from tasks.report.report_drawing import ON_PAPER, STYLE, svg_file
from umim_core.store.artifacts import sha256_bytes

# Benchmark -> what draws its figure, the figure's file and title, and its style.
_FIGURES: Final[dict[str, tuple[Callable[[Report], Figure], str, str, dict[str, object]]]] = {
    "mining_scaling": (
        scaling_figure,
        "mining-scaling",
        "Time and memory of mining against tokens",
        STYLE,
    ),
    "cache_capacity": (
        capacity_figure,
        "cache_capacity",
        "Cache memory of a row, and rows that fit into the same memory",
        STYLE | ON_PAPER,
    ),
    "wikitext_rules": (
        wikitext_figure,
        "wikitext2-tr-against-rules",
        "Token reduction against number of rules",
        STYLE,
    ),
}


def documents(folder: Path = RESULTS) -> list[Document]:
    """Return the pages and figures of all result files of a folder."""
    return [made for results in sorted(folder.glob("*.json")) for made in documents_of(results)]


def documents_of(results: Path) -> list[Document]:
    """Return the page and the figures of a result file; nothing for a file of another kind."""
    text = results.read_text(encoding="utf-8")
    found = json.loads(text)
    if not isinstance(found, dict):
        return []
    mark = f"<!-- results {sha256_bytes(text.encode())} -->\n"
    figures: dict[str, Callable[[], str]] = {}
    if found.get("kind") == "ablation":
        data = AblationData.model_validate(found)
        page = partial(ablation_page, data)
        figures = {f"{results.stem}-{name}": partial(figure_svg, data, name) for name in FIGURES}
    elif (name := found.get("benchmark")) in PAGES:
        page = partial(benchmark_page, found)
        if name in _FIGURES:
            figures = {_FIGURES[name][1]: partial(benchmark_figure, found)}
    else:
        return []
    return [
        Document(results.with_suffix(".md"), page),
        *(Document(results.with_name(f"{s}.svg"), draw, mark) for s, draw in figures.items()),
    ]


def benchmark_figure(report: Report) -> str:
    """Return the figure of a benchmark's results as an SVG file."""
    draw, *about = _FIGURES[report["benchmark"]]
    return svg_file(partial(draw, report), *about)
