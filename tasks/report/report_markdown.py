"""The report as markdown: the same tables, the figures as files next to it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tasks.report.comparison_table import comparison_markdown, shown
from tasks.report.report_data import ReportData, SpanExample
from tasks.report.report_drawing import ReportFigure
from tasks.report.report_tables import commands, tables
from tasks.report.tables import escaped, table_markdown


def render_markdown(data: ReportData, figures: Sequence[ReportFigure]) -> str:
    """Return the report as GitHub-flavoured markdown.

    Args:
        data: What to show.
        figures: Shown as ``figures/<name>.svg``.
    """
    parts = [f"# UMIM report: {data.recipe}", ""]
    parts += [f"- [{name}]({url})" for name, url in data.addresses().items()]
    if data.rows:
        parts += ["## Comparison", "", comparison_markdown(data.rows)]
    if data.checkpoints:
        parts += ["## Use the checkpoints", ""]
        for place in data.checkpoints:
            parts += [
                f"{place.label}: `{place.path}`",
                "",
                "```console",
                *commands(place),
                "```",
                "",
            ]
    for figure in figures:
        parts += [f"## {figure.title}", "", f"![{figure.title}](figures/{figure.name}.svg)", ""]
        parts += [figure.caption, ""]
    if data.examples:
        parts += ["## What gets merged", "", "`⟦...⟧` marks tokens that became one unit.", ""]
        for example in data.examples:
            parts += [_caption(example), "", "````text", _marked(example), "````", ""]
    for table in tables(data):
        parts += [f"## {table.title}", "", table_markdown(table), "", escaped(table.note), ""]
    if data.host:
        parts += ["## Machine", "", *(f"- {name}: {fact}" for name, fact in data.host.items()), ""]
    if data.config:
        text = json.dumps(data.config, indent=2, ensure_ascii=False, default=str)
        parts += ["## Recipe", "", "````json", text, "````", ""]
    return "\n".join(parts)


def _caption(example: SpanExample) -> str:
    tokens = sum(n for _, n in example.spans)
    reduction = shown(example.token_reduction, 1, scale=100)
    return f"{example.label}: {tokens} tokens, {len(example.spans)} units, TR {reduction} %"


def _marked(example: SpanExample) -> str:
    return "".join(f"⟦{text}⟧" if n > 1 else text for text, n in example.spans)
