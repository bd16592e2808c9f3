"""Scores of one of the paper's tables as lines of a terminal, each next to its limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from tasks.report.tables import DASH, Column, make_table, table_text
from umim_core.evaluation.generated_text import REDUCTIONS

_DIFFERENCE: Final = "_difference"
_SHARES: Final = {"TR": "token_reduction", "cache TR": "cache_reduction", "shortfall": "shortfall"}


def score_lines(table: Mapping[str, Any]) -> list[str]:
    """Return a line per task and setting of the content of a ``table.json``.

    A figure is a mean over questions with its standard error, ``diff`` behind a metric is its
    paired difference to the first setting; ``4 x 256`` are four answers per question of at most 256
    tokens. TR is that of all tokens that were read or generated, a prompt's as often as it was
    answered; cache TR is what a policy dropped of the contexts' KV cache, and shortfall the part of
    contexts that a baseline should have dropped and could not. Tasks with other metrics stand in a
    table of their own; tasks that were not run and the figures of texts have lines of their own.
    """
    scores: Sequence[Mapping[str, Any]] = table["scores"]
    first = next(iter(table.get("settings") or ()), None)
    lines: list[str] = []
    for metrics, rows in _by_metrics(scores).items():
        lines += ["", *table_text(make_table("", _columns(metrics, first), rows)).splitlines()]
    unrun = [f"{score['task']}: {score['not_run']}" for score in scores if "not_run" in score]
    lines += dict.fromkeys(unrun)
    for text in table["texts"]:
        lines += [f"{text['text']}: {name} {value:.4g}" for name, value in text.items()
                  if not isinstance(value, str)]  # fmt: skip
    return lines[1:] if lines[:1] == [""] else lines


def _by_metrics(
    scores: Sequence[Mapping[str, Any]],
) -> dict[tuple[str, ...], list[Mapping[str, Any]]]:
    """Return the rows of tasks that were run by the metrics of a task, reductions aside."""
    of_tasks: dict[str, dict[str, None]] = {}
    for row in scores:
        names = [name for name, value in row.items() if isinstance(value, dict)]
        own = [name for name in names if not name.endswith(_DIFFERENCE) and name not in REDUCTIONS]
        of_tasks.setdefault(row["task"], {}).update(dict.fromkeys(own))
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in scores:
        if "not_run" not in row:
            found.setdefault(tuple(of_tasks[row["task"]]), []).append(row)
    return found


def _columns(metrics: Sequence[str], first: str | None) -> list[Column]:
    columns = [
        Column("task", lambda row: str(row["task"]), left=True),
        Column("setting", lambda row: str(row["setting"]), left=True),
        Column("questions", lambda row: _number(row.get("questions"))),
        Column("answers", _answers),
    ]
    for name in metrics:
        columns.append(Column(name, partial(_figure, name)))
        columns.append(Column("diff", partial(_difference, name, first)))
    for heading, name in _SHARES.items():
        columns.append(Column(heading, partial(_row_share, name)))
    return columns + [Column(name, partial(_mean_share, name)) for name in REDUCTIONS]


def _row_share(name: str, row: Mapping[str, Any]) -> str:
    return _share(row.get(name))


def _mean_share(name: str, row: Mapping[str, Any]) -> str:
    return _share(row[name]["mean"] if name in row else None)


def _figure(name: str, row: Mapping[str, Any]) -> str:
    return _mean(row.get(name))


def _difference(name: str, first: str | None, row: Mapping[str, Any]) -> str:
    """Return a difference to the first setting; a dash in that setting's own row."""
    return DASH if row["setting"] == first else _mean(row.get(f"{name}{_DIFFERENCE}"))


def _answers(row: Mapping[str, Any]) -> str:
    return f"{row['answers']} x {row['new_tokens']}" if "new_tokens" in row else DASH


def _number(value: int | None) -> str:
    return DASH if value is None else f"{value:,}"


def _share(value: float | None) -> str:
    return DASH if value is None else f"{value:.1%}"


def _mean(value: Mapping[str, float | None] | None) -> str:
    if value is None:
        return DASH
    known = [f"{number:.3f}" for number in (value["mean"], value["stderr"]) if number is not None]
    return " ± ".join(known)
