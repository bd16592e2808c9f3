from __future__ import annotations

import json
import shutil

import pytest

from support.processes import output_of
from tasks.report.render import TEMPLATES

NODE = shutil.which("node")
RUN = """
const { matches, sortRows } = require(process.argv[1]);
const [cells, words] = JSON.parse(process.argv[2]);
const rows = cells.map((text) => ({ cells: [{ textContent: text }] }));
const sorted = (down) => sortRows(rows, 0, down).map((row) => row.cells[0].textContent);
const found = cells.filter((text) => matches(text, words));
console.log(JSON.stringify([sorted(false), sorted(true), found]));
"""


def run(cells: list[str], words: str = "") -> list[list[str]]:
    asked = json.dumps([cells, words])
    return list(json.loads(output_of(NODE, "-e", RUN, TEMPLATES / "tables.js", asked)))


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.parametrize(
    ("cells", "rising"),
    [
        (["9.5 ± 1", "–", "10.2 ± 2", "-3"], ["-3", "9.5 ± 1", "10.2 ± 2", "–"]),
        (["1,200", "900", "1.5e-3"], ["1.5e-3", "900", "1,200"]),
        (["umim 9", "base 10", ""], ["base 10", "umim 9", ""]),
    ],
)
def test_rows_sort_and_empty_cells_stay_last(cells: list[str], rising: list[str]) -> None:
    up, down, _ = run(cells)
    assert up == rising
    empty = [cell for cell in rising if cell in ("", "–")]
    assert down == [cell for cell in reversed(rising) if cell not in empty] + empty
