"""Parts of the benchmarks' pages: tables, spreads, gates and the machine."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.common import Report


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table, its columns aligned for the terminal; the first one is text."""
    lines = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def text(line: list[str]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return f"| {' | '.join(cells)} |"

    return "\n".join([text(lines[0]), text(rule), *map(text, lines[1:])])


def spread(values: dict[str, float], unit: str = "", digits: int = 2) -> str:
    """Return a median with its quartiles."""
    low, high = values["low"], values["high"]
    return f"{values['median']:.{digits}f}{unit} ({low:.{digits}f}-{high:.{digits}f})"


def gate_table(report: Report) -> str:
    """Return the gates and whether all results were equal."""
    rows = [
        [name.replace("_", " "), f"{value:,}", f"{limit:,}", "met" if passed else "missed"]
        for name, (value, limit, passed) in report["gates"].items()
    ]
    equal = "yes" if report["equal"] else "NO"
    return table(["gate", "value", "limit", ""], rows) + f"\n\nEqual results: {equal}."


def machine(report: Report) -> str:
    """Return where and with what was measured."""
    found = report["facts"]
    libraries = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    commit = f" Commit {found['commit'][:12]}." if found["commit"] else ""
    return f"Machine: {found['platform']}, {found['cores']} cores. {libraries}.{commit}"
