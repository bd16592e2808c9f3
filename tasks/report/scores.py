"""Figures of a table of the paper for a terminal, made of its ``table.json`` alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tasks.report.render import Report, file_table, table_text
from umim_core.evaluation.sizes import REDUCTIONS

_DIFFERENCE: Final = "_difference"


def score_lines(table: Report) -> list[str]:
    """Return a line per task and setting of the content of a ``table.json``.

    A figure is a mean over questions with its standard error, ``diff`` behind a metric is its
    paired difference to the first setting; ``4 x 256`` are four answers per question of at most 256
    tokens. TR is that of all tokens that were read or generated, a prompt's as often as it was
    answered; cache TR is what a policy dropped of the contexts' KV cache, and shortfall the part of
    contexts that a baseline should have dropped and could not. Tasks with other metrics stand in a
    table of their own; tasks that were not run and the figures of texts have lines of their own.
    """
    scores: Sequence[Report] = table["scores"]
    shared = {"first": next(iter(table.get("settings") or ()), None), "reductions": REDUCTIONS}
    lines: list[str] = []
    for metrics, rows in _by_metrics(scores).items():
        columns = file_table("score_columns.txt", rows, metrics=metrics, **shared)
        lines += ["", *table_text(columns).splitlines()]
    unrun = [f"{score['task']}: {score['not_run']}" for score in scores if "not_run" in score]
    lines += dict.fromkeys(unrun)
    for text in table["texts"]:
        lines += [f"{text['text']}: {name} {value:.4g}" for name, value in text.items()
                  if not isinstance(value, str)]  # fmt: skip
    return lines[1:] if lines[:1] == [""] else lines


def _by_metrics(scores: Sequence[Report]) -> dict[tuple[str, ...], list[Report]]:
    """Return the rows of tasks that were run by the metrics of a task, reductions aside."""
    of_tasks: dict[str, dict[str, None]] = {}
    for row in scores:
        names = [name for name, value in row.items() if isinstance(value, dict)]
        own = [name for name in names if not name.endswith(_DIFFERENCE) and name not in REDUCTIONS]
        of_tasks.setdefault(row["task"], {}).update(dict.fromkeys(own))
    grouped: dict[tuple[str, ...], list[Report]] = {}
    for row in scores:
        if "not_run" not in row:
            grouped.setdefault(tuple(of_tasks[row["task"]]), []).append(row)
    return grouped
