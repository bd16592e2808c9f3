"""Pages declared as text: paragraphs and tables with fields that a result file fills.

A field is a path into the results, ``{corpus.tokens:,}``; ``@side`` in a path is the value of field
``side``. A conversion changes a number before it is formatted (``{peak_bytes!i:,.0f}`` is in MiB,
see ``_CONVERSIONS``). The format is Python's, with a unit behind a space (``{seconds:.2f s}``) and
words for a truth value (``{equal:yes|NO}``). Quartiles are shown as ``1.00 s (0.90-1.10)``, a mean
with its deviation or standard error as ``9.0 ± 1.4``, counts by order as ``10 / 20 / 30``. Where
the results lack a field, ``{error?none:.1%}`` shows what follows the ``?``; if nothing does, the
text is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from tasks.report.tables import Table, table_markdown

Report = dict[str, Any]
Part = Callable[[Report], str]
_FIELD: Final = re.compile(r"\{([^{}!:?]+)(\?[^{}!:]*)?(?:!(.))?(?::([^{}]*))?\}")
_CONVERSIONS: Final[dict[str, Callable[[Any], Any]]] = {
    "i": lambda value: value / 2**20,  # mebi
    "M": lambda value: value / 1e6,
    "G": lambda value: value / 1e9,
    "T": lambda value: value / 1e12,
    "m": lambda value: value * 1e3,  # milli
    "p": lambda value: value * 100,  # per cent
    "1": lambda value: value - 1,  # one less
    "n": int,
    "-": lambda value: value.replace("_", "-"),
}
_SPREADS: Final = ("error", "stderr", "std")  # names of what stands behind a mean


class _AbsentError(LookupError):
    """A field that may be absent is."""


def filled_in(template: str, values: Mapping[str, Any]) -> str:
    """Return a text with its fields filled in; empty if it needs an absent one.

    Args:
        template: Text with fields, see the head of this file.
        values: What the fields name.

    Raises:
        KeyError: If the values lack a field without ``?``.
    """

    def shown(match: re.Match[str]) -> str:
        path, default, conversion, spec = match.groups()
        value: Any = values
        for part in path.split("."):
            key = values[part[1:]] if part.startswith("@") else part
            value = None if value is None else value.get(key)
        if value is not None:
            return formatted(_converted(value, conversion), spec or "")
        if default is None:
            raise KeyError(f"the results have no {path!r}, which a page shows")
        if default == "?":
            raise _AbsentError(path)
        return str(default[1:])

    try:
        return _FIELD.sub(shown, template)
    except _AbsentError:
        return ""


def _converted(value: Any, conversion: str | None) -> Any:
    if conversion is None or value is None:
        return value
    if conversion == "+":
        return sum(value.values())
    if isinstance(value, Mapping):  # a spread
        return {name: _converted(number, conversion) for name, number in value.items()}
    return _CONVERSIONS[conversion](value)


def formatted(value: Any, spec: str) -> str:
    """Return a number, spread, truth value or text as a page shows it."""
    if isinstance(value, bool):
        return spec.split("|")[not value]
    spec, space, unit = spec.partition(" ")
    if not isinstance(value, Mapping):
        return format(value, spec) + space + unit
    if "median" in value:
        median, low, high = (format(value[name], spec) for name in ("median", "low", "high"))
        return f"{median}{space}{unit} ({low}-{high})"
    if "mean" in value:
        spread = next(name for name in _SPREADS if name in value)
        specs = {"mean": spec, spread: spec.lstrip("+")}
        known = [format(value[name], of) for name, of in specs.items() if value[name] is not None]
        return " ± ".join(known) + space + unit if known else "-"
    return " / ".join(format(number, spec) for number in value.values())


def walk(values: Any, path: str, fields: Mapping[str, Any] | None = None) -> Iterator[Report]:
    """Yield what lies at a path, each entry's fields over those of what contains it.

    Args:
        values: Results.
        path: Names with dots between them; ``*side`` stands for every entry of a mapping or list,
            whose key or number becomes field ``side``.
        fields: What is known above the values; the values themselves if None.
    """
    fields = values if fields is None else fields
    name, _, rest = path.partition(".")
    every = name.startswith("*")
    entries = values.items() if isinstance(values, Mapping) else enumerate(values)
    for key, value in entries if every else [(name, values[name])]:
        own = value if isinstance(value, Mapping) else {}
        found = {**fields, **own, **({name[1:]: key} if every else {})}
        if rest:
            yield from walk(value, rest, found)
        else:
            yield found


def page(
    text: str, **parts: Callable[[Report], str] | Callable[[Report], Iterable[Mapping[str, Any]]]
) -> Part:
    """Return what makes a page, or a part of one, of results.

    Blocks of the text have blank lines between them. A block that begins with ``@`` is a table:
    behind the sign stands where its rows lie (a path for :func:`walk`, or the name of a part that
    returns them); then one line per column, see :func:`filled_table`. Without columns, the named
    part returns the block itself. Any other block is a paragraph.

    Args:
        text: The page, with fields.
        parts: What a block or its rows are made by, by name.
    """
    blocks = [_block(block.strip(), parts) for block in text.split("\n\n")]
    return lambda report: "\n\n".join(filter(None, (block(report).strip() for block in blocks)))


def _block(text: str, parts: Mapping[str, Any]) -> Part:
    if not text.startswith("@"):
        return partial(filled_in, " ".join(text.split()))
    head, *lines = text.removeprefix("@").splitlines()
    where = head.strip()
    if not lines:
        return parts[where]

    def table(report: Report) -> str:
        found = parts[where](report) if where in parts else walk(report, where)
        return table_markdown(filled_table(lines, found))

    return table


def filled_table(lines: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Table:
    """Return rows under columns that are declared as text.

    Args:
        lines: One per column: the heading and the text of a cell with ``|`` between them, ``<``
            before the heading of a column of text. The first column is one unless ``>`` stands
            there.
        rows: What the fields of the cells name, for every row.
    """
    columns = [tuple(map(str.strip, line.split("|", 1))) for line in lines]
    heads = tuple(heading.lstrip("<> ") for heading, _ in columns)
    left = {index for index, (heading, _) in enumerate(columns) if heading.startswith("<")}
    left |= set() if columns[0][0].startswith(">") else {0}
    cells = tuple(tuple(filled_in(cell, row) for _, cell in columns) for row in rows)
    return Table("", heads, cells, "", tuple(left))


def each(path: str, part: Part) -> Part:
    """Return a part that is shown once for every entry at a path."""
    return lambda report: "\n\n".join(part(found) for found in walk(report, path))
