"""Committed results of adaptations: their page, their figure, the table of all."""

from __future__ import annotations

import json
from pathlib import Path

from docs.make.results import documents_of
from support.tiny_adaptation import adaptation


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
