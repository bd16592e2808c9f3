"""Mixing of corpora: nothing lost, one order for one seed, every prefix with all parts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tasks.data.mixing import cut_at_lines, mix_documents

PARTS = {
    "books": ["".join(f"book {b} line {i}\n" for i in range(400)) for b in range(3)],
    "notes": [f"note {i}" for i in range(300)],
}


def mixed(path: Path, seed: int = 0) -> list[dict[str, str]]:
    mix_documents(PARTS, path, seed=seed, max_characters=100)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_piece_of_every_document_is_there_once(tmp_path: Path) -> None:
    rows = mixed(tmp_path / "mixed.jsonl")
    expected = Counter(
        (part, piece)
        for part, documents in PARTS.items()
        for document in documents
        for piece in cut_at_lines(document, 100)
    )
    assert Counter((row["part"], row["text"]) for row in rows) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["mixed.jsonl"]


def test_the_first_tenth_holds_the_parts_in_about_their_shares(tmp_path: Path) -> None:
    rows = mixed(tmp_path / "mixed.jsonl")
    first = rows[: len(rows) // 10]
    whole, there = (sum(row["part"] == "books" for row in p) / len(p) for p in (rows, first))
    assert there == pytest.approx(whole, abs=0.2)
    assert {row["text"].split()[1] for row in first if row["part"] == "books"} == {"0", "1", "2"}


def test_the_order_follows_from_the_seed_alone(tmp_path: Path) -> None:
    first = mixed(tmp_path / "first.jsonl")
    assert mixed(tmp_path / "again.jsonl") == first
    other = mixed(tmp_path / "other.jsonl", seed=1)
    assert other != first
    assert sorted(map(str, other)) == sorted(map(str, first))


@pytest.mark.parametrize(
    ("document", "pieces"),
    [
        ("one\ntwo three", ["one\n", "two three"]),
        ("one two three", ["one", " two", " three"]),
        ("0123456789abc", ["012345678", "9abc"]),
        ("a\n\nb", ["a\n\nb"]),
    ],
)
def test_a_document_is_cut_at_a_line_end_a_space_or_where_it_must(
    document: str, pieces: list[str]
) -> None:
    limit = 9 if len(pieces) < 3 else 7
    assert list(cut_at_lines(document, limit)) == pieces
