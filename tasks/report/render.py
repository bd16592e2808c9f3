"""Pages from jinja2 templates: number formats, tables of rows, Markdown and HTML environments.

A template stands in a file and is given a result file's fields. It lists a table by its columns,
one per line, heading and cell, ``<`` before the heading of a column of text, ``>`` before that of
numbers that say what a row is about::

    {% call(r) table(walk(report, "sides.*side")) %}
    side             | {{ r.side }}
    time (quartiles) | {{ r.seconds|f(".2f s") }}
    {% endcall %}

A field that the results lack is an error wherever it is shown, unless ``f`` has a ``none``.
"""

from __future__ import annotations

import math
import re
import textwrap
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from jinja2 import ChainableUndefined, Environment, FileSystemLoader, StrictUndefined, Undefined
from markdown_it import MarkdownIt
from markupsafe import Markup

DASH: Final = "–"
_WIDTH: Final = 100  # of what a terminal is shown
Report = dict[str, Any]
TEMPLATES: Final = Path(__file__).parent / "templates"
_UNITS: Final = {"MiB": 2.0**20, "M": 1e6, "G": 1e9, "T": 1e12, "ms": 1e-3, "pct": 1e-2}
_SPREADS: Final = ("error", "stderr", "std")  # names of what stands behind a mean
_PROSE: Final = re.compile(r"(?!\||#|<|>|- |---|```|!\[)")


@dataclass(frozen=True)
class Table:
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    left: tuple[int, ...] = (0,)  # columns of text
    names: int = 0  # leading columns that say what a row is about, if more than those of text


