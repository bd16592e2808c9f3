"""The report as one HTML page that opens offline: no script, no request, light and dark."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Final

from tasks.report.comparison import ComparisonRow
from tasks.report.comparison_table import DASH, comparison, shown
from tasks.report.report_data import CheckpointPlace, ReportData, SpanExample
from tasks.report.report_drawing import ReportFigure
from tasks.report.report_tables import commands, tables
from tasks.report.tables import Table

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --page: #ffffff;
  --card: #f6f7f9; --line: #d5d8dd; --grid: #d9dce1; --link: #2463b8;
  --n2: #d6e6fb; --n3: #fbe3c4; --n4: #cfeee0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9ca7b5; --page: #14181e;
  --card: #1b2129; --line: #323a45; --grid: #323a45; --link: #8ab8f5;
  --n2: #23436b; --n3: #5f431c; --n4: #1d5243; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 28px 72px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 20px; margin: 48px 0 12px; }
p { margin: 0 0 12px; }
a { color: var(--link); }
.soft, figcaption, .note { color: var(--soft); font-size: 14px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px;
  margin: 24px 0 0; }
.tile { background: var(--card); border-radius: 8px; padding: 14px 16px; }
.tile b { display: block; font-size: 25px; font-weight: 600; line-height: 1.25;
  font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 14px; }
code { overflow-wrap: anywhere; }
.scroll, figure.wide { overflow-x: auto; background:
  linear-gradient(90deg, var(--page) 40%, transparent) 0 0 / 40px 100% local no-repeat,
  linear-gradient(270deg, var(--page) 40%, transparent) 100% 0 / 40px 100% local no-repeat,
  linear-gradient(90deg, var(--line), transparent) 0 0 / 14px 100% scroll no-repeat,
  linear-gradient(270deg, var(--line), transparent) 100% 0 / 14px 100% scroll no-repeat; }
table { border-collapse: collapse; width: 100%; font-size: 14.5px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 7px 10px; text-align: right; white-space: nowrap; }
th { font-weight: 600; color: var(--soft); border-bottom: 1.5px solid var(--line);
  vertical-align: bottom; white-space: normal; }
td { border-bottom: 1px solid var(--line); }
th.l, td.l { text-align: left; }
th:first-child, td:first-child { padding-left: 0; }
.note { margin-top: 8px; }
.figures { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 28px 32px; }
figure { margin: 0; }
figure.wide { grid-column: 1 / -1; }
figure h3 { font-size: 16px; margin: 0 0 6px; }
figure svg { width: 100%; height: auto; display: block; }
figure.wide svg { min-width: 640px; }
figure.wide figcaption, figure.wide h3 { position: sticky; left: 0; }
figcaption { margin-top: 6px; }
.spans { background: var(--card); border-radius: 8px; padding: 14px 16px; margin: 0 0 10px;
  font: 14px/1.95 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.n2, .n3, .n4 { border-radius: 4px; padding: 2px 1px; margin: 0 1px;
  -webkit-box-decoration-break: clone; box-decoration-break: clone; }
.n2 { background: var(--n2); } .n3 { background: var(--n3); } .n4 { background: var(--n4); }
.key span { padding: 1px 8px; margin-right: 8px; color: var(--ink); }
pre { background: var(--card); border-radius: 8px; padding: 14px 16px; overflow-x: auto;
  font-size: 13px; line-height: 1.5; }
pre.command { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 0 10px; }
summary { cursor: pointer; margin-bottom: 12px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 0;
  font-size: 14.5px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 780px) { .figures { grid-template-columns: minmax(0, 1fr); }
  main { padding: 24px 16px 48px; } table { font-size: 13px; } th, td { padding: 6px 5px; } }
@media print { main { max-width: none; } figure, table, .spans { break-inside: avoid; } }
"""
# The browser itself refuses whatever the page might try to fetch.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def render_html(data: ReportData, figures: Sequence[ReportFigure]) -> str:
    """Return the page.

    Args:
        data: What to show.
        figures: What ``draw_figures`` made of it.
    """
    title = html.escape(f"UMIM report: {data.recipe}")
    parts = [
        f'<header><h1>{title}</h1><p class="soft">Prompts and KV caches of frozen language models, '
        "compressed by merging frequent token sequences.</p>",
        _links(data.addresses()),
        _tiles(data.rows[0]) if data.rows else "",
        "</header>",
    ]
    if data.rows:
        parts += ["<section><h2>Comparison</h2>", _table(comparison(data.rows)), "</section>"]
    parts.append(_checkpoints(data.checkpoints))
    if figures:
        shown_figures = "".join(_figure(figure) for figure in figures)
        parts.append(
            f'<section><h2>Figures</h2><div class="figures">{shown_figures}</div></section>'
        )
    if data.examples:
        parts += ["<section><h2>What gets merged</h2>", _key()]
        parts += [_example(example) for example in data.examples]
        parts.append("</section>")
    for table in tables(data):
        parts.append(f"<section><h2>{html.escape(table.title)}</h2>{_table(table)}</section>")
    parts.append(_facts(data))
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _links(links: dict[str, str]) -> str:
    safe = [
        f'<a href="{html.escape(url, quote=True)}">{html.escape(name)}</a>'
        for name, url in links.items()
    ]
    return f"<p>{' · '.join(safe)}</p>" if safe else ""


