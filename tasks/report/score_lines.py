"""Scores of one of the paper's tables as lines of a terminal, each next to its limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tasks.report.tables import DASH, Column, make_table, table_text

_DIFFERENCE: Final = "_difference"


def score_lines(table: Mapping[str, Any]) -> list[str]:
    """Return a line per task, setting and metric, of the content of a ``table.json``.

    A figure is a mean over questions with its standard error, a difference is to the first setting;
    ``4 x 256`` are four answers per question of at most 256 tokens. TR is that of all tokens that
    were read or generated, a prompt's as often as it was answered. Texts have a line per figure.
    """
    columns = [
        Column("task", lambda row: str(row["task"]), left=True),
        Column("setting", lambda row: str(row["setting"]), left=True),
        Column("metric", lambda row: str(row["metric"]), left=True),
        Column("questions", lambda row: _number(row.get("questions"))),
        Column("answers", _answers),
        Column("TR", lambda row: _share(row.get("token_reduction"))),
        Column("mean", lambda row: _mean(row.get("value"))),
        Column("difference", lambda row: _mean(row.get("difference"))),
    ]
    lines: list[str] = []
    if rows := [row for score in table["scores"] for row in _by_metric(score)]:
        lines += table_text(make_table("", columns, rows)).splitlines()
    for text in table["texts"]:
        lines += [f"{text['text']}: {name} {value:.4g}" for name, value in text.items()
                  if not isinstance(value, str)]  # fmt: skip
    return lines


def _by_metric(score: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if "not_run" in score:
        yield {**score, "metric": score["not_run"]}
        return
    for name, value in score.items():
        if isinstance(value, dict) and not name.endswith(_DIFFERENCE):
            difference = score.get(f"{name}{_DIFFERENCE}")
            yield {**score, "metric": name, "value": value, "difference": difference}


def _answers(row: Mapping[str, Any]) -> str:
    return f"{row['answers']} x {row['new_tokens']}" if "new_tokens" in row else DASH


def _number(value: int | None) -> str:
    return DASH if value is None else f"{value:,}"


def _share(value: float | None) -> str:
    return DASH if value is None else f"{value:.1%}"


def _mean(value: Mapping[str, float | None] | None) -> str:
    if value is None:
        return DASH
    known = [f"{number:.3f}" for number in (value["mean"], value["std"]) if number is not None]
    return " ± ".join(known)
