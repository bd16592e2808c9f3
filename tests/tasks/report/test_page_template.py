"""Fields of a page are filled from results: conversions, spreads, absent values, tables."""

from __future__ import annotations

import pytest

from tasks.report.page_template import each, filled_in, page, walk

RESULTS = {
    "tau": 5,
    "tokens": {"a": 2_000_000, "b": 30},
    "equal": False,
    "none": None,
    "seconds": {"median": 1.0, "low": 0.5, "high": 2.0, "runs": 10},
    "quality": {"mean": 9.0, "std": 1.414},
    "accuracy": {"mean": 0.5, "stderr": 0.125},
    "greedy": {"mean": 9.0, "std": None},
    "unknown": {"mean": None, "std": None},
    "sides": {"ours": {"bytes": 2.0**21}, "theirs": {"bytes": 2.0**20, "ratio": 2.5}},
}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("tau {tau}, {tokens.a:,}", "tau 5, 2,000,000"),
        ("{tokens.a!M:.1f} of {tokens!+:,}", "2.0 of 2,000,030"),
        ("{tokens:,}", "2,000,000 / 30"),
        ("{equal:yes|NO}", "NO"),
        ("{seconds:.2f s} in {seconds.runs}", "1.00 s (0.50-2.00) in 10"),
        ("{seconds!m:.0f ms}", "1000 ms (500-2000)"),
        ("{quality:.2f}", "9.00 ± 1.41"),
        ("{accuracy!p:.1f %}", "50.0 ± 12.5 %"),
        ("{greedy!p:.1f %}", "900.0 %"),
        ("{unknown:.1f}", "-"),
        ("{none?not measured:.1f}", "not measured"),
        ("Ray: {none.tokens?:,}", ""),
    ],
)
def test_a_field_is_shown(template: str, text: str) -> None:
    assert filled_in(template, RESULTS) == text


def test_a_field_that_the_results_lack_is_named() -> None:
    with pytest.raises(KeyError, match=r"sides\.ours\.ratio"):
        filled_in("{sides.ours.ratio:.1f}", RESULTS)


def test_a_walk_gives_the_fields_above_and_the_keys() -> None:
    found = list(walk({"tau": 5, "cells": [{"tau": 7}, {}]}, "cells.*number"))
    assert [(row["tau"], row["number"]) for row in found] == [(7, 0), (5, 1)]


def test_a_block_of_columns_becomes_a_table_and_an_absent_cell_is_empty() -> None:
    table = page("@ sides.*side\nside | {side}\nMiB | {bytes!i:.1f}\nratio | {ratio?:.1f} x")
    assert table(RESULTS).splitlines() == [
        "| side   | MiB | ratio |",
        "| ------ | --: | ----: |",
        "| ours   | 2.0 |       |",
        "| theirs | 1.0 | 2.5 x |",
    ]


def test_columns_say_their_side_and_rows_can_be_made() -> None:
    table = page("@ made\n> n | {n}\n< name | {name}", made=lambda _: [{"n": 1, "name": "ours"}])
    assert table(RESULTS).splitlines()[1:] == ["| --: | ---- |", "|   1 | ours |"]


def test_parts_that_are_absent_leave_no_gap() -> None:
    text = "# {tau}\n\n{none?}\n\nTwo\nlines.\n\n@ sides"
    made = page(text, sides=each("sides.*side", page("## {side}")))
    assert made(RESULTS) == "# 5\n\nTwo lines.\n\n## ours\n\n## theirs"
