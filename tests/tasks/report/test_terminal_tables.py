from __future__ import annotations

import re

from tasks.report.comparison import cell_row, summary
from tasks.report.render import Table, table_text
from umim_core.config.recipe import Cell


def test_a_wide_table_is_shown_in_parts_of_a_hundred_columns() -> None:
    names = [f"a-model-with-a-long-name-{n}" for n in (1, 2)]
    headings = ("backbone", *(f"metric {n}" for n in range(12)))
    rows = tuple((name, *["1"] * 12) for name in names)
    text = table_text(Table(headings, rows, note="What it means. " * 12))
    blocks = text.split("\n\n")
    assert len(blocks) == 3  # the note is the last
    for block in blocks[:2]:
        assert [line.split()[0] for line in block.splitlines()[:3]] == [
            "backbone", "a-model-with-a-long-name-1", "a-model-with-a-long-name-2",
        ]  # fmt: skip
    assert re.findall(r"metric (\d+)", text) == [str(n) for n in range(12)]
    assert max(map(len, text.splitlines())) <= 100


def test_the_summary_of_any_run_fits_a_screen_and_tells_forms_apart() -> None:
    forms = [
        {},
        {"adapter_rank": 4},
        {"merge_depth": 2, "residual": "last", "unit_positions": "preserved"},
        {"residual": "last"},
    ]
    metrics = {"token_reduction": 0.25, "top1": 0.5, "ppl_base": 20.0, "ppl_umim": 30.0}
    name = "some-owner/a-model-with-a-very-long-name-of-its-own-" + "x" * 60
    rows = [cell_row(Cell(backbone=name, **form), metrics=metrics) for form in forms * 4]
    table = summary([rows[0].model_copy(update={"source": "shipped"}), *rows[1:]])
    assert [row[2] for row in table.rows[:4]] == ["paper's", "adapters", "inside", "ours"]
    assert table.headings == ("backbone", "rules", "form", "setting", "TR %", "Top-1", "PPL ×")
    assert table.rows[1][4:] == ("25.0", "0.500", "1.50") and len(table.rows) == 12
    assert table.note.startswith("4 more rows") and table.rows[0][0].endswith("… *")
    assert max(map(len, table_text(table).splitlines())) <= 100
