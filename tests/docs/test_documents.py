"""Every generated document is what it would be made of now."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.make.__main__ import MAKERS, main
from docs.make.document import Document


@pytest.mark.parametrize("name", MAKERS)
def test_committed_documents_are_current(name: str) -> None:
    outdated = [document.path.name for document in MAKERS[name]() if not document.current()]
    assert outdated == [], f"run python -m docs.make {name}"


def test_a_document_is_written_where_it_is_missing_or_other(tmp_path: Path) -> None:
    document = Document(tmp_path / "page.md", lambda: "new")
    assert not document.current()
    document.path.write_text("old", "utf-8")
    assert not document.current()
    document.write()
    assert document.current() and document.path.read_text("utf-8") == "new"


def test_an_unknown_document_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["readmee"])
    assert "results, readme, cards, recipe-fields" in capsys.readouterr().err
