"""The report, section by section: each as HTML and as markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from tasks.report.comparison import ComparisonRow
from tasks.report.comparison_table import comparison
from tasks.report.report_data import CheckpointPlace, ReportData, SpanExample
from tasks.report.report_drawing import ReportFigure
from tasks.report.report_tables import tables
from tasks.report.tables import DASH, shown, table_html, table_markdown
from umim_core.checkpoint.next_steps import after_training
from umim_core.config.recipe import DEFAULT_TASK


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        title: Its heading.
        html: Its content as HTML.
        markdown: The same as markdown; figures bring headings of their own.
    """

    title: str
    html: str
    markdown: str


def sections(data: ReportData, figures: Sequence[ReportFigure]) -> Iterator[Section]:
    """Yield the sections that the data has something for."""
    if data.rows:
        table = comparison(data.rows, data.config)
        yield Section(table.title, table_html(table), table_markdown(table))
    if data.checkpoints:
        yield _checkpoints(data.checkpoints)
    if figures:
        yield _figures(figures)
    if data.examples:
        yield _examples(data.examples)
    for table in tables(data):
        yield Section(table.title, table_html(table), table_markdown(table))
    if data.host:
        facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in data.host.items())
        listed = "\n".join(f"- {name}: {fact}" for name, fact in data.host.items())
        yield Section("Machine", f"<dl>{facts}</dl>", listed)
    if data.config:
        text = json.dumps(data.config, indent=2, ensure_ascii=False, default=str)
        folded = _folded("Every setting of this run", f"<pre>{escape(text)}</pre>")
        yield Section("Recipe", folded, f"````json\n{text}\n````")


def tiles(row: ComparisonRow) -> str:
    """Return the figures of a row that lead the page, as HTML; empty where it has none."""
    task = next(iter(row.tasks), DEFAULT_TASK)
    found = [
        (shown(row.metric("token_reduction"), 1, scale=100) + " %", "token reduction"),
        (shown(row.metric("top1"), 3), "Top-1 agreement with the base model"),
        (
            f"{shown(row.metric('ppl_base'), 1)} → {shown(row.metric('ppl_umim'), 1)}",
            "perplexity, base → UMIM",
        ),
        (
            f"{shown(row.score('base', task), 1, scale=100)} → "
            f"{shown(row.score(row.setting, task), 1, scale=100)}",
            "task accuracy in %, base → UMIM",
        ),
        (shown(row.metric("prefill_speedup"), 2) + "×", "prefill speed, UMIM / base"),
    ]
    cells = "".join(
        f'<div class="tile"><b>{value}</b><span>{name}</span></div>'
        for value, name in found
        if value.strip(f"{DASH}→ %×")
    )
    label = escape(f"{row.label}, {row.setting}")
    return f'<div class="tiles">{cells}</div><p class="note">{label}</p>' if cells else ""


def _checkpoints(places: Sequence[CheckpointPlace]) -> Section:
    """Return where checkpoints lie and what to type; in HTML, all but the first are folded away."""
    html, texts = [], []
    for place in places:
        commands = [line.strip() for line in after_training(place.path) if line.startswith(" ")]
        label, path = f"{place.label}: ", place.path
        blocks = "".join(f'<pre class="command">{escape(line)}</pre>' for line in commands)
        html.append(f'<p class="note">{escape(label)}<code>{escape(path)}</code></p>{blocks}')
        texts.append("\n".join([f"{label}`{path}`\n\n```console", *commands, "```"]))
    notes = [line for line in after_training(places[0].path) if not line.startswith(" ")]
    first, *others = html
    parts = [first, *(f'<p class="note">{escape(note)}</p>' for note in notes)]
    if others:
        parts.append(_folded(f"Other checkpoints ({len(others)})", "".join(others)))
    return Section("Use the checkpoints", "\n".join(parts), "\n\n".join([*texts, *notes]))


def _figures(figures: Sequence[ReportFigure]) -> Section:
    drawn = "".join(
        f'<figure class="{"wide" if figure.wide else "half"}" id="figure-{figure.name}">'
        f"<h3>{escape(figure.title)}</h3>{figure.svg}"
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
        for figure in figures
    )
    texts = (
        f"### {figure.title}\n\n![{figure.title}](figures/{figure.name}.svg)\n\n{figure.caption}"
        for figure in figures
    )
    return Section("Figures", f'<div class="figures">{drawn}</div>', "\n\n".join(texts))


def _examples(examples: Sequence[SpanExample]) -> Section:
    html, texts = [], ["`⟦...⟧` marks tokens that became one unit."]
    marks = "".join(f'<span class="n{n}">{n} tokens, one unit</span>' for n in (2, 3, 4))
    html.append(f'<p class="soft key">{marks}unmarked: left as it was</p>')
    for example in examples:
        coloured = "".join(
            f'<span class="n{min(n, 4)}">{escape(piece)}</span>' if n > 1 else escape(piece)
            for piece, n in example.spans
        )
        html.append(
            f'<div class="spans">{coloured}</div><p class="note">{escape(example.caption)}</p>'
        )
        marked = "".join(f"⟦{text}⟧" if n > 1 else text for text, n in example.spans)
        texts.append(f"{example.caption}\n\n````text\n{marked}\n````")
    return Section("What gets merged", "\n".join(html), "\n\n".join(texts))


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{summary}</summary>{content}</details>"
