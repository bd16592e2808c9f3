"""The page of the paper's tables: marks, ours apart, reasons, and where our figures come from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.cluster.ray_cluster import CHECKOUT
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
SCORES = {
    "sides": {
        "none": {"kept": True, "acc": {"mean": 0.5, "std": 0.01}},
        "other": {"kept": False},
        "third": {"kept": True},
    }
}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Folders of results and of tables."""
    for name in ("results", "tables"):
        (tmp_path / name).mkdir()
    (tmp_path / "results" / "scores.json").write_text(json.dumps(SCORES), "utf-8")
    (tmp_path / "tables" / "x.yaml").write_text(TABLE, "utf-8")
    return tmp_path / "results", tmp_path / "tables"


def test_a_figure_that_does_not_hold_is_marked_and_explained(folders: tuple[Path, Path]) -> None:
    page = paper_page(*folders)
    assert "| Other | 1,234.5 †1 |   7 |" in page.markdown
    assert "†1 Acc: Of another reading." in page.markdown
    assert page.overview.rows[0][2] == "3 figures, 1 †"
    assert "| Llama |       50.0 |   – |" in page.markdown


def test_ours_stand_in_a_table_of_their_own_with_model_and_differences(
    folders: tuple[Path, Path],
) -> None:
    page = paper_page(*folders)
    head, _, ours = page.markdown.partition("**Ours on a small model**, `docs/results/scores.json`")
    assert ours.startswith(": Shorter texts.")
    assert "| base  | 50.0 ± 1.0 % |" in ours
    assert "50.0 ± 1.0" not in head and "Llama |" not in ours


def test_the_html_page_has_what_the_markdown_has(folders: tuple[Path, Path]) -> None:
    html = paper_page(*folders).html
    for text in ("tab:x: Of x</h2>", "1,234.5 †1", ">50.0 ± 1.0 %</td>", "<strong>Ours on a"):
        assert text in html
    body = html.partition("<main>")[2].partition("</main>")[0]
    assert "**" not in body and "`" not in body and "<script" not in body


def test_a_result_that_is_absent_is_not_run(folders: tuple[Path, Path]) -> None:
    (folders[0] / "scores.json").unlink()
    page = paper_page(*folders)
    assert page.overview.rows[0][3:] == ("not run", "–")
    assert "`not run: a small model`: there is no scores.json." in page.markdown


def test_every_result_that_is_named_is_there() -> None:
    files = {ours.file for table in paper_tables() for ours in table.ours}
    assert files <= {path.name for path in (CHECKOUT / "docs" / "results").iterdir()}


def test_a_row_has_a_cell_for_each_column_and_a_number_needs_no_digits(
    folders: tuple[Path, Path],
) -> None:
    file = folders[1] / "x.yaml"
    file.write_text(TABLE.replace("[Llama, 50.0, null]", "[1234, 50.0, null]"), "utf-8")
    assert "| 1,234 |" in paper_page(*folders).markdown
    file.write_text(TABLE.replace("1234.5, 7]", "1234.5, 7, 8]"), "utf-8")
    with pytest.raises(ConfigError, match="a row must have 3 cells, not 4"):
        paper_page(*folders)


