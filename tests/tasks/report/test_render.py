from __future__ import annotations

import json
import re
import shutil
from xml.etree import ElementTree

import pytest

from support.processes import output_of
from tasks.report.charts import Line, Panel, chart, svg
from tasks.report.comparison import cell_row, summary
from tasks.report.render import (
    TEMPLATES,
    Table,
    columns_table,
    environment,
    formatted,
    markdown_html,
    table_text,
)
from tasks.report.scores import score_lines
from umim_core.config.recipe import Cell

SPREAD = {"median": 1.0, "low": 0.5, "high": 2.0, "runs": 10}


@pytest.mark.parametrize(
    ("value", "spec", "per", "text"),
    [
        (5, "", 1.0, "5"),
        (2_000_000, ".1f", 1e6, "2.0"),
        (SPREAD, ".2f s", 1.0, "1.00 s (0.50-2.00)"),
        ({"mean": 9.0, "std": 1.414}, "+.2f", 1.0, "+9.00 ± 1.41"),
        ({"mean": 9.0, "std": None}, ".1f", 1.0, "9.0"),
        (None, ".1f", 1.0, "–"),
        (0.52750, ".1f", 0.01, "52.8"),  # as 100 times the value, not divided by 0.01
    ],
)
def test_a_value_is_shown(value: object, spec: str, per: float, text: str) -> None:
    assert formatted(value, spec, per) == text


TABLE = """\
{% call(r) table(rows, measured=drop) %}
side   | {{ r.side }}
MiB    | {{ r.bytes|f(".1f", MiB) }}
< kind | {{ r.kind }}
ratio  | {{ r.ratio|f(".1f x") }}
{% endcall %}
"""


@pytest.mark.parametrize("drop", [False, True])
def test_columns_of_a_template_become_a_table(drop: bool) -> None:
    rows = [{"side": "ours", "bytes": 2.0**21, "kind": "a|b", "ratio": None}]
    table = environment().from_string(TABLE).render(rows=rows, drop=drop)
    expected = ["| side | MiB | kind | ratio |", "| ---- | --: | ---- | ----: |"]
    row = r"| ours | 2.0 | a\|b |     – |"
    lines = [*expected, row]
    if drop:
        lines = [line.rpartition(" | ")[0].rstrip() + " |" for line in lines]
    assert [line.replace(" ", "") for line in table.splitlines()] == [
        line.replace(" ", "") for line in lines
    ]
    assert environment().from_string(TABLE).render(rows=[], drop=drop) == ""


def test_a_column_is_of_text_if_any_row_of_it_is() -> None:
    cell = "a | x\n{0}revision | {1}\nsize | 1".format
    rows = [("", "–"), ("< ", "abc"), ("", "–")]
    table = columns_table(rows, lambda row: cell(*row))
    assert table.left == (0, 1) and table.headings == ("a", "revision", "size")


def test_html_in_markdown_is_shown_as_text_and_tables_scroll() -> None:
    made = markdown_html("## Of <b>: x\n\n<script>x</script>\n\n| a |\n| --: |\n| <i> |\n")
    assert "<h2>Of &lt;b&gt;: x</h2>" in made
    assert "<script>" not in made and "&lt;i&gt;" in made
    assert '<div class="scroll"><table>' in made


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


ROW = {
    "task": "umim_ruler_1k",
    "setting": "own",
    "questions": 1200,
    "new_tokens": 64,
    "answers": 1,
    "token_reduction": 0.25,
    "recall": {"mean": 0.5, "stderr": 0.125},
    "recall_difference": {"mean": -0.25, "stderr": None},
    "prompt_tr": {"mean": 0.3, "stderr": 0.01},
}


def test_a_task_under_a_setting_is_one_line_with_its_limits_errors_and_differences() -> None:
    head, line, *rest = score_lines({"scores": [ROW], "texts": []})
    cells = ["umim_ruler_1k", "own", "1,200", "1 x 64", "0.500 ± 0.125", "-0.250", "25.0%", "30.0%"]
    assert [cell.strip() for cell in line.split("  ") if cell] == cells
    assert head.split()[-2:] == ["TR", "prompt_tr"] and rest == []


def test_points_have_their_texts_and_levels_are_drawn() -> None:
    line = Line("", [(0.0, 1.0), (2.0, 3.0)], texts=["τ 5", "τ 50"], errors=[0.5, 0.25])
    (axes,) = chart([Panel([line], levels=[2.0])]).axes
    assert [text.get_text() for text in axes.texts] == ["τ 5", "τ 50"]
    assert list(axes.lines[-1].get_ydata()) == [2.0, 2.0]
    ((bars,),) = (container.lines[2] for container in axes.containers)
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[0.5, 1.5], [2.75, 3.25]]


@pytest.mark.parametrize("index", [0, 12])
def test_an_svg_is_the_same_every_time_and_its_ids_are_its_own(index: int) -> None:
    panel = Panel([Line("a", [(0, 0), (1, 1)], index)])
    first, second = (svg(chart([panel]), "name", 'A "title"') for _ in range(2))
    assert first == second
    root = ElementTree.fromstring(first)  # noqa: S314  # our own drawing
    assert root.get("aria-label") == 'A "title"'
    assert all(name.startswith("name-") for name in re.findall(r' id="([^"]+)"', first))
    assert "currentColor" in first and "#22252a" not in first


NODE = shutil.which("node")
RUN = """
const { sortRows } = require(process.argv[1]);
const cells = JSON.parse(process.argv[2]);
const rows = cells.map((text) => ({ cells: [{ textContent: text }] }));
const sorted = (down) => sortRows(rows, 0, down).map((row) => row.cells[0].textContent);
console.log(JSON.stringify([sorted(false), sorted(true)]));
"""


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
    script = TEMPLATES / "tables.js"
    up, down = json.loads(output_of(NODE, "-e", RUN, script, json.dumps(cells)))
    assert up == rising
    empty = [cell for cell in rising if cell in ("", "–")]
    assert down == [cell for cell in reversed(rising) if cell not in empty] + empty
