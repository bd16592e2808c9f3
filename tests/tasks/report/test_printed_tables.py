from __future__ import annotations

from collections.abc import Iterator

import pytest

from tasks.report.paper import PaperTable, paper_tables

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
