"""The page of the paper's tables: marks, ours apart, reasons, and where our figures come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.report.paper import Ours, PaperTable, paper_page, paper_tables
from tasks.run.recipes import recipe_names
from umim_core.errors import ConfigError
from umim_core.evaluation.sizes import REDUCTIONS
from umim_core.evaluation.text_metrics import KINDS, TEXT_METRICS
from umim_core.task_sets.generation_spec import GENERATION_TASKS

TABLE = """\
label: tab:x
title: Of x
caption: Of x and y.
columns: [{name: Model}, {name: Acc, unit: "%", digits: 1}, {name: TR, digits: 0}]
rows: [[Llama, 50.0, null], [Other, 1234.5, 7]]
unsound: [{columns: [Acc], rows: [[Other]], reason: Of another reading.}]
ours:
  - file: scores.json
    model: a small model
    differs: Shorter texts.
    rows: sides.*side
    where: {kept: [true]}
    without: {side: [third]}
    words: {side: {none: base}}
    columns: |
      model | {{ side_word }}
      Acc   | {{ acc|f(".1f %", pct) }}
not_run: [{what: Llama, why: its weights are on a hub}]
"""
SIDES = {"none": {"kept": True, "acc": {"mean": 0.5, "std": 0.01}}, "other": {"kept": False}}
SIDES["third"] = {"kept": True}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for name, content in (("scores.json", json.dumps({"sides": SIDES})), ("x.yaml", TABLE)):
        (tmp_path / name).write_text(content, "utf-8")
    return tmp_path, tmp_path


def test_figures_that_do_not_hold_are_marked_and_ours_stand_apart_or_are_not_run(
    folders: tuple[Path, Path],
) -> None:
    page = paper_page(*folders)
    printed, _, ours = page.partition("**Ours on a small model**, `docs/results/scores.js")
    assert "| Other | 1,234.5 †1 |   7 |" in printed and "| Llama |       50.0 |   – |" in printed
    assert "†1 Acc: Of another reading." in printed and "50.0 ± 1.0" not in printed
    assert "on`: Shorter texts." in ours and "| base  | 50.0 ± 1.0 % |" in ours
    listed = "| tab:x | Of x  | 3 figures, 1 † | [in part](#tabx-of-x) | a small model |"
    assert listed in page and "## tab:x: Of x" in page
    (folders[0] / "scores.json").unlink()
    page = paper_page(*folders)
    assert "[not run](#tabx-of-x) | –        |" in page
    assert "`not run: a small model`: there is no scores.json." in page


def test_a_row_has_a_cell_for_each_column_and_a_number_needs_no_digits(
    folders: tuple[Path, Path],
) -> None:
    file = folders[1] / "x.yaml"
    file.write_text(TABLE.replace("[Llama, 50.0, null]", "[1234, 50.0, null]"), "utf-8")
    assert "| 1,234 |" in paper_page(*folders)
    file.write_text(TABLE.replace("1234.5, 7]", "1234.5, 7, 8]"), "utf-8")
    with pytest.raises(ConfigError, match="a row must have 3 cells, not 4"):
        paper_page(*folders)


OF_RECIPES = [
    ours
    for table in paper_tables()
    for ours in table.ours
    if ours.recipe and ours.rows.startswith("scores.")
]


def table_of(entry: Ours) -> dict[str, object]:
    """The content of a ``table.json`` of a recipe: a setting a task, one task not run."""
    first, *rest = (str(task) for task in entry.where["task"])
    figure, names = {"mean": 0.5, "std": 0.1}, list(REDUCTIONS)
    for task in (first, *rest):
        if task in GENERATION_TASKS.names():
            metrics = GENERATION_TASKS.find(task).metrics
            names += [name for metric in metrics for name in TEXT_METRICS[metric].figures]
        else:
            names += ["acc_seq", "acc", "acc_norm", "pass@1", "pass@4", *KINDS]
            names += ["exact_match,flexible-extract", "4096"]  # of RULER, by its tokens
    limits = {"new_tokens": 64, "answers": 1, "questions": 8}
    figures = {"token_reduction": 0.25, "context_token_reduction": 0.25}
    figures |= {key: figure for name in names for key in (name, f"{name}_difference")}
    rows = [{**limits, **figures, "task": task, "setting": "own"} for task in rest or [first]]
    unrun = {**limits, "task": first, "setting": "own", "not_run": "not run: context"}
    scores = [*rows, *([unrun] if rest else [])]
    return {"kind": "paper_table", "dtype": "bfloat16", "settings": ["base"], "scores": scores}


@pytest.mark.parametrize("entry", OF_RECIPES, ids=lambda entry: entry.recipe)
def test_the_table_of_a_recipe_is_shown_as_its_run_writes_it(entry: Ours, tmp_path: Path) -> None:
    assert entry.recipe in recipe_names("tables/")
    (tmp_path / entry.file).write_text(json.dumps(table_of(entry)), "utf-8")
    shown = entry.table(tmp_path)
    differing = next(n for n, head in enumerate(shown.headings) if "difference" in head)
    assert shown.rows[0][differing] == "+50.0 ± 10.0" and "25.0%" in shown.rows[0]
    first, *rest = (entry.words["task"][str(task)] for task in entry.where["task"])
    assert [row[:2] for row in shown.rows] == [(task, "own") for task in rest or [first]]
    amount = "8 questions, one answer of at most 64 tokens"
    assert entry.limits(tmp_path) == [
        f"Limits: {', '.join(rest or [first])}: {amount}; backbone in bfloat16.",
        *([f"`not run: context`: {first}."] if rest else []),
    ]


TABLES = {table.label: table for table in paper_tables()}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_table_is_whole_and_marks_are_of_its_cells(table: PaperTable) -> None:
    digits = [column.digits is None for column in table.columns]
    for row in table.rows:
        words = [isinstance(content, str) for content in row]
        assert all(a == b for a, b, c in zip(words, digits, row, strict=True) if c is not None)
    named = [name for mark in table.unsound for name in mark.columns]
    assert set(named) <= set(table.names)
    for head in (head for mark in table.unsound for head in mark.rows):
        assert any(row[: len(head)] == head for row in table.rows), head
    assert table.ours or table.not_run  # where our figures lie, or why there are none
