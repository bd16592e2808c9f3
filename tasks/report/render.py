"""Pages from jinja2 templates: number formats, tables of rows, Markdown and HTML environments.

A template stands in a file and is given a result file's fields. It lists a table by its columns,
one per line, heading and cell, ``<`` before the heading of a column of text::

    {% call(r) table(walk(report, "sides.*side")) %}
    side             | {{ r.side }}
    time (quartiles) | {{ r.seconds|f(".2f s") }}
    {% endcall %}

A field that the results lack is an error wherever it is shown, unless ``f`` has a ``none``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from jinja2 import ChainableUndefined, Environment, FileSystemLoader, StrictUndefined, Undefined
from markupsafe import Markup

from tasks.report.tables import DASH, Table, table_markdown

Report = dict[str, Any]
TEMPLATES: Final = Path(__file__).parent / "templates"
_UNITS: Final = {"MiB": 2.0**20, "M": 1e6, "G": 1e9, "T": 1e12, "ms": 1e-3, "pct": 1e-2}
_SPREADS: Final = ("error", "stderr", "std")  # names of what stands behind a mean
_PROSE: Final = re.compile(r"(?!\||#|<|>|- |---|```|!\[)")


class _Missing(ChainableUndefined, StrictUndefined):
    """A field that the results lack: its own fields lack, too, and showing it is an error."""


def formatted(value: Any, spec: str = "", per: float = 1.0, none: str | None = None) -> str:
    """Return a number, a spread, or counts by order as a page shows it.

    Quartiles become ``1.00 s (0.90-1.10)``, a mean with its deviation or standard error
    ``9.0 ± 1.4``, other mappings their values as ``10 / 20 / 30``.

    Args:
        value: A number, text or mapping.
        spec: Format of Python, a unit behind a space.
        per: What the value is divided by.
        none: Text for a value that is absent; a missing field is an error without it.
    """
    if isinstance(value, Undefined) and none is None:
        return str(value)  # raises
    if value is None or isinstance(value, Undefined):
        return DASH if none is None else none
    number, space, unit = spec.partition(" ")

    def shown(one: Any, form: str = number) -> str:
        return format(one if per == 1.0 or isinstance(one, str) else one / per, form)

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
    """Yield what lies at a path, each entry's fields over those of what contains it.

    Args:
        values: Results.
        path: Names with dots between them; ``*side`` stands for every entry of a mapping or list,
            whose key or number becomes field ``side``.
        fields: Fields of what contains the values; the values themselves if None.
    """
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


def columns_table(rows: Iterable[Any], caller: Callable[[Any], str]) -> Table:
    """Return rows under columns that the body of a template's ``call`` block lists.

    Args:
        rows: What the body's argument stands for, row by row.
        caller: Renders the body for a row: a line per column, heading and cell with ``|`` between.
            The first column is one of text unless ``>`` stands before its heading.
    """
    heads: list[str] = []
    cells: list[tuple[str, ...]] = []
    for row in rows:
        lines = [line.partition("|") for line in caller(row).splitlines() if line.strip()]
        heads = [head.strip() for head, _, _ in lines]
        cells.append(tuple(cell.strip() for _, _, cell in lines))
    left = [place for place, head in enumerate(heads) if head.startswith("<")]
    left += [0] if heads and not heads[0].startswith((">", "<")) else []
    return Table("", tuple(head.lstrip("<> ") for head in heads), tuple(cells), "", tuple(left))


def _table(rows: Iterable[Any], caller: Callable[[Any], str]) -> str:
    table = columns_table(rows, caller)
    return f"{table_markdown(table)}\n" if table.rows else ""


@lru_cache
def environment(folder: Path = TEMPLATES, *, html: bool = False) -> Environment:
    """Return the environment of a folder's templates; those of this package are found, too."""
    made = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=html,  # noqa: S701  # Markdown is not HTML
        undefined=_Missing,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {
        "f": formatted,
        "total": lambda counts: sum(counts.values()),
        "combine": lambda fields, others: {**fields, **others},
    }
    made.globals |= {"table": _table, "walk": walk, **_UNITS}
    return made


def page(template: str, report: Mapping[str, Any], folder: Path = TEMPLATES) -> str:
    """Return a Markdown page.

    Args:
        template: Name of the file.
        report: Its fields; all together are ``report``.
        folder: Where the file lies.

    Raises:
        jinja2.UndefinedError: If the page shows a field that the report lacks.
    """
    return tidy(environment(folder).get_template(template).render(report, report=report))


def filled(text: str, values: Mapping[str, Any]) -> str:
    """Return a template that is data, such as a list of columns, with its fields filled in."""
    return environment().from_string(text).render(values)


def tidy(text: str) -> str:
    """Return Markdown with paragraphs and items on one line each, one blank line between blocks."""
    return "\n\n".join(_block(block) for block in re.split(r"\n\s*\n", text.strip()))


def _block(block: str) -> str:
    if block.startswith("- "):
        return re.sub(r"\n(?!- )\s*", " ", block)
    return " ".join(block.split()) if _PROSE.match(block) else block.strip("\n")


def html(template: str, values: Mapping[str, Any]) -> str:
    """Return an HTML page; values are escaped, :class:`markupsafe.Markup` is not."""
    return environment(html=True).get_template(template).render(values)


def asset(name: str) -> Markup:
    """Return a style sheet or script of this package, as part of an HTML page."""
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))  # noqa: S704  # our own file
