"""Pages and figures of result files, each made of its file alone.

A result file says what it is: ``"benchmark": NAME`` or, as flows write it, ``"kind": "ablation"``
or ``"kind": "adaptation"``. A benchmark without a template is run no more: its page is no longer
made. A figure ends with the digest of the results that it was drawn from.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from docs.make.benchmark_rows import ROWS
from docs.make.document import RESULTS, Document
from tasks.paper.adaptation_page import adaptation_page, adaptation_svg
from tasks.report.ablation_page import FIGURES, AblationData, ablation_page, figure_svg
from tasks.report.charts import svg_file
from tasks.report.render import Report, page
from tasks.report.report_data import AttentionExample
from tasks.report.report_figures import ATTENTION, attention_figure
from umim_core.store.artifacts import sha256_bytes

TEMPLATES: Final = Path(__file__).parent / "templates"


def documents(folder: Path = RESULTS) -> list[Document]:
    """Return the pages and figures of all result files of a folder."""
    return [one for results in sorted(folder.glob("*.json")) for one in documents_of(results)]


def documents_of(results: Path) -> list[Document]:
    """Return the page and the figures of a result file; nothing for a file of another kind."""
    text = results.read_text(encoding="utf-8")
    report = json.loads(text)
    if not isinstance(report, dict):
        return []
    mark = f"<!-- results {sha256_bytes(text.encode())} -->\n"
    figures: dict[str, Callable[[], str]] = {}
    if report.get("kind") == "ablation":
        data = AblationData.model_validate(report)
        write_page = partial(ablation_page, data)
        figures = {f"{results.stem}-{name}": partial(figure_svg, data, name) for name in FIGURES}
    elif report.get("kind") == "adaptation":
        write_page = partial(adaptation_page, report, f"{results.stem}.svg")
        figures = {results.stem: partial(adaptation_svg, report)}
    elif (TEMPLATES / f"{report.get('benchmark')}.md").is_file():
        write_page = partial(benchmark_page, report)
        if example := report.get("attention"):
            figures = {f"{results.stem}-attention": partial(_attention_svg, example)}
    else:
        return []
    return [
        Document(results.with_suffix(".md"), write_page),
        *(Document(results.with_name(f"{s}.svg"), draw, mark) for s, draw in figures.items()),
    ]


def _attention_svg(example: Report) -> str:
    drawn = attention_figure(AttentionExample.model_validate(example))
    return svg_file(drawn, "attention", ATTENTION)


def benchmark_page(report: Report) -> str:
    """Return the page of a benchmark's results, its gates and its machine at the end."""
    name = report["benchmark"]
    rows = ROWS[name](report) if name in ROWS else {}
    parts = (
        page(f"{name}.md", report | rows, TEMPLATES),
        page("benchmark_end.md", report, TEMPLATES),
    )
    return "\n\n".join(parts) + "\n"
