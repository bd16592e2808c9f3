"""Report of a pipeline run: one offline HTML page, the same as markdown, JSON.

``ReportData`` in, files out: nothing is measured, fetched or timed here, so equal data makes equal
bytes. The page has no script and makes no request; it follows the reader's light or dark.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from tasks.report.html_page import html_page
from tasks.report.report_data import ReportData
from tasks.report.report_drawing import ReportFigure, standalone
from tasks.report.report_figures import draw_figures
from tasks.report.report_sections import sections, tiles
from umim_core.store.artifacts import write_json
from umim_core.store.disk import write_bytes


def write_report(out: Path, data: ReportData) -> None:
    """Write ``report.html``, ``report.md``, ``report.json`` and ``figures/*.svg``.

    Args:
        out: Directory, made if absent.
        data: What to show.
    """
    figures = draw_figures(data)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for figure in figures:
        write_bytes(out / "figures" / f"{figure.name}.svg", standalone(figure).encode())
    write_bytes(out / "report.html", _html(data, figures).encode())
    write_bytes(out / "report.md", _markdown(data, figures).encode())
    write_json(out / "report.json", json.loads(data.model_dump_json()))


def _html(data: ReportData, figures: Sequence[ReportFigure]) -> str:
    title = f"UMIM report: {data.recipe}"
    links = " · ".join(
        f'<a href="{escape(url, quote=True)}">{escape(name)}</a>'
        for name, url in data.addresses().items()
    )
    parts = [
        f"<header><h1>{escape(title)}</h1>"
        '<p class="soft">Prompts and KV caches of frozen language models, '
        "compressed by merging frequent token sequences.</p>",
        f"<p>{links}</p>" if links else "",
        tiles(data.rows[0]) if data.rows else "",
        "</header>",
        *(
            f"<section><h2>{escape(section.title)}</h2>\n{section.html}\n</section>"
            for section in sections(data, figures)
        ),
    ]
    body = "\n".join(part for part in parts if part)
    return html_page(title, body)


def _markdown(data: ReportData, figures: Sequence[ReportFigure]) -> str:
    parts = [
        f"# UMIM report: {data.recipe}",
        "\n".join(f"- [{name}]({url})" for name, url in data.addresses().items()),
        *(f"## {section.title}\n\n{section.markdown}" for section in sections(data, figures)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
