"""Tables of the report that only some runs have rows for."""

from __future__ import annotations

from tasks.report.compare import cell_row
from tasks.report.report_data import ReportData
from tasks.report.report_page import report_tables
from umim_core.config.recipe import Cell


def test_parts_of_a_mixture_have_a_table_of_their_own() -> None:
    metrics = {"top1_part_notes": 0.25, "ppl_umim_part_notes": 31.5, "kl_part_manual": 0.75}
    metrics |= {"nats_increase_part_notes": 0.5, "nats_increase_se_part_notes": 0.125}
    row = cell_row(Cell(backbone="llama"), metrics=metrics)
    text = report_tables(ReportData(recipe="tiny", rows=(row,)))
    _, _, table = text.partition("## Parts of the corpus\n\n")
    heads, _, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[:4]
    )
    place = heads.index("test text")
    assert [cells[place] for cells in lines] == ["notes", "manual"]
    assert {"0.250", "31.50", "0.500 ± 0.125"} <= set(lines[0])
    assert "0.750" in lines[1]


def test_a_run_without_parts_has_no_such_table() -> None:
    row = cell_row(Cell(backbone="llama"), metrics={"top1": 0.25})
    assert "Parts of the corpus" not in report_tables(ReportData(recipe="tiny", rows=(row,)))
