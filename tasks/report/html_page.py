"""Skeleton of an HTML page: style and policy; no script, no request, the reader's light or dark."""

from __future__ import annotations

import re
from html import escape
from typing import Final

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


def html_page(title: str, body: str) -> str:
    """Return a whole page.

    Args:
        title: As plain text.
        body: HTML of the page's main part.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def inline_html(text: str) -> str:
    """Return a line of markdown as HTML: code, bold text and links to places of the page."""
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    marked = re.sub(r"\[([^\]]+)\]\((#[\w-]+)\)", r'<a href="\2">\1</a>', marked)
    return re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", marked)
