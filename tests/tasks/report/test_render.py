from __future__ import annotations

import pytest

from tasks.report.render import (
    columns_table,
    environment,
    formatted,
    html_page,
    markdown_html,
)

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
    assert '<h2 id="of-ltbgt-x">Of &lt;b&gt;: x</h2>' in made
    assert "<script>" not in made and "&lt;i&gt;" in made
    assert '<div class="scroll"><table>' in made
    assert "<title>a &lt; b</title>" in html_page("a < b", made)
