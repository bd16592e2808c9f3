"""Report of a pipeline run: one offline HTML page, the same as markdown, JSON.

``ReportData`` in, files out: nothing is measured, fetched or timed here, so equal data makes equal
bytes. ``report_figures.py`` draws, ``report_html.py`` and ``report_markdown.py`` write.
"""

from __future__ import annotations

import json
from pathlib import Path

from tasks.report.report_data import ReportData
from tasks.report.report_drawing import standalone
from tasks.report.report_figures import draw_figures
from tasks.report.report_html import render_html
from tasks.report.report_markdown import render_markdown
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
    write_bytes(out / "report.html", render_html(data, figures).encode())
    write_bytes(out / "report.md", render_markdown(data, figures).encode())
    write_json(out / "report.json", json.loads(data.model_dump_json()))