def _tiles(row: ComparisonRow) -> str:
    base, umim = row.metric("ppl_base"), row.metric("ppl_umim")
    accuracy = f"{shown(row.score('base'), 1, scale=100)} → "
    accuracy += shown(row.score(row.setting), 1, scale=100)
    tiles = [
        (shown(row.metric("token_reduction"), 1, scale=100) + " %", "token reduction"),
        (shown(row.metric("top1"), 3), "Top-1 agreement with the base model"),
        (f"{shown(base, 1)} → {shown(umim, 1)}", "perplexity, base → UMIM"),
        (accuracy, "task accuracy in %, base → UMIM"),
        (shown(row.metric("prefill_speedup"), 2) + "×", "prefill speed, UMIM / base"),
    ]
    known = [(value, name) for value, name in tiles if value.strip(f"{DASH}→ %×")]
    cells = "".join(f'<div class="tile"><b>{v}</b><span>{n}</span></div>' for v, n in known)
    label = html.escape(f"{row.label}, {row.setting}")
    return f'<div class="tiles">{cells}</div><p class="note">{label}</p>' if known else ""


def _checkpoints(places: Sequence[CheckpointPlace]) -> str:
    """Return where checkpoints lie and what to type; all but the first are folded away."""
    blocks = [
        f'<p class="note">{html.escape(place.label)}: <code>{html.escape(place.path)}</code></p>'
        + "".join(f'<pre class="command">{html.escape(line)}</pre>' for line in commands(place))
        for place in places
    ]
    if len(blocks) > 1:
        others = "".join(blocks[1:])
        fold = (
            f"<details><summary>Other checkpoints ({len(blocks) - 1})</summary>{others}</details>"
        )
        blocks = [blocks[0], fold]
    shown_blocks = "\n".join(blocks)
    return f"<section><h2>Use the checkpoints</h2>{shown_blocks}</section>" if blocks else ""


def _table(table: Table) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        opening = [
            f'<{tag} class="l">' if i in table.left else f"<{tag}>" for i in range(len(cells))
        ]
        pairs = zip(opening, cells, strict=True)
        return "".join(f"{start}{html.escape(cell)}</{tag}>" for start, cell in pairs)

    body = "".join(f"<tr>{line('td', cells)}</tr>" for cells in table.rows)
    note = f'<p class="note">{html.escape(table.note)}</p>' if table.note else ""
    return (
        f'<div class="scroll"><table><thead><tr>{line("th", table.headings)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{note}"
    )


def _figure(figure: ReportFigure) -> str:
    wide = ' class="wide"' if figure.wide else ""
    return (
        f'<figure{wide} id="figure-{figure.name}"><h3>{html.escape(figure.title)}</h3>{figure.svg}'
        f"<figcaption>{html.escape(figure.caption)}</figcaption></figure>"
    )


def _key() -> str:
    marks = "".join(f'<span class="n{n}">{n} tokens, one unit</span>' for n in (2, 3, 4))
    return f'<p class="soft key">{marks}unmarked: left as it was</p>'


def _example(example: SpanExample) -> str:
    text = "".join(
        f'<span class="n{min(n, 4)}">{html.escape(piece)}</span>' if n > 1 else html.escape(piece)
        for piece, n in example.spans
    )
    tokens = sum(n for _, n in example.spans)
    reduction = shown(example.token_reduction, 1, scale=100)
    note = f"{example.label}: {tokens} tokens, {len(example.spans)} units, TR {reduction} %"
    return f'<div class="spans">{text}</div><p class="note">{html.escape(note)}</p>'


def _facts(data: ReportData) -> str:
    parts = []
    if data.host:
        facts = "".join(
            f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in data.host.items()
        )
        parts.append(f"<section><h2>Machine</h2><dl>{facts}</dl></section>")
    if data.config:
        text = html.escape(json.dumps(data.config, indent=2, ensure_ascii=False, default=str))
        parts.append(
            "<section><h2>Recipe</h2><details><summary>Every setting of this run</summary>"
            f"<pre>{text}</pre></details></section>"
        )
    return "\n".join(parts)
