from __future__ import annotations

import re

from tasks.report.render import Column, make_table, number_column, table_text


def test_a_wide_table_is_shown_in_parts_of_a_hundred_columns() -> None:
    columns = [
        Column("backbone", lambda row: f"a-model-with-a-long-name-{row}", left=True),
        *(number_column(f"metric {n}", float) for n in range(12)),
    ]
    text = table_text(make_table(columns, [1, 2], note="What it means. " * 12))
    blocks = text.split("\n\n")
    assert len(blocks) == 2
    for block in blocks:
        assert [line.split()[0] for line in block.splitlines()[:3]] == [
            "backbone", "a-model-with-a-long-name-1", "a-model-with-a-long-name-2",
        ]  # fmt: skip
    assert re.findall(r"metric (\d+)", text) == [str(n) for n in range(12)]
    assert max(map(len, text.splitlines())) <= 100
