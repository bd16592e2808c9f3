from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from docs.make.__main__ import MAKERS, main
from docs.make.document import RESULTS, Document
from docs.make.recipe_fields import page
from docs.make.results import benchmark_page, documents, documents_of

FACTS = {"platform": "Linux", "cores": 2, "commit": "0123456789abcdef", "versions": {"numpy": "2"}}
SPREAD = {"median": 1.0, "low": 0.5, "high": 2.0, "runs": 10}


def test_a_page_of_other_results_is_seen_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAKERS, "results", partial(documents, tmp_path))
    report = json.loads((RESULTS / "matching.json").read_text("utf-8"))
    results, page = tmp_path / "any.json", tmp_path / "any.md"
    results.write_text(json.dumps(report), "utf-8")
    assert main(["results", "--check"]) == 1
    assert main(["results"]) == 0
    assert main(["results", "--check"]) == 0
    report["held_out_tokens"] = 1024
    results.write_text(json.dumps(report), "utf-8")
    assert main(["results", "--check"]) == 1
    assert "1,024 tokens" not in page.read_text("utf-8")
    assert main(["results"]) == 0
    assert "1,024 tokens" in page.read_text("utf-8")


def test_a_result_file_has_its_page_and_the_figure_that_the_page_shows(tmp_path: Path) -> None:
    file = tmp_path / "adaptation-tiny.json"
    file.write_bytes((RESULTS / "adaptation-hellaswag-smollm2.json").read_bytes())
    page, figure = documents_of(file)
    assert (page.path.name, figure.path.name) == ("adaptation-tiny.md", "adaptation-tiny.svg")
    assert f"({figure.path.name})" in page.make()
    for document in (page, figure):
        assert not document.current()
        document.write()
        assert document.current()


def test_a_page_says_that_a_peer_was_not_installed() -> None:
    loss = {"what": "loss", "side": "ours", "seconds": SPREAD, "of_peak": 0.5, "bytes": 1}
    gpu = {"benchmark": "gpu", "facts": FACTS | {"device": "any"}, "gates": {}, "equal": True}
    gpu |= dict.fromkeys(("peak_flops", "copied_bytes", "seconds"), 1.0)
    gpu |= {"failed": [], "left_out": [], "tiny": False}
    pages = [
        benchmark_page(gpu | {"distillation": [loss, *peers]})
        for peers in ([], [loss | {"side": "Liger"}])
    ]
    assert ["Liger was not installed." in page for page in pages] == [True, False]


@pytest.mark.parametrize("name", MAKERS)
def test_committed_documents_are_current(name: str) -> None:
    outdated = [document.path.name for document in MAKERS[name]() if not document.current()]
    assert outdated == [], f"run python -m docs.make {name}"


def test_every_field_of_a_recipe_has_a_meaning() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert len(rows) > 100 and not [row for row in rows if row.endswith("|  |")]


def test_without_names_every_document_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in MAKERS:
        absent = partial(Document, tmp_path / name, str)
        monkeypatch.setitem(MAKERS, name, lambda absent=absent: [absent()])
    assert main(["--check"]) == 1
    assert [Path(line).name for line in capsys.readouterr().out.splitlines()] == list(MAKERS)


def test_an_unknown_document_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["readmee"])
    assert "results, readme, recipe-fields" in capsys.readouterr().err
