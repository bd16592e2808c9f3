"""Committed results of adaptations: their page, their figure, the table of all."""

from __future__ import annotations

import json
from pathlib import Path

from docs.make.results import documents_of
from docs.make.summaries import adaptation_summary
from support.tiny_adaptation import adaptation, point, points


def test_a_result_file_has_its_page_and_the_figure_that_the_page_shows(tmp_path: Path) -> None:
    file = tmp_path / "adaptation-tiny.json"
    file.write_text(json.dumps(adaptation()), "utf-8")
    page, figure = documents_of(file)
    assert (page.path.name, figure.path.name) == ("adaptation-tiny.md", "adaptation-tiny.svg")
    assert f"({figure.path.name})" in page.make()
    for document in (page, figure):
        assert not document.current()
        document.write()
        assert document.current()


def test_the_table_of_all_shows_the_lowest_threshold(tmp_path: Path) -> None:
    assert adaptation_summary(tmp_path) == ""
    (tmp_path / "adaptation-tiny.json").write_text(json.dumps(adaptation()), "utf-8")
    table = adaptation_summary(tmp_path)
    row = next(line for line in table.splitlines() if line.startswith("| umim_tiny"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        *("umim_tiny", "umim-small", "500", "45.0", "-5.0 ± 2.0, TR 14.0%"),
        *("-4.0 ± 2.0, TR 20.0%", "-1.0 ± 2.0, TR 20.0%"),
        *("+0.2 ± 2.0, TR 0.0%", "+4.0 ± 2.0, TR 0.0%"),
    ]
    assert "[tiny](adaptation-tiny.md)" in table


def test_a_control_without_gain_shows_no_change(tmp_path: Path) -> None:
    given = [*points(), point("lora", None, 1, kind="control", best_step=0)]
    given = [one | {"best_step": 0} if one["setting"] == "input-adapter" else one for one in given]
    (tmp_path / "adaptation-tiny.json").write_text(json.dumps(adaptation(given)), "utf-8")
    row = adaptation_summary(tmp_path).splitlines()[4]
    assert row.count("no gain") == 1 and "+2.0 ±" in row  # one seed of lora learned


def test_a_setting_that_was_not_run_is_a_dash(tmp_path: Path) -> None:
    own = adaptation()
    own["backbones"][0]["points"] = own["backbones"][0]["points"][:1]
    (tmp_path / "adaptation-tiny.json").write_text(json.dumps(own), "utf-8")
    assert adaptation_summary(tmp_path).splitlines()[4].count("–") == 4
