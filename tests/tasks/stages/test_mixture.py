from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from support.sites import here, made
from tasks.data.mixing import cut_at_lines
from tasks.run.stage import Artifact
from tasks.stages.corpus import CorpusText, mixture_stage, sources_of_splits
from umim_core.config.corpus import SPLITS, MixtureCorpus
from umim_core.text.sources import iter_documents


@pytest.fixture
def config(tmp_path: Path) -> MixtureCorpus:
    """A book of many lines, short notes in two packed files, and docstrings."""
    for split in SPLITS:
        book = "".join(f"{split} chapter {i}\n" for i in range(300))
        (tmp_path / f"book-{split}.txt").write_text(book, encoding="utf-8")
        for number in range(2):
            with gzip.open(tmp_path / f"{number}-{split}.jsonl.gz", "wt", encoding="utf-8") as file:
                file.writelines(
                    json.dumps({"text": f"{split} note {number} {i}\f."}) + "\n" for i in range(40)
                )

    def of(kind: str, pattern: str) -> dict[str, object]:
        found = {s: {"kind": kind, "paths": [str(tmp_path / pattern.format(s))]} for s in SPLITS}
        return {"kind": "files", "licence": f"{kind} licence", **found}

    raw = {
        "book": of("text", "book-{}.txt"),
        "notes": of("jsonl", "*-{}.jsonl.gz"),
        "docs": {"kind": "docstrings"},
    }
    return MixtureCorpus.model_validate({"parts": raw, "max_characters": 200})


@pytest.fixture
def docstrings(tmp_path: Path) -> Artifact:
    def write(out: Path) -> None:
        for split in SPLITS:
            lines = [json.dumps({"text": f"Return the {split} array {i}.\0"}) for i in range(30)]
            (out / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")

    return made(tmp_path, "corpus", write)


def test_every_split_holds_all_parts_and_a_part_its_own_test_documents(
    config: MixtureCorpus, docstrings: Artifact, tmp_path: Path
) -> None:
    text = CorpusText(config)
    mixed = mixture_stage(text=text, docstrings=docstrings).build(here(tmp_path))
    for split in SPLITS:
        lines = (mixed.path / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        found = Counter(row["part"] for row in rows)
        assert (found["notes"], found["docs"]) == (80, 30)
        book = [row["text"] for row in rows if row["part"] == "book"]
        assert max(map(len, book)) <= 200
        assert Counter("".join(book).splitlines()) == Counter(
            f"{split} chapter {i}" for i in range(300)
        )
        first = {json.loads(line)["part"] for line in lines[: len(lines) // 4]}
        assert first == {"book", "notes", "docs"}
    (book,) = iter_documents(sources_of_splits(mixed, text)["part_book"])
    assert book == (tmp_path / "book-test.txt").read_text(encoding="utf-8")
    notes = iter_documents(sources_of_splits(mixed, text)["part_notes"])
    assert list(notes)[41] == "test note 1 1\f."
    other = CorpusText(config.model_copy(update={"seed": 1}))
    again = mixture_stage(text=other, docstrings=docstrings).build(here(tmp_path))
    assert (again.path / "train.jsonl").read_bytes() != (mixed.path / "train.jsonl").read_bytes()
    assert again.metrics == mixed.metrics
    assert {path.suffix for path in again.path.iterdir()} == {".jsonl", ".json"}


@pytest.mark.parametrize(
    ("document", "limit", "pieces"),
    [
        ("one\ntwo three", 9, ["one\n", "two three"]),
        ("one two three", 7, ["one", " two", " three"]),
        ("0123456789abc", 9, ["012345678", "9abc"]),
        ("a\n\nb", 9, ["a\n\nb"]),
    ],
)
def test_a_document_is_cut_at_a_line_end_a_space_or_where_it_must(
    document: str, limit: int, pieces: list[str]
) -> None:
    assert list(cut_at_lines(document, limit)) == pieces