OF_RECIPES = [
    (table, ours)
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
            names.append("exact_match,flexible-extract")
    limits = {"new_tokens": 64, "answers": 1, "questions": 8}
    figures = {"token_reduction": 0.25, "context_token_reduction": 0.25}
    figures |= {key: figure for name in names for key in (name, f"{name}_difference")}
    rows = [{**limits, **figures, "task": task, "setting": "own"} for task in rest or [first]]
    unrun = {**limits, "task": first, "setting": "own", "not_run": "not run: context"}
    scores = [*rows, *([unrun] if rest else [])]
    return {"kind": "paper_table", "dtype": "bfloat16", "settings": ["base"], "scores": scores}


@pytest.mark.parametrize("entry", [ours for _, ours in OF_RECIPES], ids=lambda entry: entry.recipe)
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


# Labels of the paper's tables, in its order, with the number of figures that each prints; and its
# figures that show results.
LABELS = {
    "tab:trainingmetric1": 20,
    "tab:ppl": 72,
    "tab:qualitative-generation": 0,
    "tab:Reasoning": 14,
    "tab:QA": 183,
    "tab:summary": 48,
    "fig:hellaswag_progress": 5,
    "fig:arc_compar": 10,
    "tab:merge_rule_counts": 12,
    "tab:task_adaptation_settings": 0,
    "tab:task_adaptation_configurations": 27,
    "tab:base_training_configurations": 16,
    "tab:qualitative-generation_greedy": 0,
    "tab:qualitative-generation_top": 0,
    "tab:ngram-metrics": 36,
    "tab:similarity-metrics": 36,
    "fig:attention": 0,
    "tab:ruler_long_context": 20,
    "tab:multidoc_long_context": 16,
    "tab:long_context_summarization": 30,
    "tab:humaneval": 12,
    "tab:throughput": 24,
    "tab:threshold_ablation": 36,
    "tab:merge_capacity_ablation": 10,
    "tab:confidence_rule_ablation": 6,
}
TABLES = {table.label: table for table in paper_tables()}


def cells(table: PaperTable) -> list[tuple[tuple[object, ...], str, object]]:
    """Row, column and content of every cell."""
    return [
        (row, name, cell) for row in table.rows for name, cell in zip(table.names, row, strict=True)
    ]


def cell(label: str, column: str, *head: object) -> float:
    """The figure of the one row that begins with some cells."""
    table = TABLES[label]
    (found,) = [row for row in table.rows if row[: len(head)] == head]
    value = found[table.names.index(column)]
    assert isinstance(value, int | float)
    return value


def derived_value(rule: str, values: tuple[float, ...]) -> float:
    """What a derived column should hold, of the values of the others."""
    if rule == "mean":
        return sum(values) / len(values)
    first, second = values
    if rule == "difference":
        return first - second
    return 100 * (first / second - 1 if rule == "change" else first / (first + second))


def deviations(table: PaperTable) -> Iterator[tuple[tuple[object, ...], str, float]]:
    """Row, column and recomputed value of derived figures that differ by more than rounding."""
    for rule in table.derived:
        digits = table.columns[table.names.index(rule.column)].digits or 0
        for row in table.rows:
            cells = dict(zip(table.names, row, strict=True))
            values = [cells[name] for name in (rule.column, *rule.of)]
            numbers = tuple(float(value) for value in values if value is not None)
            if len(numbers) == len(values):
                computed = derived_value(rule.rule, numbers[1:])
                if abs(computed - numbers[0]) > 10.0**-digits * (1 + 1e-9):
                    yield row, rule.column, computed


def test_every_table_of_the_paper_has_an_entry_with_all_its_figures() -> None:
    counts = {
        label: sum(isinstance(content, int | float) for _, _, content in cells(table))
        for label, table in TABLES.items()
    }
    assert list(counts.items()) == list(LABELS.items())


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_table_is_whole_and_marks_and_rules_are_of_its_cells(table: PaperTable) -> None:
    digits = [column.digits is None for column in table.columns]
    for row in table.rows:
        assert len(row) == len(digits)
        words = [isinstance(content, str) for content in row]
        assert all(a == b for a, b, c in zip(words, digits, row, strict=True) if c is not None)
    named = [name for mark in table.unsound for name in mark.columns]
    named += [name for rule in table.derived for name in (rule.column, *rule.of)]
    assert set(named) <= set(table.names)
    assert all(len(rule.of) == 2 or rule.rule == "mean" for rule in table.derived)
    for head in (head for mark in table.unsound for head in mark.rows):
        assert any(row[: len(head)] == head for row in table.rows), head
    assert table.ours or table.not_run  # where our figures lie, or why there are none


def test_derived_figures_follow_from_their_rows_but_for_the_known_errors() -> None:
    found = {
        (label, row[:2], column): round(value, 1)
        for label, table in TABLES.items()
        for row, column, value in deviations(table)
    }
    assert found == {
        ("tab:QA", ("Llama-3.1-8B", "Select Context"), "Avg"): 57.5,
        ("tab:QA", ("Llama-3.2-1B", "Original"), "Avg"): 55.3,
        ("tab:QA", ("Llama-3.2-1B", "Merge Module"), "Avg"): 52.2,
        ("tab:ppl", ("Llama-3.2-1B", "Merge Module"), "PPL avg."): 20.0,
    }


def test_figures_that_two_tables_print_are_the_same_or_marked() -> None:
    for name, backbone in (("Llama-3.2-1.5B", "Llama-3.2-1B"), ("GPT2-XL", "GPT-2-XL")):
        for column in ("Top-1", "Top-3", "Top-p", "MRR"):
            percent = cell("tab:trainingmetric1", column, name)
            share = cell("tab:threshold_ablation", column, backbone, 5)
            assert percent == pytest.approx(100 * share, abs=0.4 if column == "MRR" else 0.06)
    thresholds, depth = TABLES["tab:threshold_ablation"], TABLES["tab:merge_capacity_ablation"]
    for column in ("Top-1", "Top-3", "Top-10", "Top-p", "MRR"):
        one = cell("tab:threshold_ablation", column, "Llama-3.2-1B", 5)
        other = cell("tab:merge_capacity_ablation", column, "One attention layer")
        marked = [
            bool(thresholds.marks(thresholds.rows[2], column)),
            bool(depth.marks(depth.rows[0], column)),
        ]
        assert marked == [one != other] * 2