def _aligned(table: Table, lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return lines of cells with all cells of a column as wide as the widest, and at least 3."""
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    sides = [str.ljust if index in table.left else str.rjust for index in range(len(widths))]
    return [
        [side(cell, width) for cell, side, width in zip(line, sides, widths, strict=True)]
        for line in lines
    ]


def fitted(table: Table) -> Table:
    """Return a table whose longest texts are cut until it fits a terminal; their ends stay."""
    lines = [list(line) for line in (table.headings, *table.rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > _WIDTH:
        widest = max(table.left, key=widths.__getitem__)
        widths[widest] -= 1
        for line in lines:
            if len(line[widest]) > widths[widest]:
                line[widest] = f"{line[widest][: widths[widest] - 3]}…{line[widest][-2:]}"
    return replace(table, headings=tuple(lines[0]), rows=tuple(map(tuple, lines[1:])))


def table_text(table: Table) -> str:
    """Return a table for a terminal, the note below it, ending in a newline.

    A table of more than 100 columns of characters is shown in parts, one below the other; each
    begins with the columns that say what a row is about.
    """
    cells = _aligned(table, [table.headings, *table.rows])
    blocks = []
    for columns in _parts(table, [len(cell) for cell in cells[0]]):
        lines = ["  ".join(line[column] for column in columns).rstrip() for line in cells]
        blocks.append("\n".join(lines))
    note = "\n".join(textwrap.wrap(table.note, _WIDTH))
    return "\n\n".join(filter(None, [*blocks, note])) + "\n"


def _parts(table: Table, widths: Sequence[int]) -> list[list[int]]:
    """Return the columns of each part of a table: those that name a row, then some of the rest."""
    names = list(range(max(table.names, *(column + 1 for column in table.left), 0)))
    parts, room = [list(names)], _WIDTH - sum(widths[column] + 2 for column in names) + 2
    left = room
    for column in range(len(names), len(widths)):
        if widths[column] + 2 > left and len(parts[-1]) > len(names):
            parts.append(list(names))
            left = room
        parts[-1].append(column)
        left -= widths[column] + 2
    return parts


def table_markdown(table: Table) -> str:
    """Return a table and its note as GitHub-flavoured markdown; its columns are aligned."""
    rows = [[escaped(cell) for cell in row] for row in table.rows]
    head, *body = _aligned(table, [table.headings, *rows])
    ends = ["-" if index in table.left else ":" for index in range(len(head))]
    rule = ["-" * (len(cell) - 1) + end for cell, end in zip(head, ends, strict=True)]
    note = ["", escaped(table.note)] if table.note else []
    return "\n".join([*(f"| {' | '.join(line)} |" for line in (head, rule, *body)), *note])


def escaped(text: str) -> str:
    """Return text that markdown shows as it is."""
    return text.replace("|", "\\|").replace("*", "\\*")


class _Missing(ChainableUndefined, StrictUndefined):
    """A field that the results lack: its own fields lack, too, and showing it is an error."""


def formatted(value: Any, spec: str = "", per: float = 1.0, none: str | None = None) -> str:
    """Return a number, a spread, or counts by order as a page shows it.

    Quartiles become ``1.00 s (0.90-1.10)``, a mean with its deviation or standard error
    ``9.0 ± 1.4``, other mappings their values as ``10 / 20 / 30``.
    """
    if isinstance(value, Undefined) and none is None:
        return str(value)  # raises
    if value is None or isinstance(value, Undefined):
        return DASH if none is None else none
    number, space, unit = spec.partition(" ")

    def shown(one: Any, form: str = number) -> str:
        if per == 1.0 or isinstance(one, str):
            return format(one, form)
        return format(one * (1 / per) if per < 1.0 else one / per, form)  # 1 / 0.01 is 100

    if not isinstance(value, Mapping):
        if isinstance(value, float) and not math.isfinite(value):
            return DASH
        return shown(value) + space + unit
    if "median" in value:
        median, low, high = (shown(value[name]) for name in ("median", "low", "high"))
        return f"{median}{space}{unit} ({low}-{high})"
    if "mean" in value:
        spread = value[next(name for name in _SPREADS if name in value)]
        if value["mean"] is None:
            return DASH
        behind = "" if spread is None else f" ± {shown(spread, number.lstrip('+'))}"
        return shown(value["mean"]) + behind + space + unit
    return " / ".join(map(shown, value.values()))


def walk(values: Any, path: str, fields: Mapping[str, Any] | None = None) -> Iterator[Report]:
    """Yield what lies at a path, each entry's fields over those of what contains it."""
    fields = values if fields is None else fields
    name, _, rest = path.partition(".")
    every = name.startswith("*")
    entries = values.items() if isinstance(values, Mapping) else enumerate(values)
    for key, value in entries if every else [(name, values[name])]:
        own = value if isinstance(value, Mapping) else {}
        row = {**fields, **own, **({name[1:]: key} if every else {})}
        if rest:
            yield from walk(value, rest, row)
        else:
            yield row


def columns_table(
    rows: Iterable[Any], caller: Callable[[Any], str], *, measured: bool = False
) -> Table:
    """Return rows under columns that ``caller`` lists for each, as a template does.

    A column is of text if it is for any row; ``measured`` leaves out those of dashes alone.
    """
    lines = [
        [line.partition("|")[::2] for line in caller(row).splitlines() if line.strip()]
        for row in rows
    ]
    headings, columns, left, names = list[str](), list[list[str]](), list[int](), 0
    for place, column in enumerate(zip(*lines, strict=True)):
        cells = [cell.strip() for _, cell in column]
        if measured and set(cells) == {DASH}:
            continue
        first = place == 0 and not column[0][0].startswith(">")
        if first or any(head.startswith("<") for head, _ in column):
            left.append(len(columns))
        headings.append(column[0][0].strip(" <>"))
        columns.append(cells)
        if any(head.startswith(">") for head, _ in column):
            names = len(columns)
    rows = tuple(zip(*columns, strict=True))
    return Table(tuple(headings), rows, left=tuple(left), names=names)


def file_table(name: str, rows: Iterable[Any], **shared: Any) -> Table:
    """Return rows (``r``) under the columns that a file of templates lists, those with figures."""
    template = environment().get_template(name)
    return columns_table(rows, lambda row: template.render(shared, r=row), measured=True)


def data_table(columns: str, rows: Iterable[Report]) -> Table:
    """Return rows under columns that are data, listed as in a template; cells name the fields."""
    template = environment().from_string(columns)
    return columns_table(rows, lambda row: template.render(row, report=row))


def _table(rows: Iterable[Any], caller: Callable[[Any], str], measured: bool = False) -> str:
    table = columns_table(rows, caller, measured=measured)
    return f"{table_markdown(table)}\n" if table.rows else ""


@lru_cache
def environment(folder: Path = TEMPLATES, *, html: bool = False) -> Environment:
    """Return the environment of a folder's templates; those of this package are found, too."""
    jinja = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=html,  # noqa: S701  # Markdown is not HTML
        undefined=_Missing,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    jinja.filters |= {
        "f": formatted,
        "total": lambda counts: sum(counts.values()),
        "combine": lambda fields, others: {**fields, **others},
    }
    jinja.globals |= {"table": _table, "walk": walk, **_UNITS}
    return jinja


def page(template: str, report: Mapping[str, Any], folder: Path = TEMPLATES) -> str:
    return tidy(environment(folder).get_template(template).render(report, report=report))


def tidy(text: str) -> str:
    """Return Markdown with paragraphs and items on one line each, one blank line between blocks."""
    return "\n\n".join(_block(block) for block in re.split(r"\n\s*\n", text.strip()))


def _block(block: str) -> str:
    if block.startswith("- "):
        return re.sub(r"\n(?!- )\s*", " ", block)
    return " ".join(block.split()) if _PROSE.match(block) else block.strip("\n")


def html(template: str, values: Mapping[str, Any]) -> str:
    """Return an HTML page in one file: tables sort and filter, nothing is fetched.

    Values are escaped, :class:`markupsafe.Markup` is not.
    """
    script = (TEMPLATES / "tables.js").read_text(encoding="utf-8")
    digest = b64encode(sha256(script.encode()).digest()).decode()
    assets = {
        "script": Markup(script),  # noqa: S704  # our own file
        "script_digest": Markup(f"sha256-{digest}"),  # noqa: S704
        "style": Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),  # noqa: S704
    }
    return environment(html=True).get_template(template).render({**assets, **values})


def markdown_html(text: str) -> Markup:
    """Return Markdown as HTML; HTML in it is shown as text, and tables can be scrolled."""
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    html = html.replace("<table>", '<div class="scroll"><table>')
    return Markup(html.replace("</table>", "</table></div>"))  # noqa: S704  # the parser escapes
