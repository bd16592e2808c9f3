"""Tables of the report that only some runs have rows for."""

from __future__ import annotations

from tasks.report.compare import cell_row
from tasks.report.report_data import ReportData
from tasks.report.report_tables import tables
from umim_core.config.recipe import Cell


def test_parts_of_a_mixture_have_a_table_of_their_own() -> None:
    metrics = {"top1_part_notes": 0.25, "ppl_umim_part_notes": 31.5, "kl_part_manual": 0.75}
    row = cell_row(Cell(backbone="llama"), metrics=metrics)
    found = {table.title: table for table in tables(ReportData(recipe="tiny", rows=(row,)))}
    table = found["Parts of the corpus"]
    place = table.headings.index("test text")
    assert [cells[place] for cells in table.rows] == ["notes", "manual"]
    assert {"0.250", "31.50"} <= set(table.rows[0])
    assert "0.750" in table.rows[1]


def test_a_run_without_parts_has_no_such_table() -> None:
    row = cell_row(Cell(backbone="llama"), metrics={"top1": 0.25})
    titles = [table.title for table in tables(ReportData(recipe="tiny", rows=(row,)))]
    assert "Parts of the corpus" not in titles
