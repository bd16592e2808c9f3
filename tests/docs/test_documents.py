from __future__ import annotations

import pytest

from docs.make.__main__ import MAKERS, main


@pytest.mark.parametrize("name", MAKERS)
def test_committed_documents_are_current(name: str) -> None:
    outdated = [document.path.name for document in MAKERS[name]() if not document.current()]
    assert outdated == [], f"run python -m docs.make {name}"


def test_an_unknown_document_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["readmee"])
    assert "results, readme, cards, recipe-fields" in capsys.readouterr().err
