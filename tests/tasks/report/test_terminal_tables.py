"""Tables in a terminal: parts of at most a hundred columns, and a note on what was measured."""

from __future__ import annotations

import re

from tasks.report.compare import cell_row
from tasks.report.comparison_table import comparison
from tasks.report.tables import Column, make_table, number_column, table_text
from umim_core.config.recipe import Cell


def test_a_wide_table_is_shown_in_parts_of_a_hundred_columns() -> None:
    columns = [
        Column("backbone", lambda row: f"a-model-with-a-long-name-{row}", left=True),
        *(number_column(f"metric {n}", lambda row: float(row), 3) for n in range(12)),
    ]
    text = table_text(make_table("Wide", columns, [1, 2], note="What it means. " * 12))
    blocks = text.split("\n\n")
    assert len(blocks) == 2
    for block in blocks:
        lines = block.splitlines()
        assert [line.split()[0] for line in lines[:3]] == [
            "backbone", "a-model-with-a-long-name-1", "a-model-with-a-long-name-2",
        ]  # fmt: skip
    assert re.findall(r"metric (\d+)", text) == [str(n) for n in range(12)]
    assert max(map(len, text.splitlines())) <= 100


def test_the_note_says_on_how_much_the_rows_were_measured() -> None:
    amounts = {"alignment_rows": 16, "perplexity_rows": 8, "task_questions": 200}
    few = {"alignment_rows": 4, "perplexity_rows": 2, "task_questions": 50}
    config = {
        "segment_length": 512,
        "evaluate": amounts,
        "headline": {"evaluate": few, "benchmark": {"prompt_lengths": [256, 1024]}},
    }
    cells = cell_row(Cell(backbone="llama"), setting="WT")
    shipped = cell_row(Cell(backbone="gpt2"), setting="WT", source="shipped")
    all_said = "Measured on 16 (Top-1) and 8 (PPL) rows of 512 tokens, 200 questions"
    assert comparison([cells, shipped], config).note.endswith(f"{all_said}.")
    assert comparison([shipped, cells], config).note.endswith(
        f"{all_said}; gpt2: 4 (Top-1) and 2 (PPL) rows of 512 tokens, 50 questions, "
        "timed at 1,024 tokens."
    )
